//! Verification of a token tree in one pass.
//!
//! Each segment of the tree has its own block table, in which every row lies where plain decoding would put
//! it. Full blocks are shared, the block in which the sequence ends is copied, and the rows of ancestors are
//! written again. The block table of the segment with the last accepted token becomes the sequence's; the
//! other blocks are freed.

use model::forward::{BLOCK_TOKENS, LogitRows, SequenceSlice, Trunk};
use shmproto::layer::CallClass;
use speculation::{
    tree::{NodeId, Segments, TokenTree},
    verification::VerificationResult,
};
use types::BlockId;

use super::{GenerateError, SplitSequence};
use crate::split_model::SplitModel;

impl SplitModel {
    /// Computes the single pending token and the tree: logits of every row. Returns the tree without the
    /// nodes for which blocks were missing.
    pub(super) fn verify(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        tree: TokenTree,
    ) -> Result<(TokenTree, Segments), GenerateError> {
        let tree = self.make_room(sequence, tree)?;
        let segments = Segments::of(&tree);
        let root = sequence.computed;
        let tokens = segments.tokens(&tree, sequence.tokens[root]);
        let tables: Vec<Vec<BlockId>> =
            (0..segments.iter().len()).map(|index| sequence.table(index)).collect();
        let trunks: Vec<Vec<Trunk>> = segments
            .iter()
            .map(|segment| {
                let trunk = segment.trunk.iter();
                let back = |rows: usize| segment.own.rows.start - rows;
                trunk
                    .map(|one| Trunk {
                        back: back(one.rows.start),
                        rows: one.rows.len(),
                        start: root + one.depth,
                    })
                    .collect()
            })
            .collect();
        let slice = |(index, segment): (usize, &speculation::tree::Segment)| SequenceSlice {
            tokens: &tokens[segment.own.rows.clone()],
            start: root + segment.own.depth,
            blocks: &tables[index],
            trunk: &trunks[index],
            adapter: sequence.adapter(),
            logits: LogitRows::All,
        };
        let batch: Vec<_> = segments.iter().enumerate().map(slice).collect();
        let mut logits = std::mem::take(&mut self.logits);
        let computed = self.forward_as(CallClass::Verify, &batch, &mut logits);
        self.logits = logits;
        computed?;
        Ok((tree, segments))
    }

    /// Allocates blocks for the tree's segments. If blocks are missing, only the first segment is kept.
    fn make_room(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        tree: TokenTree,
    ) -> Result<TokenTree, GenerateError> {
        let root = sequence.computed;
        let shared = root / BLOCK_TOKENS;
        let segments = Segments::of(&tree);
        for (index, segment) in segments.iter().enumerate() {
            let end = root + segment.own.depth + segment.own.rows.len();
            if index == 0 {
                self.grow_to(sequence, end)?;
                continue;
            }
            let Some(blocks) = self.cache.allocate(self.cache.blocks_for(end) - shared) else {
                self.cache.release(&std::mem::take(&mut sequence.forks).concat());
                let main = segments.nodes()
                    [segments.iter().next().map_or(0..0, |main| main.own.rows.clone())]
                .iter();
                return Ok(tree.pruned(main.flatten().copied().collect()));
            };
            if !root.is_multiple_of(BLOCK_TOKENS) {
                self.copy_block(sequence.blocks[shared], blocks[0]);
            }
            sequence.forks.push(blocks);
        }
        Ok(tree)
    }

    /// Continues the sequence at the last accepted token, and frees the blocks of other segments.
    pub(super) fn commit_accepted(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        segments: &Segments,
        verdict: &VerificationResult,
    ) {
        let shared = sequence.computed / BLOCK_TOKENS;
        let end = verdict.accepted.last().copied();
        let mut forks = std::mem::take(&mut sequence.forks);
        if let Some(fork) = segment_of(segments, end).checked_sub(1) {
            let behind = sequence.blocks.split_off(shared);
            sequence.blocks.append(&mut forks[fork]);
            self.cache.release(&behind);
        }
        self.cache.release(&forks.concat());
        self.offer(sequence, 1 + verdict.accepted.len());
    }
}

impl SplitSequence<'_> {
    /// Returns the block table of a segment, whose first blocks are the sequence's own.
    fn table(&self, segment: usize) -> Vec<BlockId> {
        match segment.checked_sub(1) {
            None => self.blocks.clone(),
            Some(fork) => [&self.blocks[..self.computed / BLOCK_TOKENS], &self.forks[fork]].concat(),
        }
    }
}

/// Returns the index of the segment with the node, or with the root if `node` is `None`.
fn segment_of(segments: &Segments, node: Option<NodeId>) -> usize {
    let row = segments.row(node).unwrap_or(0);
    segments.iter().position(|segment| segment.own.rows.contains(&row)).unwrap_or(0)
}
