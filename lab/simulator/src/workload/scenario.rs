//! Chat, translation and agents (E-20), with lengths measured on public data.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use super::{
    Conversation, ConversationTurn, ShareAccounting, Workload, WorkloadAdapter,
    arrivals::{AdapterArrival, ArrivalHistory, Demand},
    popularity::Popularity,
};
use crate::random::RandomStream;

/// Mean number of tokens per English word.
const TOKENS_PER_WORD: f64 = 1.3;

/// Adapter ranks as multiples of the base rank, half of the adapters each.
const RANKS_OF_BASE: [u32; 2] = [1, 2];

/// Kind of users' conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// Conversations of several turns with think time between them.
    Chat,
    /// Single turns, with an adapter for each pair of languages, in bursts.
    Translation,
    /// Many short turns after a long description of tools, in bursts.
    Agents,
}

/// A lognormal distribution of lengths: mean and deviation of the logarithm, and the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Length {
    mu: f64,
    sigma: f64,
    max: f64,
}

/// Parameters of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ScenarioShape {
    /// Minimum and maximum tokens that conversations of an adapter share, and the share of conversations
    /// that have them.
    system: (f64, f64),
    system_share: f64,
    /// Length of the first prompt in words.
    first: Length,
    user: Length,
    reply: Length,
    turns: Length,
    /// Think time in seconds.
    think: Length,
}

impl Scenario {
    /// Returns lengths and arrival pattern of the scenario.
    #[must_use]
    pub fn shape(self) -> ScenarioShape {
        let length = |mu, sigma, max| Length { mu, sigma, max };
        let chat = ScenarioShape {
            system: (64.0, 400.0),
            system_share: 0.8,
            first: length(4.23, 1.65, 800.0),
            user: length(2.82, 1.33, 400.0),
            reply: length(4.99, 1.05, 400.0),
            turns: length(1.1, 0.63, 12.0),
            think: length(3.0, 1.0, 120.0),
        };
        match self {
            Self::Chat => chat,
            Self::Translation => ScenarioShape {
                system: (40.0, 120.0),
                system_share: 1.0,
                first: length(3.2, 0.8, 300.0),
                reply: length(3.2, 0.8, 300.0),
                turns: length(0.0, 0.0, 1.0),
                ..chat
            },
            Self::Agents => ScenarioShape {
                system: (300.0, 800.0),
                system_share: 1.0,
                first: length(1.65, 0.8, 100.0),
                user: length(1.65, 0.8, 100.0),
                reply: length(2.42, 0.46, 100.0),
                turns: length(2.3, 0.4, 20.0),
                think: length(1.0, 0.5, 20.0),
            },
        }
    }
}

/// Parameters of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkloadSpec {
    /// Kind of the workload.
    pub scenario: Scenario,
    /// Number of adapters in the workload.
    pub adapters: usize,
    /// Distribution of requests over adapters.
    pub popularity: Popularity,
    /// Share of the mass that moves every minute.
    pub drift: f64,
    /// Smaller of the two ranks.
    pub rank: u32,
    /// Number of tenants that share the adapters.
    pub tenants: u16,
    /// How blocks are counted against tenant shares.
    pub shares: ShareAccounting,
    /// Requests per second of an additional hostile tenant with unique tokens; 0 for none.
    pub hostile_per_s: f64,
    /// Requests per second of all other tenants.
    pub per_s: f64,
    /// Divisor of all lengths.
    pub length_divisor: f64,
    /// History before the start, for adapters with separate arrivals.
    pub before: ArrivalHistory,
    /// Time after which no conversation begins.
    pub end: Duration,
}

/// Prompt tokens of a request of the hostile tenant, before division.
const HOSTILE_TOKENS: f64 = 800.0;

impl WorkloadSpec {
    /// Creates the workload of a seed.
    #[must_use]
    pub fn make(&self, seed: u64) -> Workload {
        let mut adapters: Vec<WorkloadAdapter> = (0..self.adapters)
            .map(|index| WorkloadAdapter {
                rank: self.rank * RANKS_OF_BASE[index % 2],
                tenant: (index % usize::from(self.tenants.max(1))) as u16,
            })
            .collect();
        let mut conversations: Vec<Conversation> = self
            .arrivals(seed)
            .into_iter()
            .enumerate()
            .map(|(number, arrival)| self.conversation(seed, number as u64, arrival))
            .collect();
        if self.hostile_per_s > 0.0 {
            conversations.extend(self.hostile(seed, adapters.len()));
            adapters.push(WorkloadAdapter { rank: self.rank, tenant: self.tenants.max(1) });
        }
        conversations.sort_by_key(|conversation| (conversation.start, conversation.content));
        Workload { adapters, conversations, shares: self.shares }
    }

    fn arrivals(&self, seed: u64) -> Vec<AdapterArrival> {
        let demand = Demand {
            adapters: self.adapters,
            popularity: self.popularity,
            drift: self.drift,
            per_s: self.per_s / self.mean_turns(),
            end: self.end,
        };
        match self.scenario {
            Scenario::Chat => demand.poisson(seed),
            Scenario::Translation | Scenario::Agents => demand.bursts(seed, self.before),
        }
    }

    /// Returns the mean turns per conversation, which converts the rate of requests to that of conversations.
    fn mean_turns(&self) -> f64 {
        let (law, mut stream) = (self.scenario.shape().turns, RandomStream::new(0, "turns", 0));
        let drawn = 10_000;
        (0..drawn).map(|_| whole(law.draw(&mut stream), 1.0) as f64).sum::<f64>() / f64::from(drawn)
    }

