//! Copies the files of an adapter into the store, and hashes them meanwhile.

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use failpoint::FailpointOutcome;
use types::TenantId;

use super::{
    AdapterStore, INCOMING, Incoming, StoreError, Temporary,
    content::{CHUNK_BYTES, ContentHasher},
    failed, sync,
};
use crate::{
    adapters::jail::{AdapterFile, AdapterLocation},
    random::random_u64,
};

impl AdapterStore {
    /// Copies and hashes the adapter at `place`. The copy is on disk when this returns.
    ///
    /// # Errors
    /// If the adapter cannot be read, is too large, or does not fit the disk; nothing is left behind.
    pub(crate) fn copy(&self, place: &AdapterLocation, owner: TenantId) -> Result<Incoming, StoreError> {
        let pieces = place.pieces()?;
        let directory = incoming_below(&self.directory)?;
        failpoint::pass("gateway.copy_begun");
        let mut hasher = ContentHasher::new(owner, pieces.len());
        let copies = pieces.into_iter().map(|piece| self.copy_piece(piece, &directory.0, &mut hasher));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        failpoint::pass("gateway.copied_before_sync");
        let mut bytes = 0;
        for (path, copy) in copies {
            copy.sync_all().map_err(failed("syncing", &path))?;
            bytes += length(&copy, &path)?;
        }
        sync(&directory.0)?;
        Ok(Incoming { content: hasher.finish(), bytes, directory, reserved: None })
    }

    fn copy_piece(
        &self,
        mut piece: AdapterFile,
        directory: &Path,
        hasher: &mut ContentHasher,
    ) -> Result<(PathBuf, File), StoreError> {
        let path = directory.join(piece.name);
        let copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let mut copy = copy.map_err(failed("creating", &path))?;
        let limit_bytes = piece.max_bytes.unwrap_or(self.max_file_bytes);
        let mut own = blake3::Hasher::new();
        let (mut total_bytes, mut chunk) = (0u64, vec![0; CHUNK_BYTES]);
        loop {
            let count = match piece.file.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed("reading", Path::new(piece.name))(error)),
            };
            // Counted while reading, because the file may have grown since its length was read.
            total_bytes = total_bytes.saturating_add(count as u64);
            if total_bytes > limit_bytes {
                return Err(StoreError::TooLarge { name: piece.name, limit_bytes });
            }
            if failpoint::hit("gateway.copy_fails") == FailpointOutcome::Fail {
                return Err(StoreError::Full(ErrorKind::StorageFull.into()));
            }
            own.update(&chunk[..count]);
            copy.write_all(&chunk[..count]).map_err(failed("writing", &path))?;
        }
        hasher.add(piece.name, total_bytes, &own.finalize());
        Ok((path, copy))
    }
}

/// Creates a directory for incoming files.
pub(super) fn incoming_below(directory: &Path) -> Result<Temporary, StoreError> {
    let path = directory.join(format!("{INCOMING}{:016x}", random_u64()));
    DirBuilder::new().mode(0o700).create(&path).map_err(failed("creating", &path))?;
    Ok(Temporary(path))
}

fn length(file: &File, path: &Path) -> Result<u64, StoreError> {
    Ok(file.metadata().map_err(failed("reading", path))?.len())
}
