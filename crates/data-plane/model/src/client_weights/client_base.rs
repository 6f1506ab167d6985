//! Client weights of a base: everything but the linear layers, read from a sparse copy or a whole model.

use std::path::{Path, PathBuf};

use model_files::model_files::ModelFiles;

use crate::{
    forward::ModelContext,
    shape::config::ModelConfig,
    sources::open::{OpenError, sparse_weights},
    weights::{
        embedding::Embedding,
        tensors::{WeightsError, load_frame},
    },
};

/// Reasons why a client cannot use a base.
#[derive(Debug, thiserror::Error)]
pub enum ClientBaseError {
    /// The model is missing or broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Norms or embedding cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The files changed while they were read.
    #[error("{} was written while it was read; start again when the file is complete", path.display())]
    Changed {
        /// Path of the file or directory.
        path: PathBuf,
    },
}

/// The client weights of a base.
#[derive(Debug)]
pub struct ClientBase {
    /// Shape, norms, routers and rotary frequencies.
    pub frame: ModelContext,
    /// Token embedding of the base.
    pub embedding: Embedding,
    /// Model files, which also hold tokenizer, chat template and sampling defaults.
    pub files: ModelFiles,
}

impl ClientBase {
    /// Reads the client weights of the model at `path`, and no tensor of a linear layer.
    ///
    /// # Errors
    /// There is no model of a known architecture, or the files changed during the read.
    pub fn open(path: &Path) -> Result<Self, ClientBaseError> {
        let files = ModelFiles::at(path).map_err(OpenError::from)?;
        let source = sparse_weights(&files)?;
        let frame = load_frame(&*source)?;
        let embedding = Embedding::load(&*source)?;
        if !source.unchanged() {
            return Err(ClientBaseError::Changed { path: path.to_path_buf() });
        }
        Ok(Self { frame, embedding, files })
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }
}
