//! A model, or the base's first layers, made ready to guess.

use std::{convert::Infallible, path::Path, sync::Arc};

use kernels::lora::LayoutError;
use model::{
    adapter::DraftAdapter,
    deltas::prepared::PreparedAdapter,
    resident::{KvDtype, LoadedWeights, ResidentError, ResidentModel, ResidentOptions, SharedBase},
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

/// What a draft may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftOptions {
    /// Cores to compute on. Empty: the thread that asks, not pinned.
    pub cores: Vec<usize>,
    /// Bytes of its keys and values at most, and of rows that it has beside a base that it shares.
    pub bytes: u64,
    /// Bits of keys and values.
    pub kv_dtype: KvDtype,
}

/// Why a model cannot draft.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// There is no model.
    #[error(transparent)]
    Find(#[from] FindError),
    /// It cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its tokens cannot be listed.
    #[error(transparent)]
    Tokens(#[from] TokenListError),
    /// They are others.
    #[error(transparent)]
    Tokenizer(#[from] TokenMismatch),
    /// Its weights are not what its configuration says.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The base's layers that it needs cannot be had.
    #[error(transparent)]
    Layers(#[from] FirstLayersError),
    /// Its adapter cannot be computed with.
    #[error("the draft's adapter cannot be computed: {0}")]
    Adapter(#[from] LayoutError),
    /// There is no memory for it, or no thread.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// What it may take does not hold anything.
    #[error(
        "{bytes} bytes do not hold a draft: it takes {needed_bytes} at least; raise --draft-bytes (of a split client --draft-kv-bytes)"
    )]
    TooFewBytes {
        /// What it may take.
        bytes: u64,
        /// What it takes at least.
        needed_bytes: u64,
    },
}

/// A draft that is ready, and what it takes.
#[derive(Debug)]
pub struct OpenedDraft<L> {
    /// It.
    pub drafter: Drafter<L>,
    /// Bytes of memory that are its own: weights, keys and values.
    pub bytes: u64,
}

/// The first layers of a base, ready to guess.
#[derive(Debug)]
pub struct SelfDraft {
    /// They.
    pub drafter: Drafter<FirstLayers>,
    /// The adapter that makes them guess.
    pub adapter: Arc<PreparedAdapter>,
    /// Bytes of memory that are neither the base's nor the adapter's.
    pub bytes: u64,
}

/// The model at `path` as a draft for a base with these `tokens`, of which there are `vocab_size`.
///
/// # Errors
/// It cannot be read, or its tokens are others.
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

/// The first layers of `base` with `adapter` as a draft for it.
///
/// # Errors
/// They are not in memory, or do not fit beside it.
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

/// Takes memory for keys and values, and starts threads.
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
