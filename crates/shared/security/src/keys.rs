//! The file of hashed API keys, which gateway and executor read and `holobiont key` edits.
//!
//! ```text
//! # ROLE  NAME   HASH OF THE KEY                LIMIT, if it is not the common one
//! admin   ops    blake3:<64 hexadecimal digits>
//! user    alice  blake3:<64 hexadecimal digits>  requests_per_min=60
//! ```
//!
//! `NAME` is the tenant; several keys may have the same name. The file holds no key twice.
//!
//! # Layout
//!
//! - [`Key`], [`KeyHash`], [`KeyRole`], [`tenant_name`]: a line of the file
//! - [`find`]: looks up a key in constant time
//! - [`KeyFile`]: the file, which its user polls for changes ([`LOOK_EVERY`])
//! - [`KeyFileEdit`]: the file with its comments, open for changes
//!
//! # Principles
//!
//! - Only hashes of keys are stored, never the keys.
//! - An invalid file is an error, and its user keeps the earlier keys: a typing error locks out no tenant.
//! - One parser: gateway and executor accept exactly what an editor writes and `holobiont check` approves.
//! - The crate has no threads, no runtime and no log: both processes have their own.

mod draft;
mod file;
mod line;

pub use self::{
    draft::KeyFileEdit,
    file::{KeyFile, KeyFileError, LOOK_EVERY, MAX_FILE_BYTES, MAX_KEYS},
    line::{Key, KeyRole, tenant_name},
};

/// Separates these hashes from those of all other uses.
const HASH_CONTEXT: &str = "holobiont 2026 API key lookup v1";

/// Hash of a key. Two hashes are compared in constant time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(blake3::Hash);

impl KeyHash {
    /// Returns the hash of the key that a client sent.
    #[must_use]
    pub fn of(given: &[u8]) -> Self {
        Self(blake3::Hash::from_bytes(blake3::derive_key(HASH_CONTEXT, given)))
    }

    /// Parses 64 hexadecimal digits; `None` if `digits` are anything else.
    #[must_use]
    pub fn from_hex(digits: &str) -> Option<Self> {
        let whole = digits.len() == 64;
        whole.then(|| blake3::Hash::from_hex(digits).ok()).flatten().map(Self)
    }

    /// Returns the 64 hexadecimal digits that stand in the file after `blake3:`.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.0.to_hex().to_string()
    }

    /// Returns the first eight hexadecimal digits, enough to distinguish the keys of one tenant.
    #[must_use]
    pub fn id(self) -> String {
        self.0.to_hex()[..8].to_owned()
    }
}

/// Returns the element of `keys` whose hash is that of `given`.
///
/// All elements are compared, each in constant time, so the duration reveals nothing about any key.
#[must_use]
pub fn find<'a, T>(keys: &'a [T], given: &[u8], hash_of: impl Fn(&T) -> KeyHash) -> Option<&'a T> {
    let hash = KeyHash::of(given);
    keys.iter().fold(None, |found, key| if hash_of(key) == hash { Some(key) } else { found })
}

/// Returns the line that admits `key`, for tests.
#[doc(hidden)]
#[must_use]
pub fn line_of(role: &str, name: &str, key: &str) -> String {
    format!("{role} {name} blake3:{}\n", KeyHash::of(key.as_bytes()).to_hex())
}
