//! API keys: the caller of each key and its rate limit.
//!
//! The crate `keys` parses the key file, for the gateway as for the executor; this module adds a limiter to
//! each key. The file is checked four times per second, so a removed key stops working within a second. If
//! the file becomes invalid, the known keys stay and an error is logged.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use ::security::keys::{Key, KeyFile, KeyHash, LOOK_EVERY};

pub use ::security::keys::{KeyFileError, line_of};

use crate::{
    caller::{Caller, KeyRole, RequestPriority},
    limits::{KeyLimit, RequestsPerMinute},
};

/// Tenant of all callers when no key is required.
const PUBLIC: &str = "public";

#[derive(Debug, Clone)]
struct KnownKey {
    hash: KeyHash,
    caller: Caller,
}

impl KnownKey {
    /// Creates the entry of `key`; a key that is also in `old` with the same limit keeps its limiter.
    fn new(key: Key, per_min: RequestsPerMinute, old: &[Self]) -> Self {
        let Key { hash, role, tenant, requests_per_min } = key;
        let per_min = requests_per_min.unwrap_or(per_min);
        let same = |old: &&Self| old.hash == hash && old.caller.limit.per_min() == per_min;
        let limit = old.iter().find(same).map(|old| old.caller.limit.clone());
        let limit = limit.unwrap_or_else(|| KeyLimit::new(per_min));
        Self { hash, caller: Caller { tenant, role, limit, priority: RequestPriority::Online } }
    }
}

#[derive(Debug)]
struct WatchedKeyFile {
    file: Mutex<KeyFile>,
    /// Default limit of keys without one.
    per_min: RequestsPerMinute,
    keys: RwLock<Arc<[KnownKey]>>,
}

#[derive(Debug)]
enum KeySource {
    Everybody(Caller),
    File(WatchedKeyFile),
}

/// API keys that are valid now.
#[derive(Debug)]
pub struct Keys(KeySource);

impl Keys {
    /// Requires no key: every caller is an administrator of the tenant `public`, and all share one limit.
    #[must_use]
    pub fn none(per_min: RequestsPerMinute) -> Self {
        let limit = KeyLimit::new(per_min);
        let (tenant, priority) = (PUBLIC.into(), RequestPriority::Online);
        Self(KeySource::Everybody(Caller { tenant, role: KeyRole::Admin, limit, priority }))
    }

    /// Reads a key file. Keys without a limit get `per_min`.
    pub fn read(path: &Path, per_min: RequestsPerMinute) -> Result<Self, KeyFileError> {
        let (file, keys) = KeyFile::open(path)?;
        let keys = keys.into_iter().map(|key| KnownKey::new(key, per_min, &[])).collect();
        Ok(Self(KeySource::File(WatchedKeyFile { file: Mutex::new(file), per_min, keys: RwLock::new(keys) })))
    }

    /// Creates the keys of a file that may not exist yet. While the file is missing, no caller is admitted.
    #[must_use]
    pub fn brought(path: &Path, per_min: RequestsPerMinute) -> Self {
        let file = Mutex::new(KeyFile::unread(path));
        Self(KeySource::File(WatchedKeyFile { file, per_min, keys: RwLock::default() }))
    }

    /// True if callers need a key.
    #[must_use]
    pub fn are_asked_for(&self) -> bool {
        matches!(self.0, KeySource::File(_))
    }

    /// Returns the caller whose key is `given`; without a key file, the public caller.
    #[must_use]
    pub fn caller(&self, given: Option<&[u8]>) -> Option<Caller> {
        match &self.0 {
            KeySource::Everybody(caller) => Some(caller.clone()),
            KeySource::File(followed) => {
                let keys = followed.now();
                ::security::keys::find(&keys, given?, |known| known.hash).map(|known| known.caller.clone())
            }
        }
    }

    /// Returns a caller in the name of `tenant`, for background requests that a key of `role` ordered. The
    /// caller has no more rights than the tenant's keys have now; `None` if the tenant has no such key.
    #[must_use]
    pub(crate) fn background_caller(&self, tenant: &str, role: KeyRole) -> Option<Caller> {
        let found = match &self.0 {
            KeySource::Everybody(caller) => (&*caller.tenant == tenant).then(|| caller.clone()),
            KeySource::File(followed) => {
                let keys = followed.now();
                let own = keys
                    .iter()
                    .map(|known| &known.caller)
                    .filter(|caller| &*caller.tenant == tenant && caller.role != KeyRole::Metrics);
                own.max_by_key(|caller| caller.role == KeyRole::Admin).cloned()
            }
        };
        found.map(|caller| Caller {
            role: if caller.role == KeyRole::Admin { role } else { caller.role },
            priority: RequestPriority::Background,
            ..caller
        })
    }

