//! Punica's BGMV: every segment of a group is computed with the ranks of the largest adapter. The results
//! equal those at true ranks (S-LoRA's MBGMV), for more work.

use std::sync::Arc;

use crate::{
    cuda::{
        Cuda, CudaError,
        lora::{LoraPlan, LoraSegment},
    },
    lora::RANK_BLOCK,
};

impl LoraPlan {
    /// Creates an empty plan whose groups are padded to their largest rank, for comparison.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn padded(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with_padding(cuda, largest)
    }
}

/// Returns the rank blocks of the largest rank in the group.
fn largest(group: &[LoraSegment<'_>]) -> Option<usize> {
    group.iter().map(|segment| segment.matrix.layout().rank.div_ceil(RANK_BLOCK)).max()
}
