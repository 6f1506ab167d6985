//! Whose turn it is: requests of all tenants wait here, and go to the executors as these have room.
//!
//! - here: waiting for a turn, and what a turn is; [`refusal`]: why there is none.
//! - `state`: the queue (`scheduling::fairness`), what each tenant may have, and what it is told at once.
//!
//! An executor computes in the order in which it is asked. So it is sent no more than keeps it busy
//! ([`FreeCapacity`](crate::executors::FreeCapacity)), and who goes next is decided here, when there is room: by class, then by tokens
//! served so far over the weight. A tenant that sends too much makes its own line longer, and is refused when that stands still.

pub mod refusal;
mod state;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use scheduling::{admission::DelayLimits, clock::Clock, routing::Forecast};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};

use self::state::{AdmittedRequest, QueueState};
pub use self::{refusal::QueueRefusal, state::TenantQueueStats};
use crate::{
    executors::{Executors, FreeCapacity},
    lock::lock,
    queue_delay::WaitingEntry,
    service_classes::{ClassId, ServiceClasses},
};

/// How often somebody who waits looks whether there is an executor at all.
const LOOK: Duration = Duration::from_secs(1);
/// How long there may be none.
const ABSENCE: Duration = Duration::from_secs(20);

/// What the queue is held to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionLimits {
    /// Sequences that wait together.
    pub max_sequences: usize,
    /// How long those of a tenant may wait before more of them are refused.
    pub delays: DelayLimits,
    /// Of an executor's places, those that tenants have together that want more than their part.
    pub burst_share: f64,
}

/// Whose a request is, to whom turns are given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Principal {
    /// The class of the request.
    pub class: ClassId,
    /// Whose key it came with.
    pub tenant: Arc<str>,
}

/// A request that wants a turn.
#[derive(Debug, Clone)]
pub struct AdmissionRequest {
    /// Whose it is.
    pub principal: Principal,
    /// Sequences that start together.
    pub sequences: usize,
    /// Tokens that it will cost, as far as that is known.
    pub cost_tokens: u64,
    /// When it is too late.
    pub deadline: Option<Instant>,
    /// What it should see beside what is under way; `None` if nothing is, or nobody knows.
    pub forecast: Option<Forecast>,
}

/// The queue of all tenants; clones are the same.
#[derive(Debug, Clone)]
pub struct AdmissionQueue(Arc<AdmissionShared>);

#[derive(Debug)]
struct AdmissionShared {
    executors: Executors,
    burst_share: f64,
    desk: Mutex<QueueState>,
}

/// A place in the queue, left when it is dropped.
struct QueueTicket<'a> {
    turns: &'a AdmissionQueue,
    /// `None` once its turn has come.
    number: Option<u64>,
}

/// The right to be sent to an executor, and the account of what is served for it; it is settled when it is dropped.
#[derive(Debug)]
pub struct AdmissionPermit {
    turns: AdmissionQueue,
    principal: Principal,
    sequences: usize,
    /// Of them, those of which nothing was heard yet.
    unbegun: usize,
    /// They themselves, until they are sent.
    pub standing: Vec<WaitingEntry>,
    charged_tokens: u64,
    served_tokens: u64,
    /// An executor's room is kept for it.
    is_reserved: bool,
}

impl AdmissionQueue {
    /// A queue before `executors`; whatever gives them room lets somebody go.
    #[must_use]
    pub fn new(
        executors: Executors,
        classes: Arc<ServiceClasses>,
        limits: AdmissionLimits,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let changed = Arc::clone(executors.room_changed());
        let desk = Mutex::new(QueueState::new(limits, classes, clock));
        let turns = Self(Arc::new(AdmissionShared { executors, burst_share: limits.burst_share, desk }));
        let shared = Arc::downgrade(&turns.0);
        tokio::spawn(async move {
            loop {
                changed.notified().await;
                let Some(shared) = shared.upgrade() else { return };
                Self(shared).dispatch();
            }
        });
        turns
    }

