//! Drafting of trees for the sequences of a step, one token each per round. A drafter model receives the
//! questions of several sequences in advance and computes them in one pass.

use scheduling::clock::Clock;
use shmproto::message::SpeculationStats;
use speculation::{
    draft_ahead::{DraftAhead, RerootedDraft},
    hybrid_drafter::{DraftCost, ProbePolicy},
    tree::TokenTree,
    tree_expansion::{BranchSelector, ExpandAction, TreeGrowth as _},
    verify_selection::StepEstimate,
};

use super::{
    drafter_state::DrafterState,
    drafts::{Drafts, PROBE_STEPS},
    overlapped_drafting::{DraftPhase, TimedDrafter},
    sequence::Sequence,
};
use crate::drafter::SequenceDrafter;

/// A growing tree of a sequence.
pub(super) struct TreeInProgress {
    /// Index of the sequence in the plan.
    pub(super) portion: usize,
    state: DrafterState,
    tree: TokenTree,
    selector: BranchSelector,
    /// Maximum number of its tokens that the step verifies.
    max_tokens: usize,
    /// Whether the tree may still grow.
    is_open: bool,
}

impl TreeInProgress {
    /// Opens already drafted branches, and announces the next question to the drafter.
    fn prefetch_next(&mut self) {
        let drafter = &mut *self.state.drafter;
        while self.tree.len() < self.max_tokens {
            match self.selector.next_action(&self.tree) {
                ExpandAction::Open => {
                    let Ok(_) = self.selector.step(&mut self.tree, drafter);
                }
                ExpandAction::Ask(at) => return drafter.prefetch_logits(&self.tree, at),
                ExpandAction::End => return,
            }
        }
    }

    /// Adds one token, if the tree may grow.
    fn step(&mut self, drafts: &mut Drafts, clock: &dyn Clock) {
        self.is_open = self.tree.len() < self.max_tokens;
        if self.is_open {
            let mut timed = drafts.timed(&mut *self.state.drafter, clock);
            let Ok(has_grown) = self.selector.step(&mut self.tree, &mut timed);
            self.is_open = has_grown;
        }
    }
}

impl Drafts {
    /// Begins a tree for a portion's sequence.
    pub(super) fn begin<A>(
        &mut self,
        (portion, sequence): (usize, &mut Sequence<A>),
        stats: &mut SpeculationStats,
    ) -> Option<TreeInProgress> {
        let max_tokens = self.max_tokens.min(sequence.left().saturating_sub(1));
        let mut state = self.take_drafter(sequence)?;
        let RerootedDraft { tree, selector, .. } = state.reconcile(sequence.text(), stats);
        Some(TreeInProgress { portion, state, tree, selector, max_tokens, is_open: true })
    }

    /// Grows the trees until no further question is worth its time for the step. The n-gram table costs
    /// nothing; its tokens are judged when the trees are complete.
    pub(super) fn grow(
        &mut self,
        growing: &mut [TreeInProgress],
        step: &mut StepEstimate,
        clock: &dyn Clock,
    ) {
        if let Some(rule) = self.rule {
            for TreeInProgress { state, tree, selector, max_tokens, .. } in growing {
                self.read_ahead(&mut *state.drafter, step);
                state.drafter.set_price(DraftCost::Free { left_s: f64::INFINITY });
                let mut timed = self.timed(&mut *state.drafter, clock);
                let Ok(()) = rule.grow(tree, (selector, &mut timed), *max_tokens);
                self.spend(&mut *state.drafter, step);
            }
            return;
        }
        for level in 0.. {
            if !growing.iter().any(|one| one.is_open) {
                return;
            }
            for one in growing.iter_mut().filter(|one| one.is_open) {
                if level == 0 {
                    self.read_ahead(&mut *one.state.drafter, step);
                }
                let price = self.price(step, one.state.drafter.owed_s());
                one.state.drafter.set_price(price);
                one.prefetch_next();
            }
            for one in growing.iter_mut().filter(|one| one.is_open) {
                one.step(self, clock);
                self.spend(&mut *one.state.drafter, step);
            }
        }
    }

    /// Ends the growth of a tree, and returns its likeliest tokens, at most as many as a step verifies.
    pub(super) fn finish(&self, growing: TreeInProgress) -> (DrafterState, TokenTree) {
        let TreeInProgress { mut state, tree, selector, max_tokens, .. } = growing;
        let proposed = tree.pruned(tree.likeliest(max_tokens));
        let goes_on = self.goes_on && state.drafter.takes_time();
        state.ahead = goes_on.then(|| DraftAhead::new(tree, selector));
        (state, proposed)
    }

    /// Lets a drafter prefill pending text, in the time that announced predictions leave.
    fn read_ahead(&mut self, drafter: &mut dyn SequenceDrafter, step: &mut StepEstimate) {
        drafter.read_ahead((step.spare_s().min(self.budget.left_s()) - drafter.owed_s()).max(0.0));
        self.spend(drafter, step);
    }

    /// Returns the price of the next prediction, when announced ones need `owed_s` seconds.
    fn price(&self, step: &StepEstimate, owed_s: f64) -> DraftCost {
        let step = StepEstimate { drafting_s: step.drafting_s + owed_s, ..*step };
        // Only one probe runs at a time.
        let is_due = self.unasked >= PROBE_STEPS && owed_s == 0.0;
        let probe = if is_due { ProbePolicy::Due } else { ProbePolicy::No };
        DraftCost::Worth { step, left_s: (self.budget.left_s() - owed_s).max(0.0), probe }
    }

    /// Charges a drafter's time to `step`.
    fn spend(&mut self, drafter: &mut dyn SequenceDrafter, step: &mut StepEstimate) {
        let spent_s = drafter.take_spent().as_secs_f64();
        step.drafting_s += spent_s;
        self.budget.spend(spent_s);
        if drafter.was_asked() {
            self.unasked = 0;
        }
    }

    fn timed<'a>(
        &'a mut self,
        drafter: &'a mut dyn SequenceDrafter,
        clock: &'a dyn Clock,
    ) -> TimedDrafter<'a> {
        TimedDrafter { drafter, time: &mut self.overlapped.time, clock, moment: DraftPhase::Before }
    }
}
