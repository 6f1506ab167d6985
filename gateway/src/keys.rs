//! The API keys there are, from a file that holds their hashes alone.
//!
//! ```text
//! # ROLE  NAME   HASH OF THE KEY                LIMIT, if it is not the common one
//! admin   ops    blake3:<64 hexadecimal digits>
//! user    alice  blake3:<64 hexadecimal digits>  requests_per_min=60
//! ```
//!
//! `NAME` is the tenant: several keys of one name are one tenant. The file is looked at again four times a second, so
//! a key that was taken out opens nothing a second later. A file that became bad leaves the keys as they were, and the
//! log says so.

use std::{
    fs, io,
    num::NonZeroU32,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use crate::{
    caller::{Caller, Role},
    limits::{KeyLimit, PerMin},
};

/// Most keys of a file: every request is compared with all of them.
const MAX_KEYS: usize = 4096;
/// Longest key file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest name of a tenant.
const MAX_NAME_BYTES: usize = 64;
/// How often the file is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The tenant of everybody when there are no keys.
const PUBLIC: &str = "public";
/// Keeps these hashes apart from all others.
const HASH_CONTEXT: &str = "holobiont 2026 API key lookup v1";

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused.
    #[error("the API key file cannot be read: {0}; check --api-key-file")]
    Read(#[from] io::Error),
    /// A line that is none.
    #[error("line {line} of the API key file {reason}; 'holobiont key add' writes such lines")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No keys at all.
    #[error("the API key file holds no key; make one with 'holobiont key add'")]
    Empty,
    /// More than is looked through.
    #[error(
        "the API key file holds more than {MAX_KEYS} keys or {MAX_FILE_BYTES} bytes; remove some with 'holobiont key rm'"
    )]
    TooMany,
}

/// A key that is known.
#[derive(Debug, Clone)]
struct Key {
    hash: blake3::Hash,
    caller: Caller,
}

/// What tells one state of a file from another: inode, length and times of change.
type Stamp = (u64, u64, i64, i64, i64, i64);

/// The file, and what it said.
#[derive(Debug)]
struct File {
    path: PathBuf,
    /// For keys that have no limit of their own.
    per_min: PerMin,
    keys: RwLock<Arc<[Key]>>,
}

#[derive(Debug)]
enum Source {
    Everybody(Caller),
    File(File),
}

/// The keys that are known now.
#[derive(Debug)]
pub struct Keys(Source);

impl Keys {
    /// No key is asked for: everybody is an administrator of the tenant `public`, and all share one limit.
    #[must_use]
    pub fn none(per_min: PerMin) -> Self {
        let limit = KeyLimit::new(per_min);
        Self(Source::Everybody(Caller { tenant: PUBLIC.into(), role: Role::Admin, limit }))
    }

    /// Reads a key file. Keys that have no limit of their own get `per_min`.
    pub fn read(path: &Path, per_min: PerMin) -> Result<Self, KeyFileError> {
        let keys = RwLock::new(read(path, per_min, &[])?);
        Ok(Self(Source::File(File { path: path.to_owned(), per_min, keys })))
    }

    /// True if callers need a key.
    #[must_use]
    pub fn are_asked_for(&self) -> bool {
        matches!(self.0, Source::File(_))
    }

    /// Whose key `given` is; anybody's if none is asked for.
    #[must_use]
    pub fn caller(&self, given: Option<&[u8]>) -> Option<Caller> {
        match &self.0 {
            Source::Everybody(caller) => Some(caller.clone()),
            Source::File(file) => find(&file.now(), given?),
        }
    }

    /// Follows changes of the file for ever.
    pub async fn follow(&self) {
        let Source::File(file) = &self.0 else {
            return std::future::pending().await;
        };
        // The file may have changed since it was read: the first look reads it again.
        let mut seen = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let stamp = stamp(&file.path);
            if seen.as_ref() != Some(&stamp) {
                file.read_again();
                seen = Some(stamp);
            }
        }
    }
}