    fn conversation(
        &self,
        seed: u64,
        number: u64,
        AdapterArrival { at, adapter }: AdapterArrival,
    ) -> Conversation {
        let shape = self.scenario.shape();
        let mut stream = RandomStream::new(seed, "conversations", number);
        let mut words = |law: Length| whole(law.draw(&mut stream) * TOKENS_PER_WORD, self.length_divisor);
        let mut turn = |prompt: Length| (words(prompt), words(shape.reply));
        let first = turn(shape.first);
        let count = whole(shape.turns.draw(&mut RandomStream::new(seed, "turns", number)), 1.0);
        let mut thinks = RandomStream::new(seed, "thinks", number);
        let rest = (1..count).map(|_| {
            let (prompt, reply) = turn(shape.user);
            ConversationTurn { think: Duration::from_secs_f64(shape.think.draw(&mut thinks)), prompt, reply }
        });
        let first = ConversationTurn { think: Duration::ZERO, prompt: first.0, reply: first.1 };
        let turns = std::iter::once(first).chain(rest).collect();
        let shares_system = RandomStream::new(seed, "systems", number).uniform() < shape.system_share;
        let system = if shares_system { self.system(&shape, adapter) } else { 0 };
        Conversation { start: at, adapter, system, content: number, turns }
    }

    /// Returns the number of tokens that conversations of an adapter share.
    fn system(&self, shape: &ScenarioShape, adapter: usize) -> usize {
        let (low, high) = shape.system;
        let at = RandomStream::new(0, "system lengths", adapter as u64).uniform();
        whole(low + (high - low) * at, self.length_divisor)
    }

    /// Creates the conversations of a tenant that sends unique prompts at a constant rate.
    fn hostile(&self, seed: u64, adapter: usize) -> Vec<Conversation> {
        let mut stream = RandomStream::new(seed, "hostile", 0);
        let (mut found, mut at) = (Vec::new(), 0.0);
        loop {
            at += stream.exponential() / self.hostile_per_s;
            if at >= self.end.as_secs_f64() {
                return found;
            }
            let prompt = whole(HOSTILE_TOKENS, self.length_divisor);
            found.push(Conversation {
                start: Duration::from_secs_f64(at),
                adapter,
                system: 0,
                content: 1 << 40 | found.len() as u64,
                turns: vec![ConversationTurn { think: Duration::ZERO, prompt, reply: 1 }],
            });
        }
    }
}

impl Length {
    fn draw(self, stream: &mut RandomStream) -> f64 {
        stream.lognormal(self.mu, self.sigma).min(self.max)
    }
}

/// Rounds a length to at least one token.
fn whole(length: f64, divisor: f64) -> usize {
    ((length / divisor).round() as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(scenario: Scenario) -> WorkloadSpec {
        WorkloadSpec {
            scenario,
            adapters: 20,
            popularity: Popularity::Zipf(0.9),
            drift: 0.1,
            rank: 32,
            tenants: 4,
            shares: ShareAccounting::ByTenant,
            hostile_per_s: 0.0,
            per_s: 20.0,
            length_divisor: 1.0,
            before: ArrivalHistory::default(),
            end: Duration::from_secs(2000),
        }
    }

    #[test]
    fn a_chat_is_as_long_as_the_conversations_that_were_measured() {
        let workload = recipe(Scenario::Chat).make(1);
        let turns: Vec<&ConversationTurn> =
            workload.conversations.iter().flat_map(|talk| &talk.turns).collect();
        let mean = turns.len() as f64 / workload.conversations.len() as f64;
        assert!((mean - 3.65).abs() < 0.3, "{mean} turns, half of 7.3 messages");
        let rate = turns.len() as f64 / 2000.0;
        assert!((rate / 20.0 - 1.0).abs() < 0.05, "{rate}");
        let mut replies: Vec<usize> = turns.iter().map(|turn| turn.reply).collect();
        replies.sort_unstable();
        let median = replies[replies.len() / 2] as f64;
        assert!((median / (4.99_f64.exp() * 1.3) - 1.0).abs() < 0.05, "{median}");
        let with_system = workload.conversations.iter().filter(|talk| talk.system > 0).count() as f64;
        assert!((with_system / workload.conversations.len() as f64 - 0.8).abs() < 0.02);
    }

    #[test]
    fn translations_have_one_turn_and_agents_many_short_ones() {
        let translation = recipe(Scenario::Translation).make(1);
        assert!(translation.conversations.iter().all(|talk| talk.turns.len() == 1));
        let agents = recipe(Scenario::Agents).make(1);
        let turns = agents.requests() as f64 / agents.conversations.len() as f64;
        assert!((9.0..13.0).contains(&turns), "{turns}");
    }

    #[test]
    fn the_hostile_one_comes_on_top_and_never_repeats_itself() {
        let plain = recipe(Scenario::Chat).make(1);
        let disturbed = WorkloadSpec { hostile_per_s: 2.0, ..recipe(Scenario::Chat) }.make(1);
        let others: Vec<_> = disturbed.conversations.iter().filter(|talk| talk.adapter < 20).collect();
        assert!(others.into_iter().eq(&plain.conversations));
        let mut contents: Vec<u64> = disturbed.conversations.iter().map(|talk| talk.content).collect();
        contents.sort_unstable();
        contents.dedup();
        assert_eq!(contents.len(), disturbed.conversations.len());
    }
}
