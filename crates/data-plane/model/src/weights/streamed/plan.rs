//! Selects the layer chunks that stay in memory under a bound.
//!
//! ```text
//! bound = double buffer + table of hashes + embedding rows + pinned chunks: head, block 0, block 1, ...
//! ```
//!
//! Every pinned byte saves one byte of each sweep, so the order matters little. The head comes first, because
//! a tied head is also the embedding, whose rows would be read one by one.

use kernels::PageSlab;

use super::{StreamError, double_buffer::SLABS, layout::WeightFileLayout};
use crate::shape::source::WeightSource;

#[derive(Debug)]
pub(super) struct PinPlan {
    /// Numbers of the chunks that stay in memory.
    pub(super) pinned: Vec<usize>,
    /// Total bytes of memory, double buffer included.
    pub(super) bytes: usize,
}

impl PinPlan {
    /// Computes the plan for the model of `source`.
    ///
    /// # Errors
    /// The bound is too small for the double buffer, or a tensor is missing.
    pub(super) fn of(source: &dyn WeightSource, bound_bytes: u64) -> Result<Self, StreamError> {
        let layout = WeightFileLayout::of(source)?;
        let bound = usize::try_from(bound_bytes).unwrap_or(usize::MAX);
        let beside = layout.table_bytes() + PageSlab::memory_bytes(layout.grain_bytes());
        let all: usize = layout.chunks.iter().map(|chunk| chunk.bytes()).sum();
        if beside + PageSlab::memory_bytes(all) <= bound {
            return Ok(Self {
                pinned: (0..layout.chunks.len()).collect(),
                bytes: beside + PageSlab::memory_bytes(all),
            });
        }
        let window = beside + SLABS * PageSlab::memory_bytes(layout.chunk_bytes());
        if window + PageSlab::memory_bytes(0) > bound {
            let least_bytes = (window + PageSlab::memory_bytes(0)) as u64;
            return Err(StreamError::Bound { bound_bytes, least_bytes });
        }
        let (mut pinned, mut taken) = (Vec::new(), 0);
        let head: Vec<usize> = (layout.blocks..layout.chunks.len()).collect();
        let blocks = (0..layout.blocks).map(|block| vec![block]);
        for together in [head].into_iter().chain(blocks) {
            let more: usize = together.iter().map(|&chunk| layout.chunks[chunk].bytes()).sum();
            if window + PageSlab::memory_bytes(taken + more) <= bound {
                taken += more;
                pinned.extend(together);
            }
        }
        Ok(Self { pinned, bytes: window + PageSlab::memory_bytes(taken) })
    }
}
