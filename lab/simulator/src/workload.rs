//! Workloads of an executor: conversations made from a seed before the run, so that every policy sees the
//! same.
//!
//! # Layout
//!
//! - here: conversations and their tokens.
//! - `popularity`: distribution over adapters. `arrivals`: arrival times.
//! - `scenario`: chat, translation, agents, and a hostile tenant.
//! - `replay`: the Azure traces.

pub mod arrivals;
pub mod popularity;
pub mod replay;
pub mod scenario;

use std::time::Duration;

use kv_cache::Namespace;
use scheduling::random::Rng;
use types::{AdapterId, TenantId};

/// One question and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConversationTurn {
    /// Time since the previous answer, or since the conversation's start.
    pub think: Duration,
    /// Number of new prompt tokens; the prompt also holds the conversation so far.
    pub prompt: usize,
    /// Number of tokens to generate.
    pub reply: usize,
}

/// A sequence of turns, each of which begins after the previous answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// Start time of the conversation.
    pub start: Duration,
    /// Index among the workload's adapters.
    pub adapter: usize,
    /// Number of first tokens that all conversations of the adapter share.
    pub system: usize,
    /// Key of the content: equal keys give equal tokens.
    pub content: u64,
    /// Turns of the conversation, at least one.
    pub turns: Vec<ConversationTurn>,
}

impl Conversation {
    /// Returns the tokens of a turn's prompt, and of prompt and answer.
    #[must_use]
    pub fn span(&self, turn: usize) -> (usize, usize) {
        let before: usize = self.turns[..turn].iter().map(|turn| turn.prompt + turn.reply).sum();
        let prompt = self.system + before + self.turns[turn].prompt;
        (prompt, prompt + self.turns[turn].reply)
    }

    /// Returns the token at a position, of prompt or answer.
    #[must_use]
    pub fn token(&self, position: usize) -> u32 {
        let key = if position < self.system { self.adapter as u64 } else { self.content | 1 << 63 };
        // Only the upper half of the bits is used: tokens are compared, never looked up.
        (Rng::keyed(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).bits(position as u64) >> 32) as u32
    }
}

/// An adapter of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkloadAdapter {
    /// Rank of the LoRA adapter.
    pub rank: u32,
    /// Number of the owning tenant.
    pub tenant: u16,
}

/// All requests of a simulation.
#[derive(Debug, Clone)]
pub struct Workload {
    /// All adapters, addressed by index.
    pub adapters: Vec<WorkloadAdapter>,
    /// Conversations in order of their starts.
    pub conversations: Vec<Conversation>,
    /// How blocks are counted against tenant shares.
    pub shares: ShareAccounting,
}

/// Tenant share of the device that a block is counted against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShareAccounting {
    /// The tenant's share; tenants above an equal share are evicted first.
    #[default]
    ByTenant,
    /// Tenants have no shares.
    None,
}

impl Workload {
    /// Returns the number of requests of all conversations.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.conversations.iter().map(|conversation| conversation.turns.len()).sum()
    }

    /// Returns the tokens of the longest request, prompt and answer.
    #[must_use]
    pub fn longest(&self) -> usize {
        let spans = self.conversations.iter().map(|talk| talk.span(talk.turns.len() - 1).1);
        spans.max().unwrap_or(0)
    }

    /// Returns the rank of the largest adapter.
    #[must_use]
    pub fn largest_rank(&self) -> u32 {
        self.adapters.iter().map(|adapter| adapter.rank).max().unwrap_or(0)
    }

    /// Returns the namespace of an adapter's blocks.
    #[must_use]
    pub fn namespace(&self, adapter: usize) -> Namespace {
        let tenant = self.adapters[adapter].tenant;
        let owner = match self.shares {
            ShareAccounting::ByTenant => tenant_id(tenant),
            ShareAccounting::None => tenant_id(0),
        };
        Namespace { adapter: Some(adapter_id(adapter)), sharing: numbered(adapter), owner }
    }
}

/// Returns the id of the adapter with an index.
#[must_use]
pub fn adapter_id(adapter: usize) -> AdapterId {
    AdapterId(numbered(adapter))
}

/// Returns the index of an adapter id.
#[must_use]
pub fn adapter_index(id: AdapterId) -> usize {
    u32::from_le_bytes([id.0[0], id.0[1], id.0[2], id.0[3]]) as usize - 1
}

/// Returns the id of a tenant; without shares all requests have one tenant.
#[must_use]
pub fn tenant_id(tenant: u16) -> TenantId {
    TenantId(numbered(tenant as usize))
}

fn numbered(index: usize) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&(index as u32 + 1).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_goes_on_where_the_answer_before_ended() {
        let turn = |prompt, reply| ConversationTurn { think: Duration::ZERO, prompt, reply };
        let talk = Conversation {
            start: Duration::ZERO,
            adapter: 3,
            system: 10,
            content: 5,
            turns: vec![turn(4, 6), turn(3, 2)],
        };
        assert_eq!([talk.span(0), talk.span(1)], [(14, 20), (23, 25)]);
        let other = Conversation { content: 6, ..talk.clone() };
        assert!((0..10).all(|position| talk.token(position) == other.token(position)));
        assert!((10..20).all(|position| talk.token(position) != other.token(position)));
    }

    #[test]
    fn ids_lead_back_to_their_indices() {
        assert!([0, 1, 255, 256, 1999].into_iter().all(|index| adapter_index(adapter_id(index)) == index));
        assert_ne!(tenant_id(0), TenantId::EVERYBODY);
    }
}
