//! Random keys, and protection of this process's memory.

use rustix::{
    process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit},
    rand::{GetRandomFlags, getrandom},
};
use shmproto::layer::seeded_rows::{KEY_BYTES, Key};
use zeroize::Zeroizing;

use crate::error::CallError;

/// Returns an unpredictable key.
///
/// # Errors
/// Fails if the operating system has no randomness.
pub(crate) fn key() -> Result<Key, CallError> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    fill(&mut *bytes)?;
    Ok(Key::new(&bytes))
}

/// Returns `count` unpredictable keys.
///
/// # Errors
/// Fails as [`key`] does.
pub(crate) fn keys(count: usize) -> Result<Vec<Key>, CallError> {
    let mut bytes = Zeroizing::new(vec![0; count * KEY_BYTES]);
    fill(&mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(Key::new).collect())
}

fn fill(bytes: &mut [u8]) -> Result<(), CallError> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => {
                return Err(CallError::Masking(
                    "the system returned no random bytes: pads would be predictable",
                ));
            }
        }
    }
    Ok(())
}

/// Prevents core dumps of this process, and access of other processes of the same user to its memory.
///
/// # Errors
/// Fails if the operating system refuses.
pub fn keep_memory_private() -> Result<(), CallError> {
    let failed = |_| CallError::Masking("cannot disable core dumps: keys could be written to a disk");
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(failed)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)
}

#[cfg(test)]
mod tests {
    use rustix::process::{dumpable_behavior, getrlimit};

    use super::*;

    #[test]
    fn no_two_keys_are_the_same() {
        let [first, second] = [key(), key()].map(|key| key.expect("there is randomness"));
        assert_ne!(first, second);
    }

    #[test]
    fn a_process_that_keeps_its_memory_private_dumps_no_core_and_cannot_be_looked_into() {
        keep_memory_private().expect("the system allows it");
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        assert_eq!(getrlimit(Resource::Core), none);
        assert_eq!(dumpable_behavior(), Ok(DumpableBehavior::NotDumpable));
    }
}
