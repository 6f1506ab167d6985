//! What everybody names, and nobody owns: the ids that go from room to room.
//!
//! # Layout
//!
//! - [`BlockId`]: a block of keys and values. [`Generation`], [`AdapterId`]: an adapter, by its content and under its owner.
//! - [`TenantId`]: that owner.
//! - [`TensorType`]: how the numbers of a tensor are stored, for those who find it and those who compute with it.
//!
//! # Principles
//!
//! - An id says which, never what: no floats, no other crate of this workspace.
//! - A hash names content; what a person calls it is an alias, and stays in the registry.
#![forbid(unsafe_code)]

mod tensor_type;

pub use tensor_type::TensorType;

use std::fmt;

/// Index of a KV block in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// 256-bit content hash of an adapter's weights and configuration (DESIGN: adapter identity).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub [u8; 32]);

/// What an adapter is called inside an executor: its generation under its owner. The same weights under two owners
/// are two adapters, so that neither can tell by time or memory what the other has loaded (RELIABILITY T2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub [u8; 32]);

impl Generation {
    /// That of several adapters added up, each times a weight, of which this takes the bits: in whatever order they are named.
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

    /// That of an adapter of these weights with a chat template of its own, of which this is the text.
    #[must_use]
    pub fn with_chat_template(self, template: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter with a chat template v1");
        hasher.update(&self.0).update(template.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

impl AdapterId {
    /// The id of `generation` under `owner`.
    #[must_use]
    pub fn new(owner: TenantId, generation: Generation) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter id v1");
        hasher.update(&owner.0).update(&generation.0);
        Self(*hasher.finalize().as_bytes())
    }
}

/// A hash of a tenant's name: enough to keep two apart, not enough to name them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub [u8; 32]);

impl TenantId {
    /// The owner of what all tenants may use. No name hashes to it.
    pub const EVERYBODY: Self = Self([0; 32]);

    /// The id of the tenant called `name`; what is nobody's is [`EVERYBODY`](Self::EVERYBODY)'s.
    #[must_use]
    pub fn of(name: Option<&str>) -> Self {
        let hash = |name: &str| blake3::derive_key("holobiont 2026 adapter owner v1", name.as_bytes());
        name.map_or(Self::EVERYBODY, |name| Self(hash(name)))
    }
}

/// An id that is shown in lower-case hexadecimal, 64 characters; `{:.12}` shortens it, as `Debug` does.
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
shown_as_hexadecimal!(Generation, AdapterId, TenantId);

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
        let [a, b] = [1, 2].map(|byte| Generation([byte; 32]));
        let sum = |parts: &[(Generation, u32)]| Generation::of_sum(parts.to_vec());
        assert_eq!(sum(&[(a, 1), (b, 2)]), sum(&[(b, 2), (a, 1)]));
        let others = [sum(&[(a, 2), (b, 1)]), sum(&[(a, 1)]), sum(&[(a, 1), (b, 2), (b, 2)]), a, b];
        assert!(!others.contains(&sum(&[(a, 1), (b, 2)])));
    }

    #[test]
    fn an_id_is_shown_whole_and_in_messages_short() {
        let id = Generation([0xab; 32]);
        assert_eq!(id.to_string(), "ab".repeat(32));
        assert_eq!(format!("{id:.12} {id:?}"), "abababababab Generation(abababababab)");
    }
}
