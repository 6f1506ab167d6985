//! Directories that a deployment has to itself.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// Where deployments keep their state, one after the other.
#[derive(Debug)]
pub struct StateDirectory(TempDir);

impl StateDirectory {
    /// A fresh one, gone when it is dropped.
    #[must_use]
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a temporary directory"));
        fs::create_dir(place.adapters()).expect("a directory for adapters");
        place
    }

    /// The state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.home().join("state")
    }

    /// Adapters may be loaded from below this.
    #[must_use]
    pub fn adapters(&self) -> PathBuf {
        self.home().join("adapters")
    }

    /// What `HOLOBIONT_HOME` is to its commands.
    #[must_use]
    pub fn home(&self) -> &Path {
        self.0.path()
    }

    /// Where its log goes.
    pub(crate) fn log(&self) -> PathBuf {
        self.home().join("log")
    }
}

impl Default for StateDirectory {
    fn default() -> Self {
        Self::new()
    }
}
