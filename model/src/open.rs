//! Opens a model wherever it is: a GGUF file, or a directory with one or with safetensors.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    generation_defaults::{GenerationDefaults, GenerationDefaultsError},
    gguf::{GgufError, GgufFile},
    gguf_source::{GgufSource, GgufSourceError},
    safetensors_source::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE, SafetensorsSource, SafetensorsSourceError},
    skeleton::is_sparse_copy,
    source::WeightSource,
};

/// Directory entries looked at when searching for a GGUF file.
const MAX_ENTRIES: usize = 1 << 12;

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path could not be looked at.
    #[error("cannot look at {}: {source}; give the path of a model file or directory", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing in the directory is a model.
    #[error("no model in {}: it has neither config.json with model.safetensors nor a .gguf file", path.display())]
    Nothing {
        /// The directory.
        path: PathBuf,
    },
    /// Several GGUF files, and no way to tell which is meant.
    #[error("{} has several models ({}); give the path of one of them", path.display(), names.join(", "))]
    Several {
        /// The directory.
        path: PathBuf,
        /// Their names, sorted.
        names: Vec<String>,
    },
    /// A single file that is not GGUF.
    #[error("{} is not a GGUF file; for safetensors give the directory that holds config.json", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
    },
    /// A client's copy of another model, without its linear layers.
    #[error("{} is a client's sparse copy, without linear layers; give the path of the whole model", path.display())]
    Sparse {
        /// The file or directory.
        path: PathBuf,
    },
    /// The GGUF file is refused.
    #[error(transparent)]
    Gguf(#[from] GgufSourceError),
    /// The directory is refused.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsSourceError),
    /// What the files say about sampling is refused.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
}

impl OpenError {
    /// True if the files are whole as far as is known, and only the architecture, or an option of it, is not
    /// supported.
    #[must_use]
    pub fn is_of_configuration(&self) -> bool {
        matches!(self, Self::Safetensors(SafetensorsSourceError::Config { .. }))
    }
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
    pub fn at(path: &Path) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Path { path: path.to_path_buf(), source };
        if !std::fs::metadata(path).map_err(failed)?.is_dir() {
            return if is_gguf(path) {
                Ok(Self::Gguf(path.to_path_buf()))
            } else {
                Err(OpenError::NotGguf { path: path.to_path_buf() })
            };
        }
        let holds = |name: &str| path.join(name).exists();
        if holds(CONFIG_FILE) && (holds(SINGLE_FILE) || holds(INDEX_FILE)) {
            return Ok(Self::Directory(path.to_path_buf()));
        }
        let mut found = gguf_files(path).map_err(failed)?;
        found.sort();
        match found.as_slice() {
            [] => Err(OpenError::Nothing { path: path.to_path_buf() }),
            [only] => Ok(Self::Gguf(only.clone())),
            several => Err(OpenError::Several {
                path: path.to_path_buf(),
                names: several
                    .iter()
                    .filter_map(|path| Some(path.file_name()?.display().to_string()))
                    .collect(),
            }),
        }
    }

    /// Finds out where the tokenizer of the model at `path` is: a directory needs no weights for that, and has none where
    /// they are made of a number ([`crate::random_source`]).
    ///
    /// # Errors
    /// If there is nothing, or more than one model.
    pub fn text_at(path: &Path) -> Result<Self, OpenError> {
        match Self::at(path) {
            Err(OpenError::Nothing { .. }) if path.join(CONFIG_FILE).exists() => {
                Ok(Self::Directory(path.to_path_buf()))
            }
            found => found,
        }
    }

    /// The file or directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(path) | Self::Directory(path) => path,
        }
    }

    /// Opens the weights.
    ///
    /// # Errors
    /// Whatever opening the one or the other kind reports, and a sparse copy, which has none of linear layers.
    pub fn weights(&self) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
        if is_sparse_copy(self.path()) {
            return Err(OpenError::Sparse { path: self.path().to_path_buf() });
        }
        self.sparse_weights()
    }

    /// Opens the weights, also those of a sparse copy, for who needs none of linear layers.
    pub(crate) fn sparse_weights(&self) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
        Ok(match self {
            Self::Gguf(path) => Box::new(GgufSource::open(path)?),
            Self::Directory(path) => Box::new(SafetensorsSource::open(path)?),
        })
    }

    /// Reads what the files say about sampling.
    ///
    /// # Errors
    /// If the files are broken.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults, OpenError> {
        Ok(match self {
            Self::Gguf(path) => {
                let file = GgufFile::open(path).map_err(GenerationDefaultsError::from)?;
                GenerationDefaults::from_gguf(&file)?
            }
            Self::Directory(path) => GenerationDefaults::from_directory(path)?,
        })
    }
}

/// Opens the model at `path`: a GGUF file, a directory with a single one, or a Hugging Face directory.
///
/// # Errors
/// If there is no model, more than one, or one that cannot be run.
pub fn open(path: &Path) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
    ModelFiles::at(path)?.weights()
}

impl From<GgufError> for OpenError {
    fn from(error: GgufError) -> Self {
        Self::Gguf(error.into())
    }
}

/// Files in a hub's cache are links to names without an extension, so that links are not followed for the name.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The GGUF files directly in a directory.
pub(crate) fn gguf_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(MAX_ENTRIES) {
        let path = entry?.path();
        if is_gguf(&path) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}
