//! One host: what it said last, and what was sent there since.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, BuildHasherDefault, Hasher},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use control_protocol::fleet::{
    GatewayReport, GatewayState, KnownTags, MAX_COUNT, ReportedAdapter, ReportedExecutor,
};
use scheduling::{
    perf::serving::RequestLoad,
    routing::{Availability, cost_estimates::CostEstimate},
};

/// A request that was sent so long before a host was asked is in what it says; later ones may be on their way.
const ON_THE_WAY: Duration = Duration::from_millis(50);

/// Most requests that are remembered as on their way to a host.
const MAX_SENT: usize = 4_096;

/// A host left something out that nobody here has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it left out adapters that were not told before")]
pub struct MissingDelta;

/// The adapters that a host can answer for, by name.
#[derive(Debug, Default)]
pub struct RegisteredAdapters {
    tag: u64,
    by_name: HashMap<String, ReportedAdapter>,
    /// A name of each generation, by its beginning.
    names: HashMap<u64, String>,
}

impl RegisteredAdapters {
    /// The adapter of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ReportedAdapter> {
        self.by_name.get(name)
    }

    /// What an adapter is called that is asked for by its generation.
    #[must_use]
    pub fn name_of(&self, generation: u64) -> Option<&str> {
        self.names.get(&generation).map(String::as_str)
    }

    fn of(tag: u64, adapters: Vec<ReportedAdapter>) -> Self {
        let names = adapters.iter().map(|adapter| (adapter.generation, adapter.name.clone())).collect();
        let named = adapters.into_iter().map(|adapter| (adapter.name.clone(), adapter));
        Self { tag, by_name: named.collect(), names }
    }
}

/// What a host said.
#[derive(Debug)]
pub(super) struct HostReport {
    asked_at: Instant,
    state: GatewayState,
    instance: u64,
    pub(super) base: String,
    pub(super) answer_tokens: f64,
    queued: u64,
    pub(super) executors: Vec<ExecutorReport>,
    pub(super) registered: Arc<RegisteredAdapters>,
    resident_tag: u64,
    /// Hashes of the names of those that each executor has in memory.
    resident: Vec<HashSet<u64, BuildHasherDefault<IdentityHasher>>>,
}

/// What a host said of an executor, as candidates are made of it.
#[derive(Debug)]
pub(super) struct ExecutorReport {
    pub(super) availability: Availability,
    pub(super) places: u64,
    pub(super) running: RequestLoad,
    pub(super) waiting: RequestLoad,
    pub(super) promised_tpot_us: Option<u64>,
    pub(super) seen: Option<CostEstimate>,
}

impl From<ReportedExecutor> for ExecutorReport {
    fn from(executor: ReportedExecutor) -> Self {
        Self {
            availability: executor.availability(),
            places: executor.places,
            running: executor.running.into(),
            waiting: executor.waiting.into(),
            promised_tpot_us: executor.promised_tpot_us,
            seen: executor.timings.map(Into::into),
        }
    }
}

/// A hash of what is a hash with a secret key already: every decision looks into one set of each host.
#[derive(Debug, Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// A request that was sent to a host.
#[derive(Debug)]
struct SentRequest {
    at: Instant,
    executor: usize,
    load: RequestLoad,
}

/// A host.
#[derive(Debug)]
pub(super) struct Host {
    /// No other ever has it.
    pub(super) number: usize,
    /// As Envoy is told it.
    pub(super) endpoint: String,
    word: Option<HostReport>,
    sent: Vec<SentRequest>,
    /// What [`Self::sent`] comes to, for each executor: every decision asks for it.
    on_the_way: Vec<RequestLoad>,
}

impl Host {
    pub(super) fn new(number: usize, address: SocketAddr) -> Self {
        let endpoint = address.to_string();
        Self { number, endpoint, word: None, sent: Vec::new(), on_the_way: Vec::new() }
    }

    pub(super) fn have(&self) -> KnownTags {
        let word = self.word.as_ref();
        KnownTags {
            registered: word.map(|word| word.registered.tag),
            resident: word.map(|word| word.resident_tag),
        }
    }

