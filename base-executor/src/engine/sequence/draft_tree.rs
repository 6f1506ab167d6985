//! A tree of drafted tokens behind a sequence, for one step (EdgeLLM, L-05 to L-07, D4.12).
//!
//! Its rows are the token that is pending anyway, and then the tree's, segment by segment. Each segment has blocks of its own in
//! which all of its path lies where plain decoding would have put it: full blocks of the sequence are shared, and the one that it
//! ends in is copied. Nothing of a tree is seen by others: what is accepted becomes the sequence's, the rest is given back.

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

/// See the module.
#[derive(Debug)]
pub(in crate::engine) struct DraftTree {
    tree: TokenTree,
    segments: Segments,
    /// Of all rows: the pending one, then those of the tree.
    tokens: Vec<u32>,
    branches: Vec<DraftBranch>,
    /// Of the sequence's blocks so many are in every branch.
    shared: usize,
}

/// What came of a tree.
#[derive(Debug)]
pub(in crate::engine) struct Verified {
    pub(in crate::engine) output: Output,
    pub(in crate::engine) tree: TokenTree,
    pub(in crate::engine) verdict: VerificationResult,
}

/// A segment with its blocks.
#[derive(Debug)]
struct DraftBranch {
    rows: Range<usize>,
    /// Position of its first row.
    start: usize,
    /// Those of its path; empty for the first segment, which goes on in the sequence's own.
    blocks: Vec<BlockId>,
    trunk: Vec<Trunk>,
}

/// A block of a branch, and which one it begins as a copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct BranchBlocks {
    pub(in crate::engine) from: BlockId,
    pub(in crate::engine) to: BlockId,
}

impl DraftTree {
    /// What was drafted.
    pub(super) fn tree(&self) -> &TokenTree {
        &self.tree
    }

    /// Rows of a pass.
    pub(in crate::engine) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// The row where the walk stands.
    fn row(&self, node: Option<NodeId>) -> usize {
        self.segments.row(node).unwrap_or(0)
    }

    /// The branch in whose blocks the path to a row is.
    fn branch_of(&self, row: usize) -> usize {
        self.branches.iter().position(|branch| branch.rows.contains(&row)).unwrap_or(0)
    }

    /// Blocks that branches have of their own.
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
    /// A segment behind the pending token at `position`.
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

    /// Positions of its path.
    fn end(&self) -> usize {
        self.start + self.rows.len()
    }
}

impl<A> Sequence<A> {
    /// Grows `tree` behind the pending token, if there are blocks for it beside `reserve` others. Blocks that are to be copied
    /// before the pass are added to `forks`.
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

    /// What a pass is to compute of its next `count` tokens, or of its tree.
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

    /// Something was drafted for the next step.
    pub(in crate::engine) fn has_grown(&self) -> bool {
        self.grown.is_some()
    }

    /// The drafted tokens that would be told next, if somebody wants to see them before they are verified: those of the likeliest
    /// branch, up to one that would end the answer, or that may not be said yet.
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

    /// Gives up what has grown.
    pub(in crate::engine) fn prune(&mut self, kv: &mut Cache) {
        if let Some(grown) = self.grown.take() {
            grown.own_blocks().for_each(|blocks| kv.release(blocks));
        }
    }

    /// Takes in the logits of all rows of its tree: the model's own tokens are drawn one after the other, as far as they had been
    /// drafted and one further.
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
            // What cannot be drawn behind accepted tokens is found once more when it is computed alone, and said then.
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
        // The last token has not been computed: it is pending now, or ends the answer.
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

    /// Goes on in the blocks that hold the path to `node`, and gives all others back; what grew in them is left.
    fn give_back(&mut self, mut grown: DraftTree, node: Option<NodeId>, kv: &mut Cache) -> TokenTree {
        let index = grown.branch_of(grown.row(node));
        if index > 0 {
            // What was the sequence's is now the branch's to give back.
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
