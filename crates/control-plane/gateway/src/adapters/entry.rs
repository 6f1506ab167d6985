//! An adapter under a name, who uses it, and how much.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::sync::watch;
use types::{AdapterId, Generation, TenantId};

use super::database::Record;
use crate::{
    caller::{Caller, KeyRole},
    clock::now_us,
    lock::lock,
    text::{Text, TextError},
};

/// Seconds over which tokens per second are counted.
const RATE_WINDOW_S: u64 = 10;

/// An adapter under a name.
#[derive(Debug)]
pub struct AdapterEntry {
    /// What was registered; `pinned` and `last_used_us` as they were then.
    pub record: Record,
    id: AdapterId,
    pinned: AtomicBool,
    /// `record.version`, and those of what was changed of it since.
    version: AtomicU64,
    last_used_us: AtomicU64,
    /// `record.expires_at`, or as it was changed since; 0 is never.
    expires_at: AtomicU64,
    /// True if `last_used_us` is newer than what is on disk.
    used_since_saved: AtomicBool,
    /// Why it cannot be used now, if it cannot.
    fault: Mutex<Option<String>>,
    /// Its receivers are the leases.
    leases: watch::Sender<()>,
    /// Where it is used.
    uses: Mutex<AdapterUses>,
    rate: Mutex<Rate>,
    /// What it is the sum of; nothing, if it has files of its own.
    parts: Vec<MergePart>,
    /// How the tokenizer beside its files differs from the base's; known to the process that loaded it.
    warnings: Mutex<Vec<String>>,
}

/// An adapter of a sum, and what it is multiplied with.
#[derive(Debug, Clone)]
pub(super) struct MergePart {
    pub(super) entry: Arc<AdapterEntry>,
    pub(super) weight: f32,
}

/// Who uses an adapter on which executor.
#[derive(Debug, Default)]
struct AdapterUses {
    /// Leases of requests that have no executor yet: they may come to any.
    anywhere: usize,
    /// Places, by the number of the executor; none is zero.
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
            parts: Vec::new(),
            warnings: Mutex::default(),
            record,
        }
    }

    /// What whoever loaded it should know.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// Notes and logs what whoever loads it should know.
    pub(super) fn set_warnings(&self, warnings: Vec<String>) {
        for warning in &warnings {
            tracing::warn!(name = %self.record.name, %warning, "an adapter was trained with another tokenizer");
        }
        *lock(&self.warnings) = warnings;
    }

    /// The text that its conversations are written in: the base's, with the adapter's own chat template if it has one.
    ///
    /// # Errors
    /// The template cannot be used with this base.
    pub fn text(&self, base: &Arc<dyn Text>) -> Result<Arc<dyn Text>, TextError> {
        match &self.record.template {
            None => Ok(Arc::clone(base)),
            Some(template) => Ok(base.with_chat_template(&template.source)?),
        }
    }

    /// The same as the sum of others.
    pub(super) fn with_parts(self, parts: Vec<MergePart>) -> Self {
        Self { parts, ..self }
    }

    /// What it is the sum of; nothing, if it has files of its own.
    pub(super) fn parts(&self) -> &[MergePart] {
        &self.parts
    }

    /// Whether both are the sum of the same adapters, with the same weights.
    pub(super) fn is_sum_of(&self, other: &Self) -> bool {
        let pairs = || self.parts.iter().zip(&other.parts);
        self.id == other.id && pairs().all(|(one, other)| Arc::ptr_eq(&one.entry, &other.entry))
    }

    /// Those whose files it is made of, each with its weight: itself, or its parts.
    pub(super) fn sources(&self) -> Vec<(&Record, f32)> {
        if self.parts.is_empty() {
            return vec![(&self.record, 1.0)];
        }
        self.parts.iter().map(|part| (&part.entry.record, part.weight)).collect()
    }

    /// What it is called in the executor.
    #[must_use]
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Whether `caller` may know that it exists.
    #[must_use]
    pub fn is_for(&self, caller: &Caller) -> bool {
        let owner = self.record.tenant.as_deref();
        owner.is_none_or(|tenant| *tenant == *caller.tenant) || caller.role == KeyRole::Admin
    }

    /// Requests that use it now.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.leases.receiver_count()
    }

    /// Whether requests use it on the executor at `index`, or may come to do so.
    #[must_use]
    pub fn is_used_at(&self, index: usize) -> bool {
        let uses = lock(&self.uses);
        uses.anywhere > 0 || uses.at.contains_key(&index)
    }

    /// Whether it is kept resident.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// When a request last used it, in microseconds since 1970; when it was loaded, if none did.
    #[must_use]
    pub fn last_used_us(&self) -> u64 {
        self.last_used_us.load(Ordering::Relaxed)
    }

    /// Tokens its requests generate in a second, over the last ten.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        lock(&self.rate).per_s(now_us() / 1_000_000)
    }

    /// Why it cannot be used now, if it cannot.
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

    /// Number of its last change.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    pub(super) fn set_version(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// True if `record` is this entry, whatever was said of it since.
    pub(super) fn is(&self, record: &Record) -> bool {
        let key = |record: &Record| (record.content, record.generation, record.loaded_at);
        key(&self.record) == key(record) && self.record.tenant == record.tenant
    }

    /// Resolves when nobody uses it.
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

    /// When it was last used, once: if that has not been saved.
    pub(super) fn unsaved_use(&self) -> Option<(String, u64)> {
        let unsaved = self.used_since_saved.swap(false, Ordering::Relaxed);
        unsaved.then(|| (self.record.name.clone(), self.last_used_us()))
    }

    fn touch(&self) {
        self.last_used_us.store(now_us(), Ordering::Relaxed);
        self.used_since_saved.store(true, Ordering::Relaxed);
    }
}

/// Keeps a generation from being freed, and its adapter from being evicted.
#[derive(Debug)]
pub struct Lease {
    /// The generation, whatever the name stands for by now.
    pub generation: Generation,
    /// What it is called in the executor.
    pub id: AdapterId,
    pub(super) entry: Arc<AdapterEntry>,
    /// True once it is known on which executor it is used.
    is_placed: AtomicBool,
    _held: watch::Receiver<()>,
    /// What keeps the parts of a sum.
    _parts: Vec<watch::Receiver<()>>,
}

impl Lease {
    /// What it is taken on.
    #[must_use]
    pub(crate) fn entry(&self) -> &AdapterEntry {
        &self.entry
    }

    /// Another of the same generation.
    #[must_use]
    pub fn again(&self) -> Self {
        self.entry.lease()
    }

    /// The name it was taken under.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.entry.record.name
    }

    /// From now on it is used where its places say: the first is on the executor at `index`.
    pub(super) fn place(&self, index: usize) -> ExecutorPin {
        let place = self.entry.place(index);
        self.mark_placed();
        place
    }

    fn mark_placed(&self) {
        if !self.is_placed.swap(true, Ordering::Relaxed) {
            lock(&self.entry.uses).anywhere -= 1;
        }
    }

    /// Notes that `count` tokens have been generated with it.
    pub fn count_tokens(&self, count: usize) {
        lock(&self.entry.rate).count(count as u64, now_us() / 1_000_000);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.mark_placed();
        self.entry.touch();
    }
}

/// Keeps an adapter on one executor as long as a request uses it there.
#[derive(Debug)]
pub struct ExecutorPin {
    pub(super) entry: Arc<AdapterEntry>,
    index: usize,
}

impl ExecutorPin {
    /// The number of the executor.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// A place on another executor beside this one.
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

/// Tokens of each of the last seconds.
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
