//! A line of the key file: parsing and formatting.

use std::{fmt, num::NonZeroU32, sync::Arc};

use crate::keys::KeyHash;

const MAX_NAME_BYTES: usize = 64;

/// Rights of a key. Roles are not ordered: a key that reads metrics cannot generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRole {
    /// Every right, among them to load and unload adapters and to see the requests of all tenants.
    Admin,
    /// The rights to generate and to use the layer service.
    User,
    /// The right to read metrics.
    Metrics,
}

impl KeyRole {
    /// All roles of this enum.
    pub const ALL: [Self; 3] = [Self::User, Self::Admin, Self::Metrics];

    /// Returns the role's name in key files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::User => "user",
            Self::Metrics => "metrics",
        }
    }

    /// Returns the role with the name `name` in key files.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// A key that the file admits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Hash by which the key is recognised.
    pub hash: KeyHash,
    /// Rights of the key.
    pub role: KeyRole,
    /// Tenant who owns the key.
    pub tenant: Arc<str>,
    /// Limit of requests per minute for this key alone; the inner `None` lifts the common limit.
    pub requests_per_min: Option<Option<NonZeroU32>>,
}

impl Key {
    /// Parses a line of the file.
    ///
    /// # Errors
    /// Returns the defect of the line, which completes "line 3 of the API key file".
    pub fn parse(line: &str) -> Result<Self, &'static str> {
        let mut words = line.split_whitespace();
        let role = words.next().unwrap_or_default();
        if role.contains(':') {
            return Err("contains an API key itself; it must contain the key's hash");
        }
        let role = KeyRole::named(role).ok_or("has a role other than admin, user or metrics")?;
        let tenant = words.next().and_then(|name| tenant_name(name).ok());
        let tenant =
            tenant.ok_or("has no name of 1 to 64 letters, digits, '_', '.' and '-' after its role")?;
        let hash = words.next().and_then(|word| word.strip_prefix("blake3:")).and_then(KeyHash::from_hex);
        let hash = hash.ok_or("has no 'blake3:' with 64 hexadecimal digits after its name")?;
        let requests_per_min = words.next().map(own_limit).transpose()?;
        match words.next() {
            Some(_) => Err("has text after its limit"),
            None => Ok(Self { hash, role, tenant, requests_per_min }),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} blake3:{}", self.role.name(), self.tenant, self.hash.to_hex())?;
        match self.requests_per_min {
            Some(limit) => write!(f, " requests_per_min={}", limit.map_or(0, NonZeroU32::get)),
            None => Ok(()),
        }
    }
}

fn own_limit(word: &str) -> Result<Option<NonZeroU32>, &'static str> {
    let number = word.strip_prefix("requests_per_min=").and_then(|number| number.parse().ok());
    number.map(NonZeroU32::new).ok_or("ends with text other than 'requests_per_min=N'")
}

/// Checks a tenant's name: 1 to 64 letters, digits, `_`, `.` and `-`.
///
/// # Errors
/// Returns a description of valid names if `name` is not valid.
pub fn tenant_name(name: &str) -> Result<Arc<str>, &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(plain) {
        true => Ok(name.into()),
        false => Err("a name is 1 to 64 letters, digits, '.', '_' and '-'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::line_of;

    #[test]
    fn a_line_may_bring_a_limit_of_its_own_or_lift_the_common_one() {
        let plain = line_of("user", "a", "hb-a");
        let own = |suffix: &str| Key::parse(&format!("{} {suffix}", plain.trim())).unwrap().requests_per_min;
        assert_eq!(own(""), None);
        assert_eq!(own("requests_per_min=0"), Some(None));
        assert_eq!(own("requests_per_min=7"), Some(NonZeroU32::new(7)));
    }

    #[test]
    fn a_key_is_written_as_the_line_that_it_was_read_from() {
        let plain = line_of("metrics", "a.b-c", "hb-a");
        for limit in ["", " requests_per_min=0", " requests_per_min=60"] {
            let line = format!("{}{limit}", plain.trim());
            assert_eq!(Key::parse(&line).unwrap().to_string(), line);
        }
    }

    #[test]
    fn the_context_of_the_hash_is_part_of_the_contract() {
        let hash = blake3::Hash::from(blake3::derive_key("holobiont 2026 API key lookup v1", b"hb-x"));
        assert_eq!(line_of("user", "acme", "hb-x"), format!("user acme blake3:{}\n", hash.to_hex()));
    }
}
