//! The file: read whole, and read again when it has changed.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::line::Key;

/// Most keys of a file: every key that is given is compared with all of them.
pub const MAX_KEYS: usize = 4096;
/// Longest key file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// How often the file is to be looked at, so that a key that was taken out opens nothing a second later.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused.
    #[error("the API key file cannot be read: {0}; check its path, and that this user may read it")]
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
        let keys = read(path)?;
        Ok((Self { path: path.to_owned(), seen }, keys))
    }

    /// The keys, if the file has changed since the last look. None, if the last one was taken out: then nobody is let
    /// in, for a key that was revoked must open nothing.
    ///
    /// # Errors
    /// If it has changed into something that cannot be used; said once for each such change.
    pub fn look(&mut self) -> Result<Option<Vec<Key>>, KeyFileError> {
        let now = stamp(&self.path);
        if now == self.seen {
            return Ok(None);
        }
        self.seen = now;
        match read(&self.path) {
            Err(KeyFileError::Empty) => Ok(Some(Vec::new())),
            read => read.map(Some),
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let about = fs::metadata(path).ok()?;
    Some((about.ino(), about.len(), about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()))
}

fn read(path: &Path) -> Result<Vec<Key>, KeyFileError> {
    if fs::metadata(path)?.len() > MAX_FILE_BYTES {
        return Err(KeyFileError::TooMany);
    }
    parse(&fs::read_to_string(path)?)
}

fn parse(text: &str) -> Result<Vec<Key>, KeyFileError> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut keys = Vec::new();
    let mut seen = HashSet::new();
    for (line, text) in lines {
        let key = Key::parse(text).map_err(|reason| KeyFileError::Line { line, reason })?;
        if !seen.insert(key.hash) {
            return Err(KeyFileError::Line { line, reason: "holds the same key as another line" });
        }
        if seen.len() > MAX_KEYS {
            return Err(KeyFileError::TooMany);
        }
        keys.push(key);
    }
    if keys.is_empty() { Err(KeyFileError::Empty) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Role, find, line_of};

    const USER: &str = "hb-user";
    const ADMIN: &str = "hb-admin";

    fn two() -> String {
        format!("# comment\n\n{}{}", line_of("user", "alice", USER), line_of("admin", "ops", ADMIN))
    }

    fn whose<'a>(keys: &'a [Key], given: &str) -> Option<&'a Key> {
        find(keys, given.as_bytes(), |key| key.hash)
    }

    #[test]
    fn a_key_gives_its_role_and_its_tenant_and_an_unknown_one_is_nobodys() {
        let keys = parse(&two()).unwrap();
        let alice = whose(&keys, USER).unwrap();
        assert_eq!((alice.role, &*alice.tenant), (Role::User, "alice"));
        assert_eq!(whose(&keys, ADMIN).unwrap().role, Role::Admin);
        assert!(whose(&keys, "hb-wrong").is_none() && whose(&keys, "").is_none());
    }

    #[test]
    fn the_last_key_that_is_taken_out_opens_nothing_either() {
        let place = tempfile::NamedTempFile::new().unwrap();
        fs::write(place.path(), two()).unwrap();
        let (mut file, keys) = KeyFile::open(place.path()).unwrap();
        assert_eq!(keys.len(), 2);
        fs::write(place.path(), "# nobody is left\n").unwrap();
        assert!(file.look().unwrap().unwrap().is_empty());
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
            let error = parse(&format!("# first\n{line}")).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("holobiont key add"), "{line}: {error}");
        }
        assert!(matches!(parse("# nothing"), Err(KeyFileError::Empty)));
    }

    #[test]
    fn a_look_reads_what_has_changed_and_says_once_that_a_change_is_bad() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        fs::write(&path, two()).unwrap();
        let (mut file, keys) = KeyFile::open(&path).unwrap();
        assert_eq!(keys.len(), 2);
        assert!(file.look().unwrap().is_none());
        fs::write(&path, line_of("admin", "ops", ADMIN)).unwrap();
        assert_eq!(file.look().unwrap().unwrap().len(), 1);
        fs::write(&path, "nonsense").unwrap();
        file.look().unwrap_err();
        assert!(file.look().unwrap().is_none());
        fs::remove_file(&path).unwrap();
        assert!(matches!(file.look(), Err(KeyFileError::Read(_))));
    }
}
