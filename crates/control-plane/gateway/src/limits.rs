//! Rate limits in requests per minute, for each key and for each adapter.
//!
//! A limit of `n` admits a burst of `n` requests and then one every 60/n seconds. A refused caller is told in
//! whole seconds when to retry. Memory is bounded: a limiter lives as long as its key, and adapters that were
//! not requested lately are forgotten.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::http::{HeaderMap, HeaderValue};
use governor::{
    DefaultDirectRateLimiter, DefaultKeyedRateLimiter, NotUntil, Quota, RateLimiter,
    clock::{Clock as _, DefaultClock, QuantaInstant},
    middleware::StateInformationMiddleware,
};
use shmproto::message::AdapterIdBytes;

use crate::{
    clock::{rfc3339, seconds_since_1970, whole_seconds},
    http_api::HttpApi,
};

/// Headers of the limit, the remaining requests and the reset.
const OPENAI_HEADERS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const ANTHROPIC_HEADERS: [&str; 3] = [
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset",
];
/// Number of remembered adapters above which a sweep forgets those that were not requested lately.
const SWEEP_ABOVE: usize = 1024;
/// Checks between two sweeps, since a sweep visits every remembered adapter.
const SWEEP_EVERY: usize = 1024;

/// Error of an exhausted rate limit, with the time to retry.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{who} {limit} requests per minute, which are used up; try again in {wait_s} s")]
pub struct RateLimited {
    /// Owner of the limit and what it limits, as the error message begins.
    who: String,
    limit: NonZeroU32,
    /// Seconds until the next request is admitted.
    pub wait_s: u32,
}

/// Requests per minute; `None` means no limit.
pub type RequestsPerMinute = Option<NonZeroU32>;

#[derive(Debug, Clone)]
pub struct KeyLimit {
    per_min: RequestsPerMinute,
    limiter: Option<Arc<DefaultDirectRateLimiter<StateInformationMiddleware>>>,
}

/// Remaining requests of a limit, for the response headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemainingQuota {
    limit: NonZeroU32,
    remaining: u32,
}

impl KeyLimit {
    #[must_use]
    pub fn new(per_min: RequestsPerMinute) -> Self {
        let limiter = per_min.map(|limit| RateLimiter::direct(Quota::per_minute(limit)).with_middleware());
        Self { per_min, limiter: limiter.map(Arc::new) }
    }

    #[must_use]
    pub(crate) fn per_min(&self) -> RequestsPerMinute {
        self.per_min
    }

    /// Counts a request, or fails with the time to retry. Returns `None` if there is no limit.
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
    /// Writes the rate limit headers of an API. Anthropic's API writes the time of the reset, and the other
    /// APIs write the seconds until then.
    pub(crate) fn write(self, api: HttpApi, headers: &mut HeaderMap) {
        let used = u64::from(self.limit.get().saturating_sub(self.remaining));
        let reset_s = (used * 60).div_ceil(u64::from(self.limit.get()));
        let ([limit, remaining, reset], when) = match api {
            HttpApi::Anthropic => {
                let when = seconds_since_1970().saturating_add(reset_s);
                (ANTHROPIC_HEADERS, rfc3339(Duration::from_secs(when)))
            }
            HttpApi::OpenAi | HttpApi::Ollama => (OPENAI_HEADERS, format!("{reset_s}s")),
        };
        headers.insert(limit, HeaderValue::from(self.limit.get()));
        headers.insert(remaining, HeaderValue::from(self.remaining));
        if let Ok(when) = HeaderValue::from_str(&when) {
            headers.insert(reset, when);
        }
    }
}

/// Rate limits per adapter; all adapters have the same limit.
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
    #[must_use]
    pub fn new(per_min: RequestsPerMinute) -> Self {
        let limit = per_min.map(|limit| (limit, RateLimiter::keyed(Quota::per_minute(limit))));
        Self { limit, checks: AtomicUsize::new(0) }
    }

    /// Counts a request for `adapter`, or fails with the time to retry. The error calls the adapter `name`.
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
        assert!(error.to_string().contains("3 requests per minute"), "{error}");
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
