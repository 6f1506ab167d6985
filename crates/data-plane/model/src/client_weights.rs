//! Client weights: everything a split client needs besides the linear layers. The weights travel as a *sparse
//! copy* of the model's files, with holes where the linear layers are, except the biases of keys.
//!
//! ```text
//! executor                                          client
//! ClientWeightsPlan::of(path) -> files, ranges -->  SparseCopy::create(directory, files, budget)
//!                    read(file, offset, bytes) -->  write(bytes) ... finish()
//!                                                   ClientBase::open(directory)
//! ```
//!
//! The readers of complete models open the copy. The marker file
//! [`SPARSE_COPY`](model_files::model_files::SPARSE_COPY) makes an executor refuse to serve the copy.
//!
//! # Layout
//! - this file: the description of a file, shared by both sides
//! - [`plan`]: the executor's side, which selects the ranges
//! - [`sparse_copy`]: the client's side, which writes the copy
//! - [`client_base`]: the client weights read from the copy

pub mod client_base;
pub mod plan;
pub mod sparse_copy;

use std::ops::Range;

pub use plan::{ClientWeightsError, ClientWeightsPlan, ClientWeightsReadError};
pub use sparse_copy::{FetchRange, SparseCopy, SparseCopyError};

/// Maximum number of files per model.
pub const MAX_FILES: usize = 1 << 11;
/// Maximum number of ranges per file.
pub const MAX_RANGES: usize = 1 << 16;

/// A model file of which some byte ranges are sent to clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientWeightsFile {
    /// Plain file name without directories.
    pub name: String,
    /// Length of the complete file in bytes.
    pub bytes: u64,
    /// Byte ranges to send: ascending, not empty, disjoint, within the file.
    pub ranges: Vec<Range<u64>>,
}

impl ClientWeightsFile {
    /// Returns the number of bytes in all ranges.
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add)
    }
}
