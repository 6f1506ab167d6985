//! The drafter of a sequence.

use std::fmt;

use model::weight_stream_stats::PIPELINE;
use shmproto::message::SpeculationStats;
use speculation::{
    draft::Draft as _,
    draft_ahead::{DraftAhead, RerootedDraft},
};

use crate::drafter::SequenceDrafter;

/// A drafter, and the number of tokens of its sequence that it knows.
pub(super) struct DrafterState {
    pub(super) drafter: Box<dyn SequenceDrafter>,
    pub(super) known: usize,
    /// Draft tree while a part of it is verified.
    pub(super) ahead: Option<DraftAhead>,
}

impl DrafterState {
    /// Gives the drafter the new tokens of `text`, and returns the draft that survives after them.
    pub(super) fn reconcile(&mut self, text: &[u32], stats: &mut SpeculationStats) -> RerootedDraft {
        let said = &text[self.known..];
        let settled = self.ahead.take().map_or(RerootedDraft::default(), |ahead| ahead.reroot(said).if_any());
        if settled.kept + settled.discarded > 0 {
            tracing::trace!(target: PIPELINE, kept = settled.kept, discarded = settled.discarded, "keep");
        }
        stats.kept += settled.kept as u64;
        let Ok(()) = self.drafter.accept(said);
        self.known = text.len();
        settled
    }
}

impl fmt::Debug for DrafterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DrafterState").field("known", &self.known).finish_non_exhaustive()
    }
}
