//! Opens a model, or the first layers of a base, as a drafter.

use std::{convert::Infallible, path::Path, sync::Arc};

use kernels::lora::LayoutError;
use model::{
    adapter::DraftAdapter,
    deltas::prepared::PreparedAdapter,
    resident::{KvPrecision, LoadedWeights, ResidentError, ResidentModel, ResidentOptions, SharedBase},
    sources::open::{OpenError, open},
    weights::{
        ResidentLayers,
        first::{FirstLayers, FirstLayersError},
        host::HostLayers,
        tensors::WeightsError,
    },
};
use model_files::{
    model_files::{FindError, ModelFiles},
    token_list::{TokenList, TokenListError, TokenMismatch},
};

use crate::{drafter::Drafter, vocabulary::Vocabulary};

/// Resources that a drafter may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftOptions {
    /// Cores to compute on; if empty, the calling thread computes without pinning.
    pub cores: Vec<usize>,
    /// Maximum bytes of the KV cache and of a shortlist's head rows, which are copied from the base.
    pub bytes: u64,
    /// Element type of the KV cache.
    pub kv_dtype: Option<KvPrecision>,
}

/// Reasons why a model cannot draft.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The path holds no model.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The model's files cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The model's tokens cannot be listed.
    #[error(transparent)]
    Tokens(#[from] TokenListError),
    /// The model's tokens differ from the base's.
    #[error(transparent)]
    Tokenizer(#[from] TokenMismatch),
    /// The weights do not match the configuration.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The base's first layers are not available.
    #[error(transparent)]
    Layers(#[from] FirstLayersError),
    /// The draft adapter does not fit the layers.
    #[error("cannot compute the draft's adapter: {0}")]
    Adapter(#[from] LayoutError),
    /// Memory or a thread for the model is missing.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// The byte limit is below the smallest drafter.
    #[error(
        "{bytes} bytes are too few for the draft model, which needs at least {needed_bytes}; raise \
         --draft-bytes (of a split client --draft-kv-bytes)"
    )]
    TooFewBytes {
        /// The limit from the options.
        bytes: u64,
        /// Minimum bytes that a drafter needs.
        needed_bytes: u64,
    },
}

/// An opened drafter with its memory use.
#[derive(Debug)]
pub struct OpenedDraft<L> {
    /// The drafter, ready to use.
    pub drafter: Drafter<L>,
    /// Bytes of its own memory: weights and KV cache.
    pub bytes: u64,
}

/// The first layers of a base, opened as a drafter.
#[derive(Debug)]
pub struct SelfDraft {
    /// The drafter over the first layers.
    pub drafter: Drafter<FirstLayers>,
    /// The draft adapter that these layers use.
    pub adapter: Arc<PreparedAdapter>,
    /// Bytes of memory beyond those of the base and the adapter.
    pub bytes: u64,
}

/// Opens the model at `path` as a drafter for a base with `vocab_size` tokens, listed in `tokens`.
///
/// # Errors
/// The model cannot be read, or its tokens differ from the base's.
pub fn by_model(
    path: &Path,
    (tokens, vocab_size): (&TokenList, usize),
    options: &DraftOptions,
) -> Result<OpenedDraft<ResidentLayers>, DraftError> {
    TokenList::of(&ModelFiles::at(path)?)?.agrees_with(tokens)?;
    let weights = LoadedWeights::load(&*open(path)?, options.cores.len().max(1))?;
    let vocabulary = Vocabulary::shared(vocab_size.min(weights.config().vocab_size));
    let weight_bytes = weights.bytes() as u64;
    let opened = ready(weights, None, vocabulary, options, options.bytes)?;
    Ok(OpenedDraft { bytes: opened.bytes + weight_bytes, ..opened })
}

/// Opens the first layers of `base` with `adapter` as a drafter for `base`.
///
/// # Errors
/// The layers are not in memory, or the drafter does not fit in `options.bytes`.
pub fn by_itself(
    base: &SharedBase,
    adapter: &DraftAdapter,
    options: &DraftOptions,
) -> Result<SelfDraft, DraftError> {
    let weights = base.first_layers(&adapter.shape)?;
    let (config, precision) = (weights.config(), weights.adapter_precision());
    let prepared = Arc::new(PreparedAdapter::new(&adapter.shortlisted(), config, precision)?);
    let vocabulary = Vocabulary::listed(base.config().vocab_size, adapter.shape.shortlist.as_ref());
    let needed_bytes = weights.bytes() as u64;
    let kv_bytes = options.bytes.checked_sub(needed_bytes);
    let kv_bytes = kv_bytes.ok_or(DraftError::TooFewBytes { bytes: options.bytes, needed_bytes })?;
    let OpenedDraft { drafter, bytes } =
        ready(weights, Some(Arc::clone(&prepared)), vocabulary, options, kv_bytes)?;
    Ok(SelfDraft { drafter, adapter: prepared, bytes: bytes + needed_bytes })
}

fn ready<L: HostLayers<Error = Infallible>>(
    weights: LoadedWeights<L>,
    adapter: Option<Arc<PreparedAdapter>>,
    vocabulary: Vocabulary,
    options: &DraftOptions,
    kv_bytes: u64,
) -> Result<OpenedDraft<L>, DraftError> {
    let block_bytes = weights.kv_shape(options.kv_dtype).block_bytes() as u64;
    if kv_bytes < block_bytes {
        let needed_bytes = options.bytes - kv_bytes + block_bytes;
        return Err(DraftError::TooFewBytes { bytes: options.bytes, needed_bytes });
    }
    let options = ResidentOptions {
        cores: options.cores.clone(),
        kv_bytes: usize::try_from(kv_bytes).unwrap_or(usize::MAX),
        kv_dtype: options.kv_dtype,
    };
    let model = ResidentModel::new(weights, &options)?;
    let bytes = model.kv_blocks() as u64 * block_bytes;
    Ok(OpenedDraft { drafter: Drafter::new(model, adapter, vocabulary), bytes })
}
