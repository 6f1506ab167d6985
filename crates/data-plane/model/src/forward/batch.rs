//! What goes through a pass: slices of sequences, row after row.

use std::{ops::Range, sync::Arc};

use kernels::attention::KvRows;
use types::BlockId;

use crate::sampling::TokenDraw;

/// Tokens a KV block holds.
pub const BLOCK_TOKENS: usize = kernels::attention::BLOCK_TOKENS;

/// For which of a slice's tokens logits are wanted, or what they are computed from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LogitRows {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// Every token's (prompt log-probabilities).
    All,
    /// The last token's, but only to draw the next token from them: where the pass draws, they do
    /// not leave the device, and are not among the logits.
    Draw(TokenDraw),
    /// None, but the hidden states, as the final norm gives them, of the token `from` and all behind it (embeddings). Slices
    /// that want states are the last of their batch.
    States {
        /// Index in the slice.
        from: usize,
    },
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
    /// What `blocks` are to hold of rows before these; none but in a tree of drafted tokens.
    pub trunk: &'a [Trunk],
    /// The adapter, or `None` for the base model.
    pub adapter: Option<&'a Arc<A>>,
    /// Which logits to compute.
    pub logits: LogitRows,
}

impl<A> SequenceSlice<'_, A> {
    /// Indices, within the slice, of the rows whose logits or states are wanted.
    fn wanted(&self) -> Range<usize> {
        let rows = self.tokens.len();
        match self.logits {
            LogitRows::None => rows..rows,
            LogitRows::Last | LogitRows::Draw(_) => rows - 1..rows,
            LogitRows::All => 0..rows,
            LogitRows::States { from } => from..rows,
        }
    }

    /// How many rows of logits are wanted.
    pub(crate) fn logit_rows(&self) -> usize {
        if self.wants_states() { 0 } else { self.wanted().len() }
    }

    fn wants_states(&self) -> bool {
        matches!(self.logits, LogitRows::States { .. })
    }
}

/// Rows of the same pass whose keys and values a slice's own blocks take in as well: its ancestors in a tree of drafted
/// tokens (EdgeLLM, L-05). Each branch has blocks of its own, in which everything lies where plain decoding would have put
/// it, so that nothing needs to be masked and no sum has another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trunk {
    /// How many rows before the slice's first the first of them is, in the batch.
    pub back: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first of them.
    pub start: usize,
}

/// Which rows of a batch are which sequence's.
#[derive(Debug)]
pub(crate) struct BatchRows {
    /// Rows of the batch.
    pub(crate) count: usize,
    sequences: Vec<PlacedSlice>,
    /// Rows that are kept once more, in the blocks of a branch.
    trunks: Vec<PlacedSlice>,
    blocks: Vec<u32>,
}

/// First row, rows and position, and where their blocks begin and end.
type PlacedSlice = (usize, usize, usize, Range<usize>);

impl BatchRows {
    /// The rows of `batch`, sequence after sequence.
    pub(crate) fn of<A>(batch: &[SequenceSlice<'_, A>]) -> Self {
        let sequences = Vec::with_capacity(batch.len());
        let mut all = Self { count: 0, sequences, trunks: Vec::new(), blocks: Vec::new() };
        for slice in batch {
            let (rows, first) = (slice.tokens.len(), all.blocks.len());
            all.blocks.extend(slice.blocks.iter().map(|block| block.0));
            let blocks = first..all.blocks.len();
            for trunk in slice.trunk {
                assert!(
                    trunk.rows <= trunk.back && trunk.back <= all.count,
                    "a trunk comes before its branch"
                );
                all.trunks.push((all.count - trunk.back, trunk.rows, trunk.start, blocks.clone()));
            }
            all.sequences.push((all.count, rows, slice.start, blocks));
            all.count += rows;
        }
        all
    }

    /// The sequences, as kernels take them.
    pub(crate) fn sequences(&self) -> Vec<KvRows<'_>> {
        self.placed(&self.sequences)
    }

    /// Rows of trunks, beside the blocks of their branches.
    pub(crate) fn trunks(&self) -> Vec<KvRows<'_>> {
        self.placed(&self.trunks)
    }

    fn placed(&self, rows: &[PlacedSlice]) -> Vec<KvRows<'_>> {
        let placed = |(first_row, rows, position, blocks): &PlacedSlice| KvRows {
            first_row: *first_row,
            rows: *rows,
            position: *position,
            blocks: &self.blocks[blocks.clone()],
        };
        rows.iter().map(placed).collect()
    }
}

/// The batch's rows whose logits or states are wanted, ascending, and for how many of them, the first, it is logits.
pub(super) fn wanted_rows<A>(batch: &[SequenceSlice<'_, A>]) -> (Vec<u32>, usize) {
    assert!(batch.is_sorted_by_key(SequenceSlice::wants_states), "who wants states comes last in a batch");
    let mut first = 0;
    let mut kept = Vec::new();
    for slice in batch {
        let rows = slice.wanted();
        kept.extend(rows.map(|row| u32::try_from(first + row).expect("a batch has far fewer rows")));
        first += slice.tokens.len();
    }
    (kept, batch.iter().map(SequenceSlice::logit_rows).sum())
}
