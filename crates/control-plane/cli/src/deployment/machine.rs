//! What the system says of this machine's memory.

/// A line of `/proc/meminfo`, in bytes; `None` without one.
pub(crate) fn memory_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim_matches([':', ' ']).split(' ').next()?.parse().ok()?;
    kib.checked_mul(1024)
}
