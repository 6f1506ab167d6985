//! Punica's BGMV: every segment of a group is computed with as many ranks as the largest has. The same results as at true
//! ranks (S-LoRA's MBGMV), for more work.

use std::sync::Arc;

use crate::{
    cuda::{
        Cuda, CudaError,
        lora::{LoraPlan, LoraSegment},
    },
    lora::RANK_BLOCK,
};

impl LoraPlan {
    /// A plan without segments whose groups are padded, for comparison.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn padded(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with_padding(cuda, largest)
    }
}

/// Rank blocks of the largest rank.
fn largest(group: &[LoraSegment<'_>]) -> Option<usize> {
    group.iter().map(|segment| segment.matrix.layout().rank.div_ceil(RANK_BLOCK)).max()
}
