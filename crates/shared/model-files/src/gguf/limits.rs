//! Limits on the contents of a GGUF file: far above the needs of models, low enough for hostile files.

/// Maximum number of key-value pairs.
pub const MAX_ENTRIES: u64 = 1 << 16;
/// Maximum number of tensors in a file.
pub const MAX_TENSORS: u64 = 1 << 16;
/// Maximum bytes of a metadata key.
pub const MAX_KEY_BYTES: u64 = 1 << 16;
/// Maximum bytes of a tensor name.
pub const MAX_NAME_BYTES: u64 = 1 << 10;
/// Maximum bytes of one metadata string; chat templates are the longest.
pub const MAX_STRING_BYTES: u64 = 1 << 24;
/// Maximum values in all metadata together, with the elements of arrays (vocabularies and merges).
pub const MAX_VALUES: u64 = 1 << 22;
/// Maximum nesting depth of arrays.
pub const MAX_ARRAY_DEPTH: u32 = 4;
/// Maximum dimensions of a tensor.
pub const MAX_DIMENSIONS: u32 = 4;
/// Alignment in bytes of files that do not declare one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Maximum alignment in bytes.
pub const MAX_ALIGNMENT: u64 = 1 << 16;