    /// Fails if a request of `tenant` would be refused whatever it asks: asked before it is read, so that a flood of them costs
    /// next to nothing.
    ///
    /// # Errors
    /// Why it would.
    pub fn check(&self, tenant: &Arc<str>) -> Result<(), QueueRefusal> {
        let room = self.room();
        lock(&self.0.desk).check_tenant(tenant, room)
    }

    /// Looks whether so many sequences may ever be computed together, before anything is made for each of them.
    ///
    /// # Errors
    /// There are more than executors take.
    pub fn check_size(&self, sequences: usize) -> Result<(), QueueRefusal> {
        state::fits(sequences, self.room())
    }

    /// Waits for a turn. Who no longer waits has left the queue.
    ///
    /// # Errors
    /// Why there is none: at once, or when it is too late.
    pub async fn wait(&self, asked: AdmissionRequest) -> Result<AdmissionPermit, QueueRefusal> {
        let deadline = asked.deadline;
        let (mut place, mut turn) = self.join(&asked)?;
        let mut absent = Duration::ZERO;
        loop {
            let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()));
            match timeout(left.min(LOOK), &mut turn).await {
                Ok(turn) => {
                    place.number = None;
                    return turn.unwrap_or(Err(QueueRefusal::Nobody));
                }
                Err(_) if left <= LOOK && deadline.is_some() => return Err(QueueRefusal::Late),
                Err(_) if self.0.executors.all().iter().any(|one| one.is_open()) => absent = Duration::ZERO,
                Err(_) if absent >= ABSENCE => return Err(QueueRefusal::Nobody),
                Err(_) => absent += LOOK,
            }
        }
    }

    /// What each tenant has and had, of each class.
    #[must_use]
    pub fn figures(&self) -> Vec<TenantQueueStats> {
        lock(&self.0.desk).figures()
    }

    /// Sequences that wait here.
    #[must_use]
    pub fn queued(&self) -> usize {
        lock(&self.0.desk).queued()
    }

    fn join(
        &self,
        asked: &AdmissionRequest,
    ) -> Result<(QueueTicket<'_>, oneshot::Receiver<Result<AdmissionPermit, QueueRefusal>>), QueueRefusal>
    {
        let room = self.room();
        let (number, turn) = lock(&self.0.desk).join(asked, room)?;
        self.dispatch();
        Ok((QueueTicket { turns: self, number: Some(number) }, turn))
    }

    fn room(&self) -> FreeCapacity {
        self.0.executors.room(self.0.burst_share)
    }

    /// Lets those go for whom there is room.
    fn dispatch(&self) {
        let grants = lock(&self.0.desk).dispatch(self.room());
        for AdmittedRequest { principal, sequences, charged_tokens, waiter } in grants {
            let turn = AdmissionPermit {
                turns: self.clone(),
                principal,
                sequences,
                unbegun: sequences,
                standing: waiter.standing,
                charged_tokens,
                served_tokens: 0,
                is_reserved: true,
            };
            // Whoever no longer waits gives it back: it is dropped.
            _ = waiter.turn.send(Ok(turn));
        }
    }
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        let left = self.number.and_then(|number| lock(&self.turns.0.desk).cancel(number));
        drop(left);
    }
}

impl AdmissionPermit {
    /// It is under way, or waits for something else: the executor's room is another's now.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.is_reserved) {
            lock(&self.turns.0.desk).release();
            self.turns.0.executors.room_changed().notify_one();
        }
    }

    /// So many tokens were computed for it, of its prompt or its answer.
    pub fn serve(&mut self, tokens: u64) {
        self.served_tokens += tokens;
    }

    /// So many of its sequences have their first tokens.
    pub fn begin(&mut self, sequences: usize) {
        self.unbegun -= sequences;
        lock(&self.turns.0.desk).begin(&self.principal, sequences);
        self.turns.0.executors.room_changed().notify_one();
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.release();
        self.begin(self.unbegun);
        let tokens = [self.charged_tokens, self.served_tokens];
        lock(&self.turns.0.desk).reconcile(&self.principal, self.sequences, tokens);
        self.turns.0.executors.room_changed().notify_one();
    }
}
