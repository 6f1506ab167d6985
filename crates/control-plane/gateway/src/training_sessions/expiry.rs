//! When a state that is kept in a directory ends: a file in it says so, and there is none of a state that stays.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use crate::clock::seconds_since_1970;

/// Holds the end, in seconds since 1970.
const EXPIRES: &str = "expires";

/// Lets a state end at a time, in seconds since 1970, or never. Durable when this returns.
///
/// # Errors
/// That cannot be written.
pub fn set(directory: &Path, at: Option<u64>) -> io::Result<()> {
    let path = directory.join(EXPIRES);
    match at {
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
        Some(at) => {
            let fresh = directory.join(format!("{EXPIRES}.new"));
            fs::write(&fresh, at.to_string())?;
            File::open(&fresh)?.sync_all()?;
            fs::rename(&fresh, &path)?;
        }
    }
    File::open(directory)?.sync_all()
}

/// When the state in a directory ends, in seconds since 1970.
pub(super) fn expires_at(directory: &Path) -> Option<u64> {
    fs::read_to_string(directory.join(EXPIRES)).ok()?.parse().ok()
}

/// Whether that time has come.
pub(super) fn is_over(expires_at: Option<u64>) -> bool {
    expires_at.is_some_and(|at| at <= seconds_since_1970())
}
