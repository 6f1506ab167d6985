//! What tells the text of one model from that of another: a hash of what tokenizer, chat template and sampling defaults are
//! made of. Whoever reads the same text finds the same hash.

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
/// Bytes of one of them; the largest are tokenizers.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// Why the text of a model could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TextHashError {
    /// A file is there but cannot be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// The hash: of a GGUF file all that precedes its tensors' data, of a directory the files that are read for text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextHash(pub [u8; 32]);

impl TextHash {
    /// Reads what `files` say of text.
    ///
    /// # Errors
    /// If a file is there but cannot be read, or is beyond any size of its kind.
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

/// Adds whether a file is there, and what is in it.
fn add_file(hasher: &mut blake3::Hasher, path: &Path) -> Result<(), TextHashError> {
    let read = whole_file::read_if_there(path, MAX_FILE_BYTES);
    match read.map_err(|source| TextHashError::Read { path: path.to_path_buf(), source })? {
        None => hasher.update(&u64::MAX.to_le_bytes()),
        Some(bytes) => hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes),
    };
    Ok(())
}
