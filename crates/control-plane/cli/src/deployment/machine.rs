//! Reads the size of this machine's memory.

/// Returns the value of a line of `/proc/meminfo` in bytes; `None` if the line is missing.
pub(crate) fn memory_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim_matches([':', ' ']).split(' ').next()?.parse().ok()?;
    kib.checked_mul(1024)
}
