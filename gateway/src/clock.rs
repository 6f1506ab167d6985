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
    fn what_is_left_of_a_second_is_waited_for() {
        assert_eq!(whole_seconds(Duration::from_millis(1001)), 2);
        assert_eq!(whole_seconds(Duration::ZERO), 1);
    }
}
