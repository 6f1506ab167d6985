//! Trees that grow for the sequences of a step, before it: a token for each, then another for each. What a model is about to be asked
//! for several of them it is told before, and says it in one pass.

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

/// A tree that grows for a sequence.
pub(super) struct TreeInProgress {
    /// The sequence's place in the plan.
    pub(super) portion: usize,
    commission: DrafterState,
    tree: TokenTree,
    pacer: BranchSelector,
    /// Most of its tokens that are verified in the step.
    max_tokens: usize,
    /// Whether there may be more to come.
    is_open: bool,
}

impl TreeInProgress {
    /// Opens what is guessed already, and tells whoever is to be asked then.
    fn prefetch_next(&mut self) {
        let author = &mut *self.commission.author;
        while self.tree.len() < self.max_tokens {
            match self.pacer.next_action(&self.tree) {
                ExpandAction::Open => {
                    let Ok(_) = self.pacer.step(&mut self.tree, author);
                }
                ExpandAction::Ask(at) => return author.prefetch_logits(&self.tree, at),
                ExpandAction::End => return,
            }
        }
    }

    /// One more token, if there is one, and room for it.
    fn step(&mut self, drafts: &mut Drafts, clock: &dyn Clock) {
        self.is_open = self.tree.len() < self.max_tokens;
        if self.is_open {
            let mut timed = drafts.timed(&mut *self.commission.author, clock);
            let Ok(has_grown) = self.pacer.step(&mut self.tree, &mut timed);
            self.is_open = has_grown;
        }
    }
}

impl Drafts {
    /// A tree for the sequence of a portion begins.
    pub(super) fn begin<A>(
        &mut self,
        (portion, sequence): (usize, &mut Sequence<A>),
        stats: &mut SpeculationStats,
    ) -> Option<TreeInProgress> {
        let max_tokens = self.max_tokens.min(sequence.left().saturating_sub(1));
        let mut commission = self.commission(sequence)?;
        let RerootedDraft { tree, pacer, .. } = commission.reconcile(sequence.text(), stats);
        Some(TreeInProgress { portion, commission, tree, pacer, max_tokens, is_open: true })
    }

    /// Lets trees grow until nothing more is worth being asked for a step, which is as it is without drafts but for the time they took.
    /// What takes no time to ask has no price: of that it is decided when the trees are there.
    pub(super) fn grow(
        &mut self,
        growing: &mut [TreeInProgress],
        step: &mut StepEstimate,
        clock: &dyn Clock,
    ) {
        if let Some(rule) = self.rule {
            for TreeInProgress { commission, tree, pacer, max_tokens, .. } in growing {
                self.read_ahead(&mut *commission.author, step);
                commission.author.set_price(DraftCost::Free { left_s: f64::INFINITY });
                let mut timed = self.timed(&mut *commission.author, clock);
                let Ok(()) = rule.grow(tree, (pacer, &mut timed), *max_tokens);
                self.spend(&mut *commission.author, step);
            }
            return;
        }
        for level in 0.. {
            if !growing.iter().any(|one| one.is_open) {
                return;
            }
            for one in growing.iter_mut().filter(|one| one.is_open) {
                if level == 0 {
                    self.read_ahead(&mut *one.commission.author, step);
                }
                let price = self.price(step, one.commission.author.owed_s());
                one.commission.author.set_price(price);
                one.prefetch_next();
            }
            for one in growing.iter_mut().filter(|one| one.is_open) {
                one.step(self, clock);
                self.spend(&mut *one.commission.author, step);
            }
        }
    }

    /// What may come next in a sequence: at most as many tokens as are verified in a step.
    pub(super) fn finish(&self, growing: TreeInProgress) -> (DrafterState, TokenTree) {
        let TreeInProgress { mut commission, tree, pacer, max_tokens, .. } = growing;
        let proposed = tree.pruned(tree.likeliest(max_tokens));
        let goes_on = self.goes_on && commission.author.takes_time();
        commission.ahead = goes_on.then(|| DraftAhead::new(tree, pacer));
        (commission, proposed)
    }

    /// Has an author read what it needs before it guesses, in the time that there is beside what is foreseen.
    fn read_ahead(&mut self, author: &mut dyn SequenceDrafter, step: &mut StepEstimate) {
        author.read_ahead((step.spare_s().min(self.allowance.left_s()) - author.owed_s()).max(0.0));
        self.spend(author, step);
    }

    /// What a model may cost next, in a step for which what was foreseen is owed so many seconds.
    fn price(&self, step: &StepEstimate, owed_s: f64) -> DraftCost {
        let step = StepEstimate { drafting_s: step.drafting_s + owed_s, ..*step };
        // One at a time.
        let is_due = self.unasked >= PROBE_STEPS && owed_s == 0.0;
        let probe = if is_due { ProbePolicy::Due } else { ProbePolicy::No };
        DraftCost::Worth { step, left_s: (self.allowance.left_s() - owed_s).max(0.0), probe }
    }

    /// Takes in what an author took, for `step`.
    fn spend(&mut self, author: &mut dyn SequenceDrafter, step: &mut StepEstimate) {
        let spent_s = author.take_spent().as_secs_f64();
        step.drafting_s += spent_s;
        self.allowance.spend(spent_s);
        if author.was_asked() {
            self.unasked = 0;
        }
    }

    /// Somebody whose guesses are timed, who guesses before a step.
    fn timed<'a>(
        &'a mut self,
        author: &'a mut dyn SequenceDrafter,
        clock: &'a dyn Clock,
    ) -> TimedDrafter<'a> {
        TimedDrafter { author, time: &mut self.writers.time, clock, moment: DraftPhase::Before }
    }
}
