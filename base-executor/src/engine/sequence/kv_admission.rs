//! How a sequence gets its blocks, and gives them back.

use std::time::Instant;

use kv_cache::{Cache, NodeId};
use model::forward::BLOCK_TOKENS;
use scheduling::batch::{BatchLimits, may_enter};

use super::{FirstOutput, PoolingState, Sequence, microseconds};

/// Blocks that come back from a lower tier.
#[derive(Debug)]
pub(in crate::engine) enum OffloadFetch {
    /// It waits for none.
    Nothing,
    /// It waits, and holds all blocks that it needs.
    Waits { nodes: Vec<NodeId>, since: Instant },
    /// They have come.
    Here,
}

/// What became of a wish to run.
#[derive(Debug)]
pub(in crate::engine) enum KvAdmission {
    /// There are too few blocks; nothing was taken.
    NoRoom,
    /// It waits for blocks from a lower tier.
    Waits,
    /// It runs; so many of its tokens, without virtual ones, were found in the cache.
    Runs { found: usize },
}

impl<A> Sequence<A> {
    /// Takes blocks for all its tokens, sharing those that are cached, if it may enter beside `running` others. Those that lower
    /// tiers have come first; until they are there it does not run.
    pub(in crate::engine) fn try_admit(
        &mut self,
        kv: &mut Cache,
        limits: &BatchLimits,
        running: usize,
        now: Instant,
    ) -> KvAdmission {
        match self.fetched {
            OffloadFetch::Waits { .. } => return KvAdmission::Waits,
            OffloadFetch::Here => return self.runs(),
            OffloadFetch::Nothing => {}
        }
        // The last token is computed in any case: its logits are needed.
        let reusable = if self.computes_all() { 0 } else { self.tokens.len() - 1 };
        let reusable = &self.tokens[..reusable];
        let mut found = self.trail.lookup(kv, reusable);
        let missing = kv.blocks_for(self.tokens.len()) - found.blocks.len();
        if !may_enter(limits, running, missing, kv.available()) {
            kv.release(&found.blocks);
            return KvAdmission::NoRoom;
        }
        let nodes = self.trail.fetch(kv, &mut found, reusable);
        let Some(fresh) = kv.allocate(kv.blocks_for(self.tokens.len()) - found.blocks.len()) else {
            kv.release(&found.blocks);
            return KvAdmission::NoRoom;
        };
        self.computed = found.blocks.len() * BLOCK_TOKENS;
        self.cursor = nodes.last().and_then(|last| kv.cursor_at(*last)).unwrap_or(found.cursor);
        self.blocks = found.blocks;
        self.blocks.extend(fresh);
        if nodes.is_empty() {
            return self.runs();
        }
        self.fetched = OffloadFetch::Waits { nodes, since: now };
        KvAdmission::Waits
    }

    fn runs(&self) -> KvAdmission {
        KvAdmission::Runs { found: self.computed.saturating_sub(self.task.virtual_tokens) }
    }

    /// It took all its blocks, and those that were to come have come.
    pub(in crate::engine) fn holds_its_blocks(&self) -> bool {
        matches!(self.fetched, OffloadFetch::Here)
    }

    /// What it has of lower tiers.
    pub(in crate::engine) fn fetched(&self) -> &OffloadFetch {
        &self.fetched
    }

    /// What it waited for is there; returns the microseconds that took.
    pub(in crate::engine) fn end_fetch(&mut self, now: Instant) -> u64 {
        let OffloadFetch::Waits { since, .. } = std::mem::replace(&mut self.fetched, OffloadFetch::Here)
        else {
            return 0;
        };
        let waited_us = microseconds(now.saturating_duration_since(since));
        self.kv_wait_us += waited_us;
        waited_us
    }

    /// Gives all blocks back and starts over, keeping its tokens. Sampling is keyed by position and the forward
    /// pass by tokens alone, so what follows is bit for bit what would have followed.
    pub(in crate::engine) fn release_blocks(&mut self, kv: &mut Cache) {
        kv.release(&std::mem::take(&mut self.blocks));
        self.computed = 0;
        self.fetched = OffloadFetch::Nothing;
        if let FirstOutput::Due { prompt, .. } = &mut self.opening {
            prompt.clear();
        }
        self.pool.iter_mut().for_each(PoolingState::clear);
    }
}
