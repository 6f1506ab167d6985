//! Callers and access: roles, and the role that each route requires.
//!
//! Roles have no order: a key for metrics cannot generate, and a key for generation cannot read metrics. An
//! administrator may do everything.

use std::sync::Arc;

pub use ::security::keys::KeyRole;

use crate::limits::KeyLimit;

/// Access that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// No key is required: for probes and browsers.
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

    /// Name of the required role, as a key file spells it.
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

/// Whether a client waits for the answer of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPriority {
    Online,
    /// The request goes only when executors have capacity that online requests do not need.
    Background,
}

/// Authenticated sender of a request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Owner of visible adapters and of the prefix cache namespace. The tenant comes from the key, never
    /// from the body.
    pub tenant: Arc<str>,
    pub role: KeyRole,
    pub limit: KeyLimit,
    pub priority: RequestPriority,
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
