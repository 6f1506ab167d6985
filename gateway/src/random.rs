//! Numbers that nobody can foresee, for seeds, ids and instance numbers; not for secrets.

use std::hash::{BuildHasher as _, RandomState};

/// A number nobody can foresee without watching this process.
#[must_use]
pub fn random_u64() -> u64 {
    // The standard library keys every `RandomState` from the operating system's generator.
    RandomState::new().hash_one(0u8)
}
