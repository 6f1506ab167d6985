//! Limits on what a file may declare: far above what models need, far below what hurts.

/// Key-value pairs.
pub const MAX_ENTRIES: u64 = 1 << 16;
/// Tensors.
pub const MAX_TENSORS: u64 = 1 << 16;
/// Bytes of a metadata key.
pub const MAX_KEY_BYTES: u64 = 1 << 16;
/// Bytes of a tensor name.
pub const MAX_NAME_BYTES: u64 = 1 << 10;
/// Bytes of one metadata string; chat templates are the longest.
pub const MAX_STRING_BYTES: u64 = 1 << 24;
/// Values in all metadata together, elements of arrays included: vocabularies and merges.
pub const MAX_VALUES: u64 = 1 << 22;
/// Arrays in arrays.
pub const MAX_ARRAY_DEPTH: u32 = 4;
/// Dimensions of a tensor.
pub const MAX_DIMENSIONS: u32 = 4;
/// The alignment of files that do not declare one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment.
pub const MAX_ALIGNMENT: u64 = 1 << 16;
