//! The batch of a pass: slices of sequences, row after row.

use std::{ops::Range, sync::Arc};

use kernels::attention::KvRows;
use types::BlockId;

use crate::sampling::TokenDraw;

/// Number of tokens per KV block.
pub const BLOCK_TOKENS: usize = kernels::attention::BLOCK_TOKENS;

/// Tokens of a slice for which logits or hidden states are wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LogitRows {
    /// No logits: a prompt chunk that is not the last.
    None,
    /// Logits of the last token.
    Last,
    /// Logits of every token (prompt log-probabilities).
    All,
    /// Logits of the last token, only to draw the next token. If the pass draws tokens itself, these logits
    /// stay on the device and are not returned.
    Draw(TokenDraw),
    /// No logits, but hidden states after the final norm, from token `from` on (embeddings). Slices that want
    /// hidden states must be the last of their batch.
    States {
        /// Index of the first token within the slice.
        from: usize,
    },
}

/// Consecutive tokens of one sequence that go through the model in one pass.
#[derive(Debug)]
pub struct SequenceSlice<'a, A> {
    /// Tokens of the slice, at least one.
    pub tokens: &'a [u32],
    /// Position of the first token; earlier positions are already in the KV blocks.
    pub start: usize,
    /// KV blocks of the sequence in order; they must hold `start + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// Earlier rows of the batch to store in `blocks` as well; used only for token trees.
    pub trunk: &'a [Trunk],
    /// Adapter of the sequence, or `None` for the base model.
    pub adapter: Option<&'a Arc<A>>,
    /// Logits or states to compute.
    pub logits: LogitRows,
}

impl<A> SequenceSlice<'_, A> {
    fn wanted(&self) -> Range<usize> {
        let rows = self.tokens.len();
        match self.logits {
            LogitRows::None => rows..rows,
            LogitRows::Last | LogitRows::Draw(_) => rows - 1..rows,
            LogitRows::All => 0..rows,
            LogitRows::States { from } => from..rows,
        }
    }

    pub(crate) fn logit_rows(&self) -> usize {
        if self.wants_states() { 0 } else { self.wanted().len() }
    }

    fn wants_states(&self) -> bool {
        matches!(self.logits, LogitRows::States { .. })
    }
}

/// Rows of the same pass whose keys and values are also stored in a slice's own blocks: its ancestors in a
/// token tree (EdgeLLM). Each branch has its own blocks with the layout of plain decoding. No masking is
/// needed, and no sum has another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trunk {
    /// Distance in rows from the first trunk row to the slice's first row.
    pub back: usize,
    /// Number of rows in the trunk.
    pub rows: usize,
    /// Position of the first trunk row.
    pub start: usize,
}

#[derive(Debug)]
pub(crate) struct BatchRows {
    pub(crate) count: usize,
    sequences: Vec<PlacedSlice>,
    /// Rows that are also stored in the blocks of a branch.
    trunks: Vec<PlacedSlice>,
    blocks: Vec<u32>,
}

/// First row, rows and position, and the range of their blocks.
type PlacedSlice = (usize, usize, usize, Range<usize>);

impl BatchRows {
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

    pub(crate) fn sequences(&self) -> Vec<KvRows<'_>> {
        self.placed(&self.sequences)
    }

    /// Returns the rows of trunks with the blocks of their branches.
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

/// Returns the rows with wanted logits or states, ascending, and the number of leading rows that want logits.
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
