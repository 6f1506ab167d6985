//! Drafting while the pass waits for streamed weights (EdgeLLM §III-D, L-10, L-11).
//!
//! ```text
//!   disk     | chunk 7     | chunk 8     | chunk 9     |
//!   pass     wait     | 7 | wait    | 8 | wait    | 9 |     one thread: it computes a layer chunk,
//!   draft    |step|step|   |step|       |step|              or drafts, never both at once
//! ```
//!
//! Draft tokens after unverified ones are *provisional* ([`speculation::draft_ahead`]). A draft run starts
//! only if recent durations predict that it delays neither the disk nor an answer by much
//! ([`speculation::draft_deadline`]). Drafters allocate memory only at the start; trees are bounded.

use std::time::Duration;

use kernels::Activations;
use model::{
    linear_sites::{EvaluateSites, PassHooks, SiteCall, SiteId},
    weight_stream_stats::{PIPELINE, PendingWeights},
};
use scheduling::clock::Clock;
use shmproto::message::SpeculationStats;
use speculation::{
    draft::{Draft, DraftToken},
    draft_ahead::DraftAhead,
    draft_deadline::DraftDeadline,
    hybrid_drafter::DraftCost,
    tree::{NodeId, TokenTree},
};

use super::drafter_state::DrafterState;
use crate::drafter::SequenceDrafter;

/// Whether drafting happens before a tree's verification or during it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DraftPhase {
    Before,
    Meanwhile,
}

/// A drafter whose runs are timed.
pub(super) struct TimedDrafter<'a> {
    pub(super) drafter: &'a mut dyn SequenceDrafter,
    pub(super) time: &'a mut DraftDeadline,
    pub(super) clock: &'a dyn Clock,
    pub(super) moment: DraftPhase,
}

impl Draft for TimedDrafter<'_> {
    type Error = std::convert::Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Self::Error> {
        self.drafter.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Self::Error> {
        let begun = self.clock.now();
        let guesses = self.drafter.guesses(tree, at);
        let took = self.clock.now().saturating_duration_since(begun);
        self.time.observe(took);
        let (ahead, took_ns) = (self.moment == DraftPhase::Meanwhile, took.as_nanos() as u64);
        tracing::trace!(target: PIPELINE, ahead, took_ns, "draft");
        guesses
    }
}

/// Drafters that may continue during a pass.
#[derive(Debug, Default)]
pub(super) struct OverlappedDrafters {
    /// Drafters, each with its sequence's index among the running ones.
    drafters: Vec<(usize, DrafterState)>,
    /// Number of drafters, from the first, that may have more tokens.
    open: usize,
    pub(super) time: DraftDeadline,
}

impl OverlappedDrafters {
    /// Starts a pass of about `takes`; `drafters` come with the indices of their running sequences.
    pub(super) fn begin(&mut self, drafters: impl Iterator<Item = (usize, DrafterState)>, takes: Duration) {
        self.drafters.extend(drafters);
        self.open = self.drafters.len();
        self.time.begin(takes);
    }

    /// Ends the pass and returns the drafters.
    pub(super) fn end(&mut self) -> impl Iterator<Item = (usize, DrafterState)> {
        self.drafters.drain(..)
    }

    /// Drafts until `wait` is over, or until another run would prolong it.
    fn resume(&mut self, wait: &dyn PendingWeights, clock: &dyn Clock, stats: &mut SpeculationStats) {
        if wait.is_over() {
            return;
        }
        self.reopen();
        while self.open > 0 && !wait.is_over() {
            let left = wait.left();
            if !self.time.allows(left) {
                return;
            }
            let begun = clock.now();
            stats.ahead += u64::from(self.step(left + self.time.spare(), clock));
            let took = clock.now().saturating_duration_since(begun);
            self.time.spend(left, took);
            stats.hidden_us += u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        }
    }

    /// Reopens all drafters, because they may know more by now or have more time.
    fn reopen(&mut self) {
        self.open = self.drafters.len();
        let trees = self.drafters.iter_mut().filter_map(|(_, state)| state.ahead.as_mut());
        trees.for_each(DraftAhead::reopen);
    }

    /// Adds one token to the most confident tree within `left`; returns false if the tree cannot grow.
    fn step(&mut self, left: Duration, clock: &dyn Clock) -> bool {
        let confidence =
            |state: &DrafterState| state.ahead.as_ref().map_or(0.0, |ahead| ahead.tree().tree_confidence());
        let open = self.drafters[..self.open].iter().enumerate();
        let best = open.max_by(|a, b| confidence(&a.1.1).total_cmp(&confidence(&b.1.1)));
        let Some((index, _)) = best else { return false };
        let DrafterState { drafter, ahead, .. } = &mut self.drafters[index].1;
        drafter.read_ahead(left.as_secs_f64());
        let left_s = left.saturating_sub(drafter.take_spent()).as_secs_f64();
        drafter.set_price(DraftCost::Free { left_s });
        let mut timed = TimedDrafter {
            drafter: &mut **drafter,
            time: &mut self.time,
            clock,
            moment: DraftPhase::Meanwhile,
        };
        let Ok(has_grown) = ahead.as_mut().map_or(Ok(false), |ahead| ahead.step(&mut timed));
        // The pass was idle, so this time is not charged.
        let _ = drafter.take_spent();
        if !has_grown {
            self.open -= 1;
            self.drafters.swap(index, self.open);
        }
        has_grown
    }
}

/// Hooks of a pass that also run drafters while it waits.
pub(super) struct DraftingHooks<'a> {
    pub(super) hooks: &'a mut dyn PassHooks,
    pub(super) drafters: &'a mut OverlappedDrafters,
    pub(super) stats: &'a mut SpeculationStats,
    pub(super) clock: &'a dyn Clock,
}

impl PassHooks for DraftingHooks<'_> {
    fn is_waiting(&mut self) -> bool {
        self.hooks.is_waiting()
    }

    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        self.hooks.before_site(site, base);
    }

    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize {
        self.hooks.join(call, x)
    }

    fn part(&mut self, out: &[f32]) {
        self.hooks.part(out);
    }

    fn while_waiting(&mut self, wait: &dyn PendingWeights) {
        self.drafters.resume(wait, self.clock, self.stats);
    }
}
