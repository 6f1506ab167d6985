//! Hashes the sources of a model's tokenizer, chat template and sampling defaults, so that two processes can
//! tell whether they handle the text of the same model.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    gguf::{GgufError, GgufFile},
    model_files::{CONFIG_FILE, ModelFiles},
    whole_file,
};

/// Files of a model directory that say how text becomes tokens, and when an answer ends.
const TEXT_FILES: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", CONFIG_FILE];
/// Maximum bytes of one text file; the largest are tokenizers.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// Error while reading the text files of a model.
#[derive(Debug, thiserror::Error)]
pub enum TextHashError {
    /// A file exists but cannot be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// Path of the file concerned.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// Hash of a GGUF file up to its tensor data, or of the text files of a model directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextHash(pub [u8; 32]);

impl TextHash {
    /// Hashes the text sources in `files`.
    ///
    /// # Errors
    /// If a file exists but cannot be read, or exceeds its size limit.
    pub fn of(files: &ModelFiles) -> Result<Self, TextHashError> {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont model text 1");
        match files {
            ModelFiles::Gguf(path) => {
                hasher.update(GgufFile::open(path)?.header());
            }
            ModelFiles::Directory(directory) => {
                for name in TEXT_FILES {
                    add_file(&mut hasher, &directory.join(name))?;
                }
            }
        }
        Ok(Self(*hasher.finalize().as_bytes()))
    }
}

/// Hashes whether the file exists, and its content.
fn add_file(hasher: &mut blake3::Hasher, path: &Path) -> Result<(), TextHashError> {
    let read = whole_file::read_if_there(path, MAX_FILE_BYTES);
    match read.map_err(|source| TextHashError::Read { path: path.to_path_buf(), source })? {
        None => hasher.update(&u64::MAX.to_le_bytes()),
        Some(bytes) => hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes),
    };
    Ok(())
}
