//! Failpoints of the debug builds, armed through a directory.

use std::{fs, path::Path};

use tempfile::TempDir;

/// The directory through which failpoints are armed.
#[derive(Debug)]
pub struct FailpointDirectory(TempDir);

impl FailpointDirectory {
    /// Creates a directory without armed failpoints.
    #[must_use]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// Returns the value of `HOLOBIONT_FAILPOINTS`.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.0.path()
    }

    /// Arms `place`: the next process that reaches it does `what` (see the crate `failpoint`).
    pub fn arm(&self, place: &str, what: &str) {
        // A process may read meanwhile and must find the whole file or none.
        let fresh = self.0.path().join(format!("{place}.new"));
        fs::write(&fresh, what).expect("the directory can be written");
        fs::rename(fresh, self.0.path().join(place)).expect("the directory can be written");
    }

    /// True once a process has reached `place`.
    #[must_use]
    pub fn has_fired(&self, place: &str) -> bool {
        self.0.path().join(format!("{place}.fired")).exists()
    }

    /// Disarms `place`, whether or not it has fired.
    pub fn clear(&self, place: &str) {
        let _ = fs::remove_file(self.0.path().join(place));
        let _ = fs::remove_file(self.0.path().join(format!("{place}.fired")));
    }
}

impl Default for FailpointDirectory {
    fn default() -> Self {
        Self::new()
    }
}
