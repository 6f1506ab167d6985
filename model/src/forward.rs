//! The one forward pass.

use std::sync::Arc;

/// Tokens a KV block holds.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a KV block in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// For which of a slice's tokens logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// Every token's (prompt log-probabilities).
    All,
}

/// Consecutive tokens of one sequence that go through the model in one pass.
#[derive(Debug)]
pub struct SequenceSlice<'a, A> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them; the positions before it are in the KV blocks already.
    pub start: usize,
    /// The sequence's KV blocks in order; they must hold `start + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// The adapter, or `None` for the base model.
    pub adapter: Option<&'a Arc<A>>,
    /// Which logits to compute.
    pub logits: LogitRows,
}

/// Whoever can run slices of sequences through a model. The engine is generic over it, so that its scheduling
/// is tested without weights.
pub trait ForwardPass {
    /// An adapter prepared for this pass.
    type Adapter;

    /// Length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Runs `batch` and writes the wanted rows of logits to `logits`, slice after slice, row after row
    /// (`logits` is resized to rows x vocab_size). Appends keys and values to the sequences' blocks.
    fn forward(&mut self, batch: &[SequenceSlice<'_, Self::Adapter>], logits: &mut Vec<f32>);
}
