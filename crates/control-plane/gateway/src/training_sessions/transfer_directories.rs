//! Directories in which a trainer writes a state for another trainer.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use crate::lock::lock;

/// Root and names of all transfer directories.
#[derive(Debug, Clone)]
pub struct TransferDirectories {
    root: PathBuf,
    /// Names of directories in use.
    open: Arc<Mutex<HashSet<String>>>,
    made: Arc<AtomicU64>,
}

impl TransferDirectories {
    /// Uses directories below `state`, the gateway's state directory.
    #[must_use]
    pub fn below(state: &Path) -> Self {
        Self { root: state.join("tinker").join("passing"), open: Arc::default(), made: Arc::default() }
    }

    /// Returns a transfer directory for `run`. The trainer creates it, and dropping the value removes it.
    #[must_use]
    pub fn open(&self, run: &str) -> TransferDirectory {
        // Runs have unique names, so no earlier process used this name.
        let name = format!("{run}-{}", self.made.fetch_add(1, Relaxed));
        lock(&self.open).insert(name.clone());
        TransferDirectory { passages: self.clone(), name }
    }

    /// Removes unused directories: a killed gateway left them, or a trainer that continued after its model
    /// had ended.
    ///
    /// # Errors
    /// Fails if the system cannot list or remove the directories.
    pub fn sweep(&self) -> io::Result<()> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if !lock(&self.open).contains(&*entry.file_name().to_string_lossy()) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }
}

/// A transfer directory in use.
#[derive(Debug)]
pub struct TransferDirectory {
    passages: TransferDirectories,
    name: String,
}

impl TransferDirectory {
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.passages.root.join(&self.name)
    }
}

impl Drop for TransferDirectory {
    fn drop(&mut self) {
        let path = self.path();
        lock(&self.passages.open).remove(&self.name);
        // The next sweep removes what this removal leaves.
        let _ = thread::Builder::new()
            .name("tinker-passage".to_owned())
            .spawn(move || drop(fs::remove_dir_all(path)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_nobody_uses_is_removed_and_what_somebody_uses_stays() {
        let state = tempfile::tempdir().unwrap();
        let passages = TransferDirectories::below(state.path());
        passages.sweep().unwrap();
        let left = state.path().join("tinker/passing/killed-0-0");
        let used = passages.open("r-0");
        for directory in [&left, &used.path()] {
            fs::create_dir_all(directory).unwrap();
            fs::write(directory.join("adapter_model.safetensors"), "weights").unwrap();
        }
        passages.sweep().unwrap();
        assert!(!left.exists() && used.path().exists());
        let next = passages.open("r-0");
        assert_ne!(next.path(), used.path(), "an adapter is never written where another is removed");
        let path = used.path();
        drop(used);
        let until = Instant::now() + Duration::from_secs(60);
        while path.exists() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(!path.exists());
    }
}
