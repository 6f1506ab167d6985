//! Bounds on a tokenizer's files: far above what models need.

/// Tokens of a vocabulary.
pub const MAX_TOKENS: usize = 1 << 21;
/// Bytes of a token. Vocabularies have runs of a few hundred spaces.
pub const MAX_TOKEN_BYTES: usize = 4096;
/// Merges.
pub const MAX_MERGES: usize = 1 << 22;
/// Bytes of `tokenizer.json`.
pub const MAX_TOKENIZER_JSON_BYTES: u64 = 1 << 28;
/// Bytes of the small files beside it: `tokenizer_config.json`, `chat_template.jinja`.
pub const MAX_CONFIG_BYTES: u64 = 1 << 24;
