//! What a gateway tells whoever chooses among hosts (`GET /v1/load`): its executors, what each has to do and takes for it,
//! and which adapters it knows and holds.
//!
//! It is asked many times a second, so what changes seldom has a tag, made of its content: who names the tag of what they
//! have is not told it again, and hosts that know the same adapters have the same tag.
//!
//! # Layout
//!
//! - [`GatewayReport`]: the answer; [`ReportedExecutor`], [`ReportedAdapter`], [`Tagged`]: its parts.
//! - [`adapter_of`]: which adapter a request means by `model`.
//!
//! # Principles
//!
//! - It says what is; what is made of it is `scheduling::routing`'s.
//! - Nothing in it names a tenant, a key or a prompt.

use std::{
    hash::{DefaultHasher, Hash, Hasher as _},
    str::FromStr,
};

use scheduling::{
    perf::{
        linear_fit::LinearFit,
        linear_model::LinearModel,
        serving::{ColdStart, LoraForm, RequestLoad, ServingModel},
    },
    routing::{Availability, cost_estimates::CostEstimate},
};
use serde::{Deserialize, Serialize};

/// Most of anything that a host has: sums of a few are far from the largest number.
pub const MAX_COUNT: u64 = 1 << 48;

/// Where it is asked for.
pub const PATH: &str = "/v1/load";

/// Whether a gateway takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GatewayState {
    /// It does.
    Ready,
    /// Not yet, or no executor of it is there.
    Unready,
    /// Not any more: it ends.
    Stopping,
}

/// What a gateway says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GatewayReport {
    /// Whether it takes requests.
    pub state: GatewayState,
    /// A number that another process at the same address has not.
    pub instance: u64,
    /// What the base model is called; empty as long as none is served.
    pub base: String,
    /// Tokens that answers have in the mean.
    pub answer_tokens: f64,
    /// Sequences that wait for their turn, and are with no executor yet.
    pub queued: u64,
    /// In the order of its settings.
    pub executors: Vec<ReportedExecutor>,
    /// All adapters that it can answer for.
    pub registered: Tagged<Vec<ReportedAdapter>>,
    /// Names of adapters that are in the memory of each executor.
    pub resident: Tagged<Vec<Vec<String>>>,
}

/// One of its executors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedExecutor {
    /// Whether it takes new requests: it is there, not drained, and not full.
    pub open: bool,
    /// Sequences that it computes together, at most.
    pub places: u64,
    /// What it is generating for.
    pub running: ReportedLoad,
    /// What it has not begun to.
    pub waiting: ReportedLoad,
    /// The shortest time for a token that was promised to one of those it has, in microseconds.
    pub promised_tpot_us: Option<u64>,
    /// What it takes for it; `None` before it was seen to work.
    pub timings: Option<Timings>,
}

impl ReportedExecutor {
    /// Whether it can take a request.
    #[must_use]
    pub fn availability(&self) -> Availability {
        if self.open { Availability::Open } else { Availability::Closed }
    }
}

/// Requests, as far as time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReportedLoad {
    requests: u64,
    ranks: u64,
    max_rank: u64,
    tokens: u64,
    token_ranks: u64,
}

impl From<RequestLoad> for ReportedLoad {
    fn from(load: RequestLoad) -> Self {
        let RequestLoad { requests, ranks, max_rank, tokens, token_ranks } = load;
        Self { requests, ranks, max_rank, tokens, token_ranks }
    }
}

impl From<ReportedLoad> for RequestLoad {
    /// What no host can have counts as the most it can.
    fn from(work: ReportedLoad) -> Self {
        let ReportedLoad { requests, ranks, max_rank, tokens, token_ranks } = work;
        let [requests, ranks, max_rank, tokens, token_ranks] =
            [requests, ranks, max_rank, tokens, token_ranks].map(|count| count.min(MAX_COUNT));
        Self { requests, ranks, max_rank, tokens, token_ranks }
    }
}

/// What an executor takes, in seconds for each unit of work ([`ServingModel`], whose kernel computes each row at its own rank).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    decode: [f64; 4],
    prefill: [f64; 3],
    link: [f64; 2],
    store: [f64; 2],
    waits_for_link: bool,
    /// They are old, and it has nothing to do.
    is_stale: bool,
}

impl From<CostEstimate> for Timings {
    fn from(CostEstimate { model, is_stale }: CostEstimate) -> Self {
        let line = |line: LinearFit| [line.alpha, line.beta];
        Self {
            decode: model.decode.seconds_each,
            prefill: model.prefill.seconds_each,
            link: line(model.link),
            store: line(model.store),
            waits_for_link: model.cold == ColdStart::Waits,
            is_stale,
        }
    }
}

impl From<Timings> for CostEstimate {
    /// What is no time is none.
    fn from(told: Timings) -> Self {
        let time = |seconds: f64| if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
        let line = |[alpha, beta]: [f64; 2]| LinearFit { alpha: time(alpha), beta: time(beta) };
        let model = ServingModel {
            form: LoraForm::TrueRank,
            decode: LinearModel { seconds_each: told.decode.map(time) },
            prefill: LinearModel { seconds_each: told.prefill.map(time) },
            link: line(told.link),
            store: line(told.store),
            cold: if told.waits_for_link { ColdStart::Waits } else { ColdStart::Assisted },
        };
        Self { model, is_stale: told.is_stale }
    }
}

