//! Starts and watches the processes of a base that several devices hold together.
//!
//! The executor is the leader: it runs the engine and the forward pass, and holds the first part of the
//! weights. It starts one child process for each other device, from its own program. A group lives and dies
//! as one: a member ends when its leader does, and the leader ends when a member does, so that the supervisor
//! restarts the whole group and no answer comes from a part of it.
//!
//! # Layout
//!
//! - [`leader`]: starts the members, waits for their weights and watches them.
//! - [`member`]: the child process.

pub(crate) mod leader;
mod member;

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use model::precision::Precision;
use model_files::model_files::ModelFiles;

pub use self::member::run as run_member;

/// First argument of a member's process.
pub const MEMBER_COMMAND: &str = "member";

/// Release of this program, which all processes of a group share.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Time that leader and members spin for each other before they sleep: longer than the work of a decode step
/// between two linear layers.
const SPIN: Duration = Duration::from_micros(100);

/// Precisions by their codes in messages.
const PRECISIONS: [Precision; 5] =
    [Precision::Int8, Precision::Mixed, Precision::Int15, Precision::Bf16, Precision::Exact];

/// Returns the code of a precision: its index in [`PRECISIONS`].
fn code_of(precision: Precision) -> u8 {
    match precision {
        Precision::Int8 => 0,
        Precision::Mixed => 1,
        Precision::Int15 => 2,
        Precision::Bf16 => 3,
        Precision::Exact => 4,
    }
}

/// Returns a hash of the names, sizes and times of a model's files. It is read without reading the weights.
fn files_hash(path: &Path) -> io::Result<[u8; 32]> {
    let mut hash = blake3::Hasher::new();
    for file in files(path)? {
        let data = fs::metadata(&file)?;
        let described = [data.dev(), data.ino(), data.size(), data.mtime().cast_unsigned()];
        hash.update(file.as_os_str().as_encoded_bytes());
        for number in described {
            hash.update(&number.to_le_bytes());
        }
        hash.update(&data.mtime_nsec().to_le_bytes());
    }
    Ok(*hash.finalize().as_bytes())
}

/// Returns the files of the model at `path`: one GGUF file, or the files of its directory.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    let directory = match ModelFiles::at(path).map_err(io::Error::other)? {
        ModelFiles::Gguf(file) => return Ok(vec![file]),
        ModelFiles::Directory(directory) => directory,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_part = path.extension().is_some_and(|name| name == "safetensors" || name == "json");
        files.extend(Some(path).filter(|_| is_part));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests")]

    use super::*;

    #[test]
    fn a_replaced_or_rewritten_model_file_has_another_hash() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        fs::write(&file, "GGUF and more").unwrap();
        let first = files_hash(&file).unwrap();
        assert_eq!(files_hash(&file).unwrap(), first);
        fs::write(&file, "GGUF and even more").unwrap();
        assert_ne!(files_hash(&file).unwrap(), first, "another size");
        let second = files_hash(&file).unwrap();
        fs::write(folder.path().join("other"), "GGUF and even more").unwrap();
        fs::rename(folder.path().join("other"), &file).unwrap();
        assert_ne!(files_hash(&file).unwrap(), second, "another file of this name and size");
        assert!(files_hash(&folder.path().join("none.gguf")).is_err());
    }

    #[test]
    fn every_precision_is_found_by_its_code() {
        for precision in PRECISIONS {
            assert_eq!(PRECISIONS[usize::from(code_of(precision))], precision);
        }
    }
}
