//! Ids that several crates of the workspace share.
//!
//! # Layout
//!
//! - [`BlockId`]: index of a KV block.
//! - [`AdapterVersion`]: content hash of an adapter. [`AdapterId`]: that content under one owner.
//! - [`TenantId`]: owner of adapters, requests and cache entries.
//! - [`TensorType`]: encoding of a stored tensor's elements.
//!
//! # Principles
//!
//! - An id only identifies: this crate contains no floats and depends on no other crate of the workspace.
//! - A hash names content. The name that a person gives is an alias and stays in the registry.
#![forbid(unsafe_code)]

mod tensor_type;

pub use tensor_type::TensorType;

use std::fmt;

/// Index of a KV block in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// 256-bit content hash of an adapter's weights and configuration (DESIGN: adapter identity).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterVersion(pub [u8; 32]);

/// Id of an adapter inside an executor: the hash of owner and adapter version. Equal weights under two owners
/// are two adapters, so neither owner can learn by time or memory what the other has loaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub [u8; 32]);

impl AdapterVersion {
    /// Returns the version of a merged adapter from its parts and the bits of their weights, in any order.
    #[must_use]
    pub fn of_sum(mut parts: Vec<(Self, u32)>) -> Self {
        parts.sort_unstable();
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 sum of adapters v1");
        hasher.update(&(parts.len() as u64).to_le_bytes());
        for (generation, weight_bits) in parts {
            hasher.update(&generation.0).update(&weight_bits.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the version of an adapter with these weights and the chat template `template`.
    #[must_use]
    pub fn with_chat_template(self, template: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter with a chat template v1");
        hasher.update(&self.0).update(template.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

impl AdapterId {
    /// Returns the id of `generation` under `owner`.
    #[must_use]
    pub fn new(owner: TenantId, generation: AdapterVersion) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter id v1");
        hasher.update(&owner.0).update(&generation.0);
        Self(*hasher.finalize().as_bytes())
    }
}

/// Hash of a tenant's name: the hash separates tenants but does not reveal their names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub [u8; 32]);

impl TenantId {
    /// Owner of content that all tenants may use; no tenant name hashes to this value.
    pub const EVERYBODY: Self = Self([0; 32]);

    /// Returns the id of the tenant called `name`; `None` gives the owner of shared content.
    #[must_use]
    pub fn of(name: Option<&str>) -> Self {
        let hash = |name: &str| blake3::derive_key("holobiont 2026 adapter owner v1", name.as_bytes());
        name.map_or(Self::EVERYBODY, |name| Self(hash(name)))
    }
}

/// Implements `Display` as 64 lower-case hexadecimal digits; `{:.12}` shortens the id, as `Debug` does.
macro_rules! shown_as_hexadecimal {
    ($($id:ident),+) => {$(
        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                hexadecimal(&self.0, f)
            }
        }

        impl fmt::Debug for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($id), "({:.12})"), self)
            }
        }
    )+};
}
shown_as_hexadecimal!(AdapterVersion, AdapterId, TenantId);

fn hexadecimal(bytes: &[u8; 32], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use fmt::Write as _;
    let mut text = String::with_capacity(64);
    for byte in bytes {
        write!(text, "{byte:02x}")?;
    }
    f.pad(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_different_owners_and_nobody_is_everybody() {
        assert_eq!(TenantId::of(None), TenantId::EVERYBODY);
        assert_ne!(TenantId::of(Some("a")), TenantId::of(Some("b")));
        assert_ne!(TenantId::of(Some("")), TenantId::EVERYBODY);
    }

    #[test]
    fn a_sum_is_what_is_added_up_in_whatever_order() {
        let [a, b] = [1, 2].map(|byte| AdapterVersion([byte; 32]));
        let sum = |parts: &[(AdapterVersion, u32)]| AdapterVersion::of_sum(parts.to_vec());
        assert_eq!(sum(&[(a, 1), (b, 2)]), sum(&[(b, 2), (a, 1)]));
        let others = [sum(&[(a, 2), (b, 1)]), sum(&[(a, 1)]), sum(&[(a, 1), (b, 2), (b, 2)]), a, b];
        assert!(!others.contains(&sum(&[(a, 1), (b, 2)])));
    }

    #[test]
    fn an_id_is_shown_whole_and_in_messages_short() {
        let id = AdapterVersion([0xab; 32]);
        assert_eq!(id.to_string(), "ab".repeat(32));
        assert_eq!(format!("{id:.12} {id:?}"), "abababababab AdapterVersion(abababababab)");
    }
}
