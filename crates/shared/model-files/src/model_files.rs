//! Lists the files of a model: one GGUF file, or a directory with one or with safetensors.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    generation_defaults::{GenerationDefaults, GenerationDefaultsError},
    gguf::GgufFile,
};

/// Name of the file with a model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the weight file of a model with only one.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index of a model's weight files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Name of the file that marks a client's sparse copy, a model directory without linear layers.
pub const SPARSE_COPY: &str = ".sparse-copy";

/// Maximum number of directory entries examined in the search for a GGUF file.
const MAX_ENTRIES: usize = 1 << 12;

/// Error while looking for a model.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The path's metadata could not be read.
    #[error("cannot read {}: {source}; give the path of a model file or directory", path.display())]
    Path {
        /// Path that the caller gave.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The directory holds no model.
    #[error("no model in {}: it has neither config.json with model.safetensors nor a .gguf file", path.display())]
    Nothing {
        /// Path of the directory concerned.
        path: PathBuf,
    },
    /// The directory holds several GGUF files, so the model is ambiguous.
    #[error("{} has several models ({}); give the path of one of them", path.display(), names.join(", "))]
    Several {
        /// Path of the directory concerned.
        path: PathBuf,
        /// Names of the files, sorted.
        names: Vec<String>,
    },
    /// The path is a single file that is not GGUF.
    #[error("{} is not a GGUF file; for safetensors give the directory that contains \
             config.json", path.display())]
    NotGguf {
        /// Path of the file concerned.
        path: PathBuf,
    },
}

/// Location of a model's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// One GGUF file with everything in it.
    Gguf(PathBuf),
    /// A directory with `config.json`, safetensors and `tokenizer.json`.
    Directory(PathBuf),
}

impl ModelFiles {
    /// Determines the kind of model at `path`.
    ///
    /// # Errors
    /// Fails if there is no model, or more than one.
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

    /// Returns the files that hold the tokenizer of the model at `path`. Unlike [`Self::at`], a directory may
    /// lack weight files, for example with random weights.
    ///
    /// # Errors
    /// Fails if there is no model, or more than one.
    pub fn text_at(path: &Path) -> Result<Self, FindError> {
        match Self::at(path) {
            Err(FindError::Nothing { .. }) if path.join(CONFIG_FILE).exists() => {
                Ok(Self::Directory(path.to_path_buf()))
            }
            found => found,
        }
    }

    /// True for a client's sparse copy, or for a file in one.
    #[must_use]
    pub fn is_sparse_copy(&self) -> bool {
        let path = self.path();
        let directory = if path.is_dir() { Some(path) } else { path.parent() };
        directory.is_some_and(|directory| directory.join(SPARSE_COPY).exists())
    }

    /// Returns the path of the file or directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(path) | Self::Directory(path) => path,
        }
    }

    /// Reads the model's default sampling parameters.
    ///
    /// # Errors
    /// Fails if the files are malformed.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults, GenerationDefaultsError> {
        match self {
            Self::Gguf(path) => GenerationDefaults::from_gguf(&GgufFile::open(path)?),
            Self::Directory(path) => GenerationDefaults::from_directory(path),
        }
    }
}

/// Uses the path before links are followed, because the targets in a hub's cache have no extension.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Returns the GGUF files directly in `directory`.
///
/// # Errors
/// Fails if the directory cannot be read.
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
