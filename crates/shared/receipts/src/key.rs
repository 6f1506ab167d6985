//! The signing key of a deployment, in a private file of the state directory.

use std::{
    fmt, fs,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use ring::{
    rand::SystemRandom,
    signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey},
};

use crate::hex::{Hash, PublicKey, Signature};

/// Name of the key's file in the state directory, in the format PKCS#8.
pub const KEY_FILE: &str = "receipt-key.pk8";

/// The reason why a deployment has no signing key.
#[derive(Debug, thiserror::Error)]
pub enum SigningKeyError {
    /// The file cannot be read or written.
    #[error("cannot {attempt} the key of receipts {}", path.display())]
    File {
        /// Verb for the error text.
        attempt: &'static str,
        /// Path of the key's file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Other users may read the file.
    #[error("other users may read the key of receipts {}; run chmod 600 on it", .0.display())]
    Exposed(PathBuf),
    /// The file holds no Ed25519 key.
    #[error("{} holds no Ed25519 key in the format PKCS#8; restore it, or remove it to make a new key", .0.display())]
    Unreadable(PathBuf),
    /// The system returned no random bytes.
    #[error("the system returned no random bytes for the key of receipts")]
    Random,
}

/// Ed25519 key pair of a deployment.
pub struct SigningKey(Ed25519KeyPair);

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SigningKey").field(&self.public_key()).finish()
    }
}

impl SigningKey {
    /// Reads the key of the state directory, and makes it first if there is none. Of several processes that
    /// start at once, all get the same key.
    ///
    /// # Errors
    /// The file cannot be read or made, holds no key, or may be read by others.
    pub fn open(state: &Path) -> Result<Self, SigningKeyError> {
        let path = state.join(KEY_FILE);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(state, &path)?,
            Err(source) => return Err(SigningKeyError::File { attempt: "read", path, source }),
            Ok(_) => {}
        }
        Self::read(path)
    }

    fn read(path: PathBuf) -> Result<Self, SigningKeyError> {
        let failed = |source| SigningKeyError::File { attempt: "read", path: path.clone(), source };
        if fs::metadata(&path).map_err(failed)?.mode() & 0o077 != 0 {
            return Err(SigningKeyError::Exposed(path));
        }
        let bytes = fs::read(&path).map_err(failed)?;
        Ed25519KeyPair::from_pkcs8(&bytes).map(Self).map_err(|_| SigningKeyError::Unreadable(path))
    }

    /// Returns the public key, which checks the signatures of this key.
    ///
    /// # Panics
    /// Never: every Ed25519 public key has 32 bytes.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(self.0.public_key().as_ref());
        PublicKey(bytes)
    }

    pub(crate) fn sign(&self, link: Hash) -> Signature {
        let mut bytes = [0; 64];
        bytes.copy_from_slice(self.0.sign(&link.0).as_ref());
        Signature(bytes)
    }
}

/// Returns true if `key` signed `link`.
pub(crate) fn is_signed(link: Hash, key: PublicKey, signature: Signature) -> bool {
    UnparsedPublicKey::new(&ED25519, &key.0).verify(&link.0, &signature.0).is_ok()
}

/// Makes a key, and puts it at `path` unless another process has done so. Readers see a whole key or none.
fn create(state: &Path, path: &Path) -> Result<(), SigningKeyError> {
    let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| SigningKeyError::Random)?;
    let beside = state.join(format!("{KEY_FILE}.{}", std::process::id()));
    let made = publish(pkcs8.as_ref(), &beside, path).and_then(|()| File::open(state)?.sync_all());
    // The file of an interrupted attempt is a key that nobody uses.
    let _ = fs::remove_file(&beside);
    made.map_err(|source| SigningKeyError::File { attempt: "make", path: path.to_owned(), source })
}

fn publish(key: &[u8], beside: &Path, path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(beside)?;
    file.write_all(key)?;
    file.sync_all()?;
    match fs::hard_link(beside, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // Some network file systems have no hard links.
        Err(_) => fs::rename(beside, path),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_made_once_and_only_its_owner_may_read_it() {
        let state = tempfile::tempdir().unwrap();
        let first = SigningKey::open(state.path()).unwrap();
        assert_eq!(SigningKey::open(state.path()).unwrap().public_key(), first.public_key());
        let path = state.path().join(KEY_FILE);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 1, "no other file is left");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(SigningKey::open(state.path()), Err(SigningKeyError::Exposed(_))));
    }

    #[test]
    fn processes_that_start_at_once_have_one_key() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(KEY_FILE);
        create(state.path(), &path).unwrap();
        let first = SigningKey::open(state.path()).unwrap().public_key();
        create(state.path(), &path).unwrap();
        assert_eq!(SigningKey::open(state.path()).unwrap().public_key(), first);
    }

    #[test]
    fn a_damaged_key_is_refused_by_name() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(KEY_FILE);
        SigningKey::open(state.path()).unwrap();
        fs::write(&path, b"no key").unwrap();
        let error = SigningKey::open(state.path()).unwrap_err().to_string();
        assert!(error.contains(KEY_FILE) && error.contains("remove it"), "{error}");
    }
}
