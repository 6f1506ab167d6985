//! Registry of running deployments: one file each, so that commands find them wherever their state is.
//!
//! A file contains only the state directory and the gateway's address. The lock of the state directory tells
//! whether the deployment runs. The first command that sees the file of a killed process removes it.

use std::{
    fs::{self, DirBuilder},
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::running::LockHolder;
use crate::home::HomeDirectory;

/// Maximum number of registry files that are read.
const MAX_FILES: usize = 1024;

/// Registry entry of a running deployment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunningDeployment {
    pub(crate) state: PathBuf,
    /// Address of the gateway, once it takes requests.
    pub(crate) url: Option<String>,
}

impl RunningDeployment {
    /// Returns the deployment's name: the last part of the state directory's path.
    pub(crate) fn name(&self) -> String {
        self.state.file_name().unwrap_or(self.state.as_os_str()).to_string_lossy().into_owned()
    }

    /// Whether the process `pid` runs and holds the state directory.
    fn is_of(&self, pid: &str) -> bool {
        let holder = LockHolder::of(&self.state).ok().flatten();
        let process = holder.map(|holder| holder.process).filter(|process| process.pid.to_string() == pid);
        process.is_some_and(|process| process.open().is_ok_and(|it| it.is_some()))
    }
}

/// Registry file of this process, removed on drop.
#[derive(Debug)]
pub(crate) struct Registration {
    path: PathBuf,
    entry: RunningDeployment,
}

impl Registration {
    /// Registers the deployment whose state directory is `state`.
    pub(crate) fn new(home: &HomeDirectory, state: &Path) -> io::Result<Self> {
        let directory = home.running();
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        let path = directory.join(std::process::id().to_string());
        let registration = Self { path, entry: RunningDeployment { state: state.to_owned(), url: None } };
        registration.write()?;
        Ok(registration)
    }

    /// Records the gateway's address. If writing fails, commands need `--url`.
    pub(crate) fn serves_at(&mut self, url: &str) {
        self.entry.url = Some(url.to_owned());
        if let Err(error) = self.write() {
            tracing::warn!(%error, "other commands find this deployment with --url alone");
        }
    }

    fn write(&self) -> io::Result<()> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        let mut new = tempfile::Builder::new().prefix(".new-").tempfile_in(directory)?;
        serde_json::to_writer(&mut new, &self.entry)?;
        new.flush()?;
        new.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns all running deployments, ordered by state directory.
pub(crate) fn running(home: &HomeDirectory) -> Vec<RunningDeployment> {
    let files = fs::read_dir(home.running()).into_iter().flatten().flatten().take(MAX_FILES);
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    let processes = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let mut found: Vec<RunningDeployment> = processes.filter_map(|pid| entry(home, &pid)).collect();
    found.sort_by(|one, other| one.state.cmp(&other.state));
    found
}

fn entry(home: &HomeDirectory, pid: &str) -> Option<RunningDeployment> {
    let path = home.running().join(pid);
    let entry: RunningDeployment = serde_json::from_str(&fs::read_to_string(&path).ok()?).ok()?;
    if entry.is_of(pid) {
        return Some(entry);
    }
    let _ = fs::remove_file(path);
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Writes the lock file of this process as `up` does.
    fn lock_state(state: &Path) {
        let lock = serde_json::to_string(&LockHolder::this(Duration::ZERO)).unwrap();
        fs::write(crate::deployment::paths::lock_path(state), lock).unwrap();
    }

    #[test]
    fn a_deployment_is_listed_while_it_runs() {
        let (home, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let home = HomeDirectory::at(home.path());
        assert_eq!(running(&home), []);
        lock_state(state.path());
        let mut registration = Registration::new(&home, state.path()).unwrap();
        registration.serves_at("http://here");
        let entry = RunningDeployment { state: state.path().to_owned(), url: Some("http://here".into()) };
        assert_eq!(running(&home), [entry]);
        drop(registration);
        assert_eq!(running(&home), []);
    }

    #[test]
    fn what_a_killed_process_left_is_not_listed_and_goes() {
        let (home, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let home = HomeDirectory::at(home.path());
        let registration = Registration::new(&home, state.path()).unwrap();
        assert_eq!(running(&home), [], "nobody holds the state");
        assert!(!registration.path.exists());
    }
}
