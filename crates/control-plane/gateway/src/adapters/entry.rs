//! An adapter under a name, the requests that use it, and its token rate.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::sync::watch;
use types::{AdapterId, AdapterVersion, TenantId};

use super::{database::Record, store::Durability};
use crate::{
    caller::{Caller, KeyRole},
    clock::now_us,
    lock::lock,
    text::Text,
};

const RATE_WINDOW_S: u64 = 10;

#[derive(Debug)]
pub struct AdapterEntry {
    /// The record as it was registered; `pinned` and `last_used_us` may have changed since.
    pub record: Record,
    id: AdapterId,
    pinned: AtomicBool,
    /// Number of the last change: `record.version` at first.
    version: AtomicU64,
    last_used_us: AtomicU64,
    /// Seconds since 1970 at which the adapter is unloaded; 0 is never.
    expires_at: AtomicU64,
    /// True if `last_used_us` is newer than the value on disk.
    used_since_saved: AtomicBool,
    /// Why the adapter cannot be used now, if it cannot.
    fault: Mutex<Option<String>>,
    /// Each lease holds a receiver of this channel, so the receiver count is the number of leases.
    leases: watch::Sender<()>,
    uses: Mutex<AdapterUses>,
    rate: Mutex<Rate>,
    durability: Durability,
    /// Parts of a merged adapter; empty if the adapter has files of its own.
    parts: Vec<MergePart>,
    /// Differences of the adapter's tokenizer from the base's; known only to the process that loaded it.
    warnings: Mutex<Vec<String>>,
}

#[derive(Debug, Clone)]
pub(super) struct MergePart {
    pub(super) entry: Arc<AdapterEntry>,
    pub(super) weight: f32,
}

/// Leases and pins of an adapter, by executor.
#[derive(Debug, Default)]
struct AdapterUses {
    /// Number of leases whose request has no executor yet, so the adapter may be used on any.
    anywhere: usize,
    /// Number of [`ExecutorPin`]s by executor index; no value is zero.
    at: BTreeMap<usize, usize>,
}

impl AdapterEntry {
    pub(super) fn new(record: Record) -> Self {
        Self {
            id: AdapterId::new(TenantId::of(record.tenant.as_deref()), record.weights()),
            pinned: AtomicBool::new(record.pinned),
            version: AtomicU64::new(record.version),
            last_used_us: AtomicU64::new(record.last_used_us),
            expires_at: AtomicU64::new(record.expires_at.unwrap_or(0)),
            used_since_saved: AtomicBool::new(false),
            fault: Mutex::new(None),
            leases: watch::Sender::new(()),
            uses: Mutex::default(),
            rate: Mutex::default(),
            durability: Durability::Durable,
            parts: Vec::new(),
            warnings: Mutex::default(),
            record,
        }
    }

    /// Returns warnings for the client that loaded the adapter.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// Stores and logs warnings for the client that loads the adapter.
    pub(super) fn set_warnings(&self, warnings: Vec<String>) {
        for warning in &warnings {
            tracing::warn!(name = %self.record.name, %warning, "an adapter was trained with another tokenizer");
        }
        *lock(&self.warnings) = warnings;
    }

    /// Returns the adapter's text side: that of the base, with the adapter's chat template if it has one.
    pub fn text(&self, base: &Arc<dyn Text>) -> Arc<dyn Text> {
        match &self.record.template {
            None => Arc::clone(base),
            Some(template) => base.with_chat_template(&template.source),
        }
    }

    pub(super) fn with_durability(self, durability: Durability) -> Self {
        Self { durability, ..self }
    }

