//! What a client holds of a base: everything but the linear layers, from a sparse copy or a whole model.

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

/// Why a client cannot use a base.
#[derive(Debug, thiserror::Error)]
pub enum ClientBaseError {
    /// There is no model, or one that is broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Norms or embedding cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The files were written to while they were read.
    #[error("{} was written to while it was read; start again once it is whole", path.display())]
    Changed {
        /// The file or directory.
        path: PathBuf,
    },
}

/// The client's part of a base.
#[derive(Debug)]
pub struct ClientBase {
    /// Shape, norms, routers and rotary frequencies.
    pub frame: ModelContext,
    /// The token embedding.
    pub embedding: Embedding,
    /// Where it was read from: tokenizer, chat template and defaults of sampling are there too.
    pub files: ModelFiles,
}

impl ClientBase {
    /// Reads the client's part of the model at `path`, and no tensor of a linear layer.
    ///
    /// # Errors
    /// If there is no model of a known architecture, or it was written to meanwhile.
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

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }
}
