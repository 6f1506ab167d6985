//! Limits on what an adapter may be.

/// Largest rank of a module.
pub const MAX_RANK: usize = 1 << 10;
/// Most virtual tokens of a prefix.
pub const MAX_VIRTUAL_TOKENS: usize = 1 << 10;
/// Bytes of `adapter_config.json`.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Bytes of the weights' safetensors header.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Bytes of the weights: copies of embedding and head of a large base come to some GiB.
pub const MAX_WEIGHT_BYTES: u64 = 1 << 33;
/// Bytes of a VeRA's layers, as the LoRA that it is: they may come of a short file.
pub const MAX_VERA_BYTES: u64 = 1 << 31;
/// Entries of a pattern or a list of modules.
pub const MAX_PATTERNS: usize = 1 << 10;
/// Bytes of one pattern.
pub const MAX_PATTERN_BYTES: usize = 1 << 12;
/// Bytes of all patterns that are no plain names.
pub const MAX_EXPRESSION_BYTES: usize = 1 << 12;

/// Tokens that may invoke an activated adapter.
pub const MAX_INVOCATION: usize = 64;
