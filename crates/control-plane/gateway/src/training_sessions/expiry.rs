//! Expiry of a state: a file in its directory has the time; a state without the file never expires.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use crate::clock::seconds_since_1970;

/// Name of the file with the expiry time, in seconds since 1970.
const EXPIRES: &str = "expires";

/// Sets the expiry time of a state, in seconds since 1970, or none. The change is durable when this returns.
///
/// # Errors
/// If the file cannot be written or removed.
pub(crate) fn set(directory: &Path, at: Option<u64>) -> io::Result<()> {
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

/// Returns the expiry time of the state in `directory`, in seconds since 1970.
pub(super) fn expires_at(directory: &Path) -> Option<u64> {
    fs::read_to_string(directory.join(EXPIRES)).ok()?.parse().ok()
}

/// Whether the expiry time has passed.
pub(super) fn is_over(expires_at: Option<u64>) -> bool {
    expires_at.is_some_and(|at| at <= seconds_since_1970())
}
