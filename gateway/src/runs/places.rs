//! Which model gets the next trainer, and which gives its trainer back because others wait.
//!
//! Of models that wait, one of the tenant who has the fewest trainers asks first, of these the one that waits longest. A model
//! gives its trainer back while somebody waits: if nothing was asked of it for [`IDLE`], or if its tenant has two trainers more
//! than one who waits and it has had its own for [`TENURE`].

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::lock::lock;

/// A model that was asked nothing for so long gives its trainer to others.
const IDLE: Duration = Duration::from_secs(30);
/// How long a model has a trainer at least while it is asked for work.
const TENURE: Duration = Duration::from_secs(60);
/// Between two models that give their trainers back: whoever waits needs some seconds to take one.
const PAUSE: Duration = Duration::from_secs(5);
/// Bytes that a suspended model counts as at least.
const LEAST_BYTES: u64 = 1 << 20;

/// All of them.
#[derive(Debug, Clone, Default)]
pub struct Places(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    tickets: u64,
    /// Whose models wait, in the order in which they came.
    waiting: BTreeMap<u64, Arc<str>>,
    tenants: HashMap<Arc<str>, Tenant>,
    /// When a model last gave its trainer back.
    yielded: Option<Instant>,
}

/// Models of a tenant.
#[derive(Debug, Default, PartialEq)]
struct Tenant {
    /// With a trainer, or asking for one.
    trained: usize,
    /// Of those that are suspended, on the disk.
    suspended_bytes: u64,
}

impl State {
    fn trained(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.trained)
    }

    fn change(&mut self, tenant: &Arc<str>, change: impl FnOnce(&mut Tenant)) {
        change(self.tenants.entry(Arc::clone(tenant)).or_default());
        self.tenants.retain(|_, tenant| *tenant != Tenant::default());
    }
}

impl Places {
    /// Waits for a trainer, behind whoever waits already.
    #[must_use]
    pub fn wait(&self, tenant: &Arc<str>) -> Place {
        let mut state = lock(&self.0);
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiting.insert(ticket, Arc::clone(tenant));
        Place { places: self.clone(), tenant: Arc::clone(tenant), ticket, stage: Stage::Waits }
    }
}

/// What a model has of trainers, until this is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    tenant: Arc<str>,
    ticket: u64,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing yet.
    Waits,
    /// A trainer, or it asks for one.
    Trains,
    /// None: what it has learned is on the disk, in so many bytes.
    Suspended(u64),
}

impl Place {
    /// Whether it may ask for a trainer now; while it asks, the next one may.
    pub fn ask(&mut self) -> bool {
        let mut state = lock(&self.places.0);
        let first = state.waiting.iter().min_by_key(|(ticket, tenant)| (state.trained(tenant), **ticket));
        if first.is_none_or(|(ticket, _)| *ticket != self.ticket) {
            return false;
        }
        state.waiting.remove(&self.ticket);
        state.change(&self.tenant, |tenant| tenant.trained += 1);
        self.stage = Stage::Trains;
        true
    }

    /// It was given none, and waits on in its place.
    pub fn wait_on(&mut self) {
        let mut state = lock(&self.places.0);
        state.change(&self.tenant, |tenant| tenant.trained -= 1);
        state.waiting.insert(self.ticket, Arc::clone(&self.tenant));
        self.stage = Stage::Waits;
    }

    /// Whether it is to give its trainer back: nothing was asked of it for `idle`, and it has had it for `tenure`.
    #[must_use]
    pub fn is_to_yield(&self, idle: Duration, tenure: Duration) -> bool {
        let mut state = lock(&self.places.0);
        let Some(fewest) = state.waiting.values().map(|tenant| state.trained(tenant)).min() else {
            return false;
        };
        let has_more = state.trained(&self.tenant) > fewest + 1;
        let is_due = idle >= IDLE || (has_more && tenure >= TENURE);
        let is_first = state.yielded.is_none_or(|at| at.elapsed() >= PAUSE);
        if is_due && is_first {
            state.yielded = Some(Instant::now());
        }
        is_due && is_first
    }

