//! Editing of a key file.
//!
//! An edit keeps all lines that it does not change, comments included, and replaces the file atomically: a
//! reader sees the old file or the new one, also after a power failure. A lock serializes editors, and no
//! editor leaves a file that readers would refuse.

use std::{
    fmt,
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustix::fs::{FlockOperation, Gid, Uid, fchown, flock};

use crate::keys::{
    Key, KeyFileError,
    file::{KeyLine, parse, read},
};

const HEADER: &str =
    "# Keys of the gateway: ROLE NAME HASH [requests_per_min=N]. `holobiont key` edits this file.\n";

/// The lines of a key file, open for changes.
#[derive(Debug)]
pub struct KeyFileEdit(Vec<KeyLine>);

impl KeyFileEdit {
    /// Reads a key file, even if it holds no key.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or a line does not parse.
    pub fn read(path: &Path) -> Result<Self, KeyFileError> {
        Ok(Self(parse(&read(path)?, path)?))
    }

    /// Reads the file, applies `change`, and replaces the file. A missing file counts as empty.
    ///
    /// # Errors
    /// Fails, leaving the file unchanged, if it cannot be read or written or would not be a valid key file.
    pub fn edit<T>(path: &Path, change: impl FnOnce(&mut Self) -> T) -> Result<T, KeyFileError> {
        let failed = |reason| KeyFileError::Write { path: path.to_owned(), reason };
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let _turn = take_turn(path).map_err(failed)?;
        let mut draft = match Self::read(path) {
            Err(KeyFileError::Read { reason, .. }) if reason.kind() == io::ErrorKind::NotFound => {
                Self(parse(HEADER, path)?)
            }
            draft => draft?,
        };
        let result = change(&mut draft);
        let text = draft.to_string();
        parse(&text, path)?;
        write(&text, path, directory).map_err(failed)?;
        Ok(result)
    }

    /// Replaces the keys of the file by those of `lines`; comments stay. Returns false, and writes nothing,
    /// if the file already holds these keys.
    ///
    /// # Errors
    /// Fails if a line does not parse, or the file cannot be read or written. The file is unchanged then.
    pub fn write_keys(path: &Path, lines: &[String]) -> Result<bool, KeyFileError> {
        let wanted = Self(parse(&lines.join("\n"), path)?);
        if Self::read(path).is_ok_and(|there| there.keys().eq(wanted.keys())) {
            return Ok(false);
        }
        Self::edit(path, |draft| {
            draft.remove(|_| true);
            wanted.keys().for_each(|key| draft.push(key.clone()));
        })?;
        Ok(true)
    }

    /// Returns the keys in the file's order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.iter().filter_map(|line| match line {
            KeyLine::Key(key) => Some(key),
            KeyLine::Other(_) => None,
        })
    }

    /// Adds a key at the end.
    pub fn push(&mut self, key: Key) {
        self.0.push(KeyLine::Key(key));
    }

    /// Removes the keys for which `is_meant` is true, and returns their number.
    pub fn remove(&mut self, is_meant: impl Fn(&Key) -> bool) -> usize {
        let before = self.0.len();
        self.0.retain(|line| !matches!(line, KeyLine::Key(key) if is_meant(key)));
        before - self.0.len()
    }
}

impl fmt::Display for KeyFileEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| match line {
            KeyLine::Key(key) => writeln!(f, "{key}"),
            KeyLine::Other(text) => writeln!(f, "{text}"),
        })
    }
}

/// Replaces the file by a new one of mode 0600 with the same owner.
fn write(text: &str, path: &Path, directory: &Path) -> io::Result<()> {
    let mut new = tempfile::Builder::new().prefix(".api-keys-").tempfile_in(directory)?;
    new.write_all(text.as_bytes())?;
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

/// Waits until no other editor works. The lock is held until the returned file is dropped.
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
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::keys::{KeyFile, KeyHash, KeyRole, MAX_KEYS};

    fn key(tenant: &str, secret: &str) -> Key {
        let hash = KeyHash::of(secret.as_bytes());
        Key { hash, role: KeyRole::User, tenant: tenant.into(), requests_per_min: None }
    }

    #[test]
    fn a_new_file_is_private_and_comments_survive_edits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/api-keys");
        KeyFileEdit::edit(&path, |draft| draft.push(key("a", "1"))).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&path).unwrap() + "\n# mine\n";
        fs::write(&path, &text).unwrap();
        KeyFileEdit::edit(&path, |draft| draft.push(key("b", "2"))).unwrap();
        let removed = KeyFileEdit::edit(&path, |draft| draft.remove(|key| &*key.tenant == "a")).unwrap();
        assert_eq!(removed, 1);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(HEADER) && text.contains("# mine") && !text.contains("user a "), "{text}");
        assert_eq!(KeyFileEdit::read(&path).unwrap().keys().count(), 1);
    }

    #[test]
    fn a_file_is_made_to_hold_what_is_wanted_and_left_alone_if_it_does() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-keys");
        let (a, b) = (key("a", "1").to_string(), key("b", "2").to_string());
        assert!(KeyFileEdit::write_keys(&path, &[]).unwrap(), "a file without a key is a file");
        assert!(KeyFileEdit::write_keys(&path, &[a.clone(), b.clone()]).unwrap());
        assert!(!KeyFileEdit::write_keys(&path, &[a.clone(), b.clone()]).unwrap());
        let text = fs::read_to_string(&path).unwrap() + "# mine\n";
        fs::write(&path, text).unwrap();
        assert!(KeyFileEdit::write_keys(&path, std::slice::from_ref(&b)).unwrap(), "what was revoked goes");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("# mine") && text.contains(&b) && !text.contains(&a), "{text}");
        assert!(KeyFileEdit::write_keys(&path, &["nonsense".to_owned()]).is_err());
        assert_eq!(KeyFileEdit::read(&path).unwrap().keys().count(), 1);
    }

    #[test]
    fn editors_take_turns_and_none_loses_a_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-keys");
        std::thread::scope(|scope| {
            for editor in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    KeyFileEdit::edit(path, |draft| draft.push(key("a", &editor.to_string()))).unwrap();
                });
            }
        });
        assert_eq!(KeyFileEdit::read(&path).unwrap().keys().count(), 8);
    }

    #[test]
    fn an_edit_that_readers_would_refuse_leaves_the_file_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-keys");
        let all = |draft: &mut KeyFileEdit| (0..MAX_KEYS).for_each(|n| draft.push(key("a", &n.to_string())));
        KeyFileEdit::edit(&path, all).unwrap();
        let twice = KeyFileEdit::edit(&path, |draft| draft.push(key("b", "0"))).unwrap_err();
        assert!(twice.to_string().contains("same key"), "{twice}");
        let more = KeyFileEdit::edit(&path, |draft| draft.push(key("b", "new"))).unwrap_err();
        assert!(matches!(more, KeyFileError::TooMany(_)), "{more}");
        assert_eq!(KeyFile::open(&path).unwrap().1.len(), MAX_KEYS);
    }
}
