//! Opens adapter files by paths that came over HTTP, without ever leaving the adapter root.
//!
//! The kernel keeps the bounds (`openat2` with `RESOLVE_BENEATH`), so no link can be swapped between a check
//! and its use. Links are followed if they stay beneath the root. Only regular files are opened: the check is
//! made on the open descriptor, and `O_NONBLOCK` keeps a FIFO from blocking the thread. A hard link is an
//! ordinary file and is read like any other.

use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2},
    io::Errno,
};

/// Configuration file in PEFT's format.
pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
/// Weight file in PEFT's format.
pub(crate) const WEIGHT_FILE: &str = "adapter_model.safetensors";
/// Name of every GGUF adapter in the store, regardless of its original name.
pub(crate) const GGUF_FILE: &str = "adapter.gguf";

/// Names of weights as pickles, which are never read.
pub(super) const PICKLES: [&str; 3] = ["adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"];

pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 20;
const MAX_PATH_BYTES: usize = 4095;
/// Maximum number of directory entries that are searched for a GGUF file.
const MAX_ENTRIES: usize = 4096;
/// How often a lookup is retried that raced with a rename somewhere in the tree.
const MAX_RACES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The path leads, or could lead, out of the root.
    #[error(
        "'{}' is not inside the adapter root ({reason}); copy the adapter into the root, or use another \
         --adapter-root", path.display()
    )]
    Forbidden { path: PathBuf, reason: &'static str },
    #[error(
        "cannot open '{}' ({reason}); give the directory that contains {CONFIG_FILE} and {WEIGHT_FILE}, \
         or a .gguf file", path.display()
    )]
    Unreadable { path: PathBuf, reason: Errno },
    /// The file is a FIFO, a device or a socket.
    #[error("'{}' is not a regular file; adapters are read from regular files only", .0.display())]
    NotAFile(PathBuf),
    #[error(
        "'{}' is a pickle, which may run code when it is read; convert it to {WEIGHT_FILE} (in PEFT: \
         save_pretrained(..., safe_serialization=True))", .0.display()
    )]
    Pickle(PathBuf),
    #[error("'{}' has no adapter: {reason}", path.display())]
    NoAdapter { path: PathBuf, reason: &'static str },
}

#[derive(Debug)]
pub(crate) struct AdapterFile {
    /// Name of the file in the store.
    pub name: &'static str,
    pub file: File,
    /// Limit in bytes; `None` means the limit for weights.
    pub max_bytes: Option<u64>,
}

/// Directory or file with an adapter.
#[derive(Debug)]
pub(crate) struct AdapterLocation {
    /// Directory to which `inside` is relative.
    base: OwnedFd,
    inside: PathBuf,
    resolve: ResolveFlags,
    /// Path as requested, for errors.
    asked: PathBuf,
}

