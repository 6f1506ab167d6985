//! A control group with little memory, if the system allows one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::gateway::WATCHDOG;

/// Control group that is removed when dropped, once it has no process.
pub(crate) struct ControlGroup(PathBuf);

impl ControlGroup {
    /// Creates a group whose processes share `memory_bytes`; `None` with a message if that is not possible.
    pub(crate) fn new(name: &str, memory_bytes: u64) -> Option<Self> {
        let name = format!("holobiont-test-{name}-{}", std::process::id());
        // Version 2 keeps all controllers in one tree, version 1 each in its own.
        let trees = [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        let made = trees
            .iter()
            .find_map(|(root, file)| Self::below(Path::new(root), &name, file, memory_bytes).ok());
        if made.is_none() {
            eprintln!("{name}: no control group for memory can be made here, so nothing is tested");
        }
        made
    }

    fn below(root: &Path, name: &str, file: &str, memory_bytes: u64) -> io::Result<Self> {
        let path = root.join(name);
        fs::create_dir(&path)?;
        let group = Self(path);
        // The file is missing without the controller.
        fs::OpenOptions::new().write(true).open(group.0.join(file))?;
        fs::write(group.0.join(file), memory_bytes.to_string())?;
        Ok(group)
    }

    /// Shell command that moves the shell into the group.
    pub(crate) fn join_command(&self) -> String {
        format!("echo $$ > {}/cgroup.procs &&", self.0.display())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let begun = Instant::now();
        // Killed processes stay in the group until the system has removed them.
        while fs::remove_dir(&self.0).is_err() && begun.elapsed() < WATCHDOG {
            thread::sleep(Duration::from_millis(10));
        }
    }
}
