//! Reasons for refusing an adapter.

use std::{
    io,
    path::{Path, PathBuf},
};

use kernels::PackError;
use model_files::gguf::GgufError;

use super::{limits, patterns::is_tail};
use crate::sources::{hf_names::EMBEDDING, safetensors::file::SafetensorsFormatError};

/// Reasons for refusing an adapter.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; an adapter is a directory with adapter_config.json and adapter_model.safetensors, or a GGUF file", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The weights have a format that can run code on loading.
    #[error("{} is a pickle file, which is not supported; save the adapter as safetensors", path.display())]
    Pickle {
        /// Path of the file.
        path: PathBuf,
    },
    /// The path holds no adapter at all.
    #[error("{} is not an adapter; give a PEFT directory or a GGUF adapter", path.display())]
    NotAnAdapter {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// The files changed while they were read.
    #[error("{} changed while it was read; load the adapter again when it is complete", path.display())]
    Changing {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The configuration is not JSON.
    #[error("{} is not a usable configuration: {source}; save the adapter again", path.display())]
    Json {
        /// Path of the file `adapter_config.json`.
        path: PathBuf,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// The configuration asks for an unsupported feature.
    #[error("{}: `{option}` is {value}, which is not supported; train the adapter as plain LoRA, IA3 or prefix tuning", path.display())]
    Unsupported {
        /// Path of the file.
        path: PathBuf,
        /// Name of the option.
        option: String,
        /// The option's value, shortened.
        value: String,
    },
    /// The adapter is of a type of PEFT that is not served.
    #[error("{}: adapters of the type {name} are not served: {because}", path.display())]
    Type {
        /// Path of the file.
        path: PathBuf,
        /// PEFT's name of the type.
        name: String,
        /// Reason for the refusal, with the remedy.
        because: &'static str,
    },
    /// The task is neither text generation nor embeddings nor classification.
    #[error("{}: `task_type` is {value}, but must be CAUSAL_LM, FEATURE_EXTRACTION or SEQ_CLS; train the \
             adapter for one of these", path.display())]
    Task {
        /// Path of the file.
        path: PathBuf,
        /// The option's value, shortened.
        value: String,
    },
    /// The initialization subtracted the adapter's initial weights from the base's weights.
    #[error(
        "{}: `init_lora_weights` is {value}, so the adapter was trained on changed base weights; save it \
         for the unchanged base (in PEFT: save_pretrained(..., \
         path_initial_model_for_weight_conversion=DIR), where DIR is the adapter before \
         training)", path.display())]
    ChangedBase {
        /// Path of the file.
        path: PathBuf,
        /// The option's value, shortened.
        value: String,
    },
    /// An option is missing or has an invalid value.
    #[error("{}: `{option}` {problem}; correct the configuration", path.display())]
    Option {
        /// Path of the file.
        path: PathBuf,
        /// Name of the option.
        option: String,
        /// Defect of the option.
        problem: String,
    },
    /// The weight file is broken.
    #[error("{} is not a usable safetensors file: {source}; save the adapter again", path.display())]
    Weights {
        /// Path of the weight file.
        path: PathBuf,
        /// Error of the safetensors parser.
        source: SafetensorsFormatError,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor belongs to no linear layer of the base model.
    #[error("{}: tensor `{tensor}` changes a part of the base model that adapters cannot change; save \
             the adapter without it", path.display())]
    UnknownTensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor is an unrequested copy of base weights, which may differ from the served base's. The copy is
    /// of a linear layer, or of the embedding or head where the adapter replaces only the other.
    #[error(
        "{}: tensor `{tensor}` is a copy of base weights that the configuration does not name; add its \
         layer to `modules_to_save`, or save the adapter without it (in PEFT: save_pretrained(..., \
         save_embedding_layers=False))", path.display())]
    BaseCopy {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The embedding or head has another number of tokens than the base.
    #[error(
        "{}: tensor `{tensor}` has {found} rows, but the base model's vocabulary has {rows} tokens; \
         train the adapter without a resized vocabulary", path.display())]
    ResizedVocabulary {
        /// Path of the file.
        path: PathBuf,
        /// Vocabulary size of the base.
        tensor: String,
        /// Number of rows of the tensor.
        rows: usize,
        /// Rows of the tensor.
        found: usize,
    },
    /// No tensor has the name of a language model's layer.
    #[error(
        "{}: no tensor, such as `{tensor}`, has the name of a layer of the base model; names must be \
         like `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`; rename the tensors, or \
         use the adapter's own base model", path.display())]
    ForeignNames {
        /// Path of the file.
        path: PathBuf,
        /// Name of the first tensor.
        tensor: String,
    },
    /// Tensors of one file are named after different models.
    #[error(
        "{}: the name of tensor `{tensor}` begins differently from those of other layers; save an \
         adapter of one model", path.display())]
    MixedNames {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The layers need more memory than an adapter may use.
    #[error("{}: its layers have more than {limit} bytes, the limit of an adapter; lower `r`, or adapt \
             fewer layers", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// The embedding has low-rank factors in an adapter that is no plain LoRA.
    #[error("{}: tensor `{tensor}` adapts the token embedding, which is supported only for plain LoRA; \
             remove it from `target_modules` and train again", path.display())]
    Embedding {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// A module has both low-rank factors and a saved copy.
    #[error("{}: tensor `{tensor}` adapts a layer that `modules_to_save` copies; name the layer only in \
             `target_modules` or `modules_to_save`", path.display())]
    AdaptedCopy {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// There is no memory for the copy of base weights.
    #[error("{}: no memory for tensor `{tensor}`: {source}; free memory, or save it in 16 \
             bits", path.display())]
    Pack {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Error of the packing function.
        source: PackError,
    },
    /// A tensor adapts experts in an unknown form, or in another form than the rest of the file.
    #[error("{}: tensor `{tensor}` adapts experts in a form that is not supported or not selected; save \
             the adapter as a LoRA with PEFT, with its own configuration", path.display())]
    Expert {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor adapts a router.
    #[error("{}: tensor `{tensor}` adapts a router of experts, which is not supported; train the adapter \
             without routers", path.display())]
    Router {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The configuration adapts a parameter that is not one of the base's experts.
    #[error("{}: `target_parameters` has {value}, but only parameters of this base's experts can be \
             adapted, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`; train the adapter \
             without it", path.display())]
    Parameters {
        /// Path of the file.
        path: PathBuf,
        /// Name of the parameter in the option.
        value: String,
    },
    /// The process computes no deltas of experts.
    #[error(
        "the adapter changes experts, which {place} cannot compute; load it into an executor with the \
             base on the CPU"
    )]
    NoExperts {
        /// The process or device that refuses the adapter.
        place: &'static str,
    },
    /// Two tensors describe the same weights.
    #[error("{}: tensors `{tensor}` and `{other}` hold the same weights; save the adapter again with one \
             of them", path.display())]
    Duplicate {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Name of the earlier tensor.
        other: String,
    },
    /// The weights adapt a layer that the configuration does not target.
    #[error("{}: there are weights for `{module}`, which `target_modules` does not select; use the \
             configuration that belongs to the weights", path.display())]
    NotTargeted {
        /// Path of the file.
        path: PathBuf,
        /// Name of the layer.
        module: String,
    },
    /// A targeted layer has no weights, or only one of its factors.
    #[error("{}: tensor `{tensor}` is missing{}; save the adapter again", path.display(), foreign.as_deref().map(but_foreign).unwrap_or_default())]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Name of a present tensor that fits no layer of a language model.
        foreign: Option<String>,
    },
    /// A tensor's shape differs from that required by base model and configuration.
    #[error("{}: tensor `{tensor}` has the shape {found:?} instead of {expected:?}; use an adapter for \
             this base model", path.display())]
    Shape {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Shape that base model and configuration require.
        expected: Vec<usize>,
        /// Stored shape of the tensor.
        found: Vec<usize>,
    },
    /// The rank is 0 or above [`limits::MAX_RANK`].
    #[error("{}: `{module}` has rank {rank}, and ranks from 1 to {} are supported", path.display(), limits::MAX_RANK)]
    Rank {
        /// Path of the file.
        path: PathBuf,
        /// Name of the layer.
        module: String,
        /// Rank of the layer.
        rank: usize,
    },
    /// A LoRA of the supported ranks lacks too much of a layer's change.
    #[error(
        "{}: a LoRA of rank {rank} lacks {:.0} % of the change of `{module}`, and the limit is {:.0} %; merge \
         the adapter into its base (in PEFT: merge_and_unload)", path.display(), 100.0 * error, 100.0 * limits::MAX_CONVERSION_ERROR)]
    Approximation {
        /// Path of the file.
        path: PathBuf,
        /// Name of the layer.
        module: String,
        /// Rank of the LoRA.
        rank: usize,
        /// Norm of the missing part, as a share of the norm of the change.
        error: f64,
    },
    /// The conversion to a LoRA needs more arithmetic than a load may do.
    #[error(
        "{}: the change of `{module}` has rank {rank}, and its conversion to a LoRA takes too long; merge \
         the adapter into its base (in PEFT: merge_and_unload)", path.display())]
    Conversion {
        /// Path of the file.
        path: PathBuf,
        /// Name of the layer.
        module: String,
        /// Rank of the change.
        rank: usize,
    },
    /// A weight is infinite or not a number.
    #[error("{}: tensor `{tensor}` has the value {value} at element {index}; the training went wrong", path.display())]
    NotFinite {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Index of the element in its tensor.
        index: usize,
        /// The value: NaN or an infinity.
        value: f32,
    },
    /// The draft has no layers, or more than the base.
    #[error("{}: a draft of {layers} layers cannot be: the base has {base_layers}, of which it computes the first, 1 at least", path.display())]
    DraftLayers {
        /// Path of the file.
        path: PathBuf,
        /// Number of layers in the configuration.
        layers: usize,
        /// Number of layers of the base.
        base_layers: usize,
    },
    /// A draft adapts a layer that it does not compute.
    #[error("{}: there are weights for `{module}`, but the draft adapter computes only the first \
             {layers} layers; save it without them", path.display())]
    BeyondDraft {
        /// Path of the file.
        path: PathBuf,
        /// Name of the layer.
        module: String,
        /// Number of layers that the draft computes.
        layers: usize,
    },
    /// The shortlist does not name tokens of the base in ascending order.
    #[error("{}: entry {index} of `draft.shortlist` is {id}: ids must ascend, from 0 to {} at most, and there must be one", path.display(), vocab_size.saturating_sub(1))]
    Shortlist {
        /// Path of the file.
        path: PathBuf,
        /// Index of the bad entry.
        index: usize,
        /// The bad token id, or -1 for an empty list.
        id: i64,
        /// Vocabulary size of the base.
        vocab_size: usize,
    },
    /// A draft adapter was given where an answering adapter is required.
    #[error("{} is a draft adapter and answers no requests; load it into an executor to draft with \
             it", path.display())]
    Draft {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The adapter is a DoRA, and the base's weights are not available.
    #[error(
        "{} is a DoRA (`use_dora`), which needs the base's weights; load it into an executor that has \
         them in memory", path.display())]
    Dora {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The adapter changes embedding, head or biases where that is not supported.
    #[error(
        "{} changes the token embedding, the head or biases, so it cannot be trained, merged or compared; load \
         it into an executor or split client", path.display())]
    Vocabulary {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The adapter has a classification head where that is not supported.
    #[error(
        "{} has a classification head (`task_type` SEQ_CLS), so it cannot be trained, merged or compared, \
         or used by a split client; load it into an executor", path.display())]
    Classification {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The classification head has no labels, or too many.
    #[error("{}: tensor `{tensor}` has {labels} labels, and from 1 to {} are supported", path.display(), limits::MAX_LABELS)]
    LabelCount {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Number of rows of the tensor.
        labels: usize,
    },
    /// The configuration names a label that the classification head lacks.
    #[error("{}: the classification head has {labels} labels, but `id2label` names label {label}; correct \
             the configuration", path.display())]
    Labels {
        /// Path of the weight file.
        path: PathBuf,
        /// Index of the named label.
        label: usize,
        /// Number of labels of the head.
        labels: usize,
    },
    /// No layer is adapted.
    #[error("{}: no tensor adapts a layer of the base model, so the adapter has no effect and is not \
             loaded", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Describes a tensor that may be the missing one under an unknown name.
fn but_foreign(tensor: &str) -> String {
    format!(", and `{}` is not the name of a layer of the base model", tensor.escape_debug())
}

/// Parts of the names of router tensors, in old and new files of transformers and in GGUF files.
const OF_ROUTERS: [&str; 4] =
    [".block_sparse_moe.gate.", ".mlp.gate.", ".mlp.base_layer.gate.", ".ffn_gate_inp."];

/// Parts of the names of expert tensors in these files.
const OF_EXPERTS: [&str; 3] = [".experts.", ".block_sparse_moe.", "_exps."];

impl AdapterError {
    /// Returns the reason for refusing the tensor `name` in the file `path`, which fits no adaptable layer.
    pub(super) fn unknown(path: &Path, name: &str) -> Self {
        let (path, tensor) = (path.to_path_buf(), name.escape_debug().to_string());
        let is_copy = |module: &str| name.strip_suffix(".weight").is_some_and(|name| is_tail(name, module));
        if is_copy("base_layer") || is_copy(EMBEDDING) || is_copy("lm_head") || is_copy("original_module") {
            Self::BaseCopy { path, tensor }
        } else if name.contains(".lora_embedding_") {
            Self::Embedding { path, tensor }
        } else if OF_ROUTERS.iter().any(|part| name.contains(part)) {
            Self::Router { path, tensor }
        } else if OF_EXPERTS.iter().any(|part| name.contains(part)) {
            Self::Expert { path, tensor }
        } else {
            Self::UnknownTensor { path, tensor }
        }
    }
}