    /// Its adapters, if they have this tag.
    pub(super) fn registered(&self, tag: u64) -> Option<Arc<RegisteredAdapters>> {
        let word = self.word.as_ref().filter(|word| word.registered.tag == tag)?;
        Some(Arc::clone(&word.registered))
    }

    /// Whether another process is there than before.
    pub(super) fn is_another(&self, report: &GatewayReport) -> bool {
        self.word.as_ref().is_some_and(|word| word.instance != report.instance)
    }

    /// It said this; `shared` are adapters of the same tag that another host knows. `hasher` is the same for all hosts.
    pub(super) fn hear(
        &mut self,
        asked_at: Instant,
        report: GatewayReport,
        shared: Option<Arc<RegisteredAdapters>>,
        hasher: &impl BuildHasher,
    ) -> Result<(), MissingDelta> {
        let before = self.word.take();
        let tag = report.registered.tag;
        let told = |adapters: Vec<ReportedAdapter>| Arc::new(RegisteredAdapters::of(tag, adapters));
        let registered = shared.or_else(|| report.registered.content.map(told)).ok_or(MissingDelta)?;
        let resident_tag = report.resident.tag;
        let kept = before.filter(|word| word.resident_tag == resident_tag).map(|word| word.resident);
        let hashes = |names: &Vec<String>| names.iter().map(|name| hasher.hash_one(name)).collect();
        let told = |names: Vec<Vec<String>>| names.iter().map(hashes).collect();
        let resident = report.resident.content.map(told).or(kept).ok_or(MissingDelta)?;
        self.sent.retain(|sent| sent.at + ON_THE_WAY > asked_at);
        self.on_the_way.clear();
        self.sent.iter().for_each(|sent| add(&mut self.on_the_way, sent));
        self.word = Some(HostReport {
            asked_at,
            state: report.state,
            instance: report.instance,
            base: report.base,
            answer_tokens: report.answer_tokens,
            queued: report.queued,
            executors: report.executors.into_iter().map(ExecutorReport::from).collect(),
            registered,
            resident_tag,
            resident,
        });
        Ok(())
    }

    /// It does not answer: what it said holds no more.
    pub(super) fn forget(&mut self) {
        self.word = None;
        self.sent.clear();
        self.on_the_way.clear();
    }

    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        self.word.as_ref().map(|word| now.saturating_duration_since(word.asked_at))
    }

    pub(super) fn is_ready(&self, now: Instant, stale: Duration) -> bool {
        self.ready_word(now, stale).is_some()
    }

    /// What it said, if that is not old and it takes requests.
    pub(super) fn ready_word(&self, now: Instant, stale: Duration) -> Option<&HostReport> {
        let word = self.word.as_ref()?;
        let is_fresh = now.saturating_duration_since(word.asked_at) <= stale;
        (is_fresh && word.state == GatewayState::Ready).then_some(word)
    }

    /// A request goes to one of its executors now.
    pub(super) fn send(&mut self, at: Instant, executor: usize, load: RequestLoad) {
        if self.sent.len() < MAX_SENT {
            let sent = SentRequest { at, executor, load };
            add(&mut self.on_the_way, &sent);
            self.sent.push(sent);
        }
    }

    /// What was sent to an executor since it said what it has.
    pub(super) fn on_the_way(&self, executor: usize) -> RequestLoad {
        self.on_the_way.get(executor).copied().unwrap_or_default()
    }
}

/// One more is on its way to its executor.
fn add(on_the_way: &mut Vec<RequestLoad>, sent: &SentRequest) {
    if on_the_way.len() <= sent.executor {
        on_the_way.resize(sent.executor + 1, RequestLoad::default());
    }
    on_the_way[sent.executor] = on_the_way[sent.executor].plus(sent.load);
}

impl HostReport {
    /// Whether an executor has the adapter of this hash in memory.
    pub(super) fn has(&self, executor: usize, adapter: u64) -> bool {
        self.resident.get(executor).is_some_and(|hashes| hashes.contains(&adapter))
    }

    /// Sequences that wait in the gateway, for each executor.
    pub(super) fn queued_each(&self) -> u64 {
        self.queued.min(MAX_COUNT).div_ceil(self.executors.len().max(1) as u64)
    }
}
