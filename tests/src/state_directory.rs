//! Directories of a single deployment.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// State directory, used by one deployment at a time.
#[derive(Debug)]
pub struct StateDirectory(TempDir);

impl StateDirectory {
    /// Creates a new directory, which is removed on drop.
    #[must_use]
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a temporary directory"));
        fs::create_dir(place.adapters()).expect("a directory for adapters");
        place
    }

    /// Returns the path of the state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.home().join("state")
    }

    /// Returns the folder from which adapters may be loaded.
    #[must_use]
    pub fn adapters(&self) -> PathBuf {
        self.home().join("adapters")
    }

    /// Returns the value of `HOLOBIONT_HOME` for commands.
    #[must_use]
    pub fn home(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.home().join("log")
    }
}

impl Default for StateDirectory {
    fn default() -> Self {
        Self::new()
    }
}
