//! The draft tree of a sequence for one step (EdgeLLM).
//!
//! The rows of a tree are the pending token, then the tree's segments. Each segment has a block table in
//! which its whole path lies as in plain decoding: full blocks of the sequence are shared, the partly filled
//! one is copied. Other sequences see no tree. Blocks of accepted tokens join the sequence, others are
//! released.

use std::ops::Range;

use kv_cache::Cache;
use model::forward::{BLOCK_TOKENS, LogitRows, SequenceSlice, Trunk};
use shmproto::message::{Output, ProvisionalMode};
use speculation::{
    tree::{NodeId, Segment, Segments, TokenTree},
    verification::{TreeVerifier, VerificationResult},
};
use types::BlockId;

use super::{Sequence, failure};

/// A draft tree with its rows and blocks.
#[derive(Debug)]
pub(in crate::engine) struct DraftTree {
    tree: TokenTree,
    segments: Segments,
    /// Tokens of all rows: the pending one, then those of the tree.
    tokens: Vec<u32>,
    branches: Vec<DraftBranch>,
    /// Number of the sequence's blocks that every branch shares.
    shared: usize,
}

/// Result of a verification, with its output.
#[derive(Debug)]
pub(in crate::engine) struct Verified {
    pub(in crate::engine) output: Output,
    pub(in crate::engine) tree: TokenTree,
    pub(in crate::engine) verdict: VerificationResult,
}

#[derive(Debug)]
struct DraftBranch {
    rows: Range<usize>,
    /// Position of the first row.
    start: usize,
    /// Blocks of the branch's path; empty for the first segment, which uses the sequence's blocks.
    blocks: Vec<BlockId>,
    trunk: Vec<Trunk>,
}

/// A block of a branch, and the block that is copied to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct BranchBlocks {
    pub(in crate::engine) from: BlockId,
    pub(in crate::engine) to: BlockId,
}

impl DraftTree {
    pub(super) fn tree(&self) -> &TokenTree {
        &self.tree
    }

    pub(in crate::engine) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the row of a node, or of the root.
    fn row(&self, node: Option<NodeId>) -> usize {
        self.segments.row(node).unwrap_or(0)
    }

    /// Returns the branch whose blocks hold the path to a row.
    fn branch_of(&self, row: usize) -> usize {
        self.branches.iter().position(|branch| branch.rows.contains(&row)).unwrap_or(0)
    }

    /// Returns the unshared blocks of each branch.
    fn own_blocks(&self) -> impl Iterator<Item = &[BlockId]> {
        self.branches.iter().skip(1).map(|branch| &branch.blocks[self.shared..])
    }

    fn slices<'a, A>(&'a self, sequence: &'a Sequence<A>) -> impl Iterator<Item = SequenceSlice<'a, A>> {
        self.branches.iter().enumerate().map(move |(index, branch)| SequenceSlice {
            tokens: &self.tokens[branch.rows.clone()],
            start: branch.start,
            blocks: if index == 0 { &sequence.blocks } else { &branch.blocks },
            trunk: &branch.trunk,
            adapter: sequence.adapter(),
            logits: LogitRows::All,
        })
    }
}

impl DraftBranch {
    /// Creates the branch of a segment after the pending token at `position`.
    fn new(segment: &Segment, position: usize) -> Self {
        let Segment { own, trunk } = segment;
        let trunk = trunk.iter().map(|above| Trunk {
            back: own.rows.start - above.rows.start,
            rows: above.rows.len(),
            start: position + above.depth,
        });
        Self {
            rows: own.rows.clone(),
            start: position + own.depth,
            blocks: Vec::new(),
            trunk: trunk.collect(),
        }
    }

    /// Returns the position after the last row.
    fn end(&self) -> usize {
        self.start + self.rows.len()
    }
}

impl<A> Sequence<A> {
    /// Attaches `tree` after the pending token, if blocks are available for it besides `reserve` others.
    /// Blocks to be copied before the pass are added to `forks`.
    pub(in crate::engine) fn grow(
        &mut self,
        tree: TokenTree,
        kv: &mut Cache,
        reserve: usize,
        forks: &mut Vec<BranchBlocks>,
    ) {
        let (position, shared) = (self.computed, self.computed / BLOCK_TOKENS);
        let segments = Segments::of(&tree);
        let mut branches: Vec<_> =
            segments.iter().map(|segment| DraftBranch::new(segment, position)).collect();
        let own = |branch: &DraftBranch| branch.end().div_ceil(BLOCK_TOKENS) - shared;
        let extra = (shared + own(&branches[0])).saturating_sub(self.blocks.len());
        let wanted = extra + branches[1..].iter().map(own).sum::<usize>();
        if kv.available() < wanted + reserve {
            return;
        }
        let Some(mut fresh) = kv.allocate(wanted) else { return };
        self.blocks.extend(fresh.drain(..extra));
        for branch in &mut branches[1..] {
            let own = fresh.drain(..own(branch));
            branch.blocks = self.blocks[..shared].iter().copied().chain(own).collect();
            if position % BLOCK_TOKENS > 0 {
                forks.push(BranchBlocks { from: self.blocks[shared], to: branch.blocks[shared] });
            }
        }
        let tokens = segments.tokens(&tree, self.tokens[position]);
        self.grown = Some(DraftTree { tree, segments, tokens, branches, shared });
    }

