//! What the operating system says of a process.

use std::fs;

/// The processes that `id` started and that run now.
pub(crate) fn children(id: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("the processes of this machine");
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|child| parent(*child) == Some(id)).collect()
}

/// Who started a process, while it runs. One that is dead but not waited for does not.
pub(crate) fn parent(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // State and parent come after the name, which is in parentheses.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    fields.next()?.parse().ok().filter(|_| state != "Z")
}

/// What a process is called.
pub(crate) fn name(id: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{id}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// What a process was started with.
pub(crate) fn arguments(id: u32) -> String {
    fs::read(format!("/proc/{id}/cmdline"))
        .map_or_else(|_| String::new(), |line| String::from_utf8_lossy(&line).into_owned())
}

/// What a process has open, sorted: a path, or the kind and inode of a socket or pipe.
pub(crate) fn open_files(id: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let mut files: Vec<_> = targets.map(|target| target.display().to_string()).collect();
    files.sort_unstable();
    files
}

/// Threads of a process, but for those named `except`.
pub(crate) fn threads(id: u32, except: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim_end() != except).count()
}

/// Memory of a process that is in use and not a file's, in bytes.
pub(crate) fn resident_bytes(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a figure");
    let kib = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
    kib * 1024
}

/// The memfds that a process holds: what it would leak if it forgot one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedMemory {
    /// Open ones.
    pub files: usize,
    /// Mapped ones, each part that is mapped by itself.
    pub maps: usize,
}

impl SharedMemory {
    /// What the process `id` holds now; nothing if there is no such process.
    #[must_use]
    pub fn of(id: u32) -> Self {
        let is_shared = |path: &str| path.contains("/memfd:");
        let entries = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten();
        let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let maps = fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default();
        Self {
            files: links.filter(|link| is_shared(&link.to_string_lossy())).count(),
            maps: maps.lines().filter(|line| is_shared(line)).count(),
        }
    }
}
