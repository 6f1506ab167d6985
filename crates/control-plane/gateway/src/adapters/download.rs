//! Files of a registered adapter for download: a PEFT directory, or one GGUF file.

use std::{fs, io, path::PathBuf, sync::Arc};

use super::{entry::AdapterEntry, errors::ResidencyError, registry::Registry, store::CacheHold};

/// The files of an adapter, kept on this host until this is dropped.
#[derive(Debug)]
pub(crate) struct Download {
    directory: PathBuf,
    /// Names and sizes in bytes, sorted by name.
    pub(crate) files: Vec<(String, u64)>,
    _held: CacheHold,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The files could not be fetched from the bucket.
    #[error(transparent)]
    Files(#[from] ResidencyError),
    #[error("cannot read the files of '{name}': {source}; the adapter may have been unloaded")]
    Read { name: String, source: io::Error },
}

impl Registry {
    /// Returns the files of an adapter, and fetches them to this host if necessary.
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
    /// Opens a file by its name and returns its size in bytes; `None` if there is no such file.
    pub(crate) async fn open(&self, name: &str) -> io::Result<Option<(tokio::fs::File, u64)>> {
        let Some((name, bytes)) = self.files.iter().find(|(own, _)| own == name) else { return Ok(None) };
        Ok(Some((tokio::fs::File::open(self.directory.join(name)).await?, *bytes)))
    }
}