impl AdapterLocation {
    /// Returns the location `asked` inside `root`. A relative path is relative to `root`, which must be
    /// absolute and without links.
    ///
    /// # Errors
    /// If the path itself shows that it is not inside the root, or the root cannot be opened.
    pub(crate) fn inside(root: &Path, asked: &Path) -> Result<Self, JailError> {
        let forbidden = |reason| JailError::Forbidden { path: shortened(asked), reason };
        let bytes = asked.as_os_str().as_encoded_bytes();
        if bytes.len() > MAX_PATH_BYTES {
            return Err(forbidden("it is longer than 4095 bytes"));
        }
        if bytes.contains(&0) {
            return Err(forbidden("it contains a NUL"));
        }
        if asked.components().any(|part| part == Component::ParentDir) {
            return Err(forbidden("it contains '..'"));
        }
        let inside = match asked.strip_prefix(root) {
            Ok(inside) => inside.to_owned(),
            Err(_) if asked.is_relative() => asked.to_owned(),
            // The path may name the root differently; the kernel checks the result again.
            Err(_) => {
                let real = asked.canonicalize().ok();
                let inside = real.as_deref().and_then(|real| real.strip_prefix(root).ok());
                inside.ok_or_else(|| forbidden("it is outside the root"))?.to_owned()
            }
        };
        let base = open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|reason| JailError::Unreadable { path: root.to_owned(), reason })?;
        let inside = if inside.as_os_str().is_empty() { PathBuf::from(".") } else { inside };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        Ok(Self { base, inside, resolve, asked: asked.to_owned() })
    }

    /// Returns a location outside of any root, for paths that the operator gave on the command line.
    ///
    /// # Errors
    /// If the working directory cannot be opened.
    pub(crate) fn anywhere(asked: &Path) -> Result<Self, JailError> {
        let base = open(".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|reason| JailError::Unreadable { path: asked.to_owned(), reason })?;
        let resolve = ResolveFlags::NO_MAGICLINKS;
        Ok(Self { base, inside: asked.to_owned(), resolve, asked: asked.to_owned() })
    }

    /// Returns the same location, named `asked` in errors.
    #[must_use]
    pub(super) fn displayed_as(self, asked: &Path) -> Self {
        Self { asked: asked.to_owned(), ..self }
    }

    /// Opens the files of the adapter: PEFT's two files in a directory, or one GGUF file.
    ///
    /// # Errors
    /// If there is no adapter, or its files may not be read; see [`JailError`].
    pub(crate) fn pieces(&self) -> Result<Vec<AdapterFile>, JailError> {
        let found = self.open(Path::new(""), OFlags::PATH)?;
        let kind = fstat(&found).map_err(|reason| self.unreadable(Path::new(""), reason))?.st_mode;
        match FileType::from_raw_mode(kind) {
            FileType::Directory => self.of_directory(),
            FileType::RegularFile => self.of_file(),
            _ => Err(JailError::NotAFile(self.asked.clone())),
        }
    }

    /// Returns the file `name` beside the adapter's own files, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read or is longer than `limit`.
    pub(super) fn beside(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match self.regular_if_there(Path::new(name)) {
            Ok(Some(file)) => file,
            // A GGUF file has no text files beside it.
            Ok(None) | Err(JailError::Unreadable { reason: Errno::NOTDIR, .. }) => return Ok(None),
            Err(error) => return Err(io::Error::other(error)),
        };
        let mut bytes = Vec::new();
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit {
            return Err(io::Error::other(format!("it has more than {limit} bytes")));
        }
        Ok(Some(bytes))
    }

    /// Opens the file `name` in the directory; `None` if there is no such file.
    ///
    /// # Errors
    /// If the file may not be read.
    pub(super) fn file(&self, name: &str) -> Result<Option<File>, JailError> {
        self.regular_if_there(Path::new(name))
    }

    fn of_directory(&self) -> Result<Vec<AdapterFile>, JailError> {
        let Some(config) = self.regular_if_there(Path::new(CONFIG_FILE))? else {
            return self.of_gguf_directory();
        };
        let Some(weights) = self.regular_if_there(Path::new(WEIGHT_FILE))? else {
            return Err(self.without_weights());
        };
        Ok(vec![
            AdapterFile { name: CONFIG_FILE, file: config, max_bytes: Some(MAX_CONFIG_BYTES) },
            AdapterFile { name: WEIGHT_FILE, file: weights, max_bytes: None },
        ])
    }

    fn without_weights(&self) -> JailError {
        for pickle in PICKLES {
            if self.open(Path::new(pickle), OFlags::PATH).is_ok() {
                return JailError::Pickle(self.asked.join(pickle));
            }
        }
        JailError::NoAdapter { path: self.asked.clone(), reason: "adapter_model.safetensors is missing" }
    }

    fn of_gguf_directory(&self) -> Result<Vec<AdapterFile>, JailError> {
        let directory = self.open(Path::new(""), OFlags::RDONLY | OFlags::DIRECTORY)?;
        let entries = Dir::read_from(&directory).map_err(|reason| self.unreadable(Path::new(""), reason))?;
        let names = entries.take(MAX_ENTRIES).filter_map(Result::ok);
        let names = names.map(|entry| PathBuf::from(entry.file_name().to_string_lossy().into_owned()));
        let mut found = names.filter(|name| name.extension().is_some_and(|end| end == "gguf"));
        let none = |reason| JailError::NoAdapter { path: self.asked.clone(), reason };
        match (found.next(), found.next()) {
            (Some(name), None) => Ok(vec![gguf(self.regular(&name)?)]),
            (Some(_), Some(_)) => Err(none("it has several .gguf files; give the path of one of them")),
            (None, _) => Err(none("adapter_config.json is missing, and there is no .gguf file")),
        }
    }

    fn of_file(&self) -> Result<Vec<AdapterFile>, JailError> {
        let ending = self.inside.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        match ending {
            "gguf" => Ok(vec![gguf(self.regular(Path::new(""))?)]),
            "bin" | "pt" | "pth" | "pkl" => Err(JailError::Pickle(self.asked.clone())),
            _ => Err(JailError::NoAdapter {
                path: self.asked.clone(),
                reason: "it is a file, but not a .gguf file; give its directory",
            }),
        }
    }

    fn regular_if_there(&self, name: &Path) -> Result<Option<File>, JailError> {
        match self.regular(name) {
            Ok(file) => Ok(Some(file)),
            Err(JailError::Unreadable { reason: Errno::NOENT, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn regular(&self, name: &Path) -> Result<File, JailError> {
        let opened = self.open(name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let mode = fstat(&opened).map_err(|reason| self.unreadable(name, reason))?.st_mode;
        if FileType::from_raw_mode(mode) == FileType::RegularFile {
            Ok(File::from(opened))
        } else {
            Err(JailError::NotAFile(self.asked.join(name)))
        }
    }

    /// Opens from the base, not from a directory, because links may lead elsewhere beneath the root.
    fn open(&self, name: &Path, flags: OFlags) -> Result<OwnedFd, JailError> {
        let path = if name.as_os_str().is_empty() { self.inside.clone() } else { self.inside.join(name) };
        let mut races = 0;
        loop {
            match openat2(&self.base, &path, flags | OFlags::CLOEXEC, Mode::empty(), self.resolve) {
                Ok(opened) => return Ok(opened),
                Err(Errno::AGAIN | Errno::INTR) if races < MAX_RACES => races += 1,
                Err(reason) => return Err(self.unreadable(name, reason)),
            }
        }
    }

    fn unreadable(&self, name: &Path, reason: Errno) -> JailError {
        let path = if name.as_os_str().is_empty() { self.asked.clone() } else { self.asked.join(name) };
        match reason {
            Errno::XDEV | Errno::AGAIN => {
                JailError::Forbidden { path, reason: "a link in it leads out of the root" }
            }
            // `openat2` reports these errors for sockets and for devices without a driver.
            Errno::NXIO | Errno::NODEV => JailError::NotAFile(path),
            reason => JailError::Unreadable { path, reason },
        }
    }
}

fn gguf(file: File) -> AdapterFile {
    AdapterFile { name: GGUF_FILE, file, max_bytes: None }
}

/// Shortens a path to 200 characters, so that errors do not repeat names of 4 KiB.
fn shortened(path: &Path) -> PathBuf {
    let text = path.display().to_string();
    if text.chars().count() <= 200 {
        text.into()
    } else {
        text.chars().take(200).chain(['…']).collect::<String>().into()
    }
}
