//! Unpredictable numbers for seeds, ids and instance numbers, and cryptographic [`secret`]s.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
};

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns a number that is unpredictable without access to this process.
#[must_use]
pub fn random_u64() -> u64 {
    // The standard library keys every `RandomState` from the operating system's generator.
    RandomState::new().hash_one(0u8)
}

/// Returns a random unique id with the prefix `of`.
#[must_use]
pub(crate) fn new_id(of: &str) -> String {
    format!("{of}_{:016x}{:016x}", random_u64(), random_u64())
}

/// Returns 32 secret bytes from the operating system.
///
/// # Errors
/// If the operating system provides none.
pub(crate) fn secret() -> io::Result<[u8; 32]> {
    let (mut secret, mut filled) = ([0; 32], 0);
    while filled < secret.len() {
        match getrandom(&mut secret[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(error) if error == rustix::io::Errno::INTR => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(secret)
}
