//! Files of an adapter that arrive over HTTP, collected in a directory from which they can be loaded.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use text::adapter_text;
use tokio::{
    fs::{File, OpenOptions},
    io::AsyncWriteExt as _,
};

use super::{AdapterStore, StoreError, Temporary, copy::incoming_below, failed};
use crate::adapters::jail::{
    AdapterLocation, CONFIG_FILE, GGUF_FILE, JailError, MAX_CONFIG_BYTES, WEIGHT_FILE,
};

/// The files received so far. Dropping it removes them; remains after a crash are removed at the next start.
#[derive(Debug)]
pub struct IncomingAdapter {
    directory: Temporary,
    max_file_bytes: u64,
}

#[derive(Debug)]
pub struct IncomingFile {
    name: &'static str,
    path: PathBuf,
    file: File,
    bytes: u64,
    limit_bytes: u64,
}

impl AdapterStore {
    /// Creates a directory for the files of an adapter.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn receive(&self) -> Result<IncomingAdapter, StoreError> {
        let directory = incoming_below(&self.directory)?;
        Ok(IncomingAdapter { directory, max_file_bytes: self.max_file_bytes })
    }
}

impl IncomingAdapter {
    /// Begins the file with the name `name`, as given in the upload.
    ///
    /// # Errors
    /// If adapters have no such file, or the name occurs twice.
    pub async fn begin(&self, name: &str) -> Result<IncomingFile, StoreError> {
        let (name, limit_bytes) = match name {
            CONFIG_FILE => (CONFIG_FILE, MAX_CONFIG_BYTES),
            WEIGHT_FILE => (WEIGHT_FILE, self.max_file_bytes),
            name if Path::new(name).extension().is_some_and(|ending| ending == "gguf") => {
                (GGUF_FILE, self.max_file_bytes)
            }
            other => match adapter_text::FILES.into_iter().find(|(known, _)| *known == other) {
                Some((name, limit)) => (name, limit),
                None => return Err(no_part(other, "is not a file of an adapter")),
            },
        };
        let path = self.directory.0.join(name);
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).await;
        let file = match created {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(no_part(name, "appears twice"));
            }
            created => created.map_err(failed("creating", &path))?,
        };
        Ok(IncomingFile { name, path, file, bytes: 0, limit_bytes })
    }

    pub(in crate::adapters) fn place(&self) -> Result<AdapterLocation, JailError> {
        AdapterLocation::anywhere(&self.directory.0)
    }
}

impl IncomingFile {
    /// # Errors
    /// If the file exceeds its limit, or the system refuses.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        if self.bytes > self.limit_bytes {
            return Err(StoreError::TooLarge { name: self.name, limit_bytes: self.limit_bytes });
        }
        self.file.write_all(bytes).await.map_err(failed("writing", &self.path))
    }

    /// Ends the file after its last bytes.
    ///
    /// # Errors
    /// If the system refuses.
    pub async fn end(mut self) -> Result<(), StoreError> {
        self.file.flush().await.map_err(failed("writing", &self.path))
    }
}

fn no_part(name: &str, reason: &'static str) -> StoreError {
    StoreError::NoPart { name: name.chars().take(200).collect(), reason }
}
