//! Who an API key belongs to: the file of hashed keys, which gateway and executor read and `holobiont key` edits.
//!
//! ```text
//! # ROLE  NAME   HASH OF THE KEY                LIMIT, if it is not the common one
//! admin   ops    blake3:<64 hexadecimal digits>
//! user    alice  blake3:<64 hexadecimal digits>  requests_per_min=60
//! ```
//!
//! `NAME` is the tenant: several keys of one name are one tenant. No key stands there twice.
//!
//! # Layout
//!
//! - [`Key`], [`KeyHash`], [`KeyRole`], [`tenant_name`]: a line of the file
//! - [`find`]: whose key is this, in a time that tells nothing
//! - [`KeyFile`]: the file, looked at again as often as its user likes ([`LOOK_EVERY`])
//! - [`KeyFileEdit`]: the file with its comments, to be edited
//!
//! # Principles
//!
//! - The keys themselves are nowhere; only their hashes are.
//! - A file that became bad is an error, and its user keeps the keys it had: a slip of the pen locks nobody out.
//! - One parser: what an editor leaves, and what `holobiont check` approves, is what gateway and executor accept.
//! - No threads, no runtime, no log: both processes bring their own.

mod draft;
mod file;
mod line;

pub use self::{
    draft::KeyFileEdit,
    file::{KeyFile, KeyFileError, LOOK_EVERY, MAX_FILE_BYTES, MAX_KEYS},
    line::{Key, KeyRole, tenant_name},
};

/// Keeps these hashes apart from all others.
const HASH_CONTEXT: &str = "holobiont 2026 API key lookup v1";

/// What is kept of a key. Two are compared in constant time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(blake3::Hash);

impl KeyHash {
    /// The hash of the key that somebody gave.
    #[must_use]
    pub fn of(given: &[u8]) -> Self {
        Self(blake3::Hash::from_bytes(blake3::derive_key(HASH_CONTEXT, given)))
    }

    /// Of its 64 hexadecimal digits.
    #[must_use]
    pub fn from_hex(digits: &str) -> Option<Self> {
        let whole = digits.len() == 64;
        whole.then(|| blake3::Hash::from_hex(digits).ok()).flatten().map(Self)
    }

    /// As the file has it, without `blake3:`.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.0.to_hex().to_string()
    }

    /// Eight digits of it: enough to tell the keys of one tenant apart.
    #[must_use]
    pub fn id(self) -> String {
        self.0.to_hex()[..8].to_owned()
    }
}

/// The one of `keys` that `given` hashes to.
///
/// All of them are compared, each in constant time: how long it takes tells nothing about any key.
#[must_use]
pub fn find<'a, T>(keys: &'a [T], given: &[u8], hash_of: impl Fn(&T) -> KeyHash) -> Option<&'a T> {
    let hash = KeyHash::of(given);
    keys.iter().fold(None, |found, key| if hash_of(key) == hash { Some(key) } else { found })
}

/// The line that lets `key` in, for tests.
#[doc(hidden)]
#[must_use]
pub fn line_of(role: &str, name: &str, key: &str) -> String {
    format!("{role} {name} blake3:{}\n", KeyHash::of(key.as_bytes()).to_hex())
}
