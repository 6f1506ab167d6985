//! What is asked of the executor: conversations, made from a seed before anything runs, so that every policy sees the same.
//!
//! # Layout
//!
//! - here: what a conversation is.
//! - `popularity`: how often each adapter is asked for. `arrivals`: when.
//! - `scenario`: chat, translation, agents, and a tenant that means harm.
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
    /// From the answer before, or from the conversation's start.
    pub think: Duration,
    /// Tokens that are new in its prompt; what was said before is in it too.
    pub prompt: usize,
    /// Tokens to generate.
    pub reply: usize,
}

/// Turns that follow each other; the next begins when the one before was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// When it begins.
    pub start: Duration,
    /// An index among the workload's adapters.
    pub adapter: usize,
    /// Tokens at its beginning that all conversations of its adapter share.
    pub system: usize,
    /// What it is about: equal numbers have equal tokens.
    pub content: u64,
    /// At least one.
    pub turns: Vec<ConversationTurn>,
}

impl Conversation {
    /// Tokens of a turn's prompt, and of prompt and answer.
    #[must_use]
    pub fn span(&self, turn: usize) -> (usize, usize) {
        let before: usize = self.turns[..turn].iter().map(|turn| turn.prompt + turn.reply).sum();
        let prompt = self.system + before + self.turns[turn].prompt;
        (prompt, prompt + self.turns[turn].reply)
    }

    /// The token at a position, whoever says it.
    #[must_use]
    pub fn token(&self, position: usize) -> u32 {
        let key = if position < self.system { self.adapter as u64 } else { self.content | 1 << 63 };
        // The upper half of the bits: tokens are compared, never looked up.
        (Rng::keyed(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).bits(position as u64) >> 32) as u32
    }
}

/// An adapter of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkloadAdapter {
    /// Its rank.
    pub rank: u32,
    /// Whose it is.
    pub tenant: u16,
}

/// Everything that is asked.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The adapters.
    pub adapters: Vec<WorkloadAdapter>,
    /// In order of their starts.
    pub conversations: Vec<Conversation>,
    /// What blocks are counted against.
    pub shares: ShareAccounting,
}

/// Whose share of the device a block is counted against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShareAccounting {
    /// Its tenant's: whoever has more than an equal share gives first.
    #[default]
    ByTenant,
    /// Nobody has a share.
    None,
}

impl Workload {
    /// Requests of all conversations.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.conversations.iter().map(|conversation| conversation.turns.len()).sum()
    }

    /// Tokens of the longest request, prompt and answer.
    #[must_use]
    pub fn longest(&self) -> usize {
        let spans = self.conversations.iter().map(|talk| talk.span(talk.turns.len() - 1).1);
        spans.max().unwrap_or(0)
    }

    /// The rank of the largest adapter.
    #[must_use]
    pub fn largest_rank(&self) -> u32 {
        self.adapters.iter().map(|adapter| adapter.rank).max().unwrap_or(0)
    }

    /// Under what an adapter's blocks are cached.
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

/// The id of an adapter.
#[must_use]
pub fn adapter_id(adapter: usize) -> AdapterId {
    AdapterId(numbered(adapter))
}

/// The index of an adapter.
#[must_use]
pub fn adapter_index(id: AdapterId) -> usize {
    u32::from_le_bytes([id.0[0], id.0[1], id.0[2], id.0[3]]) as usize - 1
}

/// The id of a tenant; nobody is everybody.
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
