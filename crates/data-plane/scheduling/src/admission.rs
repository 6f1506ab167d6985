//! Admission by controlled delay: a burst is queued, an overload is refused.
//!
//! The length of the queue says little: five hundred requests at once are a burst, which passes; eight that
//! never get fewer are an overload. An overload shows when requests wait longer than a *target* throughout an
//! *interval*. This rule of an overload is CoDel's (RFC 8289), applied at the queue's entrance instead of its
//! exit, because every admitted request is served. Without such a *standing* queue every request is admitted.
//! With one, a request is admitted if its forecast wait is at most the target; the others receive the
//! forecast.
//!
//! The forecast is Little's law: if `N` requests lack a first token and `rate` of them get it per second, the
//! last one gets its own after `N / rate`. The computation of the prompt, after the turn has come, is no
//! waiting, so its mean is subtracted. The forecast therefore needs no number of concurrent sequences, and a
//! KV cache that holds fewer sequences than are allowed does not falsify it.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Number of most recent first tokens from which the forecast takes its rate and delay.
const MAX_SAMPLES: usize = 128;
/// Upper bound of a forecast, because a forecast from few samples is unreliable.
const MAX_FORECAST: Duration = Duration::from_secs(600);

/// Limits that define a standing queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayLimits {
    /// Longest wait for a turn that requests may have permanently.
    pub target: Duration,
    /// How long waits may exceed the target before the queue counts as standing; a burst must end within it.
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
    /// At least one slot is free.
    Free,
    /// Every slot runs a request.
    Taken,
}

/// Durations of one request until its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstToken {
    /// Time that the request waited for its turn.
    pub queued: Duration,
    /// Time from the turn to the token, in which the prompt is computed.
    pub computed: Duration,
}

/// Refusal of a request: the queue stands, and the request would wait too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("requests wait longer than {} ms", target.as_millis())]
pub struct Overload {
    /// Limit that the forecast exceeds.
    pub target: Duration,
    /// Forecast wait of the refused request.
    pub forecast: Duration,
}

#[derive(Debug, Clone, Copy)]
struct FirstTokenSample {
    at: Instant,
    computed: Duration,
}

/// Admission controller; the caller reports events and their times.
#[derive(Debug)]
pub struct ControlledDelay {
    limits: DelayLimits,
    samples: VecDeque<FirstTokenSample>,
    /// Since when every turn came later than the target.
    late_since: Option<Instant>,
    /// Since when no turn has come although all slots are taken.
    stuck_since: Option<Instant>,
    /// When the standing queue was last noticed; `None` while no queue stands.
    standing: Option<Instant>,
}

impl ControlledDelay {
    /// Creates a controller without any observations.
    #[must_use]
    pub fn new(limits: DelayLimits) -> Self {
        Self { limits, samples: VecDeque::new(), late_since: None, stuck_since: None, standing: None }
    }

    /// Records that a request got its first token.
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

    /// Records that no request waits any more, so earlier samples say nothing about the next queue. While
    /// requests are refused the samples stay: the queue is short only because of the refusals, and without
    /// the known rate all of them would be admitted at once.
    pub fn emptied(&mut self) {
        if self.standing.is_none() {
            self.samples.clear();
        }
        self.late_since = None;
        self.stuck_since = None;
    }

    /// Admits one more request beside `waiting` requests without a first token. A queue stands if first
    /// tokens came later than the target for a whole interval (CoDel).
    ///
    /// # Errors
    /// Returns `Overload` if the queue stands and the new request would wait longer than the target.
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

    /// Whether the queue stands: after an interval of late turns, until one without late turns or refusals.
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

    /// Forecasts how long a new request behind `waiting` others waits for its turn.
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
