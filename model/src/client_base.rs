//! What a client holds of a base: everything but the linear layers, from a sparse copy or a whole model.

use std::path::{Path, PathBuf};

use kernels::{TensorType, attention::KvShape, lora::LoraPrecision};

use crate::{
    config::ModelConfig,
    embedding::Embedding,
    forward::Skeleton,
    layout::BLOCK_TARGETS,
    open::{ModelFiles, OpenError},
    resident::{KvDtype, kv_shape},
    rope::RopeTable,
    source::{Target, TensorId, WeightSource},
    weights::{WeightsError, load_norms},
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
    /// Shape, norms and rotary frequencies.
    pub skeleton: Skeleton,
    /// The token embedding.
    pub embedding: Embedding,
    /// The linear layers take activations unrounded, so that adapters, keys and values are kept in 32 bits.
    pub exact: bool,
    /// Where it was read from: tokenizer, chat template and defaults of sampling are there too.
    pub files: ModelFiles,
}

impl ClientBase {
    /// Reads the client's part of the model at `path`, and no tensor of a linear layer.
    ///
    /// # Errors
    /// If there is no model of a known architecture, or it was written to meanwhile.
    pub fn open(path: &Path) -> Result<Self, ClientBaseError> {
        let files = ModelFiles::at(path)?;
        let source = files.sparse_weights()?;
        let config = source.config().clone();
        let exact = is_exact(&*source);
        let norms = load_norms(&*source)?;
        let embedding = Embedding::load(&*source)?;
        let rope = RopeTable::new(&config);
        if !source.unchanged() {
            return Err(ClientBaseError::Changed { path: path.to_path_buf() });
        }
        Ok(Self { skeleton: Skeleton { config, norms, rope }, embedding, exact, files })
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.skeleton.config
    }

    /// How adapters are kept: as the resident engine of the same base keeps them.
    #[must_use]
    pub fn adapter_precision(&self) -> LoraPrecision {
        if self.exact { LoraPrecision::Exact } else { LoraPrecision::Compact }
    }

    /// The shape of KV blocks of `dtype`: as in the resident engine of the same base.
    #[must_use]
    pub fn kv_shape(&self, dtype: KvDtype) -> KvShape {
        kv_shape(self.config(), self.exact, dtype)
    }
}

/// True if every linear layer takes its activations unrounded, by what the files say of it.
fn is_exact(source: &dyn WeightSource) -> bool {
    let config = source.config();
    let head = if config.tied_head { TensorId::TokenEmbedding } else { TensorId::Weight(0, Target::LmHead) };
    let blocks =
        (0..config.layers).flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Weight(layer, target)));
    let is_float = |id| matches!(source.kind(id), Some(TensorType::F32 | TensorType::F16));
    blocks.chain([head]).all(is_float)
}
