//! Why an adapter is refused.

use std::{
    io,
    path::{Path, PathBuf},
};

use kernels::PackError;
use model_files::gguf::GgufError;

use super::{limits, patterns::is_tail};
use crate::sources::{hf_names::EMBEDDING, safetensors::file::SafetensorsFormatError};

/// Why an adapter is refused.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; an adapter is a directory with adapter_config.json and adapter_model.safetensors, or a GGUF file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Weights in a format that can run code when it is read.
    #[error("{} is a pickle file, which is never read; save the adapter as safetensors", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file that is no adapter at all.
    #[error("{} is no adapter; give a PEFT directory or a GGUF adapter", path.display())]
    NotAnAdapter {
        /// The file or directory.
        path: PathBuf,
    },
    /// The files changed while they were read.
    #[error("{} changed while it was read; load the adapter again once it is written", path.display())]
    Changing {
        /// The directory.
        path: PathBuf,
    },
    /// The configuration is not JSON.
    #[error("{} is not a usable configuration: {source}; save the adapter again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The configuration asks for something that is not supported.
    #[error("{}: `{option}` is {value}, which is not supported; train the adapter as plain LoRA, IA3 or prefix tuning", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The option.
        option: String,
        /// Its value, shortened.
        value: String,
    },
    /// An adapter of a model that does something else than text and embeddings.
    #[error("{}: `task_type` is {value}, and adapters for text (CAUSAL_LM) and embeddings (FEATURE_EXTRACTION) are served; train it for one of these", path.display())]
    Task {
        /// The file.
        path: PathBuf,
        /// Its value, shortened.
        value: String,
    },
    /// An initialization that took from the base's weights what it gave to the adapter.
    #[error(
        "{}: `init_lora_weights` is {value}, so the adapter was trained on base weights that were changed; save it for the base as it is (in PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=DIR), where DIR is the adapter as it was saved before training)", path.display())]
    ChangedBase {
        /// The file.
        path: PathBuf,
        /// Its value, shortened.
        value: String,
    },
    /// An option is missing or makes no sense.
    #[error("{}: `{option}` {problem}; correct the configuration", path.display())]
    Option {
        /// The file.
        path: PathBuf,
        /// The option.
        option: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The weight file is broken.
    #[error("{} is not a usable safetensors file: {source}; save the adapter again", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafetensorsFormatError,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor that is nothing of a linear layer of the base model.
    #[error("{}: tensor `{tensor}` changes nothing that the base model lets an adapter change; save the adapter without it", path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A copy of weights of the base that may or may not equal those of the base that is served: of a linear layer, or of the embedding or
    /// head where the other is the adapter's own.
    #[error(
        "{}: tensor `{tensor}` is a copy of the base model's weights that the configuration does not ask for; name its layer in `modules_to_save`, or save the adapter without it (in PEFT: save_pretrained(..., save_embedding_layers=False))", path.display())]
    BaseCopy {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// An embedding or head for more or fewer tokens than the base has.
    #[error(
        "{}: tensor `{tensor}` has {found} rows, and the base model has a vocabulary of {rows} tokens: the adapter was trained on a vocabulary that was resized; train it on the base as it is, with tokens that the base has", path.display())]
    ResizedVocabulary {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Tokens of the base.
        rows: usize,
        /// Rows of the tensor.
        found: usize,
    },
    /// No tensor has a name that layers of language models have.
    #[error(
        "{}: tensor `{tensor}` is named like no layer of the base model, and neither is any other; names are expected as in `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`: rename them, or name the model that the adapter is for", path.display())]
    ForeignNames {
        /// The file.
        path: PathBuf,
        /// The first of its tensors.
        tensor: String,
    },
    /// Tensors of one file are named after different models.
    #[error(
        "{}: the name of tensor `{tensor}` has another beginning than those of other layers, so they are of different models; save the adapter of one", path.display())]
    MixedNames {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// More comes of it than an adapter may have.
    #[error("{}: its layers come to more than {limit} bytes, which no adapter may have; lower `r`, or adapt fewer layers", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// Low-rank factors of the token embedding, of what is no plain LoRA.
    #[error("{}: tensor `{tensor}` adapts the token embedding, which only a plain LoRA for answers may; train the adapter without it among `target_modules`", path.display())]
    Embedding {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Low-rank factors of what the adapter has a copy of its own of.
    #[error("{}: tensor `{tensor}` adapts what `modules_to_save` has a copy of, which is one or the other; name the layer in one of `target_modules` and `modules_to_save`", path.display())]
    AdaptedCopy {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// There is no memory for a copy of the base's weights.
    #[error("{}: tensor `{tensor}` cannot be kept: {source}; free memory, or save it in 16 bits", path.display())]
    Pack {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        source: PackError,
    },
    /// Changes of an expert, or of what sends rows to them.
    #[error("{}: tensor `{tensor}` adapts an expert or a router, which is not supported; train the adapter on attention (q_proj, k_proj, v_proj, o_proj)", path.display())]
    Expert {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Low-rank factors of tensors that are no linear layers to PEFT: those of experts.
    #[error("{}: `target_parameters` is {value}, and experts cannot be adapted; train the adapter on attention (q_proj, k_proj, v_proj, o_proj)", path.display())]
    Parameters {
        /// The file.
        path: PathBuf,
        /// Its value, shortened.
        value: String,
    },
    /// A tensor that another one already stood for.
    #[error("{}: tensors `{tensor}` and `{other}` stand for the same weights, which so are there twice; save the adapter again", path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The one that stood for the same.
        other: String,
    },
    /// The configuration does not target a layer that the weights adapt.
    #[error("{}: there are weights for `{module}`, which `target_modules` does not select; configuration and weights do not belong together", path.display())]
    NotTargeted {
        /// The file.
        path: PathBuf,
        /// The layer.
        module: String,
    },
    /// The configuration targets a layer that the weights do not adapt, or by halves.
    #[error("{}: tensor `{tensor}` is missing{}; save the adapter again", path.display(), foreign.as_deref().map(but_foreign).unwrap_or_default())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// A tensor that is there, and named like no layer of a language model.
        foreign: Option<String>,
    },
    /// A tensor of another shape than base model and configuration call for.
    #[error("{}: tensor `{tensor}` has the shape {found:?} where {expected:?} is expected; the adapter is not for this base model", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// `[rows, cols]`.
        expected: [usize; 2],
        /// As stored.
        found: Vec<usize>,
    },
    /// A rank of 0, or beyond [`limits::MAX_RANK`].
    #[error("{}: `{module}` has rank {rank}, and ranks from 1 to {} are supported", path.display(), limits::MAX_RANK)]
    Rank {
        /// The file.
        path: PathBuf,
        /// The layer.
        module: String,
        /// The rank.
        rank: usize,
    },
    /// A weight that is not a number, or infinite.
    #[error("{}: tensor `{tensor}` has the value {value} at element {index}; the training went wrong", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Which element.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A draft that computes nothing of the base, or more than there is.
    #[error("{}: a draft of {layers} layers cannot be: the base has {base_layers}, of which it computes the first, 1 at least", path.display())]
    DraftLayers {
        /// The file.
        path: PathBuf,
        /// What it says.
        layers: usize,
        /// Layers of the base.
        base_layers: usize,
    },
    /// A layer that a draft adapts and does not compute.
    #[error("{}: there are weights for `{module}`, and the draft computes the first {layers} layers only; save it without them", path.display())]
    BeyondDraft {
        /// The file.
        path: PathBuf,
        /// The layer.
        module: String,
        /// Layers that it computes.
        layers: usize,
    },
    /// A shortlist that does not name tokens of the base, each once and in order.
    #[error("{}: entry {index} of `draft.shortlist` is {id}: ids must ascend, from 0 to {} at most, and there must be one", path.display(), vocab_size.saturating_sub(1))]
    Shortlist {
        /// The file.
        path: PathBuf,
        /// Which entry.
        index: usize,
        /// What it is; -1 where there is none.
        id: i64,
        /// Tokens of the base.
        vocab_size: usize,
    },
    /// A draft where an adapter is wanted that answers.
    #[error("{} is a draft: it answers nobody; load it into an executor, which drafts with it", path.display())]
    Draft {
        /// The directory.
        path: PathBuf,
    },
    /// A DoRA where the base's weights are not at hand.
    #[error(
        "{} is a DoRA (`use_dora`), which needs the base's own weights: load it into an executor that has them in its memory", path.display())]
    Dora {
        /// The directory.
        path: PathBuf,
    },
    /// A LoRA that changes the token embedding or replaces the head, where that cannot be.
    #[error(
        "{} changes the token embedding or replaces the head: load it into an executor or a split client; it cannot be trained, merged or compared", path.display())]
    Vocabulary {
        /// The directory.
        path: PathBuf,
    },
    /// No layer is adapted.
    #[error("{}: no tensor adapts a layer of the base model; an adapter that does nothing is not loaded", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Says that the tensor that is missed may be there under a name that is not known.
