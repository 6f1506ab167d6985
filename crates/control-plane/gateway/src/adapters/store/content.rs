//! Content ids: a hash of the owner and of all files of an adapter.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use types::TenantId;

use crate::adapters::jail::{CONFIG_FILE, GGUF_FILE, WEIGHT_FILE};

pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// H(owner, names, lengths and bytes of an adapter's files).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentId(pub [u8; 32]);

impl ContentId {
    pub(super) fn named(name: &str) -> Option<Self> {
        blake3::Hash::from_hex(name).ok().map(|hash| Self(*hash.as_bytes()))
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentId({self:.12})")
    }
}

#[derive(Debug)]
pub(super) struct ContentHasher(blake3::Hasher);

impl ContentHasher {
    /// Creates a hasher for an adapter of `owner` with `files` files.
    pub(super) fn new(owner: TenantId, files: usize) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter files v1");
        hasher.update(&owner.0).update(&(files as u64).to_le_bytes());
        Self(hasher)
    }

    /// Like [`ContentHasher::new`], for an ephemeral adapter, which shares no files with a durable one.
    pub(super) fn ephemeral(owner: TenantId, files: usize) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 ephemeral adapter files v1");
        hasher.update(&owner.0).update(&(files as u64).to_le_bytes());
        Self(hasher)
    }

    /// Adds the next file: its name, its length in bytes, and the hash of its bytes.
    pub(super) fn add(&mut self, name: &str, bytes: u64, hash: &blake3::Hash) {
        self.0.update(name.as_bytes()).update(&[0]).update(&bytes.to_le_bytes());
        self.0.update(hash.as_bytes());
    }

    pub(super) fn finish(&self) -> ContentId {
        ContentId(*self.0.finalize().as_bytes())
    }
}

/// Returns the names of the files in `directory`, in the order in which they are hashed.
pub(super) fn names(directory: &Path) -> &'static [&'static str] {
    if directory.join(GGUF_FILE).exists() { &[GGUF_FILE] } else { &[CONFIG_FILE, WEIGHT_FILE] }
}

/// Returns the content id of the files in `directory` for `owner`, and their total bytes. May block.
pub(super) fn of_directory(directory: &Path, owner: TenantId) -> io::Result<(ContentId, u64)> {
    let names = names(directory);
    let (mut hasher, mut sum, mut chunk) = (ContentHasher::new(owner, names.len()), 0, vec![0; CHUNK_BYTES]);
    for name in names {
        let (mut file, mut own, mut bytes) = (File::open(directory.join(name))?, blake3::Hasher::new(), 0);
        loop {
            let count = file.read(&mut chunk)?;
            if count == 0 {
                break;
            }
            own.update(&chunk[..count]);
            bytes += count as u64;
        }
        hasher.add(name, bytes, &own.finalize());
        sum += bytes;
    }
    Ok((hasher.finish(), sum))
}
