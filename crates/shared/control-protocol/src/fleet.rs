//! The report of a gateway to the endpoint picker, which chooses a host for each request (`GET /v1/load`).
//!
//! The report lists the gateway's executors, their load and timings, and the adapters that it knows and
//! holds. A picker polls many times a second, so the parts that seldom change have a tag, a hash of their
//! content. The gateway omits the content if the request names its tag. Hosts that know the same adapters
//! have the same tag.
//!
//! # Layout
//!
//! - [`GatewayReport`]: the answer; [`ReportedExecutor`], [`ReportedAdapter`], [`Tagged`]: its parts.
//! - [`adapter_of`]: the adapter that a request names in `model`.
//!
//! # Principles
//!
//! - A report contains only facts; `scheduling::routing` draws the conclusions.
//! - A report contains no tenant, no key and no prompt.

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

/// Upper limit of every count in a report, low enough that sums of a few counts cannot overflow.
pub const MAX_COUNT: u64 = 1 << 48;

/// Path of the endpoint that returns the report.
pub const PATH: &str = "/v1/load";

/// Whether a gateway takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GatewayState {
    /// The gateway accepts requests.
    Ready,
    /// The gateway does not accept requests yet, or has no connected executor.
    Unready,
    /// The gateway is shutting down.
    Stopping,
}

/// The report of one gateway.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GatewayReport {
    /// Whether the gateway accepts requests.
    pub state: GatewayState,
    /// Random number of the process, different from that of another process at the same address.
    pub instance: u64,
    /// Name of the base model; empty until the gateway serves one.
    pub base: String,
    /// Mean number of tokens per answer.
    pub answer_tokens: f64,
    /// Sequences in the admission queue that no executor has yet.
    pub queued: u64,
    /// Executors, in the order of the gateway's settings.
    pub executors: Vec<ReportedExecutor>,
    /// All adapters that the gateway can serve.
    pub registered: Tagged<Vec<ReportedAdapter>>,
    /// Names of the adapters in the memory of each executor.
    pub resident: Tagged<Vec<Vec<String>>>,
}

/// One executor of a gateway.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedExecutor {
    /// Whether the executor takes new requests: it is connected, not drained, and not full.
    pub open: bool,
    /// Number of batch slots: the maximum number of sequences per step.
    pub places: u64,
    /// Requests for which the executor generates tokens.
    pub running: ReportedLoad,
    /// Requests that the executor has not begun.
    pub waiting: ReportedLoad,
    /// The shortest time per output token promised to any of its requests, in microseconds.
    pub promised_tpot_us: Option<u64>,
    /// Measured timings of the executor; `None` before its first measured work.
    pub timings: Option<Timings>,
}

impl ReportedExecutor {
    /// Returns whether the executor can take a request.
    #[must_use]
    pub fn availability(&self) -> Availability {
        if self.open { Availability::Open } else { Availability::Closed }
    }
}

/// Work of a group of requests, in the quantities that determine its time.
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
    /// Limits every count to [`MAX_COUNT`].
    fn from(work: ReportedLoad) -> Self {
        let ReportedLoad { requests, ranks, max_rank, tokens, token_ranks } = work;
        let [requests, ranks, max_rank, tokens, token_ranks] =
            [requests, ranks, max_rank, tokens, token_ranks].map(|count| count.min(MAX_COUNT));
        Self { requests, ranks, max_rank, tokens, token_ranks }
    }
}

/// Cost of an executor's work, in seconds per unit ([`ServingModel`] with each row computed at its own rank).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    decode: [f64; 4],
    prefill: [f64; 3],
    link: [f64; 2],
    store: [f64; 2],
    waits_for_link: bool,
    /// The timings are old, and the executor is idle.
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
    /// Replaces negative and non-finite times by 0.
    fn from(timings: Timings) -> Self {
        let time = |seconds: f64| if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
        let line = |[alpha, beta]: [f64; 2]| LinearFit { alpha: time(alpha), beta: time(beta) };
        let model = ServingModel {
            form: LoraForm::TrueRank,
            decode: LinearModel { seconds_each: timings.decode.map(time) },
            prefill: LinearModel { seconds_each: timings.prefill.map(time) },
            link: line(timings.link),
            store: line(timings.store),
            cold: if timings.waits_for_link { ColdStart::Waits } else { ColdStart::Assisted },
        };
        Self { model, is_stale: timings.is_stale }
    }
}