    /// Whether the registry has the adapter, so that it outlives this gateway.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durability == Durability::Durable
    }

    pub(super) fn with_parts(self, parts: Vec<MergePart>) -> Self {
        Self { parts, ..self }
    }

    pub(super) fn parts(&self) -> &[MergePart] {
        &self.parts
    }

    /// Whether both entries merge the same adapters with the same weights.
    pub(super) fn is_sum_of(&self, other: &Self) -> bool {
        let pairs = || self.parts.iter().zip(&other.parts);
        self.id == other.id && pairs().all(|(one, other)| Arc::ptr_eq(&one.entry, &other.entry))
    }

    /// Returns the records with the adapter's files, with weights: its own record, or those of its parts.
    pub(super) fn sources(&self) -> Vec<(&Record, f32)> {
        if self.parts.is_empty() {
            return vec![(&self.record, 1.0)];
        }
        self.parts.iter().map(|part| (&part.entry.record, part.weight)).collect()
    }

    #[must_use]
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Whether `caller` may know that the adapter exists.
    #[must_use]
    pub(crate) fn is_for(&self, caller: &Caller) -> bool {
        let owner = self.record.tenant.as_deref();
        owner.is_none_or(|tenant| *tenant == *caller.tenant) || caller.role == KeyRole::Admin
    }

    /// Number of requests that use the adapter now.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.leases.receiver_count()
    }

    /// Whether requests use the adapter on the executor at `index`, or may still do so.
    #[must_use]
    pub(crate) fn is_used_at(&self, index: usize) -> bool {
        let uses = lock(&self.uses);
        uses.anywhere > 0 || uses.at.contains_key(&index)
    }

    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Time of the last use by a request, or of the load if there was none, in microseconds since 1970.
    #[must_use]
    pub fn last_used_us(&self) -> u64 {
        self.last_used_us.load(Ordering::Relaxed)
    }

    /// Generated tokens per second with this adapter, over the last ten seconds.
    #[must_use]
    pub(crate) fn tokens_per_s(&self) -> f64 {
        lock(&self.rate).per_s(now_us() / 1_000_000)
    }

    #[must_use]
    pub fn fault(&self) -> Option<String> {
        lock(&self.fault).clone()
    }

    pub(super) fn set_fault(&self, fault: Option<String>) {
        *lock(&self.fault) = fault;
    }

    pub(super) fn set_pinned(&self, pinned: bool) {
        self.pinned.store(pinned, Ordering::Relaxed);
    }

    /// When the adapter is unloaded, in seconds since 1970; `None` is never.
    #[must_use]
    pub fn expires_at(&self) -> Option<u64> {
        Some(self.expires_at.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    pub(super) fn set_expiry(&self, at: Option<u64>) {
        self.expires_at.store(at.unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    pub(super) fn set_version(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// True if `record` is the same registration as this entry; pin, expiry and last use may differ.
    pub(super) fn is(&self, record: &Record) -> bool {
        let key = |record: &Record| (record.content, record.generation, record.loaded_at);
        key(&self.record) == key(record) && self.record.tenant == record.tenant
    }

    /// Waits until no request uses the adapter.
    pub(super) async fn drained(&self) {
        self.leases.closed().await;
    }

    pub(super) fn lease(self: &Arc<Self>) -> Lease {
        let held = self.leases.subscribe();
        self.touch();
        lock(&self.uses).anywhere += 1;
        Lease {
            generation: self.record.generation,
            id: self.id,
            entry: Arc::clone(self),
            is_placed: AtomicBool::new(false),
            _held: held,
            _parts: self.parts.iter().map(|part| part.entry.leases.subscribe()).collect(),
        }
    }

    fn place(self: &Arc<Self>, index: usize) -> ExecutorPin {
        *lock(&self.uses).at.entry(index).or_default() += 1;
        ExecutorPin { entry: Arc::clone(self), index }
    }

    /// Returns the name and the last use if that use is not saved yet, and marks it as saved.
    pub(super) fn unsaved_use(&self) -> Option<(String, u64)> {
        let unsaved = self.used_since_saved.swap(false, Ordering::Relaxed) && self.is_durable();
        unsaved.then(|| (self.record.name.clone(), self.last_used_us()))
    }

    fn touch(&self) {
        self.last_used_us.store(now_us(), Ordering::Relaxed);
        self.used_since_saved.store(true, Ordering::Relaxed);
    }
}

/// Keeps an adapter version from being freed, and its adapter from being evicted.
#[derive(Debug)]
pub struct Lease {
    /// Leased adapter version; the name may refer to another version by now.
    pub generation: AdapterVersion,
    pub id: AdapterId,
    pub(super) entry: Arc<AdapterEntry>,
    /// True once the executor of the request is known.
    is_placed: AtomicBool,
    _held: watch::Receiver<()>,
    /// Leases of the parts of a merged adapter.
    _parts: Vec<watch::Receiver<()>>,
}

impl Lease {
    #[must_use]
    pub(crate) fn entry(&self) -> &AdapterEntry {
        &self.entry
    }

    /// Returns another lease of the same adapter version.
    #[must_use]
    pub fn again(&self) -> Self {
        self.entry.lease()
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.entry.record.name
    }

    /// Pins the adapter on the executor at `index`. After the first call, only pins say where it is used.
    pub(crate) fn place(&self, index: usize) -> ExecutorPin {
        let place = self.entry.place(index);
        self.allow_eviction();
        place
    }

    /// Lets executors evict the adapter until a pin says where it is used. The lease still keeps the adapter
    /// version from being freed.
    pub(crate) fn allow_eviction(&self) {
        if !self.is_placed.swap(true, Ordering::Relaxed) {
            lock(&self.entry.uses).anywhere -= 1;
        }
    }

    pub(crate) fn count_tokens(&self, count: usize) {
        lock(&self.entry.rate).count(count as u64, now_us() / 1_000_000);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.allow_eviction();
        self.entry.touch();
    }
}

/// Keeps an adapter on one executor while a request uses it there.
#[derive(Debug)]
pub struct ExecutorPin {
    pub(super) entry: Arc<AdapterEntry>,
    index: usize,
}

impl ExecutorPin {
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Pins the same adapter on another executor, in addition to this pin.
    pub(super) fn beside(&self, index: usize) -> Self {
        self.entry.place(index)
    }
}

impl Drop for ExecutorPin {
    fn drop(&mut self) {
        let mut uses = lock(&self.entry.uses);
        if let Some(count) = uses.at.get_mut(&self.index) {
            *count -= 1;
            if *count == 0 {
                uses.at.remove(&self.index);
            }
        }
    }
}

/// Generated tokens in each of the last seconds.
#[derive(Debug, Default)]
struct Rate {
    seconds: [(u64, u64); RATE_WINDOW_S as usize],
}

impl Rate {
    fn count(&mut self, tokens: u64, now_s: u64) {
        let second = &mut self.seconds[(now_s % RATE_WINDOW_S) as usize];
        if second.0 != now_s {
            *second = (now_s, 0);
        }
        second.1 = second.1.saturating_add(tokens);
    }

    fn per_s(&self, now_s: u64) -> f64 {
        let recent = self.seconds.iter().filter(|(second, _)| now_s.saturating_sub(*second) < RATE_WINDOW_S);
        let tokens: u64 = recent.map(|(_, tokens)| tokens).sum();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people; counts stay below 2^53")]
        let tokens = tokens as f64;
        tokens / f64::from(u32::try_from(RATE_WINDOW_S).unwrap_or(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_second_are_those_of_the_last_ten_seconds() {
        let mut rate = Rate::default();
        rate.count(50, 100);
        rate.count(50, 105);
        assert!((rate.per_s(105) - 10.0).abs() < 1e-9);
        assert!((rate.per_s(112) - 5.0).abs() < 1e-9);
        assert!(rate.per_s(200).abs() < 1e-9);
        rate.count(20, 110);
        assert!((rate.per_s(110) - 7.0).abs() < 1e-9, "second 100 is overwritten, not added to");
    }
}
