//! The key file: one line for each key, `ROLE NAME blake3:HASH [requests_per_min=N]`, and comments.
//!
//! Editing keeps what it does not change, comments included, and replaces the file as a whole: a reader sees the old one
//! or the new one, also after a power cut. Editors take turns.

use std::{
    fmt,
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::fs::{FlockOperation, Gid, Uid, fchown, flock};

use crate::exit::{Exit, Explain};

/// Separates this hash from any other use of the same key.
const CONTEXT: &str = "holobiont 2026 API key lookup v1";

/// Longest name of a tenant.
const MAX_NAME_BYTES: usize = 64;

/// Longest key file.
const MAX_FILE_BYTES: u64 = 16 << 20;

const HEADER: &str =
    "# Keys of the gateway: ROLE NAME HASH [requests_per_min=N]. `holobiont key` edits this file.\n";

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the key file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write the key file {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is no key.
    #[error("line {line} of the key file {path} is no key: {reason}")]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong with it. Never the line itself: it may be a key in plain text.
        reason: &'static str,
    },
}

impl Explain for KeyFileError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { source, .. } | Self::Write { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Exit::Refused
            }
            Self::Read { .. } | Self::Write { .. } => Exit::Failed,
            Self::Line { .. } => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some("holobiont key add NAME makes the file".into()),
            Self::Write { .. } => None,
            Self::Line { .. } => Some("remove the line; holobiont key add NAME makes a new key".into()),
        }
    }
}

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Role {
    /// Ask models
    User,
    /// Everything
    Admin,
    /// Read metrics
    Metrics,
}

impl Role {
    /// The word in the file.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        [Self::User, Self::Admin, Self::Metrics].into_iter().find(|role| role.word() == word)
    }
}

/// A tenant's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyName(String);

impl FromStr for KeyName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        match (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed) {
            true => Ok(Self(text.to_owned())),
            false => Err("a name is 1 to 64 letters, digits, '.', '_' and '-'"),
        }
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// What is kept of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyHash(blake3::Hash);

impl KeyHash {
    /// The hash of a key.
    pub(crate) fn of(key: &str) -> Self {
        Self(blake3::derive_key(CONTEXT, key.as_bytes()).into())
    }

    /// Enough of it to tell keys of one tenant apart.
    pub(crate) fn id(self) -> String {
        self.0.to_hex()[..8].to_owned()
    }
}

/// A key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// What it may do.
    pub(crate) role: Role,
    /// Whose it is.
    pub(crate) name: KeyName,
    /// How it is recognised.
    pub(crate) hash: KeyHash,
    /// Its own limit.
    pub(crate) requests_per_min: Option<u32>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} blake3:{}", self.role.word(), self.name, self.hash.0.to_hex())?;
        match self.requests_per_min {
            Some(limit) => write!(f, " requests_per_min={limit}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Entry {
    type Err = &'static str;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let mut words = line.split_whitespace();
        let role =
            words.next().and_then(Role::from_word).ok_or("it does not begin with user, admin or metrics")?;
        let name = words.next().ok_or("it has no name")?.parse()?;
        let hash =
            words.next().and_then(|word| word.strip_prefix("blake3:")).ok_or("it has no blake3: hash")?;
        let hash = blake3::Hash::from_hex(hash).map_err(|_| "its hash is not 64 hexadecimal digits")?;
        let limit =
            words.next().map(|word| word.strip_prefix("requests_per_min=").and_then(|n| n.parse().ok()));
        let requests_per_min = match limit {
            Some(None) => return Err("what follows the hash is not requests_per_min=N"),
            Some(limit) => limit,
            None => None,
        };
        match words.next() {
            Some(_) => Err("it has too many words"),
            None => Ok(Self { role, name, hash: KeyHash(hash), requests_per_min }),
        }
    }
}

/// A line of the file.
#[derive(Debug)]
enum Line {
    Key(Entry),
    /// A comment or nothing.
    Other(String),
}

/// A key file that has been read.
#[derive(Debug)]
pub(crate) struct KeyFile {
    lines: Vec<Line>,
}

