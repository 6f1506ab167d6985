//! How often somebody may ask: requests a minute, for each key and for each adapter.
//!
//! A limit of `n` a minute lets `n` requests through at once and then one each 60/n seconds. Who asks more often is
//! told in whole seconds when the next request will be let through. Nothing here grows: a key's limiter lives with
//! the key, and adapters that were not asked for lately are forgotten.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::http::{HeaderMap, HeaderValue};
use governor::{
    DefaultDirectRateLimiter, DefaultKeyedRateLimiter, NotUntil, Quota, RateLimiter,
    clock::{Clock as _, DefaultClock, QuantaInstant},
    middleware::StateInformationMiddleware,
};
use shmproto::message::AdapterIdBytes;

use crate::clock::whole_seconds;

/// Adapters remembered before those that were not asked for lately are forgotten.
const SWEEP_ABOVE: usize = 1024;
/// Checks between two sweeps: a sweep looks at every adapter that is remembered.
const SWEEP_EVERY: usize = 1024;

/// A limit is used up; says when to come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{who} {limit} requests a minute, and they are used up; try again in {wait_s} s")]
pub struct RateLimited {
    /// Whose limit it is, and what that one may do.
    who: String,
    /// Requests a minute.
    limit: NonZeroU32,
    /// After so many seconds the next request is let through.
    pub wait_s: u32,
}

/// Requests a minute; `None` is no limit.
pub type RequestsPerMinute = Option<NonZeroU32>;

/// The limit of one key.
#[derive(Debug, Clone)]
pub struct KeyLimit {
    per_min: RequestsPerMinute,
    limiter: Option<Arc<DefaultDirectRateLimiter<StateInformationMiddleware>>>,
}

/// What is left of a limit, for the answer's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemainingQuota {
    limit: NonZeroU32,
    remaining: u32,
}

impl KeyLimit {
    /// A limit of which nothing has been used.
    #[must_use]
    pub fn new(per_min: RequestsPerMinute) -> Self {
        let limiter = per_min.map(|limit| RateLimiter::direct(Quota::per_minute(limit)).with_middleware());
        Self { per_min, limiter: limiter.map(Arc::new) }
    }

    /// Requests a minute.
    #[must_use]
    pub fn per_min(&self) -> RequestsPerMinute {
        self.per_min
    }

    /// Counts a request, or says when to come back. `None` if there is no limit.
    pub fn check(&self) -> Result<Option<RemainingQuota>, RateLimited> {
        let (Some(limit), Some(limiter)) = (self.per_min, &self.limiter) else {
            return Ok(None);
        };
        match limiter.check() {
            Ok(state) => Ok(Some(RemainingQuota { limit, remaining: state.remaining_burst_capacity() })),
            Err(until) => Err(used_up("this API key may send".to_owned(), limit, &until)),
        }
    }
}

impl RemainingQuota {
    /// Writes OpenAI's headers.
    pub fn write(self, headers: &mut HeaderMap) {
        let used = u64::from(self.limit.get().saturating_sub(self.remaining));
        let reset_s = (used * 60).div_ceil(u64::from(self.limit.get()));
        headers.insert("x-ratelimit-limit-requests", HeaderValue::from(self.limit.get()));
        headers.insert("x-ratelimit-remaining-requests", HeaderValue::from(self.remaining));
        if let Ok(reset) = HeaderValue::from_str(&format!("{reset_s}s")) {
            headers.insert("x-ratelimit-reset-requests", reset);
        }
    }
}

/// The limits of all adapters, which are the same for each.
pub struct AdapterLimits {
    limit: Option<(NonZeroU32, DefaultKeyedRateLimiter<AdapterIdBytes>)>,
    checks: AtomicUsize,
}

impl std::fmt::Debug for AdapterLimits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let per_min = self.limit.as_ref().map(|(limit, _)| limit);
        f.debug_struct("AdapterLimits").field("per_min", &per_min).finish_non_exhaustive()
    }
}

impl AdapterLimits {
    /// Limits of which nothing has been used.
    #[must_use]
    pub fn new(per_min: RequestsPerMinute) -> Self {
        let limit = per_min.map(|limit| (limit, RateLimiter::keyed(Quota::per_minute(limit))));
        Self { limit, checks: AtomicUsize::new(0) }
    }

    /// Counts a request for `adapter`, which callers know as `name`, or says when to come back.
    pub fn check(&self, adapter: &AdapterIdBytes, name: &str) -> Result<(), RateLimited> {
        let Some((limit, limiter)) = &self.limit else {
            return Ok(());
        };
        let count = self.checks.fetch_add(1, Ordering::Relaxed);
        if count % SWEEP_EVERY == SWEEP_EVERY - 1 && limiter.len() > SWEEP_ABOVE {
            limiter.retain_recent();
        }
        let answers = || format!("the adapter '{name}' answers");
        limiter.check_key(adapter).map_err(|until| used_up(answers(), *limit, &until))
    }
}

fn used_up(who: String, limit: NonZeroU32, until: &NotUntil<QuantaInstant>) -> RateLimited {
    RateLimited { who, limit, wait_s: whole_seconds(until.wait_time_from(DefaultClock::default().now())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_without_a_limit_is_never_refused() {
        let limit = KeyLimit::new(None);
        assert!((0..100).all(|_| limit.check().unwrap().is_none()));
    }

    #[test]
    fn a_limit_lets_its_number_through_and_then_says_when_to_come_back() {
        let limit = KeyLimit::new(NonZeroU32::new(3));
        let remaining: Vec<u32> = (0..3).map(|_| limit.check().unwrap().unwrap().remaining).collect();
        assert_eq!(remaining, [2, 1, 0]);
        let error = limit.check().unwrap_err();
        assert_eq!(error.wait_s, 20);
        assert!(error.to_string().contains("3 requests a minute"), "{error}");
        assert!(error.to_string().ends_with("in 20 s"), "{error}");
    }

    #[test]
    fn adapters_have_limits_of_their_own() {
        let limits = AdapterLimits::new(NonZeroU32::new(1));
        limits.check(&[1; 32], "a").unwrap();
        limits.check(&[2; 32], "b").unwrap();
        assert!(limits.check(&[1; 32], "a").unwrap_err().to_string().contains("'a'"));
    }
}
