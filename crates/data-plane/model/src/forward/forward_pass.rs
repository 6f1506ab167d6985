//! The whole pass, as an engine runs it.

use std::sync::Arc;

use types::BlockId;

use super::batch::SequenceSlice;
use crate::{
    linear_sites::{NoHooks, PassHooks, SitePath},
    sampling::Drawn,
    weight_stream_stats::WeightStreamStats,
};

/// Runs slices of sequences through a model. With this trait, tests of scheduling need no weights.
pub trait ForwardPass {
    /// An adapter prepared for this pass.
    type Adapter;

    /// Error of a pass, which leaves its rows' keys and values undefined. `Infallible` on the CPU.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Returns the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Returns the length of a row of hidden states.
    fn hidden_size(&self) -> usize;

    /// Returns the hidden states requested in the last pass
    /// ([`LogitRows::States`](super::LogitRows::States)), slice by slice: `[rows, hidden]`.
    fn states(&self) -> &[f32];

    /// True if the pass draws tokens for [`LogitRows::Draw`](super::LogitRows::Draw). Otherwise that request
    /// means [`LogitRows::Last`](super::LogitRows::Last).
    fn draws(&self) -> bool {
        false
    }

    /// Returns the draws of the last pass, one for each slice that asked; `None` where all logits are NaN.
    fn drawn(&self) -> &[Option<Drawn>] {
        &[]
    }

    /// True if the pass accepts slices with a trunk ([`SequenceSlice::trunk`]).
    fn branches(&self) -> bool {
        false
    }

    /// True if the pass supports the float path of the layers through [`set_path`](Self::set_path).
    fn takes_linear(&self) -> bool {
        false
    }

    /// Sets the path of later passes through the base's layers. The float path must be
    /// [supported](Self::takes_linear).
    fn set_path(&mut self, path: SitePath) {
        debug_assert!(path == SitePath::Fast || self.takes_linear());
    }

    /// True once the device is lost and this process cannot compute any more.
    fn is_lost(&self) -> bool {
        false
    }

    /// True if `error` means missing memory: a smaller batch, or a later retry, may succeed.
    fn lacked_memory(error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// True if `error` means that streamed weights could not be read from disk.
    fn lacked_weights(error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// Returns the stats of streamed weights, or `None` if all weights are in memory.
    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        None
    }

    /// Runs `batch` and writes the wanted rows of logits to `logits`, slice by slice, row by row (`logits` is
    /// resized to rows x vocab_size). Appends keys and values to the sequences' blocks.
    ///
    /// # Errors
    /// The device fails.
    fn forward(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), Self::Error> {
        self.forward_with_hooks(batch, logits, &mut NoHooks)
    }

    /// Runs `batch` like [`forward`](Self::forward), and lets calls of split clients join at their sites.
    ///
    /// # Errors
    /// The device fails.
    fn forward_with_hooks(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
        hooks: &mut dyn PassHooks,
    ) -> Result<(), Self::Error>;

    /// Returns the bytes of a KV block, as [`read_block`](Self::read_block) copies them.
    fn block_bytes(&self) -> usize;

    /// Copies the contents of a KV block: the elements of all layers in the layout of this kind of device,
    /// little-endian. The contents are valid only for passes over the same weights with the same arithmetic.
    ///
    /// # Errors
    /// The device fails.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` is not [`block_bytes`](Self::block_bytes) long.
    fn read_block(&mut self, block: BlockId, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies the contents of the block `from` to the block `to`.
    ///
    /// # Errors
    /// The device fails; the contents of `to` are undefined then.
    ///
    /// # Panics
    /// If one of the blocks does not exist.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Self::Error> {
        let mut bytes = vec![0; self.block_bytes()];
        self.read_block(from, &mut bytes)?;
        self.write_block(to, &bytes)
    }

    /// Replaces the contents of a block by bytes from [`read_block`](Self::read_block), of this or an earlier
    /// process. Sequences then continue as if they had computed the block.
    ///
    /// # Errors
    /// The device fails; the block's contents are undefined then.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` is not [`block_bytes`](Self::block_bytes) long.
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), Self::Error>;
}
