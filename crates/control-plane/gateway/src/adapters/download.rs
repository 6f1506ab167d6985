//! Files of a registered adapter, as people take them away: a PEFT directory, or one GGUF file.

use std::{fs, io, path::PathBuf, sync::Arc};

use super::{entry::AdapterEntry, errors::ResidencyError, registry::Registry, store::CacheHold};

/// The files of an adapter, on this host as long as this lives.
#[derive(Debug)]
pub(crate) struct Download {
    directory: PathBuf,
    /// Each name with its bytes, in the order of the names.
    pub(crate) files: Vec<(String, u64)>,
    _held: CacheHold,
}

/// Why files cannot be taken away.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The files do not come from the bucket.
    #[error(transparent)]
    Files(#[from] ResidencyError),
    /// The files cannot be read.
    #[error("the files of '{name}' cannot be read: {source}; the adapter may just have been unloaded")]
    Read {
        /// Of which adapter.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Registry {
    /// Brings the files of an adapter to this host, if they lie elsewhere.
    pub(crate) async fn download(&self, entry: &Arc<AdapterEntry>) -> Result<Download, DownloadError> {
        let (path, held) = self.files_of(entry).await?;
        let read = |source| DownloadError::Read { name: entry.record.name.clone(), source };
        let directory =
            if path.is_dir() { path } else { path.parent().map(PathBuf::from).unwrap_or_default() };
        let mut files = Vec::new();
        for file in fs::read_dir(&directory).map_err(read)? {
            let file = file.map_err(read)?;
            files.push((
                file.file_name().to_string_lossy().into_owned(),
                file.metadata().map_err(read)?.len(),
            ));
        }
        files.sort();
        Ok(Download { directory, files, _held: held })
    }
}

impl Download {
    /// Opens a file by its name, if there is one; returns its bytes too.
    pub(crate) async fn open(&self, name: &str) -> io::Result<Option<(tokio::fs::File, u64)>> {
        let Some((name, bytes)) = self.files.iter().find(|(own, _)| own == name) else { return Ok(None) };
        Ok(Some((tokio::fs::File::open(self.directory.join(name)).await?, *bytes)))
    }
}
