//! Allocation and release of a sequence's blocks.

use std::time::Instant;

use kv_cache::{Cache, NodeId};
use model::forward::BLOCK_TOKENS;
use scheduling::batch::{BatchLimits, may_enter};

use super::{FirstOutput, PoolingState, Sequence, microseconds};

/// Blocks that come from a lower tier.
#[derive(Debug)]
pub(in crate::engine) enum OffloadFetch {
    Nothing,
    /// The sequence waits for `nodes`, and holds all blocks it needs.
    Waits {
        nodes: Vec<NodeId>,
        since: Instant,
    },
    Here,
}

/// Result of an admission attempt.
#[derive(Debug)]
pub(in crate::engine) enum KvAdmission {
    /// There are too few blocks; none was taken.
    NoRoom,
    /// The sequence waits for blocks from a lower tier.
    Waits,
    /// The sequence runs, with `found` of its tokens, virtual ones excluded, from the prefix cache.
    Runs { found: usize },
}

impl<A> Sequence<A> {
    /// Takes blocks for all tokens, sharing cached ones, if admission with `running` others is allowed.
    /// Blocks in lower tiers are fetched first, and the sequence waits for them.
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
        // The last token is always computed, because its logits are needed.
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

    /// Whether the sequence holds all its blocks, and the fetched ones have arrived.
    pub(in crate::engine) fn holds_its_blocks(&self) -> bool {
        matches!(self.fetched, OffloadFetch::Here)
    }

    pub(in crate::engine) fn fetched(&self) -> &OffloadFetch {
        &self.fetched
    }

    /// Ends the fetch; returns the waiting time in microseconds.
    pub(in crate::engine) fn end_fetch(&mut self, now: Instant) -> u64 {
        let OffloadFetch::Waits { since, .. } = std::mem::replace(&mut self.fetched, OffloadFetch::Here)
        else {
            return 0;
        };
        let waited_us = microseconds(now.saturating_duration_since(since));
        self.kv_wait_us += waited_us;
        waited_us
    }

    /// Releases all blocks and starts over with the same tokens. Sampling depends on positions and the pass
    /// on tokens only, so the continuation is bit for bit the same.
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
