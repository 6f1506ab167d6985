//! The file: read whole, and read again when it has changed.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::keys::line::Key;

/// Most keys of a file: every key that is given is compared with all of them.
pub const MAX_KEYS: usize = 4096;
/// Longest key file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// How often the file is to be looked at, so that a key that was taken out opens nothing a second later.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Why a key file cannot be used. Each is a line of its own: cause and next step.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused to give it.
    #[error("cannot read the key file {}: {reason}; check its path, and that this user may read it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// The system refused to take it.
    #[error("cannot write the key file {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// A line that is none. The line itself is never shown: it may be a key in plain text.
    #[error("line {line} of the key file {} {reason}; 'holobiont key add' writes such lines", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No keys at all.
    #[error("the key file {} holds no key; make one with 'holobiont key add'", .0.display())]
    Empty(PathBuf),
    /// More than is looked through.
    #[error(
        "the key file {} holds more than {MAX_KEYS} keys or {MAX_FILE_BYTES} bytes; remove some with 'holobiont key rm'",
        .0.display()
    )]
    TooMany(PathBuf),
}

/// What tells one state of a file from another: inode, length and times of change.
type Stamp = (u64, u64, i64, i64, i64, i64);

/// A key file, and the state in which it was last read.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    seen: Option<Stamp>,
}

impl KeyFile {
    /// Reads a key file.
    ///
    /// # Errors
    /// If it cannot be read, or a line of it is none.
    pub fn open(path: &Path) -> Result<(Self, Vec<Key>), KeyFileError> {
        // The stamp is the older of the two: a change in between is seen at the next look.
        let seen = stamp(path);
        let keys = keys_in(path)?;
        Ok((Self { path: path.to_owned(), seen }, keys))
    }

    /// A key file that is read at the first look, if it is there then.
    #[must_use]
    pub fn unread(path: &Path) -> Self {
        Self { path: path.to_owned(), seen: None }
    }

    /// The keys, if the file has changed since the last look. None, if the last one was taken out: then nobody is let
    /// in, for a key that was revoked must open nothing.
    ///
    /// # Errors
    /// If it has changed into something that cannot be used; said once for each such change.
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

/// The text of a key file, if it is short enough to be one.
pub(crate) fn read(path: &Path) -> Result<String, KeyFileError> {
    let failed = |reason| KeyFileError::Read { path: path.to_owned(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// A line of the file.
#[derive(Debug)]
pub(crate) enum KeyLine {
    /// A key.
    Key(Key),
    /// A comment, or nothing.
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

/// The lines of `text`, which stands in the file `path` or is to stand there. The one rule of what a key file is.
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
            return Err(wrong("holds the same key as another line"));
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
            ("admin:plain-text-key".to_owned(), "holds a key itself"),
            (format!("root ops blake3:{hash}"), "role"),
            (format!("user ../x blake3:{hash}"), "name"),
            (format!("user a blake3:{}", &hash[1..]), "64"),
            (format!("user a sha256:{hash}"), "blake3"),
            (format!("user a blake3:{hash} requests_per_min=many"), "requests_per_min"),
            (format!("user a blake3:{hash} requests_per_min=1 more"), "goes on"),
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