fn but_foreign(tensor: &str) -> String {
    format!(", and `{}` is named like no layer of the base model", tensor.escape_debug())
}

/// What names of tensors of experts and routers have in them: in the files of transformers, old and new, and in GGUF's.
const OF_EXPERTS: [&str; 6] =
    [".experts.", "block_sparse_moe.", ".mlp.gate.", ".mlp.base_layer.gate.", "_exps.", ".ffn_gate_inp."];

impl AdapterError {
    /// Why the tensor `name` of the file at `path`, which is of no linear layer that an adapter may change, is refused.
    pub(super) fn unknown(path: &Path, name: &str) -> Self {
        let (path, tensor) = (path.to_path_buf(), name.escape_debug().to_string());
        let is_copy = |module: &str| name.strip_suffix(".weight").is_some_and(|name| is_tail(name, module));
        if is_copy("base_layer") || is_copy(EMBEDDING) || is_copy("lm_head") || is_copy("original_module") {
            Self::BaseCopy { path, tensor }
        } else if name.contains(".lora_embedding_") {
            Self::Embedding { path, tensor }
        } else if OF_EXPERTS.iter().any(|part| name.contains(part)) {
            Self::Expert { path, tensor }
        } else {
            Self::UnknownTensor { path, tensor }
        }
    }
}
