//! Limits on the size of an adapter.

/// Maximum rank of a module.
pub const MAX_RANK: usize = 1 << 10;
/// Maximum virtual tokens of a prefix.
pub const MAX_VIRTUAL_TOKENS: usize = 1 << 10;
/// Maximum bytes of `adapter_config.json`.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Maximum bytes of the weights' safetensors header: an adapter may have tensors for each of many experts.
pub const MAX_HEADER_BYTES: u64 = 1 << 23;
/// Maximum signs of this header that begin or separate values; a tensor has about twelve.
pub const MAX_HEADER_SIGNS: usize = 1 << 19;
/// Maximum bytes of the weights: copies of a large base's embedding and head take some GiB.
pub const MAX_WEIGHT_BYTES: u64 = 1 << 33;
/// Maximum bytes of factors that all experts of a block share in the file and that memory holds for each.
pub const MAX_EXPANDED_BYTES: u64 = 1 << 31;
/// Maximum bytes of an adapter converted to a LoRA, because a short file can describe large layers.
pub const MAX_CONVERTED_BYTES: u64 = 1 << 31;
/// Maximum multiplications of a conversion to a LoRA: some minutes of one core.
pub const MAX_CONVERSION_OPERATIONS: u64 = 1 << 37;
/// Maximum norm of what a converted adapter lacks in a layer, as a share of the norm of the layer's change.
pub const MAX_CONVERSION_ERROR: f64 = 0.05;
/// Maximum tokens with rows of their own in embedding or head.
pub const MAX_TRAINED_TOKENS: usize = 1 << 12;
/// Maximum entries of a pattern option or module list.
pub const MAX_PATTERNS: usize = 1 << 10;
/// Maximum bytes of one pattern.
pub const MAX_PATTERN_BYTES: usize = 1 << 12;
/// Maximum bytes of all patterns that are no plain names.
pub const MAX_EXPRESSION_BYTES: usize = 1 << 12;

/// Maximum labels of a classification head, which the host computes for each prompt.
pub const MAX_LABELS: usize = 1 << 8;
/// Maximum bytes of a label's name.
pub const MAX_LABEL_BYTES: usize = 1 << 8;

/// Maximum tokens of an invocation sequence.
pub const MAX_INVOCATION: usize = 64;
