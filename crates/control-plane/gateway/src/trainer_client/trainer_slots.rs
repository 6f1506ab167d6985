//! Queue for trainers: the next model or fine-tuning job to get one, and the model that must give its own
//! back.
//!
//! Among waiting models and jobs, the tenant with the fewest trainers is served first, and of that tenant the
//! one that waits longest. A waiter that has not asked for [`ABSENCE`] is skipped. A model gives its trainer
//! back while others wait, in two cases. First, it has been idle for [`IDLE`] and longer than other models.
//! Second, it has had its trainer for [`TENURE`], and its tenant has at least two trainers more than a
//! waiting tenant. A job keeps its trainer to its end.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::lock::lock;

/// Idle time after which a model gives its trainer to others.
const IDLE: Duration = Duration::from_secs(30);
/// Minimum time that a busy model keeps its trainer.
const TENURE: Duration = Duration::from_secs(60);
/// Pause between two models that give their trainers back, since a waiter needs some seconds to take one.
const PAUSE: Duration = Duration::from_secs(5);
/// Time without a request after which a waiter no longer delays others.
const ABSENCE: Duration = Duration::from_secs(10);
/// Minimum bytes that a suspended model counts.
const LEAST_BYTES: u64 = 1 << 20;

/// Shared queue for trainers.
#[derive(Debug, Clone, Default)]
pub struct TrainerSlots(Arc<Mutex<TrainerSlotState>>);

#[derive(Debug, Default)]
struct TrainerSlotState {
    tickets: Ticket,
    /// Waiting models and jobs, in the order of their arrival.
    waiting: BTreeMap<Ticket, Waiting>,
    /// Time of last use of each model that has a trainer but no work.
    idle: HashMap<Ticket, Instant>,
    tenants: HashMap<Arc<str>, TenantModels>,
    /// Time when a model last gave its trainer back.
    yielded: Option<Instant>,
}

/// Identifier of a slot; a later slot has a larger one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Waiting {
    tenant: Arc<str>,
    /// Time of the last request or renewal.
    asked: Instant,
}

/// Use of trainers by one tenant.
#[derive(Debug, Default, PartialEq)]
struct TenantModels {
    /// Number of models and jobs that have a trainer or request one.
    trained: usize,
    /// Bytes on disk of suspended models.
    suspended_bytes: u64,
}

impl TrainerSlotState {
    /// Returns waiting slots with their tenants, except those that have not asked for [`ABSENCE`].
    fn present(&self) -> impl Iterator<Item = (Ticket, &Arc<str>)> {
        let present = self.waiting.iter().filter(|(_, waiting)| waiting.asked.elapsed() < ABSENCE);
        present.map(|(ticket, waiting)| (*ticket, &waiting.tenant))
    }

    /// Returns the slot that may ask next.
    fn first(&self) -> Option<Ticket> {
        self.present()
            .min_by_key(|(ticket, tenant)| (self.trained(tenant), *ticket))
            .map(|(ticket, _)| ticket)
    }

    fn trained(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.trained)
    }

    fn change(&mut self, tenant: &Arc<str>, change: impl FnOnce(&mut TenantModels)) {
        change(self.tenants.entry(Arc::clone(tenant)).or_default());
        self.tenants.retain(|_, tenant| *tenant != TenantModels::default());
    }
}

impl TrainerSlots {
    /// Adds a waiting slot at the end of the queue.
    #[must_use]
    pub fn wait(&self, tenant: &str) -> TrainerSlot {
        let place = self.place(tenant, SlotStage::Waits);
        place.renew();
        place
    }

    /// Counts a trainer that the tenant has on another host.
    #[must_use]
    pub fn elsewhere(&self, tenant: &str) -> TrainerSlot {
        let place = self.place(tenant, SlotStage::Trains);
        lock(&self.0).change(&place.tenant, |tenant| tenant.trained += 1);
        place
    }

    /// Returns the slot that may ask for a trainer next.
    #[must_use]
    pub fn first(&self) -> Option<Ticket> {
        lock(&self.0).first()
    }

