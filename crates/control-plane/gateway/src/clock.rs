//! The current time in the units of the APIs and records.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, SecondsFormat};

/// Returns the seconds since 1970, for OpenAI's `created` fields.
#[must_use]
pub fn seconds_since_1970() -> u64 {
    since_1970().as_secs()
}

/// Returns the microseconds since 1970, for the time of last use in the registry.
pub(crate) fn now_us() -> u64 {
    u64::try_from(since_1970().as_micros()).unwrap_or(u64::MAX)
}

/// Returns the current time in RFC 3339, in UTC: `2026-11-25T20:47:03.123456Z`.
pub(crate) fn now_rfc3339() -> String {
    rfc3339(since_1970())
}

/// Formats a time since 1970 in RFC 3339, in UTC. A time beyond the calendar becomes 1970.
pub(crate) fn rfc3339(since: Duration) -> String {
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let time = DateTime::from_timestamp(seconds, since.subsec_nanos()).unwrap_or_default();
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// Returns `wait` in seconds for `Retry-After`: at least 1, rounded up so that a retry after it is
/// admitted.
pub(crate) fn whole_seconds(wait: Duration) -> u32 {
    u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}

/// Returns the time since 1970; 0 if the clock is set before 1970.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_rfc_3339_has_them() {
        for (seconds, text) in
            [(951_782_400, "2000-02-29T00:00:00.000250Z"), (u64::MAX, "1970-01-01T00:00:00.000000Z")]
        {
            assert_eq!(rfc3339(Duration::new(seconds, 250_000)), text);
        }
    }

    #[test]
    fn what_is_left_of_a_second_is_waited_for() {
        assert_eq!(whole_seconds(Duration::from_millis(1001)), 2);
        assert_eq!(whole_seconds(Duration::ZERO), 1);
    }
}