    /// Returns the slices of a pass for the next `count` tokens, or for the tree.
    pub(in crate::engine) fn slices(
        &self,
        count: usize,
        logits: LogitRows,
    ) -> impl Iterator<Item = SequenceSlice<'_, A>> {
        let plain = self.grown.is_none().then(|| SequenceSlice {
            tokens: &self.tokens[self.computed..self.computed + count],
            start: self.computed,
            blocks: &self.blocks,
            trunk: &[],
            adapter: self.adapter(),
            logits,
        });
        plain.into_iter().chain(self.grown.iter().flat_map(|grown| grown.slices(self)))
    }

    pub(in crate::engine) fn has_grown(&self) -> bool {
        self.grown.is_some()
    }

    /// Returns the provisional tokens, if the request wants them: the likeliest branch up to a stop token.
    pub(in crate::engine) fn provisional(&self) -> Option<Output> {
        let grown = self.grown.as_ref().filter(|_| self.task.provisional == ProvisionalMode::Wanted)?;
        let drafted = grown.tree.likeliest_branch().map(|node| grown.tree.token(node));
        let tokens: Vec<_> = drafted.take_while(|token| !self.task.stop_tokens.contains(token)).collect();
        (!tokens.is_empty()).then(|| Output {
            request: self.caller.request,
            provisional: tokens,
            ..Output::default()
        })
    }

    /// Drops the draft tree and releases its blocks.
    pub(in crate::engine) fn prune(&mut self, kv: &mut Cache) {
        if let Some(grown) = self.grown.take() {
            grown.own_blocks().for_each(|blocks| kv.release(blocks));
        }
    }

    /// Verifies the tree with the logits of all its rows. Samples the model's tokens one after the other,
    /// until one is not in the tree.
    pub(in crate::engine) fn verify(
        &mut self,
        rows: &mut [f32],
        vocab_size: usize,
        kv: &mut Cache,
    ) -> Verified {
        let Some(grown) = self.grown.take() else { unreachable!("only what has grown is verified") };
        let (mut walk, mut tokens, mut finish) = (TreeVerifier::new(&grown.tree), Vec::new(), None);
        let allowed = self.allowed();
        let failed = loop {
            let logits = &mut rows[grown.row(walk.at()) * vocab_size..][..vocab_size];
            let chosen = match &allowed {
                Ok(allowed) => self.choose(logits, (allowed, walk.at())),
                Err(error) => Err(error.clone()),
            };
            // An error after accepted tokens recurs, and is reported, when the next token is computed alone.
            let token = match chosen {
                Ok(token) => token,
                Err(error) => break Some(error),
            };
            finish = self.finish_after(token.token);
            let is_drafted = walk.advance(token.token);
            tokens.push(token);
            if finish.is_some() || !is_drafted {
                break None;
            }
        };
        let verdict = walk.verdict();
        // The last token is not computed: it is pending now, or ends the answer.
        let computed = tokens.len().max(1);
        let last = verdict.accepted[..computed - 1].last().copied();
        let tree = self.give_back(grown, last, kv);
        let output = match failed.filter(|_| tokens.is_empty()) {
            Some(error) => failure(self.caller.request, error),
            None => {
                self.keep(computed, kv);
                self.output(tokens, finish)
            }
        };
        Verified { output, tree, verdict }
    }

    /// Keeps the blocks with the path to `node`, releases all others, and returns the tree.
    fn give_back(&mut self, mut grown: DraftTree, node: Option<NodeId>, kv: &mut Cache) -> TokenTree {
        let index = grown.branch_of(grown.row(node));
        if index > 0 {
            // The sequence's former blocks are released as the branch's.
            std::mem::swap(&mut self.blocks, &mut grown.branches[index].blocks);
        }
        grown.own_blocks().for_each(|blocks| kv.release(blocks));
        let needed = self.tokens.len().div_ceil(BLOCK_TOKENS);
        if self.blocks.len() > needed {
            kv.release(&self.blocks.split_off(needed));
        }
        grown.tree
    }
}