    fn place(&self, tenant: &str, stage: SlotStage) -> TrainerSlot {
        let mut state = lock(&self.0);
        state.tickets.0 += 1;
        TrainerSlot { places: self.clone(), tenant: tenant.into(), ticket: state.tickets, stage }
    }
}

/// Slot of a model or a job in the queue for trainers; dropping it frees the trainer.
#[derive(Debug)]
pub struct TrainerSlot {
    places: TrainerSlots,
    tenant: Arc<str>,
    ticket: Ticket,
    stage: SlotStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotStage {
    /// The slot waits for a trainer.
    Waits,
    /// The slot has a trainer or requests one.
    Trains,
    /// The model is suspended, with this number of bytes on disk.
    Suspended(u64),
}

impl TrainerSlot {
    /// Whether this slot may request a trainer now. While it does, the next slot may request one too.
    pub fn ask(&mut self) -> bool {
        if !self.waits() {
            return false;
        }
        self.renew();
        let mut state = lock(&self.places.0);
        if state.first() != Some(self.ticket) {
            return false;
        }
        state.waiting.remove(&self.ticket);
        state.change(&self.tenant, |tenant| tenant.trained += 1);
        self.stage = SlotStage::Trains;
        true
    }

    /// Returns the slot to its place in the queue, because it received no trainer.
    pub(crate) fn wait_on(&mut self) {
        let mut state = lock(&self.places.0);
        state.change(&self.tenant, |tenant| tenant.trained -= 1);
        self.stage = SlotStage::Waits;
        drop(state);
        self.renew();
    }

    #[must_use]
    pub(crate) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Whether the slot waits for a trainer.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.stage == SlotStage::Waits
    }

    /// Records that the waiter is still there.
    pub(crate) fn renew(&self) {
        let waiting = Waiting { tenant: Arc::clone(&self.tenant), asked: Instant::now() };
        lock(&self.places.0).waiting.insert(self.ticket, waiting);
    }

    /// Whether an idle model must give its trainer back. The model last `used` the trainer then, and has had
    /// it for `tenure`.
    #[must_use]
    pub(crate) fn is_to_yield(&self, used: Instant, tenure: Duration) -> bool {
        let mut state = lock(&self.places.0);
        state.idle.insert(self.ticket, used);
        let Some(fewest) = state.present().map(|(_, tenant)| state.trained(tenant)).min() else {
            return false;
        };
        let is_idle = used.elapsed() >= IDLE && state.idle.values().all(|other| used <= *other);
        let has_more = state.trained(&self.tenant) > fewest + 1;
        let is_first = state.yielded.is_none_or(|at| at.elapsed() >= PAUSE);
        let yields = is_first && (is_idle || (has_more && tenure >= TENURE));
        if yields {
            state.yielded = Some(Instant::now());
            state.idle.remove(&self.ticket);
        }
        yields
    }

    /// Records that the model has work.
    pub(crate) fn works(&self) {
        lock(&self.places.0).idle.remove(&self.ticket);
    }

    /// Bytes on disk of the tenant's suspended models.
    #[must_use]
    pub(crate) fn suspended_bytes(&self) -> u64 {
        lock(&self.places.0).tenants.get(&self.tenant).map_or(0, |tenant| tenant.suspended_bytes)
    }

    /// Releases the trainer of a model whose state takes `bytes` on disk.
    pub(crate) fn suspend(&mut self, bytes: u64) {
        let bytes = bytes.max(LEAST_BYTES);
        lock(&self.places.0).change(&self.tenant, |tenant| {
            tenant.trained -= 1;
            tenant.suspended_bytes += bytes;
        });
        self.stage = SlotStage::Suspended(bytes);
    }
}

