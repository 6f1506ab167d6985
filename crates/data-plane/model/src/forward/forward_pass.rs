//! The whole pass, as an engine runs it.

use std::sync::Arc;

use types::BlockId;

use super::batch::SequenceSlice;
use crate::{
    linear_sites::{NoHooks, PassHooks, SitePath},
    sampling::Drawn,
    weight_stream_stats::WeightStreamStats,
};

/// Whoever can run slices of sequences through a model. The engine is generic over it, so that its scheduling
/// is tested without weights.
pub trait ForwardPass {
    /// An adapter prepared for this pass.
    type Adapter;

    /// Why a pass is not finished; the keys and values of its rows are undefined then. `Infallible` on the CPU.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Length of a row of hidden states.
    fn hidden_size(&self) -> usize;

    /// The rows of hidden states that the last pass was asked for ([`LogitRows::States`](super::LogitRows::States)), slice
    /// after slice: `[rows, hidden]`.
    fn states(&self) -> &[f32];

    /// True if it draws tokens itself where [`LogitRows::Draw`](super::LogitRows::Draw) asks for it; else that means
    /// [`LogitRows::Last`](super::LogitRows::Last).
    fn draws(&self) -> bool {
        false
    }

    /// What was drawn in the last pass, one for each slice that asked for it; `None` where no logit was a number.
    fn drawn(&self) -> &[Option<Drawn>] {
        &[]
    }

    /// True if it takes slices that branch off others ([`SequenceSlice::trunk`]).
    fn branches(&self) -> bool {
        false
    }

    /// True if it takes the layers' linear path too, where [`set_path`](Self::set_path) says so.
    fn takes_linear(&self) -> bool {
        false
    }

    /// Has what is computed from now on take `path` through the base's layers: the linear one only where it is
    /// [there](Self::takes_linear).
    fn set_path(&mut self, path: SitePath) {
        debug_assert!(path == SitePath::Fast || self.takes_linear());
    }

    /// True once nothing can be computed in this process any more: its device is lost.
    fn is_lost(&self) -> bool {
        false
    }

    /// True if `error` means that memory was lacking: a smaller batch may pass, and the same one later.
    fn lacked_memory(error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// True if `error` means that weights could not be read from the disk they come from.
    fn lacked_weights(error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// What it costs that weights come from a disk, where they do.
    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        None
    }

    /// Runs `batch` and writes the wanted rows of logits to `logits`, slice after slice, row after row
    /// (`logits` is resized to rows x vocab_size). Appends keys and values to the sequences' blocks.
    ///
    /// # Errors
    /// The device fails.
    fn forward(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), Self::Error> {
        self.forward_in_company(batch, logits, &mut NoHooks)
    }

    /// As [`forward`](Self::forward), and others' calls join the pass at the layers they wait for.
    ///
    /// # Errors
    /// The device fails.
    fn forward_in_company(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
        company: &mut dyn PassHooks,
    ) -> Result<(), Self::Error>;

    /// Bytes of a block of keys and values, as [`read_block`](Self::read_block) gives them.
    fn block_bytes(&self) -> usize;

    /// Copies what a block holds: the elements of all layers as they lie in the memory of this kind of device,
    /// little-endian. They mean the same to passes over the same weights with the same arithmetic, and to no others.
    ///
    /// # Errors
    /// The device fails.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` is not [`block_bytes`](Self::block_bytes) long.
    fn read_block(&mut self, block: BlockId, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies what one block holds to another.
    ///
    /// # Errors
    /// The device fails; what the other holds is undefined then.
    ///
    /// # Panics
    /// If one of them does not exist.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Self::Error> {
        let mut bytes = vec![0; self.block_bytes()];
        self.read_block(from, &mut bytes)?;
        self.write_block(to, &bytes)
    }

    /// Replaces what a block holds by what [`read_block`](Self::read_block) gave, here or in an earlier process.
    /// Sequences then go on from it as if they had computed it.
    ///
    /// # Errors
    /// The device fails; what the block holds is undefined then.
    ///
    /// # Panics
    /// As [`read_block`](Self::read_block).
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), Self::Error>;
}
