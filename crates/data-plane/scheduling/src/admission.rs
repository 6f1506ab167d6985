//! Admission by controlled delay: a burst is queued, an overload is refused.
//!
//! How long the queue is says little: five hundred requests at once are a burst, which passes, and eight that never get
//! fewer are an overload. What tells them apart is whether requests wait for longer than a *target* all through an
//! *interval* (the rule of CoDel, RFC 8289, asked at the queue's entrance instead of its exit: whoever was let in is
//! served). While there is no such *standing* queue, everyone is let in. While there is one, a request is let in if the
//! forecast says that it will wait no longer than the target, and others are told the forecast.
//!
//! The forecast is Little's law: of `N` requests without a first token, of which `rate` a second get theirs, the last gets
//! its own `N / rate` from now. What that takes *after* the turn has come (the prompt is computed) is no waiting, and its
//! mean is subtracted. So nothing needs to be known of how many run together, and a pool of keys and values that holds
//! fewer of them than are allowed changes nothing.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// First tokens whose rate and delay the forecast is made of.
const MAX_SAMPLES: usize = 128;
/// Nobody is told to come back later than this: a forecast from few samples is worth little.
const MAX_FORECAST: Duration = Duration::from_secs(600);

/// What counts as a standing queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayLimits {
    /// How long requests may wait for their turn for any length of time.
    pub target: Duration,
    /// For how long they may wait longer than that: within it a burst must have come.
    pub interval: Duration,
}

impl Default for DelayLimits {
    fn default() -> Self {
        Self { target: Duration::from_millis(250), interval: Duration::from_secs(5) }
    }
}

/// Whether another request could run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotAvailability {
    /// There are places left.
    Free,
    /// As many are under way as run together.
    Taken,
}

/// How long one request took to its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstToken {
    /// It waited for its turn so long.
    pub queued: Duration,
    /// From its turn to the token: the prompt was computed.
    pub computed: Duration,
}

/// The queue stands, and a newcomer would wait for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("requests have waited for longer than {} ms for some time", target.as_millis())]
pub struct Overload {
    /// The limit that is passed.
    pub target: Duration,
    /// How long a newcomer would wait.
    pub forecast: Duration,
}

/// When a first token came, and what its prompt took.
#[derive(Debug, Clone, Copy)]
struct FirstTokenSample {
    at: Instant,
    computed: Duration,
}

/// The controller. It is told what happens, when, and what it is asked about; see the module's description.
#[derive(Debug)]
pub struct ControlledDelay {
    limits: DelayLimits,
    samples: VecDeque<FirstTokenSample>,
    /// Since when nobody has had a turn within the target.
    late_since: Option<Instant>,
    /// Since when nobody has had a turn at all, though all places are taken.
    stuck_since: Option<Instant>,
    /// The queue stands; when that was last felt.
    standing: Option<Instant>,
}

impl ControlledDelay {
    /// A controller that has seen nothing.
    #[must_use]
    pub fn new(limits: DelayLimits) -> Self {
        Self { limits, samples: VecDeque::new(), late_since: None, stuck_since: None, standing: None }
    }

    /// A request got its first token.
    pub fn begun(&mut self, first: FirstToken, now: Instant) {
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(FirstTokenSample { at: now, computed: first.computed });
        self.stuck_since = None;
        if first.queued <= self.limits.target {
            self.late_since = None;
        } else {
            self.late_since.get_or_insert(now);
            self.standing = self.standing.map(|_| now);
        }
    }

    /// Nobody waits any more: what was seen says nothing about the next queue. But for as long as newcomers are refused
    /// a queue is short *because* of what is known: who forgot the rate then would let all of them in at once.
    pub fn emptied(&mut self) {
        if self.standing.is_none() {
            self.samples.clear();
        }
        self.late_since = None;
        self.stuck_since = None;
    }

    /// Whether one more is let in beside `waiting` without a first token.
    ///
    /// # Errors
    /// The queue stands, and a newcomer would wait for longer than the target.
    pub fn admit(&mut self, waiting: usize, places: SlotAvailability, now: Instant) -> Result<(), Overload> {
        match places {
            SlotAvailability::Free => self.stuck_since = None,
            SlotAvailability::Taken if waiting == 0 => self.stuck_since = Some(now),
            SlotAvailability::Taken => _ = self.stuck_since.get_or_insert(now),
        }
        if !self.stands(now) || waiting == 0 {
            return Ok(());
        }
        let forecast = self.forecast(waiting, now);
        if forecast <= self.limits.target {
            return Ok(());
        }
        self.standing = Some(now);
        Err(Overload { target: self.limits.target, forecast })
    }

    /// It does from the end of an interval of late turns, and no longer once nothing was late and nobody refused for
    /// one.
    fn stands(&mut self, now: Instant) -> bool {
        let DelayLimits { target, interval } = self.limits;
        let is_older = |since: Option<Instant>, age| since.is_some_and(|since| now - since >= age);
        if is_older(self.late_since, interval) || is_older(self.stuck_since, target + interval) {
            self.standing = Some(now);
        } else if is_older(self.standing, interval) {
            self.standing = None;
            self.samples.clear();
        }
        self.standing.is_some()
    }

    /// How long a newcomer behind `waiting` others waits for its turn.
    #[must_use]
    pub fn forecast(&self, waiting: usize, now: Instant) -> Duration {
        let Some(oldest) = self.samples.front() else {
            return self.stuck_since.map_or(Duration::ZERO, |since| now - since);
        };
        let count = self.samples.len() as f64;
        let seconds_each = (now - oldest.at).as_secs_f64() / count;
        let computing: Duration = self.samples.iter().map(|sample| sample.computed).sum();
        let seconds = waiting as f64 * seconds_each - computing.as_secs_f64() / count;
        Duration::from_secs_f64(seconds.clamp(0.0, MAX_FORECAST.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests;
