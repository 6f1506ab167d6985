//! Lists the files of a model: one GGUF file, or a directory with one or with safetensors.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    generation_defaults::{GenerationDefaults, GenerationDefaultsError},
    gguf::GgufFile,
};

/// The file that says a directory's shape.
pub const CONFIG_FILE: &str = "config.json";
/// The name of a model's only weight file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The name of the list of a model's weight files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The file by which a client's sparse copy, which has no linear layers, is told from a model.
pub const SPARSE_COPY: &str = ".sparse-copy";

/// Directory entries looked at when searching for a GGUF file.
const MAX_ENTRIES: usize = 1 << 12;

/// Error while looking for a model.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The path could not be looked at.
    #[error("cannot look at {}: {source}; give the path of a model file or directory", path.display())]
    Path {
        /// Path that the caller gave.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Nothing in the directory is a model.
    #[error("no model in {}: it has neither config.json with model.safetensors nor a .gguf file", path.display())]
    Nothing {
        /// Path of the directory concerned.
        path: PathBuf,
    },
    /// Several GGUF files, and no way to tell which is meant.
    #[error("{} has several models ({}); give the path of one of them", path.display(), names.join(", "))]
    Several {
        /// Path of the directory concerned.
        path: PathBuf,
        /// Names of the files, sorted.
        names: Vec<String>,
    },
    /// A single file that is not GGUF.
    #[error("{} is not a GGUF file; for safetensors give the directory that holds config.json", path.display())]
    NotGguf {
        /// Path of the file concerned.
        path: PathBuf,
    },
}

/// Where a model's weights are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// One GGUF file with everything in it.
    Gguf(PathBuf),
    /// A directory with `config.json`, safetensors and `tokenizer.json`.
    Directory(PathBuf),
}

impl ModelFiles {
    /// Finds out what kind of model is at `path`.
    ///
    /// # Errors
    /// If there is nothing, or more than one model.
    pub fn at(path: &Path) -> Result<Self, FindError> {
        let failed = |source| FindError::Path { path: path.to_path_buf(), source };
        if !std::fs::metadata(path).map_err(failed)?.is_dir() {
            return if is_gguf(path) {
                Ok(Self::Gguf(path.to_path_buf()))
            } else {
                Err(FindError::NotGguf { path: path.to_path_buf() })
            };
        }
        let holds = |name: &str| path.join(name).exists();
        if holds(CONFIG_FILE) && (holds(SINGLE_FILE) || holds(INDEX_FILE)) {
            return Ok(Self::Directory(path.to_path_buf()));
        }
        let mut found = gguf_files(path).map_err(failed)?;
        found.sort();
        match found.as_slice() {
            [] => Err(FindError::Nothing { path: path.to_path_buf() }),
            [only] => Ok(Self::Gguf(only.clone())),
            several => Err(FindError::Several {
                path: path.to_path_buf(),
                names: several
                    .iter()
                    .filter_map(|path| Some(path.file_name()?.display().to_string()))
                    .collect(),
            }),
        }
    }

    /// Finds out where the tokenizer of the model at `path` is: a directory needs no weights for that, and has none where
    /// they are made of a number.
    ///
    /// # Errors
    /// If there is nothing, or more than one model.
    pub fn text_at(path: &Path) -> Result<Self, FindError> {
        match Self::at(path) {
            Err(FindError::Nothing { .. }) if path.join(CONFIG_FILE).exists() => {
                Ok(Self::Directory(path.to_path_buf()))
            }
            found => found,
        }
    }

    /// True of a client's sparse copy, or a file in one.
    #[must_use]
    pub fn is_sparse_copy(&self) -> bool {
        let path = self.path();
        let directory = if path.is_dir() { Some(path) } else { path.parent() };
        directory.is_some_and(|directory| directory.join(SPARSE_COPY).exists())
    }

    /// The file or directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(path) | Self::Directory(path) => path,
        }
    }

    /// Reads what the files say about sampling.
    ///
    /// # Errors
    /// If the files are broken.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults, GenerationDefaultsError> {
        match self {
            Self::Gguf(path) => GenerationDefaults::from_gguf(&GgufFile::open(path)?),
            Self::Directory(path) => GenerationDefaults::from_directory(path),
        }
    }
}

/// Files in a hub's cache are links to names without an extension, so that links are not followed for the name.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The GGUF files directly in a directory.
///
/// # Errors
/// If the directory cannot be read.
pub fn gguf_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(MAX_ENTRIES) {
        let path = entry?.path();
        if is_gguf(&path) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}
