//! Bounds on a tokenizer's files, far above what models need.

/// Maximum number of tokens in a vocabulary.
pub const MAX_TOKENS: usize = 1 << 21;
/// Maximum length of a token in bytes; vocabularies have runs of a few hundred spaces.
pub const MAX_TOKEN_BYTES: usize = 4096;
/// Maximum number of BPE merges.
pub const MAX_MERGES: usize = 1 << 22;
/// Maximum size of `tokenizer.json` in bytes.
pub const MAX_TOKENIZER_JSON_BYTES: u64 = 1 << 28;
/// Maximum size in bytes of `tokenizer_config.json` and of `chat_template.jinja`.
pub const MAX_CONFIG_BYTES: u64 = 1 << 24;
