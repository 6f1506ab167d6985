//! Who may do what.
//!
//! Keys come from one file, a line each: `role:key`. In memory there are only their hashes. Without a key file
//! everybody is an administrator, which is why the gateway then listens on loopback only (`config`).

use std::{fs, io, path::Path, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::Response,
};

use crate::{app::App, openai::errors::ApiError};

/// Shortest key, in bytes: shorter ones can be guessed.
const MIN_KEY_BYTES: usize = 16;
/// Longest key, in bytes.
const MAX_KEY_BYTES: usize = 512;
/// Most keys of a file: every request is compared with all of them.
const MAX_KEYS: usize = 4096;
/// The tenant of everybody when there are no keys.
const PUBLIC: &str = "public";

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused.
    #[error("the API key file cannot be read: {0}; check --api-key-file")]
    Read(#[from] io::Error),
    /// A line is not `role:key`.
    #[error("line {line} of the API key file {reason}; each line is 'admin:KEY' or 'user:KEY'")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No keys at all.
    #[error("the API key file holds no key; add a line 'admin:KEY'")]
    Empty,
    /// More keys than are looked through.
    #[error("the API key file holds more than {MAX_KEYS} keys; remove some")]
    TooMany,
}

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Generate.
    User,
    /// Also load and unload adapters, and see what everybody does.
    Admin,
}

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everybody: for probes that have no key.
    Open,
    /// Callers with at least this role.
    Role(Role),
}

/// Who is asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Whose prefixes are shared: derived from the key, never from the request's body.
    pub tenant: Arc<str>,
    /// What they may do.
    pub role: Role,
}

#[derive(Debug)]
struct Key {
    hash: blake3::Hash,
    caller: Caller,
}

/// The keys that are known.
#[derive(Debug)]
pub struct Keys {
    /// `None`: no key is asked for.
    keys: Option<Vec<Key>>,
}

impl Keys {
    /// No key is asked for, everybody is an administrator.
    #[must_use]
    pub fn none() -> Self {
        Self { keys: None }
    }

    /// Reads a key file.
    pub fn read(path: &Path) -> Result<Self, KeyFileError> {
        let text = fs::read_to_string(path)?;
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let keys = lines.map(|(line, text)| key(line, text)).collect::<Result<Vec<_>, _>>()?;
        match keys.len() {
            0 => Err(KeyFileError::Empty),
            1..=MAX_KEYS => Ok(Self { keys: Some(keys) }),
            _ => Err(KeyFileError::TooMany),
        }
    }

    /// The caller with the key in `headers`.
    fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let Some(keys) = &self.keys else {
            return Ok(Caller { tenant: PUBLIC.into(), role: Role::Admin });
        };
        let given = given(headers).ok_or_else(|| {
            ApiError::unauthorized("no API key; send it as 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        })?;
        let hash = hash(given);
        // Hashes are compared in constant time, and all of them: the time tells nothing about any key.
        let found = keys.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
        found.map(|key| key.caller.clone()).ok_or_else(|| ApiError::unauthorized("this API key is not known"))
    }
}

fn key(line: usize, text: &str) -> Result<Key, KeyFileError> {
    let wrong = |reason| KeyFileError::Line { line, reason };
    let (role, key) = text.split_once(':').ok_or_else(|| wrong("has no ':'"))?;
    let role = match role.trim() {
        "admin" => Role::Admin,
        "user" => Role::User,
        _ => return Err(wrong("names a role that does not exist")),
    };
    let key = key.trim().as_bytes();
    if !(MIN_KEY_BYTES..=MAX_KEY_BYTES).contains(&key.len()) {
        return Err(wrong("holds a key of less than 16 or more than 512 bytes"));
    }
    let tenant = blake3::derive_key("holobiont 2026 tenant of an API key v1", key);
    let tenant = blake3::Hash::from_bytes(tenant).to_hex()[..32].into();
    Ok(Key { hash: hash(key), caller: Caller { tenant, role } })
}

fn hash(key: &[u8]) -> blake3::Hash {
    blake3::Hash::from_bytes(blake3::derive_key("holobiont 2026 API key lookup v1", key))
}

fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let key = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))?;
    (key.len() <= MAX_KEY_BYTES).then(|| key.trim_ascii())
}

/// Lets a request through if its key allows it, and tells the handler whose it is.
pub async fn guard(
    State((app, access)): State<(Arc<App>, Access)>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Access::Role(needed) = access {
        let caller = app.keys.caller(request.headers())?;
        if caller.role < needed {
            return Err(ApiError::forbidden("this API key may not do that; use one of role 'admin'"));
        }
        request.extensions_mut().insert(caller);
    }
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const USER: &str = "user-key-0123456789";
    const ADMIN: &str = "admin-key-0123456789";

    fn keys(text: &str) -> Result<Keys, KeyFileError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, text).unwrap();
        Keys::read(&path)
    }

    fn with(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_key_gives_its_role_by_either_header() {
        let keys = keys(&format!("# comment\n\nuser:{USER}\nadmin:{ADMIN}\n")).unwrap();
        assert_eq!(keys.caller(&with("authorization", &format!("Bearer {USER}"))).unwrap().role, Role::User);
        assert_eq!(keys.caller(&with("x-api-key", ADMIN)).unwrap().role, Role::Admin);
    }

    #[test]
    fn an_unknown_key_and_no_key_are_refused() {
        let keys = keys(&format!("user:{USER}")).unwrap();
        keys.caller(&with("authorization", "Bearer wrong-key-0123456789")).unwrap_err();
        keys.caller(&with("authorization", "Basic abc")).unwrap_err();
        keys.caller(&HeaderMap::new()).unwrap_err();
    }

    #[test]
    fn two_keys_are_two_tenants() {
        let keys = keys(&format!("user:{USER}\nadmin:{ADMIN}")).unwrap();
        let tenant = |key: &str| keys.caller(&with("x-api-key", key)).unwrap().tenant;
        assert_ne!(tenant(USER), tenant(ADMIN));
    }

    #[test]
    fn a_file_that_cannot_be_meant_is_refused_with_its_line() {
        assert!(matches!(keys("\nroot:0123456789abcdef"), Err(KeyFileError::Line { line: 2, .. })));
        assert!(matches!(keys("user:short"), Err(KeyFileError::Line { line: 1, .. })));
        assert!(matches!(keys("# nothing"), Err(KeyFileError::Empty)));
    }
}
