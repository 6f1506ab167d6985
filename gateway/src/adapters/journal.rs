//! The registry on disk: one JSON file, replaced as a whole.
//!
//! A write goes to a temporary file, is synced, renamed over the old one, and the directory is synced: after a
//! crash there is the old registry or the new one, never half of either. A lock keeps a second gateway out.

use std::{
    fmt,
    fs::{self, File, TryLockError},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use model::generation::Generation;
use serde::{Deserialize, Serialize};

/// Name of the registry within the state directory.
const FILE: &str = "adapters.json";
/// Name of the file that is locked while a gateway uses the directory.
const LOCK: &str = "gateway.lock";
/// Layout of the file.
const VERSION: u32 = 1;
/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Why the registry could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refused.
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has room", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has it.
    #[error("the state directory '{}' is in use by another gateway; stop it or give another --state", .0.display())]
    Locked(PathBuf),
    /// The file is not a registry.
    #[error("'{}' is not a registry this version can read ({reason}); move it away to start with an empty one", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// A generation as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hex(Generation);

/// An adapter as it is remembered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// What people call it.
    pub name: String,
    /// Where its files are.
    pub path: PathBuf,
    /// What it is.
    pub generation: Hex,
    /// Largest rank of its modules.
    pub rank: u32,
    /// Bytes it takes in the executor.
    pub bytes: u64,
    /// Linear layers it changes.
    pub modules: u32,
    /// Seconds since 1970.
    pub loaded_at: u64,
}

#[derive(Serialize, Deserialize)]
struct Contents {
    version: u32,
    adapters: Vec<Record>,
}

/// The file; one process has it at a time.
#[derive(Debug, Clone)]
pub struct Journal {
    directory: Arc<Path>,
    /// Locked as long as the journal lives.
    _lock: Arc<File>,
}

impl Journal {
    /// Opens the registry in `directory`, which is created if it is not there, and reads what it holds.
    pub fn open(directory: &Path) -> Result<(Self, Vec<Record>), JournalError> {
        fs::create_dir_all(directory).map_err(failed("creating", directory))?;
        let lock_path = directory.join(LOCK);
        let lock = File::create(&lock_path).map_err(failed("creating", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Locked(directory.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed("locking", &lock_path)(error)),
        }
        let records = read(&directory.join(FILE))?;
        Ok((Self { directory: directory.into(), _lock: Arc::new(lock) }, records))
    }

    /// Replaces what is on disk; when it returns, a power cut loses nothing.
    pub async fn write(&self, adapters: Vec<Record>) -> Result<(), JournalError> {
        let journal = self.clone();
        let written = tokio::task::spawn_blocking(move || journal.replace(adapters)).await;
        written.unwrap_or_else(|panic| Err(failed("writing", &self.directory)(io::Error::other(panic))))
    }

    fn replace(&self, adapters: Vec<Record>) -> Result<(), JournalError> {
        let path = self.directory.join(FILE);
        let fresh = self.directory.join(format!("{FILE}.new"));
        let text = serde_json::to_vec_pretty(&Contents { version: VERSION, adapters })
            .map_err(|error| failed("writing", &path)(error.into()))?;
        let mut file = File::create(&fresh).map_err(failed("creating", &fresh))?;
        file.write_all(&text).map_err(failed("writing", &fresh))?;
        file.sync_all().map_err(failed("syncing", &fresh))?;
        fs::rename(&fresh, &path).map_err(failed("replacing", &path))?;
        let directory = File::open(&self.directory).map_err(failed("opening", &self.directory))?;
        directory.sync_all().map_err(failed("syncing", &self.directory))
    }
}

fn read(path: &Path) -> Result<Vec<Record>, JournalError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("opening", path)(error)),
    };
    let damaged = |reason: String| JournalError::Damaged { path: path.to_owned(), reason };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed("reading", path))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(damaged(format!("it has more than {MAX_FILE_BYTES} bytes")));
    }
    let contents: Contents = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if contents.version != VERSION {
        return Err(damaged(format!("its version is {}, not {VERSION}", contents.version)));
    }
    Ok(contents.adapters)
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError + use<> {
    let path = path.to_owned();
    move |source| JournalError::Io { attempt, path, source }
}

impl Record {
    /// What it is.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation.0
    }
}

impl From<Generation> for Hex {
    fn from(generation: Generation) -> Self {
        Self(generation)
    }
}

impl From<Hex> for String {
    fn from(hex: Hex) -> Self {
        hex.0.to_string()
    }
}

impl TryFrom<String> for Hex {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let hash =
            blake3::Hash::from_hex(&text).map_err(|error| format!("'{text}' is no generation: {error}"))?;
        Ok(Self(Generation(*hash.as_bytes())))
    }
}

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(name: &str) -> Record {
        let (path, generation) = (PathBuf::from("a"), Generation([7; 32]).into());
        Record { name: name.to_owned(), path, generation, rank: 16, bytes: 100, modules: 4, loaded_at: 1 }
    }

    #[test]
    fn what_was_written_is_read_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let (journal, records) = Journal::open(state.path()).unwrap();
        assert_eq!(records, vec![]);
        journal.replace(vec![example("a"), example("b")]).unwrap();
        drop(journal);
        let (_journal, records) = Journal::open(state.path()).unwrap();
        assert_eq!(records, vec![example("a"), example("b")]);
    }

    #[test]
    fn a_second_gateway_is_kept_out_of_the_state_directory() {
        let state = tempfile::tempdir().unwrap();
        let _first = Journal::open(state.path()).unwrap();
        assert!(matches!(Journal::open(state.path()), Err(JournalError::Locked(_))));
    }

    #[test]
    fn a_damaged_registry_is_an_error_and_not_an_empty_one() {
        let state = tempfile::tempdir().unwrap();
        fs::write(state.path().join(FILE), b"{\"version\":1,\"adapters\":[{\"name\"").unwrap();
        assert!(matches!(Journal::open(state.path()), Err(JournalError::Damaged { .. })));
    }

    #[test]
    fn a_crash_before_the_rename_leaves_the_old_registry() {
        let state = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(state.path()).unwrap();
        journal.replace(vec![example("a")]).unwrap();
        fs::write(state.path().join("adapters.json.new"), b"half").unwrap();
        assert_eq!(read(&state.path().join(FILE)).unwrap(), vec![example("a")]);
    }
}
