//! A line of the key file.

use std::{num::NonZeroU32, sync::Arc};

use crate::KeyHash;

/// Longest name of a tenant.
const MAX_NAME_BYTES: usize = 64;

/// What a key is for. Roles are not in order: a key that scrapes figures cannot generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Everything: load and unload adapters, and see what everybody does.
    Admin,
    /// Generate, and rent base layers.
    User,
    /// Read the figures.
    Metrics,
}

impl Role {
    /// The role that a key file calls `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "admin" => Some(Self::Admin),
            "user" => Some(Self::User),
            "metrics" => Some(Self::Metrics),
            _ => None,
        }
    }
}

/// A key that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// How it is recognised.
    pub hash: KeyHash,
    /// What it is for.
    pub role: Role,
    /// Whose it is.
    pub tenant: Arc<str>,
    /// Its own limit of requests a minute, if it has one; the inner `None` lifts the common one.
    pub requests_per_min: Option<Option<NonZeroU32>>,
}

impl Key {
    /// Reads a line; the error completes "line 3 of the API key file".
    pub(crate) fn parse(line: &str) -> Result<Self, &'static str> {
        let mut words = line.split_whitespace();
        let role = words.next().unwrap_or_default();
        if role.contains(':') {
            return Err("holds a key itself; only hashes of keys are kept");
        }
        let role = Role::named(role).ok_or("names a role that is not admin, user or metrics")?;
        let tenant = words.next().filter(|name| is_tenant_name(name));
        let tenant =
            tenant.ok_or("has no name of 1 to 64 letters, digits, '_', '.' and '-' after its role")?;
        let hash = words.next().and_then(|word| word.strip_prefix("blake3:")).and_then(KeyHash::from_hex);
        let hash = hash.ok_or("has no 'blake3:' with 64 hexadecimal digits after its name")?;
        let requests_per_min = words.next().map(own_limit).transpose()?;
        match words.next() {
            Some(_) => Err("goes on after its limit"),
            None => Ok(Self { hash, role, tenant: tenant.into(), requests_per_min }),
        }
    }
}

fn own_limit(word: &str) -> Result<Option<NonZeroU32>, &'static str> {
    let number = word.strip_prefix("requests_per_min=").and_then(|number| number.parse().ok());
    number.map(NonZeroU32::new).ok_or("ends in something that is not 'requests_per_min=N'")
}

/// Whether a tenant may be called so: 1 to 64 letters, digits, `_`, `.` and `-`.
#[must_use]
pub fn is_tenant_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line_of;

    #[test]
    fn a_line_may_bring_a_limit_of_its_own_or_lift_the_common_one() {
        let plain = line_of("user", "a", "hb-a");
        let own = |suffix: &str| Key::parse(&format!("{} {suffix}", plain.trim())).unwrap().requests_per_min;
        assert_eq!(own(""), None);
        assert_eq!(own("requests_per_min=0"), Some(None));
        assert_eq!(own("requests_per_min=7"), Some(NonZeroU32::new(7)));
    }

    #[test]
    fn a_hash_is_what_holobiont_key_add_writes() {
        // The vector of the command's own test: the context is part of the contract.
        let hash = blake3::Hash::from(blake3::derive_key("holobiont 2026 API key lookup v1", b"hb-x"));
        assert_eq!(line_of("user", "acme", "hb-x"), format!("user acme blake3:{}\n", hash.to_hex()));
    }
}
