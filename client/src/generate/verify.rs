//! A tree of drafted tokens in one sweep.
//!
//! Each segment of the tree has a block table of its own, in which everything lies where plain decoding would have put it:
//! full blocks are shared, the block that the sequence ends in is copied, ancestors' rows are written along. The table of the
//! segment in which the answer goes on becomes the sequence's; the others are given back.

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
    /// Computes the pending token, the only one there is, and what was drafted behind it: logits of every row. What finds no
    /// blocks is not verified: the tree that was is given back.
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

    /// Takes blocks for the tree's segments, or lets all go but the branch that the first guesses make.
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

    /// Goes on where the verdict ends, and gives back what lies elsewhere.
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
    /// The blocks of a segment, the first of which are the sequence's own.
    fn table(&self, segment: usize) -> Vec<BlockId> {
        match segment.checked_sub(1) {
            None => self.blocks.clone(),
            Some(fork) => [&self.blocks[..self.computed / BLOCK_TOKENS], &self.forks[fork]].concat(),
        }
    }
}

/// The segment in which a node, or the root, lies.
fn segment_of(segments: &Segments, node: Option<NodeId>) -> usize {
    let row = segments.row(node).unwrap_or(0);
    segments.iter().position(|segment| segment.own.rows.contains(&row)).unwrap_or(0)
}
