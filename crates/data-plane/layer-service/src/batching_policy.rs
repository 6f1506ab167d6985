//! Policies that decide when waiting calls are computed, and how long each waits for co-batching.

use std::{
    fmt,
    time::{Duration, Instant},
};

use shmproto::layer::CallClass;

use super::{
    call_queue::{AllowedClasses, CallId, QueuedCall, SplitPolicy, any_class},
    settings::{Batching, BatchingPolicy},
};

/// View of the waiting calls for a policy.
pub trait WaitingCalls {
    /// Returns the newest call that has arrived.
    fn last(&self) -> CallId;

    /// Returns the oldest waiting call.
    fn oldest(&self) -> Option<&QueuedCall>;

    /// Whether every active connection waits for an answer, so that no further call can arrive.
    fn everybody_waits(&self, now: Instant) -> bool;
}

/// Policy that decides when calls are computed, and how many together.
pub trait BatchPolicy: fmt::Debug + Send {
    /// Returns how long a call waits for co-batching.
    fn wait(&self, class: CallClass, rows: usize) -> Duration;

    /// Returns the newest call that may be in the next batch.
    fn until(&mut self, now: Instant, queue: &dyn WaitingCalls) -> CallId;

    /// Whether calls are due before their waiting time has passed.
    fn is_early(&self, now: Instant, queue: &dyn WaitingCalls) -> bool;

    /// Returns when a call will be due if no other comes; this may be in the past. At `waited` the first
    /// call's waiting time has passed.
    fn deadline(&self, now: Instant, waited: Instant, queue: &dyn WaitingCalls) -> Instant;

    /// Returns how calls of a batch may be split.
    fn cut(&self) -> SplitPolicy {
        SplitPolicy::Rows
    }

    /// Whether calls join resident passes.
    fn joins_passes(&self) -> bool {
        true
    }
}

/// Returns the policy that the settings select, for a base of `sites` sites.
#[must_use]
pub fn of(batching: &Batching, sites: usize) -> Box<dyn BatchPolicy> {
    match batching.policy {
        BatchingPolicy::Opportunistic => Box::new(Opportunistic { batching: *batching, sites }),
        BatchingPolicy::Alone => Box::new(NoBatching),
        BatchingPolicy::Lockstep => Box::new(Lockstep { round: CallId(0) }),
    }
}

/// Computes a call after a wait proportional to its rows, with all calls of the same queue (Symbiosis §3.6).
#[derive(Debug)]
struct Opportunistic {
    batching: Batching,
    sites: usize,
}

impl BatchPolicy for Opportunistic {
    fn wait(&self, class: CallClass, rows: usize) -> Duration {
        wait(&self.batching, class, rows, self.sites)
    }

    fn until(&mut self, _: Instant, queue: &dyn WaitingCalls) -> CallId {
        queue.last()
    }

    fn is_early(&self, now: Instant, queue: &dyn WaitingCalls) -> bool {
        queue.everybody_waits(now)
    }

    fn deadline(&self, now: Instant, waited: Instant, queue: &dyn WaitingCalls) -> Instant {
        if queue.everybody_waits(now) { waited.min(now) } else { waited }
    }
}

/// Computes each call alone and at once.
#[derive(Debug)]
struct NoBatching;

impl BatchPolicy for NoBatching {
    fn wait(&self, _: CallClass, _: usize) -> Duration {
        Duration::ZERO
    }

    fn until(&mut self, _: Instant, queue: &dyn WaitingCalls) -> CallId {
        queue.last()
    }

    fn is_early(&self, _: Instant, _: &dyn WaitingCalls) -> bool {
        false
    }

    fn deadline(&self, _: Instant, waited: Instant, _: &dyn WaitingCalls) -> Instant {
        waited
    }

    fn cut(&self) -> SplitPolicy {
        SplitPolicy::Alone
    }

    fn joins_passes(&self) -> bool {
        false
    }
}

/// Maximum wait of [`Lockstep`].
pub(crate) const LOCKSTEP: Duration = Duration::from_secs(1);

/// Computes all waiting calls in one round when every active session waits, or after [`LOCKSTEP`].
#[derive(Debug)]
struct Lockstep {
    /// Newest call of the current round.
    round: CallId,
}

impl Lockstep {
    /// Whether calls of the current round are left.
    fn has_round(&self, queue: &dyn WaitingCalls) -> bool {
        queue.oldest().is_some_and(|call| call.id <= self.round)
    }
}

impl BatchPolicy for Lockstep {
    fn wait(&self, _: CallClass, _: usize) -> Duration {
        Duration::ZERO
    }

    fn until(&mut self, now: Instant, queue: &dyn WaitingCalls) -> CallId {
        let is_late = |call: &QueuedCall| now.saturating_duration_since(call.arrived) >= LOCKSTEP;
        let begins = || queue.everybody_waits(now) || queue.oldest().is_some_and(is_late);
        if !self.has_round(queue) && begins() {
            self.round = queue.last();
        }
        self.round
    }

    fn is_early(&self, _: Instant, _: &dyn WaitingCalls) -> bool {
        false
    }

    fn deadline(&self, now: Instant, waited: Instant, queue: &dyn WaitingCalls) -> Instant {
        if queue.everybody_waits(now) || self.has_round(queue) {
            return now;
        }
        queue.oldest().map_or(waited, |call| call.arrived) + LOCKSTEP
    }
}