impl Drop for TrainerSlot {
    fn drop(&mut self) {
        let mut state = lock(&self.places.0);
        state.idle.remove(&self.ticket);
        match self.stage {
            SlotStage::Waits => drop(state.waiting.remove(&self.ticket)),
            SlotStage::Trains => state.change(&self.tenant, |tenant| tenant.trained -= 1),
            SlotStage::Suspended(bytes) => {
                state.change(&self.tenant, |tenant| tenant.suspended_bytes -= bytes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    /// Returns the time `time` before now.
    fn ago(time: Duration) -> Instant {
        Instant::now().checked_sub(time).unwrap()
    }

    fn trained(places: &TrainerSlots, tenant: &str) -> TrainerSlot {
        let mut place = places.wait(tenant);
        assert!(place.ask());
        place
    }

    #[test]
    fn a_tenant_with_fewer_trainers_asks_first_and_then_who_waits_longest() {
        let places = TrainerSlots::default();
        let first = trained(&places, "alice");
        let [mut second, mut third, mut other] = ["alice", "alice", "bob"].map(|tenant| places.wait(tenant));
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
        let places = TrainerSlots::default();
        let idle = [trained(&places, "alice"), trained(&places, "alice")];
        assert!(!idle[0].is_to_yield(ago(IDLE), NOW), "nobody waits");
        let waiting = places.wait("alice");
        assert!(!idle[0].is_to_yield(ago(NOW), TENURE), "the one who waits has no fewer trainers");
        assert!(idle[0].is_to_yield(ago(IDLE), NOW));
        assert!(!idle[1].is_to_yield(ago(IDLE), NOW), "the other was asked a moment ago");
        drop(waiting);
    }

    #[test]
    fn of_idle_models_of_all_tenants_the_one_that_is_idle_longest_gives_its_trainer_to_a_job() {
        let places = TrainerSlots::default();
        let [shorter, longer, busy] = ["alice", "bob", "bob"].map(|tenant| trained(&places, tenant));
        for (place, idle) in [(&shorter, IDLE), (&longer, IDLE * 2), (&busy, IDLE * 3)] {
            assert!(!place.is_to_yield(ago(idle), NOW), "nobody waits");
        }
        busy.works();
        let _job = places.wait("carol");
        assert!(!shorter.is_to_yield(ago(IDLE), NOW));
        assert!(longer.is_to_yield(ago(IDLE * 2), NOW));
        lock(&places.0).yielded = None;
        assert!(shorter.is_to_yield(ago(IDLE), NOW), "it is the next");
    }

    #[test]
    fn who_waits_and_does_not_ask_keeps_nobody_waiting_and_comes_first_again() {
        let places = TrainerSlots::default();
        let mut job = places.wait("alice");
        let mut model = places.wait("alice");
        assert!(!model.ask());
        lock(&places.0).waiting.get_mut(&job.ticket).unwrap().asked = ago(ABSENCE);
        assert!(model.ask());
        model.wait_on();
        job.renew();
        assert!(!model.ask() && places.first() == Some(job.ticket()) && job.ask());
    }

    #[test]
    fn a_trainer_on_another_host_counts_until_it_is_given_back() {
        let places = TrainerSlots::default();
        let elsewhere = places.elsewhere("alice");
        let [mut alices, mut bobs] = ["alice", "bob"].map(|tenant| places.wait(tenant));
        assert!(!alices.ask() && bobs.ask());
        drop(elsewhere);
        assert!(alices.ask());
    }

    #[test]
    fn a_tenant_who_keeps_all_trainers_busy_gives_some_to_others_and_keeps_the_last() {
        let places = TrainerSlots::default();
        let busy = [trained(&places, "alice"), trained(&places, "alice")];
        let _waiting = places.wait("bob");
        assert!(!busy[0].is_to_yield(ago(NOW), NOW), "it has just got it");
        assert!(busy[0].is_to_yield(ago(NOW), TENURE));
        let [first, last] = busy;
        drop(first);
        lock(&places.0).yielded = None;
        assert!(!last.is_to_yield(ago(NOW), TENURE), "each would have one");
    }

    #[test]
    fn a_suspended_model_counts_its_bytes_and_no_trainer() {
        let places = TrainerSlots::default();
        let [mut small, mut large] = [trained(&places, "alice"), trained(&places, "alice")];
        small.suspend(0);
        large.suspend(LEAST_BYTES * 3);
        assert_eq!((small.suspended_bytes(), lock(&places.0).trained("alice")), (LEAST_BYTES * 4, 0));
        drop((small, large));
        assert!(lock(&places.0).tenants.is_empty());
    }
}
