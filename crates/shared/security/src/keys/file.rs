//! The key file, which is read as a whole and read again after each change.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::keys::line::Key;

/// Maximum number of keys per file; each key that a client sends is compared with all of them.
pub const MAX_KEYS: usize = 4096;
/// Maximum length of a key file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// Interval at which the file should be polled, so that a revoked key is refused within a second.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Error of reading or writing a key file. Each message is one line with cause and next step.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused to read the file.
    #[error("cannot read the key file {}: {reason}; check its path, and that this user may read it", path.display())]
    Read {
        /// Path of the key file.
        path: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// The system refused to write the file.
    #[error("cannot write the key file {}: {reason}", path.display())]
    Write {
        /// Path of the key file.
        path: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// A line does not parse. The message never shows the line, because it may be a key in plain text.
    #[error("line {line} of the key file {} {reason}; 'holobiont key add' writes such lines", path.display())]
    Line {
        /// Path of the key file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Defect of the line, as the end of a sentence.
        reason: &'static str,
    },
    /// The file holds no key.
    #[error("the key file {} has no keys; add one with 'holobiont key add'", .0.display())]
    Empty(PathBuf),
    /// The file exceeds the maximum number of keys or bytes.
    #[error(
        "the key file {} has more than {MAX_KEYS} keys or {MAX_FILE_BYTES} bytes; remove some with \
         'holobiont key rm'",
        .0.display()
    )]
    TooMany(PathBuf),
}

/// State of a file, which differs after a change: inode, length, and times of modification and change.
type Stamp = (u64, u64, i64, i64, i64, i64);

/// A key file, and its state when it was last read.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    seen: Option<Stamp>,
}

impl KeyFile {
    /// Reads a key file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, holds no key, or a line does not parse.
    pub fn open(path: &Path) -> Result<(Self, Vec<Key>), KeyFileError> {
        // The stamp is read before the keys, so a change in between is noticed at the next poll.
        let seen = stamp(path);
        let keys = keys_in(path)?;
        Ok((Self { path: path.to_owned(), seen }, keys))
    }

    /// Returns a key file that the first `poll` reads, if it exists then.
    #[must_use]
    pub fn unread(path: &Path) -> Self {
        Self { path: path.to_owned(), seen: None }
    }

    /// Returns the keys if the file has changed since the last poll, else `None`. A file without keys gives
    /// an empty list, because a revoked key must never be accepted.
    ///
    /// # Errors
    /// Fails if the changed file is not valid. Each such change is reported once.
    pub fn poll(&mut self) -> Result<Option<Vec<Key>>, KeyFileError> {
        let now = stamp(&self.path);
        if now == self.seen {
            return Ok(None);
        }
        self.seen = now;
        match keys_in(&self.path) {
            Err(KeyFileError::Empty(_)) => Ok(Some(Vec::new())),
            keys => keys.map(Some),
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let about = fs::metadata(path).ok()?;
    Some((about.ino(), about.len(), about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()))
}

fn keys_in(path: &Path) -> Result<Vec<Key>, KeyFileError> {
    let keys: Vec<Key> = parse(&read(path)?, path)?.into_iter().filter_map(KeyLine::key).collect();
    if keys.is_empty() { Err(KeyFileError::Empty(path.to_owned())) } else { Ok(keys) }
}

/// Reads the text of a key file, up to one byte more than a key file may have.
pub(crate) fn read(path: &Path) -> Result<String, KeyFileError> {
    let failed = |reason| KeyFileError::Read { path: path.to_owned(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

#[derive(Debug)]
pub(crate) enum KeyLine {
    Key(Key),
    /// A comment or an empty line.
    Other(String),
}

impl KeyLine {
    fn key(self) -> Option<Key> {
        match self {
            Self::Key(key) => Some(key),
            Self::Other(_) => None,
        }
    }
}

/// Parses `text`, the content of the file `path`. No other code decides whether a key file is valid.
pub(crate) fn parse(text: &str, path: &Path) -> Result<Vec<KeyLine>, KeyFileError> {
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(KeyFileError::TooMany(path.to_owned()));
    }
    let mut seen = HashSet::new();
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let wrong = |reason| KeyFileError::Line { path: path.to_owned(), line: index + 1, reason };
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            lines.push(KeyLine::Other(line.to_owned()));
            continue;
        }
        let key = Key::parse(trimmed).map_err(wrong)?;
        if !seen.insert(key.hash) {
            return Err(wrong("has the same key as another line"));
        }
        if seen.len() > MAX_KEYS {
            return Err(KeyFileError::TooMany(path.to_owned()));
        }
        lines.push(KeyLine::Key(key));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{KeyRole, find, line_of};

    const USER: &str = "hb-user";
    const ADMIN: &str = "hb-admin";

    fn two() -> String {
        format!("# comment\n\n{}{}", line_of("user", "alice", USER), line_of("admin", "ops", ADMIN))
    }

    fn keys_of(text: &str) -> Result<Vec<Key>, KeyFileError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        KeyFile::open(file.path()).map(|(_, keys)| keys)
    }

    fn whose<'a>(keys: &'a [Key], given: &str) -> Option<&'a Key> {
        find(keys, given.as_bytes(), |key| key.hash)
    }

