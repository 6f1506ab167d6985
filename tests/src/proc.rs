//! Process information of the operating system.

use std::fs;

pub(crate) fn children(id: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("the processes of this machine");
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|child| parent(*child) == Some(id)).collect()
}

/// Returns the parent of a running process; `None` for a zombie.
pub(crate) fn parent(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // State and parent come after the name, which is in parentheses.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    fields.next()?.parse().ok().filter(|_| state != "Z")
}

pub(crate) fn name(id: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{id}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

pub(crate) fn arguments(id: u32) -> String {
    fs::read(format!("/proc/{id}/cmdline"))
        .map_or_else(|_| String::new(), |line| String::from_utf8_lossy(&line).into_owned())
}

/// Returns the open files of a process, sorted: a path, or the kind and inode of a socket or pipe.
pub(crate) fn open_files(id: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let mut files: Vec<_> = targets.map(|target| target.display().to_string()).collect();
    files.sort_unstable();
    files
}

/// Counts the threads of a process, except those named `except`.
pub(crate) fn threads(id: u32, except: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim_end() != except).count()
}

/// Returns the anonymous resident memory of a process in bytes.
pub(crate) fn resident_bytes(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a figure");
    let kib = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
    kib * 1024
}

/// The memfds that a process holds, to detect leaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedMemory {
    /// Number of open memfds.
    pub files: usize,
    /// Number of mappings of memfds.
    pub maps: usize,
}

impl SharedMemory {
    /// Returns the memfds of process `id`; none if there is no such process.
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
