//! Small and untrusted files, read whole: regular files only, and never more than a stated limit.

use std::{
    io::{self, Read},
    path::Path,
};

use shmproto::file::open_regular;

/// Returns the bytes of the regular file at `path`.
///
/// # Errors
/// If the file cannot be opened or read.
/// `FileTooLarge` beyond `limit_bytes`, also if the file grows meanwhile.
pub fn read(path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let length = file.metadata()?.len();
    if length > limit_bytes {
        return Err(too_large(limit_bytes));
    }
    let mut bytes = Vec::new();
    let capacity = usize::try_from(length).map_err(|_| too_large(limit_bytes))?;
    bytes.try_reserve_exact(capacity).map_err(|_| io::ErrorKind::OutOfMemory)?;
    file.take(limit_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit_bytes {
        return Err(too_large(limit_bytes));
    }
    Ok(bytes)
}

/// Like [`read`], but `None` if there is no such file.
pub fn read_if_there(path: &Path, limit_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    match read(path, limit_bytes) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn too_large(limit_bytes: u64) -> io::Error {
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("the file is larger than the limit of {limit_bytes} bytes"),
    )
}