/// Returns how long a call of `rows` rows waits at one of `sites` sites (Symbiosis §3.6). The wait is
/// proportional to the rows, because a larger call gains more from a batch and loses less by waiting. A token
/// tree has many rows but is as urgent as one.
pub(crate) fn wait(batching: &Batching, class: CallClass, rows: usize, sites: usize) -> Duration {
    let counted = match class {
        CallClass::Verify => rows.min(1),
        CallClass::Decode | CallClass::Prefill | CallClass::Training | CallClass::Noise => rows,
    };
    let factor = batching.class_factors[class as usize] * batching.wait_factor;
    let wanted = batching.row_wait.as_secs_f64() * counted as f64 * factor;
    // Factors are finite and not negative, and the result is within the maximum.
    Duration::from_secs_f64(wanted.min(batching.max_wait.as_secs_f64()) / sites.max(1) as f64)
}

/// Whether a client waits for its next token.
#[must_use]
pub fn is_urgent(class: CallClass) -> bool {
    matches!(class, CallClass::Decode | CallClass::Verify)
}

/// Whether calls of the class are limited to a share beside requests, because no client waits for a next
/// token. Noise calls are not: a client without noises cannot compute its next token.
#[must_use]
pub fn is_background(class: CallClass) -> bool {
    class == CallClass::Training
}

/// Waiting time after which a background call is computed even without budget, so that its client does not
/// time out. With a share of 0 under constant load, training gets only this.
pub const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Budget of background calls beside requests: a share of the requests' computing time. A batch may overdraw
/// the budget; the next one waits until that is paid back, or for [`LONGEST_WAIT`].
#[derive(Debug)]
pub struct BackgroundBudget {
    share: f64,
    seconds: f64,
}

/// Maximum saved budget, in seconds.
const MAX_SAVED: f64 = 0.01;

impl BackgroundBudget {
    /// Makes an empty budget with this share.
    #[must_use]
    pub fn new(share: f64) -> Self {
        Self { share, seconds: 0.0 }
    }

    /// Adds the share of time `requests` that requests took.
    pub fn earn(&mut self, requests: Duration) {
        self.seconds = (self.seconds + self.share * requests.as_secs_f64()).min(MAX_SAVED);
    }

    /// Subtracts the time that background calls took.
    pub fn spend(&mut self, background: Duration) {
        self.seconds -= background.as_secs_f64();
    }

    /// Returns the allowed classes, if the oldest background call has waited for `waited`.
    #[must_use]
    pub fn allowed(&self, waited: Duration) -> AllowedClasses {
        if self.seconds > 0.0 || waited >= LONGEST_WAIT { any_class } else { |class| !is_background(class) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_grows_with_the_rows_up_to_the_bound_and_is_shared_by_the_sites() {
        let batching = Batching::default();
        let micros = |class, rows, sites| wait(&batching, class, rows, sites).as_micros();
        assert_eq!(micros(CallClass::Decode, 1, 1), 195);
        assert_eq!(micros(CallClass::Prefill, 100, 1), 19_500);
        assert_eq!(micros(CallClass::Prefill, 10_000, 1), 50_000);
        assert_eq!(micros(CallClass::Prefill, 10_000, 100), 500);
        assert_eq!(micros(CallClass::Training, 10, 1), 3_900);
        assert_eq!(micros(CallClass::Noise, 10, 1), 7_800);
    }

    #[test]
    fn background_calls_get_their_share_however_long_each_takes() {
        let mut allowance = BackgroundBudget::new(0.1);
        let trains = |allowance: &BackgroundBudget| allowance.allowed(Duration::ZERO)(CallClass::Training);
        assert!(!trains(&allowance), "nothing is earned yet");
        let (mut requests, mut background) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..1000 {
            allowance.earn(Duration::from_millis(8));
            requests += Duration::from_millis(8);
            while trains(&allowance) {
                allowance.spend(Duration::from_millis(15));
                background += Duration::from_millis(15);
            }
        }
        let share = background.as_secs_f64() / requests.as_secs_f64();
        assert!((share - 0.1).abs() < 0.005, "{share}");
    }

    #[test]
    fn nothing_is_saved_up_and_a_share_of_nothing_is_a_turn_now_and_then() {
        let mut allowance = BackgroundBudget::new(1.0);
        allowance.earn(Duration::from_secs(3600));
        allowance.spend(Duration::from_millis(20));
        assert!(!allowance.allowed(Duration::ZERO)(CallClass::Training));
        let mut none = BackgroundBudget::new(0.0);
        none.earn(Duration::from_secs(3600));
        assert!(!none.allowed(LONGEST_WAIT - Duration::from_millis(1))(CallClass::Training));
        assert!(none.allowed(LONGEST_WAIT)(CallClass::Training));
        assert!(none.allowed(Duration::ZERO)(CallClass::Noise), "somebody's next token waits for it");
    }

    #[test]
    fn a_tree_waits_no_longer_than_a_token() {
        let batching = Batching::default();
        assert_eq!(wait(&batching, CallClass::Verify, 60, 4), wait(&batching, CallClass::Decode, 1, 4));
    }
}