    /// Follows changes of the key file forever.
    pub async fn follow(&self) {
        let KeySource::File(followed) = &self.0 else {
            return std::future::pending().await;
        };
        loop {
            followed.refresh();
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl WatchedKeyFile {
    fn now(&self) -> Arc<[KnownKey]> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn refresh(&self) {
        let looked = self.file.lock().unwrap_or_else(PoisonError::into_inner).poll();
        match looked {
            Ok(None) => {}
            Ok(Some(keys)) => {
                let old = self.now();
                let keys: Arc<[KnownKey]> =
                    keys.into_iter().map(|key| KnownKey::new(key, self.per_min, &old)).collect();
                if !old.iter().map(|known| known.hash).eq(keys.iter().map(|known| known.hash)) {
                    tracing::info!(keys = keys.len(), "the API keys were read again");
                }
                *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
            }
            Err(error) => tracing::error!(%error, "cannot read the API keys; the old keys stay valid"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, num::NonZeroU32};

    use super::*;

    const USER: &str = "hb-user";
    const ADMIN: &str = "hb-admin";

    fn two() -> String {
        format!("# comment\n\n{}{}", line_of("user", "alice", USER), line_of("admin", "ops", ADMIN))
    }

    #[test]
    fn an_unknown_key_and_no_key_are_nobodys() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, two()).unwrap();
        let keys = Keys::read(&path, None).unwrap();
        let alice = keys.caller(Some(USER.as_bytes())).unwrap();
        assert_eq!((alice.role, &*alice.tenant), (KeyRole::User, "alice"));
        assert!(keys.caller(Some(b"hb-wrong")).is_none());
        assert!(keys.caller(None).is_none());
    }

    #[test]
    fn a_limit_of_a_line_stands_before_the_common_one() {
        let own = |own| {
            let (role, tenant, hash) = (KeyRole::User, "a".into(), KeyHash::of(b"a"));
            let key = Key { hash, role, tenant, requests_per_min: own };
            KnownKey::new(key, NonZeroU32::new(3), &[]).caller.limit.per_min()
        };
        assert_eq!(own(Some(NonZeroU32::new(7))), NonZeroU32::new(7));
        assert_eq!(own(Some(None)), None);
        assert_eq!(own(None), NonZeroU32::new(3));
    }

    #[test]
    fn reading_again_forgets_what_was_taken_out_and_keeps_what_is_used_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, two()).unwrap();
        let keys = Keys::read(&path, NonZeroU32::new(1)).unwrap();
        keys.caller(Some(ADMIN.as_bytes())).unwrap().limit.check().unwrap();
        let KeySource::File(followed) = &keys.0 else { panic!("it has a file") };
        fs::write(&path, line_of("admin", "ops", ADMIN)).unwrap();
        followed.refresh();
        assert!(keys.caller(Some(USER.as_bytes())).is_none());
        keys.caller(Some(ADMIN.as_bytes())).unwrap().limit.check().unwrap_err();
        fs::write(&path, "nonsense").unwrap();
        followed.refresh();
        assert!(keys.caller(Some(ADMIN.as_bytes())).is_some(), "a bad file changes nothing");
    }

    #[test]
    fn a_background_caller_has_no_more_rights_than_its_key_had_and_its_tenant_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let metrics = line_of("metrics", "eve", "hb-m");
        fs::write(
            &path,
            line_of("user", "alice", "hb-1") + &line_of("admin", "alice", "hb-2") + &two() + &metrics,
        )
        .unwrap();
        let keys = Keys::read(&path, None).unwrap();
        let role = |tenant, role| keys.background_caller(tenant, role).map(|caller| caller.role);
        assert_eq!(role("alice", KeyRole::User), Some(KeyRole::User));
        assert_eq!(role("alice", KeyRole::Admin), Some(KeyRole::Admin));
        fs::write(&path, line_of("user", "alice", "hb-1") + &metrics).unwrap();
        let KeySource::File(followed) = &keys.0 else { panic!("it has a file") };
        followed.refresh();
        assert_eq!(role("alice", KeyRole::Admin), Some(KeyRole::User));
        assert_eq!((role("ops", KeyRole::Admin), role("eve", KeyRole::User)), (None, None));
        let everybody = Keys::none(None).background_caller(PUBLIC, KeyRole::User).unwrap();
        assert_eq!((everybody.role, everybody.priority), (KeyRole::User, RequestPriority::Background));
    }

    #[test]
    fn keys_that_are_yet_to_come_let_nobody_in_before_they_do() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let keys = Keys::brought(&path, None);
        let KeySource::File(followed) = &keys.0 else { panic!("it has a file") };
        followed.refresh();
        assert!(keys.are_asked_for() && keys.caller(Some(USER.as_bytes())).is_none());
        assert!(keys.caller(None).is_none());
        fs::write(&path, two()).unwrap();
        followed.refresh();
        assert!(keys.caller(Some(USER.as_bytes())).is_some());
    }
}