/// An adapter that a gateway can answer for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReportedAdapter {
    /// What it is called.
    pub name: String,
    /// Its rank.
    pub rank: u64,
    /// Bytes of its factors.
    pub bytes: u64,
    /// The beginning of its generation ([`beginning_of`]); 0 from a gateway of before, which does not say it.
    #[serde(default)]
    pub generation: u64,
}

/// The first 16 of a generation's hexadecimal digits, which tell all generations of a fleet apart; `None` if they are none.
#[must_use]
pub fn beginning_of(generation: &str) -> Option<u64> {
    u64::from_str_radix(generation.get(..16)?, 16).ok()
}

/// What is told only to those who do not have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged<T> {
    /// A hash of the content.
    pub tag: u64,
    /// The content; `None` for who has this tag.
    pub content: Option<T>,
}

impl<T: Hash> Tagged<T> {
    /// For somebody who has what `known` is the tag of.
    #[must_use]
    pub fn of(content: T, known: Option<u64>) -> Self {
        // Without a key, so that all hosts find the same.
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        let tag = hasher.finish();
        Self { tag, content: (known != Some(tag)).then_some(content) }
    }

    /// The same for somebody else.
    #[must_use]
    pub fn unless_known(&self, known: Option<u64>) -> Self
    where
        T: Clone,
    {
        let content = if known == Some(self.tag) { None } else { self.content.clone() };
        Self { tag: self.tag, content }
    }
}

/// The tags of what somebody has, as the query of a request: `registered=1&resident=2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KnownTags {
    /// Of the adapters that are known.
    pub registered: Option<u64>,
    /// Of those that are in memory.
    pub resident: Option<u64>,
}

impl KnownTags {
    /// Path and query of the request.
    #[must_use]
    pub fn uri(&self) -> String {
        let named = [("registered", self.registered), ("resident", self.resident)];
        let pairs = named.into_iter().filter_map(|(name, tag)| Some(format!("{name}={}", tag?)));
        let query = pairs.collect::<Vec<_>>().join("&");
        if query.is_empty() { PATH.to_owned() } else { format!("{PATH}?{query}") }
    }
}

/// A query that is none of [`KnownTags`]'s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidTags;

impl FromStr for KnownTags {
    type Err = InvalidTags;

    fn from_str(query: &str) -> Result<Self, InvalidTags> {
        let mut have = Self::default();
        for (name, tag) in query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        {
            let tag = Some(tag.parse().map_err(|_| InvalidTags)?);
            match name {
                "registered" => have.registered = tag,
                "resident" => have.resident = tag,
                _ => return Err(InvalidTags),
            }
        }
        Ok(have)
    }
}

/// The adapter that `model` names where the base is called `base`: an adapter, `base:adapter` or `base::adapter`; `None` is
/// the base.
#[must_use]
pub fn adapter_of<'a>(model: &'a str, base: &str) -> Option<&'a str> {
    match model.strip_prefix(base) {
        Some("") => None,
        Some(rest) => Some(rest.strip_prefix("::").or_else(|| rest.strip_prefix(':')).unwrap_or(model)),
        None => Some(model),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_named_alone_or_after_the_base() {
        for model in ["a", "base:a", "base::a"] {
            assert_eq!(adapter_of(model, "base"), Some("a"), "{model}");
        }
        assert_eq!(adapter_of("base", "base"), None);
        // Never the base for something that only looks like it.
        for model in ["basement", "bas", "other:a"] {
            assert_eq!(adapter_of(model, "base"), Some(model));
        }
        assert_eq!(adapter_of("base:", "base"), Some(""));
    }

    #[test]
    fn who_has_something_is_not_told_it_again() {
        let adapters = || vec![ReportedAdapter { name: "a".to_owned(), rank: 8, bytes: 100, generation: 7 }];
        let told = Tagged::of(adapters(), None);
        assert_eq!(told.content, Some(adapters()));
        assert_eq!(
            (told.unless_known(None), told.unless_known(Some(told.tag)).content),
            (told.clone(), None)
        );
        assert_eq!(Tagged::of(adapters(), Some(told.tag)).content, None);
        assert_eq!(Tagged::of(adapters(), Some(told.tag ^ 1)), told);
        let have = KnownTags { registered: Some(told.tag), resident: None };
        let query = have.uri();
        assert_eq!(query.split_once('?').map(|(_, query)| query.parse()), Some(Ok(have)));
        assert_eq!((KnownTags::default().uri().as_str(), "".parse()), (PATH, Ok(KnownTags::default())));
        for wrong in ["registered", "resident=x", "tenant=1"] {
            assert_eq!(wrong.parse::<KnownTags>(), Err(InvalidTags), "{wrong}");
        }
    }

    #[test]
    fn a_generation_is_known_by_its_beginning() {
        assert_eq!(beginning_of("00000000000000ff1234"), Some(255));
        for none in ["", "00000000000000f", "zz000000000000ff12", "\u{e9}".repeat(16).as_str()] {
            assert_eq!(beginning_of(none), None, "{none}");
        }
    }

    #[test]
    fn what_is_told_is_what_was_seen() {
        let seen = CostEstimate { model: scheduling::routing::cost_estimates::UNSEEN, is_stale: true };
        assert_eq!(CostEstimate::from(Timings::from(seen)), seen);
        let nonsense = Timings { decode: [f64::NAN, -1.0, f64::INFINITY, 2.0], ..Timings::from(seen) };
        assert_eq!(CostEstimate::from(nonsense).model.decode.seconds_each, [0.0, 0.0, 0.0, 2.0]);
    }
}