impl File {
    fn now(&self) -> Arc<[Key]> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn read_again(&self) {
        let old = self.now();
        match read(&self.path, self.per_min, &old) {
            Ok(keys) => {
                if !old.iter().map(|key| key.hash).eq(keys.iter().map(|key| key.hash)) {
                    tracing::info!(keys = keys.len(), "the API keys have changed");
                }
                *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
            }
            Err(error) => tracing::error!(%error, "the API keys stay as they were"),
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let about = fs::metadata(path).ok()?;
    Some((about.ino(), about.len(), about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()))
}

/// Hashes are compared in constant time, and all of them: how long it takes tells nothing about any key.
fn find(keys: &[Key], given: &[u8]) -> Option<Caller> {
    let hash = hash(given);
    let found = keys.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
    found.map(|key| key.caller.clone())
}

fn hash(key: &[u8]) -> blake3::Hash {
    blake3::Hash::from_bytes(blake3::derive_key(HASH_CONTEXT, key))
}

/// Reads the file; a key that was in `old` keeps what is left of its limit.
fn read(path: &Path, per_min: PerMin, old: &[Key]) -> Result<Arc<[Key]>, KeyFileError> {
    if fs::metadata(path)?.len() > MAX_FILE_BYTES {
        return Err(KeyFileError::TooMany);
    }
    let text = fs::read_to_string(path)?;
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut keys: Vec<Key> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (line, text) in lines {
        let mut key = key(text, per_min).map_err(|reason| KeyFileError::Line { line, reason })?;
        if !seen.insert(*key.hash.as_bytes()) {
            return Err(KeyFileError::Line { line, reason: "holds the same key as another line" });
        }
        if seen.len() > MAX_KEYS {
            return Err(KeyFileError::TooMany);
        }
        let same =
            |old: &&Key| old.hash == key.hash && old.caller.limit.per_min() == key.caller.limit.per_min();
        if let Some(old) = old.iter().find(same) {
            key.caller.limit = old.caller.limit.clone();
        }
        keys.push(key);
    }
    if keys.is_empty() { Err(KeyFileError::Empty) } else { Ok(keys.into()) }
}

fn key(line: &str, per_min: PerMin) -> Result<Key, &'static str> {
    let mut words = line.split_whitespace();
    let role = words.next().unwrap_or_default();
    if role.contains(':') {
        return Err("holds a key itself; only hashes of keys are kept");
    }
    let role = Role::named(role).ok_or("names a role that is not admin, user or metrics")?;
    let tenant = words.next().filter(|name| is_name(name));
    let tenant = tenant.ok_or("has no name of 1 to 64 letters, digits, '_', '.' and '-' after its role")?;
    let hash = words.next().and_then(|word| word.strip_prefix("blake3:"));
    let hash = hash.filter(|hash| hash.len() == 64).and_then(|hash| blake3::Hash::from_hex(hash).ok());
    let hash = hash.ok_or("has no 'blake3:' with 64 hexadecimal digits after its name")?;
    let own = words.next().map(own_limit).transpose()?;
    match words.next() {
        Some(_) => Err("goes on after its limit"),
        None => {
            let limit = KeyLimit::new(own.unwrap_or(per_min));
            Ok(Key { hash, caller: Caller { tenant: tenant.into(), role, limit } })
        }
    }
}

fn own_limit(word: &str) -> Result<PerMin, &'static str> {
    let number = word.strip_prefix("requests_per_min=").and_then(|number| number.parse().ok());
    number.map(NonZeroU32::new).ok_or("ends in something that is not 'requests_per_min=N'")
}

fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(plain)
}

/// The line that lets `key` in, for tests.
#[doc(hidden)]
#[must_use]
pub fn line_of(role: &str, name: &str, key: &str) -> String {
    format!("{role} {name} blake3:{}\n", hash(key.as_bytes()).to_hex())
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: &str = "hb-user";
    const ADMIN: &str = "hb-admin";

    fn keys(text: &str) -> Result<Keys, KeyFileError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, text).unwrap();
        Keys::read(&path, None)
    }

    fn two() -> String {
        format!("# comment\n\n{}{}", line_of("user", "alice", USER), line_of("admin", "ops", ADMIN))
    }

    #[test]
    fn a_key_gives_its_role_and_its_tenant() {
        let keys = keys(&two()).unwrap();
        let caller = keys.caller(Some(USER.as_bytes())).unwrap();
        assert_eq!((caller.role, &*caller.tenant), (Role::User, "alice"));
        assert_eq!(keys.caller(Some(ADMIN.as_bytes())).unwrap().role, Role::Admin);
    }

    #[test]
    fn an_unknown_key_and_no_key_are_nobodys() {
        let keys = keys(&two()).unwrap();
        assert!(keys.caller(Some(b"hb-wrong")).is_none());
        assert!(keys.caller(None).is_none());
    }

    #[test]
    fn a_file_that_cannot_be_meant_is_refused_with_its_line_and_the_next_step() {
        let hash = "0".repeat(64);
        for (line, reason) in [
            ("admin:plain-text-key".to_owned(), "holds a key itself"),
            (format!("root ops blake3:{hash}"), "role"),
            (format!("user ../x blake3:{hash}"), "name"),
            (format!("user a blake3:{}", &hash[1..]), "64"),
            (format!("user a sha256:{hash}"), "blake3"),
            (format!("user a blake3:{hash} requests_per_min=many"), "requests_per_min"),
            (format!("user a blake3:{hash} requests_per_min=1 more"), "goes on"),
            (format!("user a blake3:{hash}\nuser b blake3:{hash}"), "same key"),
        ] {
            let error = keys(&format!("# first\n{line}")).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("holobiont key add"), "{line}: {error}");
        }
        assert!(matches!(keys("# nothing"), Err(KeyFileError::Empty)));
    }

    #[test]
    fn a_limit_of_a_line_stands_before_the_common_one() {
        let own = line_of("user", "a", USER).replace('\n', " requests_per_min=7");
        let none = line_of("user", "b", ADMIN).replace('\n', " requests_per_min=0");
        let parse = |line: &str| key(line, NonZeroU32::new(3)).unwrap().caller.limit.per_min();
        assert_eq!(parse(&own), NonZeroU32::new(7));
        assert_eq!(parse(&none), None);
        assert_eq!(parse(&line_of("user", "c", "hb-c")), NonZeroU32::new(3));
    }

    #[test]
    fn reading_again_forgets_what_was_taken_out_and_keeps_what_is_used_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, two()).unwrap();
        let keys = Keys::read(&path, NonZeroU32::new(1)).unwrap();
        keys.caller(Some(ADMIN.as_bytes())).unwrap().limit.check().unwrap();
        let Source::File(file) = &keys.0 else { panic!("it has a file") };
        fs::write(&path, line_of("admin", "ops", ADMIN)).unwrap();
        file.read_again();
        assert!(keys.caller(Some(USER.as_bytes())).is_none());
        keys.caller(Some(ADMIN.as_bytes())).unwrap().limit.check().unwrap_err();
        fs::write(&path, "nonsense").unwrap();
        file.read_again();
        assert!(keys.caller(Some(ADMIN.as_bytes())).is_some(), "a bad file changes nothing");
    }
}