impl KeyFile {
    /// Reads a key file; every line must be understood.
    pub(crate) fn read(path: &Path) -> Result<Self, KeyFileError> {
        let failed = |source| KeyFileError::Read { path: path.to_owned(), source };
        if fs::metadata(path).map_err(failed)?.len() > MAX_FILE_BYTES {
            return Err(failed(io::Error::other("it is longer than 16 MiB")));
        }
        Self::parse(&fs::read_to_string(path).map_err(failed)?, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, KeyFileError> {
        let parse = |(index, line): (usize, &str)| match line.trim() {
            "" => Ok(Line::Other(line.to_owned())),
            comment if comment.starts_with('#') => Ok(Line::Other(line.to_owned())),
            key => key.parse().map(Line::Key).map_err(|reason| KeyFileError::Line {
                path: path.to_owned(),
                line: index + 1,
                reason,
            }),
        };
        Ok(Self { lines: text.lines().enumerate().map(parse).collect::<Result<_, _>>()? })
    }

    /// Reads the file, changes it, and puts the whole in its place; a file that is not there begins empty.
    pub(crate) fn edit<T>(path: &Path, change: impl FnOnce(&mut Self) -> T) -> Result<T, KeyFileError> {
        let failed = |source| KeyFileError::Write { path: path.to_owned(), source };
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let _turn = take_turn(path).map_err(failed)?;
        let mut file = match Self::read(path) {
            Err(KeyFileError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::parse(HEADER, path)?
            }
            file => file?,
        };
        let result = change(&mut file);
        file.write(path, directory).map_err(failed)?;
        Ok(result)
    }

    /// The keys, in the file's order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.lines.iter().filter_map(|line| match line {
            Line::Key(entry) => Some(entry),
            Line::Other(_) => None,
        })
    }

    /// Adds a key at the end.
    pub(crate) fn push(&mut self, entry: Entry) {
        self.lines.push(Line::Key(entry));
    }

    /// Removes the keys that are meant; how many there were.
    pub(crate) fn remove(&mut self, is_meant: impl Fn(&Entry) -> bool) -> usize {
        let before = self.lines.len();
        self.lines.retain(|line| !matches!(line, Line::Key(entry) if is_meant(entry)));
        before - self.lines.len()
    }

    /// A new file of mode 0600 takes the old one's place and owner.
    fn write(&self, path: &Path, directory: &Path) -> io::Result<()> {
        let mut new = tempfile::Builder::new().prefix(".api-keys-").tempfile_in(directory)?;
        for line in &self.lines {
            match line {
                Line::Key(entry) => writeln!(new, "{entry}")?,
                Line::Other(text) => writeln!(new, "{text}")?,
            }
        }
        if let Ok(old) = fs::metadata(path) {
            let ours = new.as_file().metadata()?;
            if (old.uid(), old.gid()) != (ours.uid(), ours.gid()) {
                fchown(new.as_file(), Some(Uid::from_raw(old.uid())), Some(Gid::from_raw(old.gid())))?;
            }
        }
        new.as_file().sync_all()?;
        new.persist(path).map_err(|error| error.error)?;
        File::open(directory)?.sync_all()
    }
}

/// Waits until no other editor is at work; the turn ends with the returned file.
fn take_turn(path: &Path) -> io::Result<File> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".lock");
    let lock = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path.with_file_name(name))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn entry(name: &str, key: &str) -> Entry {
        Entry {
            role: Role::User,
            name: name.parse().unwrap(),
            hash: KeyHash::of(key),
            requests_per_min: None,
        }
    }

    #[test]
    fn a_line_is_what_the_gateway_reads() {
        let mut entry = entry("acme", "hb-x");
        entry.requests_per_min = Some(60);
        // `blake3::derive_key` with the context of the contract; the gateway has the same vector.
        let hash = blake3::Hash::from(blake3::derive_key("holobiont 2026 API key lookup v1", b"hb-x"));
        let text = format!("user acme blake3:{} requests_per_min=60", hash.to_hex());
        assert_eq!(entry.to_string(), text);
        assert_eq!(text.parse(), Ok(entry));
    }

    #[test]
    fn a_new_file_is_private_and_comments_survive_edits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/api-keys");
        KeyFile::edit(&path, |file| file.push(entry("a", "1"))).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&path).unwrap() + "\n# mine\n";
        fs::write(&path, &text).unwrap();
        KeyFile::edit(&path, |file| file.push(entry("b", "2"))).unwrap();
        let removed = KeyFile::edit(&path, |file| file.remove(|entry| entry.name.0 == "a")).unwrap();
        assert_eq!(removed, 1);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(HEADER) && text.contains("# mine") && !text.contains("user a "), "{text}");
        assert_eq!(KeyFile::read(&path).unwrap().entries().count(), 1);
    }

    #[test]
    fn editors_take_turns_and_none_loses_a_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-keys");
        std::thread::scope(|scope| {
            for editor in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    KeyFile::edit(path, |file| file.push(entry("a", &editor.to_string()))).unwrap();
                });
            }
        });
        assert_eq!(KeyFile::read(&path).unwrap().entries().count(), 8);
    }

    #[test]
    fn a_line_that_is_no_key_is_refused_by_number_and_never_shown() {
        let hash = "0".repeat(64);
        let cases = [
            "user:hb-secret".to_owned(),
            "user acme hb-secret".to_owned(),
            format!("root acme blake3:{hash}"),
            format!("user acme blake3:{hash} secret=1"),
            format!("user ac/me blake3:{hash}"),
            format!("user acme blake3:{hash} requests_per_min=1 secret"),
            "user acme blake3:secret".to_owned(),
        ];
        for line in cases {
            let error = KeyFile::parse(&format!("# ok\n{line}\n"), Path::new("f")).unwrap_err().to_string();
            assert!(error.contains("line 2") && !error.contains("secret"), "{line}: {error}");
        }
    }
}
