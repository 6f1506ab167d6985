//! Numbers that nobody can foresee: for seeds, ids and instance numbers, and [`secret`] ones.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
};

use rustix::rand::{GetRandomFlags, getrandom};

/// A number nobody can foresee without watching this process.
#[must_use]
pub fn random_u64() -> u64 {
    // The standard library keys every `RandomState` from the operating system's generator.
    RandomState::new().hash_one(0u8)
}

/// A secret of 32 bytes from the operating system.
///
/// # Errors
/// The system gives none.
pub fn secret() -> io::Result<[u8; 32]> {
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
