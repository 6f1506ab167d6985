//! The time, in the units that are written down.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, SecondsFormat};

/// Now, as OpenAI's `created` fields count it.
#[must_use]
pub fn seconds_since_1970() -> u64 {
    since_1970().as_secs()
}

/// Now in microseconds since 1970, as the registry notes when an adapter was used.
pub(crate) fn now_us() -> u64 {
    u64::try_from(since_1970().as_micros()).unwrap_or(u64::MAX)
}

/// Now, as RFC 3339 writes it, in UTC: `2026-11-25T20:47:03.123456Z`.
pub(crate) fn now_rfc3339() -> String {
    rfc3339(since_1970())
}

/// A time since 1970, as RFC 3339 writes it, in UTC; 1970 itself for one that no calendar reaches.
pub(crate) fn rfc3339(since: Duration) -> String {
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let time = DateTime::from_timestamp(seconds, since.subsec_nanos()).unwrap_or_default();
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// How long to wait, as `Retry-After` counts it. Rounded up: who waits that long is let through.
pub(crate) fn whole_seconds(wait: Duration) -> u32 {
    u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}

/// A clock before 1970 counts as one at its start.
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
