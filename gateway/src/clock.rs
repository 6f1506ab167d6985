//! The time of day, in the units that are written down.

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

/// A clock before 1970 counts as one at its start.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