    #[test]
    fn a_key_gives_its_role_and_its_tenant_and_an_unknown_one_is_nobodys() {
        let keys = keys_of(&two()).unwrap();
        let alice = whose(&keys, USER).unwrap();
        assert_eq!((alice.role, &*alice.tenant), (KeyRole::User, "alice"));
        assert_eq!(whose(&keys, ADMIN).unwrap().role, KeyRole::Admin);
        assert!(whose(&keys, "hb-wrong").is_none() && whose(&keys, "").is_none());
    }

    #[test]
    fn the_last_key_that_is_taken_out_opens_nothing_either() {
        let place = tempfile::NamedTempFile::new().unwrap();
        fs::write(place.path(), two()).unwrap();
        let (mut file, keys) = KeyFile::open(place.path()).unwrap();
        assert_eq!(keys.len(), 2);
        fs::write(place.path(), "# nobody is left\n").unwrap();
        assert!(file.poll().unwrap().unwrap().is_empty());
        assert!(KeyFile::open(place.path()).is_err(), "nobody starts with such a file by mistake");
    }

    #[test]
    fn a_file_that_cannot_be_meant_is_refused_with_its_line_and_the_next_step() {
        let hash = "0".repeat(64);
        for (line, reason) in [
            ("admin:plain-text-key".to_owned(), "contains an API key itself"),
            (format!("root ops blake3:{hash}"), "role"),
            (format!("user ../x blake3:{hash}"), "name"),
            (format!("user a blake3:{}", &hash[1..]), "64"),
            (format!("user a sha256:{hash}"), "blake3"),
            (format!("user a blake3:{hash} requests_per_min=many"), "requests_per_min"),
            (format!("user a blake3:{hash} requests_per_min=1 more"), "text after its limit"),
            (format!("user a blake3:{hash}\nuser b blake3:{hash}"), "same key"),
        ] {
            let error = keys_of(&format!("# first\n{line}")).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("holobiont key add"), "{line}: {error}");
        }
        assert!(matches!(keys_of("# nothing"), Err(KeyFileError::Empty(_))));
    }

    #[test]
    fn a_line_that_is_no_key_is_refused_by_number_and_never_shown() {
        let hash = "0".repeat(64);
        for line in [
            "user:hb-secret".to_owned(),
            "user acme hb-secret".to_owned(),
            "secret acme blake3:x".to_owned(),
            format!("user acme blake3:{hash} secret=1"),
            format!("user secret/me blake3:{hash}"),
            format!("user acme blake3:{hash} requests_per_min=1 secret"),
            "user acme blake3:secret".to_owned(),
        ] {
            let error = keys_of(&format!("# ok\n{line}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2") && !error.contains("secret"), "{line}: {error}");
        }
    }

    #[test]
    fn a_file_has_a_most_of_keys_and_of_bytes() {
        let lines =
            |count: usize| (0..count).map(|n| line_of("user", "a", &n.to_string())).collect::<String>();
        assert_eq!(keys_of(&lines(MAX_KEYS)).unwrap().len(), MAX_KEYS);
        assert!(matches!(keys_of(&lines(MAX_KEYS + 1)), Err(KeyFileError::TooMany(_))));
        let padding = "#".repeat(usize::try_from(MAX_FILE_BYTES).unwrap());
        assert!(matches!(keys_of(&(padding + &two())), Err(KeyFileError::TooMany(_))));
    }

    #[test]
    fn a_look_reads_what_has_changed_and_says_once_that_a_change_is_bad() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, two()).unwrap();
        let (mut file, keys) = KeyFile::open(&path).unwrap();
        assert_eq!(keys.len(), 2);
        assert!(file.poll().unwrap().is_none());
        fs::write(&path, line_of("admin", "ops", ADMIN)).unwrap();
        assert_eq!(file.poll().unwrap().unwrap().len(), 1);
        fs::write(&path, "nonsense").unwrap();
        file.poll().unwrap_err();
        assert!(file.poll().unwrap().is_none());
        fs::remove_file(&path).unwrap();
        assert!(matches!(file.poll(), Err(KeyFileError::Read { .. })));
    }
}
