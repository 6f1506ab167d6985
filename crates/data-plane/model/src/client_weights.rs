//! What a client needs of a model besides its linear layers, and how it gets there: a *sparse copy* of the model's own
//! files, whole where they are small, with holes where the linear layers are.
//!
//! ```text
//! executor                                     client
//! SkeletonPlan::of(path) -> files, ranges -->  SparseCopy::create(directory, files, budget)
//!               read(file, offset, bytes) -->  write(bytes) ... finish()
//!                                              ClientBase::open(directory)
//! ```
//!
//! The copy is opened with the readers of whole models. Who would run it is refused: it has [`SPARSE_COPY`](model_files::model_files::SPARSE_COPY).
//!
//! # Layout
//! - this file: what both sides say of a file
//! - [`plan`]: the executor's side
//! - [`sparse_copy`]: the client's; [`client_base`]: what it holds once it has read the copy

pub mod client_base;
pub mod plan;
pub mod sparse_copy;

use std::ops::Range;

pub use plan::{ClientWeightsError, ClientWeightsPlan, ClientWeightsReadError};
pub use sparse_copy::{FetchRange, SparseCopy, SparseCopyError};

/// Most files of a model.
pub const MAX_FILES: usize = 1 << 11;
/// Most ranges of a file.
pub const MAX_RANGES: usize = 1 << 16;

/// A file of which only some ranges are given out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientWeightsFile {
    /// A plain file name.
    pub name: String,
    /// Its whole length.
    pub bytes: u64,
    /// What is given out: ascending, not empty, apart from each other, within the file.
    pub ranges: Vec<Range<u64>>,
}

impl ClientWeightsFile {
    /// Bytes that are given out.
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add)
    }
}
