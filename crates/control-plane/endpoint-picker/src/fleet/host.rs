//! The state of one host: its latest report, and the requests sent since.

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

/// Age from which a request is part of a host's report; later ones may still be on their way.
const ON_THE_WAY: Duration = Duration::from_millis(50);

/// Maximum number of requests remembered as on their way to a host.
const MAX_SENT: usize = 4_096;

/// A report omits a list that is unknown here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its report omits adapters that it did not report before")]
pub struct MissingDelta;

/// The adapters that a host can serve, by name.
#[derive(Debug, Default)]
pub(crate) struct RegisteredAdapters {
    tag: u64,
    by_name: HashMap<String, ReportedAdapter>,
    /// One name per adapter version, by the first bytes of the version's hash.
    names: HashMap<u64, String>,
}

impl RegisteredAdapters {
    #[must_use]
    pub(crate) fn get(&self, name: &str) -> Option<&ReportedAdapter> {
        self.by_name.get(name)
    }

    /// Returns a name of an adapter version.
    #[must_use]
    pub(crate) fn name_of(&self, generation: u64) -> Option<&str> {
        self.names.get(&generation).map(String::as_str)
    }

    fn of(tag: u64, adapters: Vec<ReportedAdapter>) -> Self {
        let names = adapters.iter().map(|adapter| (adapter.generation, adapter.name.clone())).collect();
        let named = adapters.into_iter().map(|adapter| (adapter.name.clone(), adapter));
        Self { tag, by_name: named.collect(), names }
    }
}

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
    /// Name hashes of the adapters in each executor's memory.
    resident: Vec<HashSet<u64, BuildHasherDefault<IdentityHasher>>>,
}

/// One executor of a report.
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

/// A hasher that returns its input, a keyed hash; each choice looks into one set per host.
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

#[derive(Debug)]
struct SentRequest {
    at: Instant,
    executor: usize,
    load: RequestLoad,
}

#[derive(Debug)]
pub(super) struct Host {
    /// Unique number, never reused.
    pub(super) number: usize,
    /// Address in the form that Envoy expects.
    pub(super) endpoint: String,
    latest: Option<HostReport>,
    sent: Vec<SentRequest>,
    /// Sum of [`Self::sent`] per executor, kept because every choice needs it.
    on_the_way: Vec<RequestLoad>,
}

impl Host {
    pub(super) fn new(number: usize, address: SocketAddr) -> Self {
        let endpoint = address.to_string();
        Self { number, endpoint, latest: None, sent: Vec::new(), on_the_way: Vec::new() }
    }

    pub(super) fn have(&self) -> KnownTags {
        let latest = self.latest.as_ref();
        KnownTags {
            registered: latest.map(|latest| latest.registered.tag),
            resident: latest.map(|latest| latest.resident_tag),
        }
    }

    /// Returns the host's adapters, if they have this tag.
    pub(super) fn registered(&self, tag: u64) -> Option<Arc<RegisteredAdapters>> {
        let latest = self.latest.as_ref().filter(|latest| latest.registered.tag == tag)?;
        Some(Arc::clone(&latest.registered))
    }

    /// Whether the report comes from another process than the previous one.
    pub(super) fn is_another(&self, report: &GatewayReport) -> bool {
        self.latest.as_ref().is_some_and(|latest| latest.instance != report.instance)
    }

    /// Stores a report. `shared`: another host's adapters with the same tag. `hasher`: equal for all hosts.
    pub(super) fn hear(
        &mut self,
        asked_at: Instant,
        report: GatewayReport,
        shared: Option<Arc<RegisteredAdapters>>,
        hasher: &impl BuildHasher,
    ) -> Result<(), MissingDelta> {
        let before = self.latest.take();
        let tag = report.registered.tag;
        let indexed = |adapters: Vec<ReportedAdapter>| Arc::new(RegisteredAdapters::of(tag, adapters));
        let registered = shared.or_else(|| report.registered.content.map(indexed)).ok_or(MissingDelta)?;
        let resident_tag = report.resident.tag;
        let kept = before.filter(|latest| latest.resident_tag == resident_tag).map(|latest| latest.resident);
        let hashes = |names: &Vec<String>| names.iter().map(|name| hasher.hash_one(name)).collect();
        let hashed = |names: Vec<Vec<String>>| names.iter().map(hashes).collect();
        let resident = report.resident.content.map(hashed).or(kept).ok_or(MissingDelta)?;
        self.sent.retain(|sent| sent.at + ON_THE_WAY > asked_at);
        self.on_the_way.clear();
        self.sent.iter().for_each(|sent| add(&mut self.on_the_way, sent));
        self.latest = Some(HostReport {
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

    /// Drops the report of a host that does not answer.
    pub(super) fn forget(&mut self) {
        self.latest = None;
        self.sent.clear();
        self.on_the_way.clear();
    }

    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        self.latest.as_ref().map(|latest| now.saturating_duration_since(latest.asked_at))
    }

    pub(super) fn is_ready(&self, now: Instant, stale: Duration) -> bool {
        self.ready_word(now, stale).is_some()
    }

    /// Returns the report, if it is recent and the host accepts requests.
    pub(super) fn ready_word(&self, now: Instant, stale: Duration) -> Option<&HostReport> {
        let latest = self.latest.as_ref()?;
        let is_fresh = now.saturating_duration_since(latest.asked_at) <= stale;
        (is_fresh && latest.state == GatewayState::Ready).then_some(latest)
    }

    /// Records a request that is sent to an executor.
    pub(super) fn send(&mut self, at: Instant, executor: usize, load: RequestLoad) {
        if self.sent.len() < MAX_SENT {
            let sent = SentRequest { at, executor, load };
            add(&mut self.on_the_way, &sent);
            self.sent.push(sent);
        }
    }

    /// Returns the load that was sent to an executor since its last report.
    pub(super) fn on_the_way(&self, executor: usize) -> RequestLoad {
        self.on_the_way.get(executor).copied().unwrap_or_default()
    }
}

fn add(on_the_way: &mut Vec<RequestLoad>, sent: &SentRequest) {
    if on_the_way.len() <= sent.executor {
        on_the_way.resize(sent.executor + 1, RequestLoad::default());
    }
    on_the_way[sent.executor] = on_the_way[sent.executor].plus(sent.load);
}

impl HostReport {
    /// Whether an executor has the adapter with this hash in memory.
    pub(super) fn has(&self, executor: usize, adapter: u64) -> bool {
        self.resident.get(executor).is_some_and(|hashes| hashes.contains(&adapter))
    }

    /// Returns the sequences that wait in the gateway, divided by the number of executors.
    pub(super) fn queued_each(&self) -> u64 {
        self.queued.min(MAX_COUNT).div_ceil(self.executors.len().max(1) as u64)
    }
}
