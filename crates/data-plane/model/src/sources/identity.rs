//! Computes the identity of a model from its path, for programs that do not load the model. The function
//! reads all files, unless a result is stored for their current state.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use model_files::{model_files::ModelFiles, text_hash::TextHash};

use crate::{
    shape::identity::{CONTEXT, HasIdentity as _, HashedWeights},
    sources::open::{OpenError, weights},
};

/// Maximum number of files in a model directory that are checked for changes.
const MAX_FILES: usize = 1 << 12;

/// Computes the identity of the model at `path` by reading all of it.
///
/// # Errors
/// There is no model of a known architecture.
pub fn of_model(path: &Path) -> Result<[u8; 32], OpenError> {
    let files = ModelFiles::at(path)?;
    let text = TextHash::of(&files)?;
    Ok(HashedWeights::new(weights(&files)?).identity(text))
}

/// Computes the identity as [`of_model`] does, but reads an unchanged model only once: the directory `kept`,
/// if given, stores identities by names, sizes, times and inodes of the model's files.
///
/// # Errors
/// The errors of [`of_model`].
pub fn of_model_once(path: &Path, kept: Option<&Path>) -> Result<[u8; 32], OpenError> {
    let Some(kept) = kept else {
        return of_model(path);
    };
    let files = ModelFiles::at(path)?;
    let stamp = stamp_of(&files).ok();
    let place = |stamp: blake3::Hash| kept.join(stamp.to_hex().as_str());
    if let Some(known) = stamp.and_then(|stamp| fs::read(place(stamp)).ok()?.try_into().ok()) {
        return Ok(known);
    }
    let identity = of_model(path)?;
    if let Some(stamp) = stamp.filter(|&stamp| stamp_of(&files).is_ok_and(|after| after == stamp)) {
        // The rename makes the entry complete or absent; a failure only costs the next caller a read.
        let fresh = kept.join(format!("new-{}", std::process::id()));
        let keep = || fs::create_dir_all(kept).and_then(|()| fs::write(&fresh, identity));
        drop(keep().and_then(|()| fs::rename(&fresh, place(stamp))));
    }
    Ok(identity)
}

/// Returns a hash of file metadata that changes with the model's files.
fn stamp_of(files: &ModelFiles) -> io::Result<blake3::Hash> {
    let mut paths = match files {
        ModelFiles::Gguf(path) => vec![path.clone()],
        ModelFiles::Directory(directory) => {
            let entries = fs::read_dir(directory)?.take(MAX_FILES);
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?
        }
    };
    paths.sort();
    let mut hasher = blake3::Hasher::new_derive_key("holobiont kept identity of a model");
    hasher.update(CONTEXT.as_bytes());
    for path in paths {
        let file = fs::metadata(&path)?;
        hasher.update(path.canonicalize()?.as_os_str().as_encoded_bytes());
        hasher.update(&[0]);
        hasher.update(&file.len().to_le_bytes());
        for number in [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&file.dev().to_le_bytes()).update(&file.ino().to_le_bytes());
    }
    Ok(hasher.finalize())
}
