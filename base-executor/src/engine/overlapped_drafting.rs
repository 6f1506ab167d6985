//! Drafting goes on while the pass waits for weights on their way from a disk (EdgeLLM §III-D, L-10, L-11).
//!
//! ```text
//!   disk     | floor 7     | floor 8     | floor 9     |
//!   pass     wait     | 7 | wait    | 8 | wait    | 9 |     one thread: it computes with a floor,
//!   draft    |step|step|   |step|       |step|              or guesses, never both at once
//! ```
//!
//! What is verified is behind tokens that are not known to come, so each such guess is *provisional*
//! ([`speculation::draft_ahead`]). A guess is begun only if it will be done before the disk would idle or an answer be late, by what
//! both took so far, or little later ([`speculation::draft_deadline`]). It takes no memory: whoever drafts took its own at the start, and a
//! tree has a bound.

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

/// Whether a guess is made before its tree is verified, or meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DraftPhase {
    Before,
    Meanwhile,
}

/// An author whose guesses are timed.
pub(super) struct TimedDrafter<'a> {
    pub(super) author: &'a mut dyn SequenceDrafter,
    pub(super) time: &'a mut DraftDeadline,
    pub(super) clock: &'a dyn Clock,
    pub(super) moment: DraftPhase,
}

impl Draft for TimedDrafter<'_> {
    type Error = std::convert::Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Self::Error> {
        self.author.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Self::Error> {
        let begun = self.clock.now();
        let guesses = self.author.guesses(tree, at);
        let took = self.clock.now().saturating_duration_since(begun);
        self.time.observe(took);
        let (ahead, took_ns) = (self.moment == DraftPhase::Meanwhile, took.as_nanos() as u64);
        tracing::trace!(target: PIPELINE, ahead, took_ns, "draft");
        guesses
    }
}

/// Those who may go on drafting during a pass.
#[derive(Debug, Default)]
pub(super) struct OverlappedDrafters {
    /// With each the sequence it drafts for, by its place among those that run.
    authors: Vec<(usize, DrafterState)>,
    /// How many of them, from the first on, may have more to say.
    open: usize,
    pub(super) time: DraftDeadline,
}

impl OverlappedDrafters {
    /// A pass that `takes` about so long begins: those of `authors`, each with the place of its sequence among those that run, may
    /// draft meanwhile.
    pub(super) fn begin(&mut self, authors: impl Iterator<Item = (usize, DrafterState)>, takes: Duration) {
        self.authors.extend(authors);
        self.open = self.authors.len();
        self.time.begin(takes);
    }

    /// The pass has ended: who drafted.
    pub(super) fn end(&mut self) -> impl Iterator<Item = (usize, DrafterState)> {
        self.authors.drain(..)
    }

    /// Goes on drafting until `wait` is over, or a guess would make it longer.
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

    /// Whoever had no more to say, or not in the time that there was, may by now.
    fn reopen(&mut self) {
        self.open = self.authors.len();
        let trees = self.authors.iter_mut().filter_map(|(_, commission)| commission.ahead.as_mut());
        trees.for_each(DraftAhead::reopen);
    }

    /// One more token for the tree that is likeliest to come true as a whole, within `left`; false if it takes none any more.
    fn step(&mut self, left: Duration, clock: &dyn Clock) -> bool {
        let confidence = |commission: &DrafterState| {
            commission.ahead.as_ref().map_or(0.0, |ahead| ahead.tree().tree_confidence())
        };
        let open = self.authors[..self.open].iter().enumerate();
        let best = open.max_by(|a, b| confidence(&a.1.1).total_cmp(&confidence(&b.1.1)));
        let Some((index, _)) = best else { return false };
        let DrafterState { author, ahead, .. } = &mut self.authors[index].1;
        author.read_ahead(left.as_secs_f64());
        let left_s = left.saturating_sub(author.take_spent()).as_secs_f64();
        author.set_price(DraftCost::Free { left_s });
        let mut timed = TimedDrafter {
            author: &mut **author,
            time: &mut self.time,
            clock,
            moment: DraftPhase::Meanwhile,
        };
        let Ok(has_grown) = ahead.as_mut().map_or(Ok(false), |ahead| ahead.step(&mut timed));
        // The pass had nothing else to do: nobody pays for it.
        let _ = author.take_spent();
        if !has_grown {
            self.open -= 1;
            self.authors.swap(index, self.open);
        }
        has_grown
    }
}

/// The company of a pass, and those who draft while it waits.
pub(super) struct DraftingHooks<'a> {
    pub(super) company: &'a mut dyn PassHooks,
    pub(super) writers: &'a mut OverlappedDrafters,
    pub(super) stats: &'a mut SpeculationStats,
    pub(super) clock: &'a dyn Clock,
}

impl PassHooks for DraftingHooks<'_> {
    fn is_waiting(&mut self) -> bool {
        self.company.is_waiting()
    }

    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        self.company.before_site(site, base);
    }

    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize {
        self.company.join(call, x)
    }

    fn part(&mut self, out: &[f32]) {
        self.company.part(out);
    }

    fn while_waiting(&mut self, wait: &dyn PendingWeights) {
        self.writers.resume(wait, self.clock, self.stats);
    }
}
