//! Authentication of clients by key or certificate, never by the name that a client sends.
//!
//! Keys come from the gateway's key file. The roles `user` and `admin` may use the layer service, and the
//! name beside the key is the tenant. A missing key and a wrong key get the same answer after the same work.
//! The file is polled four times a second, and sessions with a revoked key are closed.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use security::keys::{Key, KeyFile, KeyFileError, KeyHash, KeyRole};

use super::Tenant;

/// Message to a client that is not authenticated, the same in all cases.
pub const REFUSED: &str =
    "no valid key or certificate; ask the executor's operator for one ('holobiont key add')";

/// An authenticated client, and its credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Tenant of the client's sessions.
    pub tenant: Tenant,
    shown: PresentedCredential,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PresentedCredential {
    /// No credential was required.
    Nothing,
    /// A certificate signed by the client CA.
    Certificate,
    /// A key from the key file.
    Key(KeyHash),
}

/// Authenticator of clients, with or without a key file.
#[derive(Debug)]
pub struct Authenticator(Option<WatchedKeys>);

#[derive(Debug)]
struct WatchedKeys {
    file: Mutex<KeyFile>,
    keys: RwLock<Arc<[Key]>>,
}

impl Authenticator {
    /// Requires no key: every client is the tenant [`Tenant::PUBLIC`].
    #[must_use]
    pub fn without_keys() -> Self {
        Self(None)
    }

    /// Requires a key from this file.
    ///
    /// # Errors
    /// Fails if the file cannot be used.
    pub fn open(path: &Path) -> Result<Self, KeyFileError> {
        let (file, keys) = KeyFile::open(path)?;
        Ok(Self(Some(WatchedKeys { file: Mutex::new(file), keys: RwLock::new(keys.into()) })))
    }

    /// Whether keys are required.
    #[must_use]
    pub fn asks_for_keys(&self) -> bool {
        self.0.is_some()
    }

    /// Authenticates the holder of a key; without a key file, any client. An empty `given` means no key.
    #[must_use]
    pub fn by_key(&self, given: &[u8]) -> Option<Principal> {
        let Some(followed) = &self.0 else {
            return Some(Principal {
                tenant: Tenant::new(Tenant::PUBLIC),
                shown: PresentedCredential::Nothing,
            });
        };
        let keys = followed.now();
        let key = security::keys::find(&keys, given, |key| key.hash).filter(|key| may_rent(key.role))?;
        Some(Principal { tenant: Tenant::new(&key.tenant), shown: PresentedCredential::Key(key.hash) })
    }

    /// Authenticates the holder of a certificate with this name, which the handshake has verified.
    #[must_use]
    pub fn by_certificate(&self, name: &str) -> Option<Principal> {
        security::keys::tenant_name(name).ok()?;
        Some(Principal { tenant: Tenant::new(name), shown: PresentedCredential::Certificate })
    }

    /// Whether the client is still admitted: its key is still in the file, for the same tenant.
    #[must_use]
    pub fn still_admits(&self, principal: &Principal) -> bool {
        let (Some(followed), PresentedCredential::Key(hash)) = (&self.0, &principal.shown) else {
            return true;
        };
        let same =
            |key: &Key| key.hash == *hash && *key.tenant == *principal.tenant.as_str() && may_rent(key.role);
        followed.now().iter().any(same)
    }

    /// Polls the key file; true if the keys have changed. An invalid file keeps the old keys.
    pub fn refresh_keys(&self) -> bool {
        let Some(followed) = &self.0 else { return false };
        match followed.file.lock().unwrap_or_else(PoisonError::into_inner).poll() {
            Ok(None) => false,
            Ok(Some(keys)) => {
                tracing::info!(keys = keys.len(), "the keys of split clients were read again");
                *followed.keys.write().unwrap_or_else(PoisonError::into_inner) = keys.into();
                true
            }
            Err(error) => {
                tracing::error!(%error, "cannot read the keys of split clients; the old keys stay valid");
                false
            }
        }
    }
}

impl WatchedKeys {
    fn now(&self) -> Arc<[Key]> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn may_rent(role: KeyRole) -> bool {
    matches!(role, KeyRole::User | KeyRole::Admin)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file(lines: &str) -> (tempfile::TempDir, Authenticator) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, lines).unwrap();
        let keeper = Authenticator::open(&path).unwrap();
        (directory, keeper)
    }

    #[test]
    fn users_and_administrators_may_rent_and_who_reads_figures_may_not() {
        let line = |role: &str| security::keys::line_of(role, role, role);
        let (_directory, keeper) = file(&["user", "admin", "metrics"].map(line).concat());
        let tenant = |key: &str| keeper.by_key(key.as_bytes()).map(|principal| principal.tenant.to_string());
        assert_eq!(tenant("user").as_deref(), Some("user"));
        assert_eq!(tenant("admin").as_deref(), Some("admin"));
        assert_eq!(tenant("metrics"), None);
        assert_eq!((tenant("wrong"), tenant("")), (None, None));
    }

    #[test]
    fn a_key_that_is_taken_out_or_given_to_another_tenant_admits_no_longer() {
        let (directory, keeper) = file(&security::keys::line_of("user", "alice", "a"));
        let alice = keeper.by_key(b"a").unwrap();
        assert!(keeper.still_admits(&alice) && !keeper.refresh_keys());
        for lines in
            [security::keys::line_of("user", "bob", "a"), security::keys::line_of("user", "alice", "b")]
        {
            fs::write(directory.path().join("keys"), lines).unwrap();
            assert!(keeper.refresh_keys());
            assert!(!keeper.still_admits(&alice));
        }
    }

    #[test]
    fn a_certificate_names_a_tenant_that_a_key_file_could_name() {
        let keeper = Authenticator::without_keys();
        assert_eq!(keeper.by_certificate("alice").unwrap().tenant.as_str(), "alice");
        assert!(keeper.by_certificate("alice\nbob").is_none() && keeper.by_certificate("").is_none());
        assert_eq!(keeper.by_key(b"").unwrap().tenant.as_str(), Tenant::PUBLIC);
    }
}
