//! Where a process may be made to die: the failpoints of the debug builds.

use std::{fs, path::Path};

use tempfile::TempDir;

/// The directory through which places are armed.
#[derive(Debug)]
pub struct FailpointDirectory(TempDir);

impl FailpointDirectory {
    /// Nothing is armed.
    #[must_use]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// What `HOLOBIONT_FAILPOINTS` is set to.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.0.path()
    }

    /// Arms `place`: whoever gets there next does `what` (see the crate `failpoint`).
    pub fn arm(&self, place: &str, what: &str) {
        // A process may look while this writes: it must find all of it or nothing.
        let fresh = self.0.path().join(format!("{place}.new"));
        fs::write(&fresh, what).expect("the directory can be written");
        fs::rename(fresh, self.0.path().join(place)).expect("the directory can be written");
    }

    /// True once somebody got to `place`.
    #[must_use]
    pub fn has_fired(&self, place: &str) -> bool {
        self.0.path().join(format!("{place}.fired")).exists()
    }

    /// Disarms `place`, whether it has fired or not.
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
