//! Who is asking, and who may do what: roles, and what each route asks for.
//!
//! Roles are not in order: a key that scrapes figures cannot generate, and one that generates cannot scrape. An
//! administrator may do everything.

use std::sync::Arc;

pub use ::security::keys::KeyRole;

use crate::limits::KeyLimit;

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everybody: for probes and browsers, which have no key.
    Open,
    /// Keys of the role `metrics` or `admin`.
    Metrics,
    /// Keys of the role `user` or `admin`.
    User,
    /// Keys of the role `admin`.
    Admin,
}

impl Access {
    /// True if a key of `role` may use the route.
    #[must_use]
    pub fn allows(self, role: KeyRole) -> bool {
        match self {
            Self::Open => true,
            Self::Metrics => matches!(role, KeyRole::Metrics | KeyRole::Admin),
            Self::User => matches!(role, KeyRole::User | KeyRole::Admin),
            Self::Admin => role == KeyRole::Admin,
        }
    }

    /// The role that is needed, as a key file calls it.
    #[must_use]
    pub fn needed(self) -> &'static str {
        match self {
            Self::Open => "any",
            Self::Metrics => "metrics",
            Self::User => "user",
            Self::Admin => "admin",
        }
    }
}

/// Who is asking.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Whose adapters are seen and whose prefixes are shared: from the key, never from the request's body.
    pub tenant: Arc<str>,
    /// What they may do.
    pub role: KeyRole,
    /// How often they may ask.
    pub limit: KeyLimit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_not_in_order() {
        let allowed = |access: Access| {
            [KeyRole::Admin, KeyRole::User, KeyRole::Metrics].map(|role| access.allows(role))
        };
        assert_eq!(allowed(Access::Open), [true, true, true]);
        assert_eq!(allowed(Access::Metrics), [true, false, true]);
        assert_eq!(allowed(Access::User), [true, true, false]);
        assert_eq!(allowed(Access::Admin), [true, false, false]);
    }
}
