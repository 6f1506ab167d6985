//! What of the weights is pinned under a bound.
//!
//! ```text
//! bound = window of two floors + table of hashes + an embedding's rows + pinned floors: the head, block 0, block 1, ...
//! ```
//!
//! Every pinned byte saves as much of every sweep, so the order decides little; but the head comes in one with the embedding of a
//! model that ties them, whose rows would be read one by one.

use kernels::PageSlab;

use super::{StreamError, double_buffer::SLABS, layout::WeightFileLayout};
use crate::shape::source::WeightSource;

/// See the module.
#[derive(Debug)]
pub(super) struct PinPlan {
    /// Floors that stay in memory.
    pub(super) pinned: Vec<usize>,
    /// Bytes of memory that all of it takes.
    pub(super) bytes: usize,
}

impl PinPlan {
    /// The plan for the model of `source`.
    ///
    /// # Errors
    /// The bound is too small for a window, or a tensor is missing.
    pub(super) fn of(source: &dyn WeightSource, bound_bytes: u64) -> Result<Self, StreamError> {
        let layout = WeightFileLayout::of(source)?;
        let bound = usize::try_from(bound_bytes).unwrap_or(usize::MAX);
        let beside = layout.table_bytes() + PageSlab::memory_bytes(layout.grain_bytes());
        let all: usize = layout.floors.iter().map(|floor| floor.bytes()).sum();
        if beside + PageSlab::memory_bytes(all) <= bound {
            return Ok(Self {
                pinned: (0..layout.floors.len()).collect(),
                bytes: beside + PageSlab::memory_bytes(all),
            });
        }
        let window = beside + SLABS * PageSlab::memory_bytes(layout.floor_bytes());
        if window + PageSlab::memory_bytes(0) > bound {
            let least_bytes = (window + PageSlab::memory_bytes(0)) as u64;
            return Err(StreamError::Bound { bound_bytes, least_bytes });
        }
        let (mut pinned, mut taken) = (Vec::new(), 0);
        let head: Vec<usize> = (layout.blocks..layout.floors.len()).collect();
        let blocks = (0..layout.blocks).map(|block| vec![block]);
        for together in [head].into_iter().chain(blocks) {
            let more: usize = together.iter().map(|&floor| layout.floors[floor].bytes()).sum();
            if window + PageSlab::memory_bytes(taken + more) <= bound {
                taken += more;
                pinned.extend(together);
            }
        }
        Ok(Self { pinned, bytes: window + PageSlab::memory_bytes(taken) })
    }
}