    /// Bytes on the disk of the tenant's models that are suspended.
    #[must_use]
    pub fn suspended_bytes(&self) -> u64 {
        lock(&self.places.0).tenants.get(&self.tenant).map_or(0, |tenant| tenant.suspended_bytes)
    }

    /// Its trainer is free, and what it has learned is on the disk, in so many bytes.
    pub fn suspend(&mut self, bytes: u64) {
        let bytes = bytes.max(LEAST_BYTES);
        lock(&self.places.0).change(&self.tenant, |tenant| {
            tenant.trained -= 1;
            tenant.suspended_bytes += bytes;
        });
        self.stage = Stage::Suspended(bytes);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = lock(&self.places.0);
        match self.stage {
            Stage::Waits => drop(state.waiting.remove(&self.ticket)),
            Stage::Trains => state.change(&self.tenant, |tenant| tenant.trained -= 1),
            Stage::Suspended(bytes) => state.change(&self.tenant, |tenant| tenant.suspended_bytes -= bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn trained(places: &Places, tenant: &Arc<str>) -> Place {
        let mut place = places.wait(tenant);
        assert!(place.ask());
        place
    }

    #[test]
    fn a_tenant_with_fewer_trainers_asks_first_and_then_who_waits_longest() {
        let (places, alice, bob) = (Places::default(), "alice".into(), "bob".into());
        let first = trained(&places, &alice);
        let [mut second, mut third, mut other] = [&alice, &alice, &bob].map(|tenant| places.wait(tenant));
        assert!(!second.ask() && !third.ask() && other.ask());
        other.wait_on();
        assert!(!second.ask() && other.ask(), "it waits on in its place");
        assert!(!third.ask() && second.ask() && third.ask());
        drop((first, second, third, other));
        let state = lock(&places.0);
        assert!(state.waiting.is_empty() && state.tenants.is_empty(), "{state:?}");
    }

    #[test]
    fn an_idle_model_gives_its_trainer_back_only_while_somebody_waits_and_one_at_a_time() {
        let (places, alice) = (Places::default(), "alice".into());
        let idle = [trained(&places, &alice), trained(&places, &alice)];
        assert!(!idle[0].is_to_yield(IDLE, NOW), "nobody waits");
        let waiting = places.wait(&alice);
        assert!(!idle[0].is_to_yield(NOW, TENURE), "the one who waits has no fewer trainers");
        assert!(idle[0].is_to_yield(IDLE, NOW));
        assert!(!idle[1].is_to_yield(IDLE, NOW), "the other was asked a moment ago");
        drop(waiting);
    }

    #[test]
    fn a_tenant_who_keeps_all_trainers_busy_gives_some_to_others_and_keeps_the_last() {
        let (places, alice, bob) = (Places::default(), "alice".into(), "bob".into());
        let busy = [trained(&places, &alice), trained(&places, &alice)];
        let _waiting = places.wait(&bob);
        assert!(!busy[0].is_to_yield(NOW, NOW), "it has just got it");
        assert!(busy[0].is_to_yield(NOW, TENURE));
        let [first, last] = busy;
        drop(first);
        lock(&places.0).yielded = None;
        assert!(!last.is_to_yield(NOW, TENURE), "each would have one");
    }

    #[test]
    fn a_suspended_model_counts_its_bytes_and_no_trainer() {
        let (places, alice) = (Places::default(), "alice".into());
        let [mut small, mut large] = [trained(&places, &alice), trained(&places, &alice)];
        small.suspend(0);
        large.suspend(LEAST_BYTES * 3);
        assert_eq!((small.suspended_bytes(), lock(&places.0).trained("alice")), (LEAST_BYTES * 4, 0));
        drop((small, large));
        assert!(lock(&places.0).tenants.is_empty());
    }
}