/// An adapter that a gateway can serve.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReportedAdapter {
    /// Name of the adapter in requests.
    pub name: String,
    /// Rank of the adapter's deltas.
    pub rank: u64,
    /// Bytes of the adapter's factors.
    pub bytes: u64,
    /// The beginning of the adapter version ([`beginning_of`]); 0 from an older gateway.
    #[serde(default)]
    pub generation: u64,
}

/// Returns the number that the first 16 hexadecimal digits of an adapter version form; `None` if `generation`
/// does not begin with 16 such digits. These digits distinguish all versions of a fleet.
#[must_use]
pub fn beginning_of(generation: &str) -> Option<u64> {
    u64::from_str_radix(generation.get(..16)?, 16).ok()
}

/// Content that is omitted for receivers that already have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged<T> {
    /// Hash of the content.
    pub tag: u64,
    /// The content; `None` for a receiver that named this tag.
    pub content: Option<T>,
}

impl<T: Hash> Tagged<T> {
    /// Tags `content`, and omits it if `known` is its tag.
    #[must_use]
    pub fn of(content: T, known: Option<u64>) -> Self {
        // This hasher has no random key, so all hosts compute the same tag.
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        let tag = hasher.finish();
        Self { tag, content: (known != Some(tag)).then_some(content) }
    }

    /// Returns a copy for another receiver, without the content if `known` is its tag.
    #[must_use]
    pub fn unless_known(&self, known: Option<u64>) -> Self
    where
        T: Clone,
    {
        let content = if known == Some(self.tag) { None } else { self.content.clone() };
        Self { tag: self.tag, content }
    }
}

/// The tags of the content that a receiver has, as the query of a request: `registered=1&resident=2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KnownTags {
    /// Tag of the known list of registered adapters.
    pub registered: Option<u64>,
    /// Tag of the known lists of resident adapters.
    pub resident: Option<u64>,
}

impl KnownTags {
    /// Returns path and query of the request.
    #[must_use]
    pub fn uri(&self) -> String {
        let named = [("registered", self.registered), ("resident", self.resident)];
        let pairs = named.into_iter().filter_map(|(name, tag)| Some(format!("{name}={}", tag?)));
        let query = pairs.collect::<Vec<_>>().join("&");
        if query.is_empty() { PATH.to_owned() } else { format!("{PATH}?{query}") }
    }
}

/// The query string does not parse as [`KnownTags`].
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

/// Returns the adapter that `model` names, where `base` is the name of the base model.
///
/// An adapter is written as `adapter`, `base:adapter` or `base::adapter`. `None` means the base itself.
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
        // A name that only begins like the base's is never the base.
        for model in ["basement", "bas", "other:a"] {
            assert_eq!(adapter_of(model, "base"), Some(model));
        }
        assert_eq!(adapter_of("base:", "base"), Some(""));
    }

    #[test]
    fn who_has_something_is_not_told_it_again() {
        let adapters = || vec![ReportedAdapter { name: "a".to_owned(), rank: 8, bytes: 100, generation: 7 }];
        let tagged = Tagged::of(adapters(), None);
        assert_eq!(tagged.content, Some(adapters()));
        assert_eq!(
            (tagged.unless_known(None), tagged.unless_known(Some(tagged.tag)).content),
            (tagged.clone(), None)
        );
        assert_eq!(Tagged::of(adapters(), Some(tagged.tag)).content, None);
        assert_eq!(Tagged::of(adapters(), Some(tagged.tag ^ 1)), tagged);
        let have = KnownTags { registered: Some(tagged.tag), resident: None };
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
