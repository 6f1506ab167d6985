//! One request in the engine.

use std::time::Duration;

use kv_cache::{Cache, Cursor, NodeId};
use scheduling::batch::{BatchLimits, PromptLogits, RunningStage, may_enter};
use types::BlockId;

use crate::workload::Workload;

/// Key of a request: a conversation and its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TurnOrigin {
    pub(crate) conversation: usize,
    pub(crate) turn: usize,
}

/// Times of the events of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestTimes {
    pub(crate) arrived: Duration,
    /// Total time of waiting for the adapter.
    pub(crate) adapter_wait: Duration,
    /// Total time of waiting for blocks of lower tiers.
    pub(crate) kv_wait: Duration,
    /// Time of the first run.
    pub(crate) entered: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
}

/// Sources of the prompt's blocks at the first admission.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrefixHits {
    pub(crate) on_device: usize,
    pub(crate) below: usize,
}

#[derive(Debug)]
pub(crate) struct SimSequence {
    pub(crate) origin: TurnOrigin,
    pub(crate) adapter: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    pub(crate) end: usize,
    block_tokens: usize,
    pub(crate) computed: usize,
    pub(crate) blocks: Vec<BlockId>,
    cursor: Cursor,
    /// Number of blocks found on the device; blocks from lower tiers follow.
    found: usize,
    awaited: Vec<NodeId>,
    pub(crate) is_pinned: bool,
    pub(crate) was_cold: bool,
    /// Time since which the sequence waits.
    pub(crate) waits_since: Duration,
    pub(crate) times: RequestTimes,
    pub(crate) hits: Option<PrefixHits>,
}

/// Result of trying to admit a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryOutcome {
    /// There are too few blocks, and none was allocated.
    NoRoom,
    /// All blocks are on the device.
    Ready,
    /// Some blocks are being copied.
    Awaits,
}

impl SimSequence {
    pub(crate) fn new(
        workload: &Workload,
        origin: TurnOrigin,
        (arrived, block_tokens): (Duration, usize),
    ) -> Self {
        let conversation = &workload.conversations[origin.conversation];
        let (prompt, end) = conversation.span(origin.turn);
        let tokens = (0..prompt).map(|position| conversation.token(position)).collect();
        Self {
            origin,
            adapter: conversation.adapter,
            tokens,
            prompt,
            end,
            block_tokens,
            computed: 0,
            blocks: Vec::new(),
            cursor: Cursor::root(workload.namespace(conversation.adapter)),
            found: 0,
            awaited: Vec::new(),
            is_pinned: false,
            was_cold: false,
            waits_since: arrived,
            times: RequestTimes { arrived, ..RequestTimes::default() },
            hits: None,
        }
    }

    /// Allocates blocks for all tokens, known ones from any tier and new ones, if the sequence may run
    /// beside `running` others.
    pub(crate) fn try_admit(
        &mut self,
        cache: &mut Cache,
        workload: &Workload,
        limits: (&BatchLimits, usize),
    ) -> EntryOutcome {
        // The last token is always computed, because its logits are needed.
        let reusable = &self.tokens[..self.tokens.len() - 1];
        let mut prefix = cache.lookup(workload.namespace(self.adapter), reusable);
        let (found, total) = (prefix.blocks.len(), cache.blocks_for(self.tokens.len()));
        if !may_enter(limits.0, limits.1, total - found, cache.available()) {
            cache.release(&prefix.blocks);
            return EntryOutcome::NoRoom;
        }
        self.awaited = cache.fetch(&mut prefix, reusable);
        self.found = found;
        self.cursor = prefix.cursor;
        let Some(fresh) = cache.allocate(total - prefix.blocks.len()) else {
            cache.release(&prefix.blocks);
            return EntryOutcome::NoRoom;
        };
        self.blocks = prefix.blocks;
        self.blocks.extend(fresh);
        if self.awaited.is_empty() { self.finish_fetch(cache, 0) } else { EntryOutcome::Awaits }
    }

    /// Checks whether the awaited blocks have arrived; the sequence may then run with those.
    pub(crate) fn check_arrivals(&mut self, cache: &mut Cache) -> EntryOutcome {
        match cache.arrived(&self.awaited) {
            None => EntryOutcome::Awaits,
            Some(arrived) => self.finish_fetch(cache, arrived),
        }
    }

    fn finish_fetch(&mut self, cache: &mut Cache, arrived: usize) -> EntryOutcome {
        let missing = self.awaited.len() - arrived;
        let last = arrived.checked_sub(1).map(|last| self.awaited[last]);
        self.awaited.clear();
        if let Some(cursor) = last.and_then(|last| cache.cursor_at(last)) {
            self.cursor = cursor;
        }
        let known = self.found + arrived;
        if missing > 0 {
            // These blocks will not arrive, so their tokens are computed into new blocks.
            cache.release(&self.blocks.drain(known..known + missing).collect::<Vec<_>>());
            let Some(fresh) = cache.allocate(missing) else {
                self.release_blocks(cache);
                return EntryOutcome::NoRoom;
            };
            self.blocks.extend(fresh);
        }
        self.computed = known * self.block_tokens;
        self.hits.get_or_insert(PrefixHits { on_device: self.found, below: arrived });
        EntryOutcome::Ready
    }

    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    pub(crate) fn missing_blocks(&self, cache: &Cache) -> usize {
        cache.blocks_for(self.tokens.len()).saturating_sub(self.blocks.len())
    }

    /// Returns the sequence in the scheduler's form.
    pub(crate) fn stage(&self, cache: &Cache) -> RunningStage {
        if self.generated() > 0 && self.pending() == 1 {
            return RunningStage::Decoding { missing_blocks: self.missing_blocks(cache) };
        }
        RunningStage::Prompt { pending: self.pending(), report: PromptLogits::Last }
    }

    /// Records `count` computed tokens and publishes full blocks. Returns whether a token follows.
    pub(crate) fn advance(&mut self, count: usize, cache: &mut Cache) -> bool {
        let block_tokens = self.block_tokens;
        let full_before = self.computed / block_tokens;
        self.computed += count;
        for index in full_before..self.computed / block_tokens {
            let tokens = &self.tokens[index * block_tokens..][..block_tokens];
            self.blocks[index] = cache.insert(&mut self.cursor, tokens, self.blocks[index]);
        }
        self.pending() == 0
    }

    /// Releases all blocks and starts over, keeping the tokens.
    pub(crate) fn release_blocks(&mut self, cache: &mut Cache) {
        cache.release(&std::mem::take(&mut self.blocks));
        self.awaited.clear();
        self.computed = 0;
    }
}
