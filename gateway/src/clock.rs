//! The time, in the units that are written down.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

/// A time since 1970, as RFC 3339 writes it, in UTC.
pub(crate) fn rfc3339(since: Duration) -> String {
    let (seconds, micros) = (since.as_secs(), since.subsec_micros());
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(day);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of a day since 1970. Years are counted from March, so that a leap day is the last of its year, in cycles of
/// 400 years (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn date(day: u64) -> (u64, u64, u64) {
    let day = day + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let (month, turn) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + turn, month, of_month)
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
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000250Z"),
            (951_782_400, "2000-02-29T00:00:00.000250Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000250Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000250Z"),
        ] {
            assert_eq!(rfc3339(Duration::new(seconds, 250_000)), text);
        }
    }

    #[test]
    fn what_is_left_of_a_second_is_waited_for() {
        assert_eq!(whole_seconds(Duration::from_millis(1001)), 2);
        assert_eq!(whole_seconds(Duration::ZERO), 1);
    }
}
