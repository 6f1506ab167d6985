//! Uploads adapter files to an executor that does not share the store.
//!
//! The files stay under a path of the executor until their connection ends, which is long enough to load
//! them. A loaded adapter needs no files. After an eviction the files are uploaded again, as they would be
//! read from a disk again.

use std::{path::Path, time::Duration};

use shmproto::remote_executor::{FileName, RemoteReply, RemoteRequest, StagedFile};
use tokio::{
    fs::{self, File},
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use super::{RemoteEndpoint, RemoteError, TlsTunnel};

const CHUNK_BYTES: usize = 256 << 10;
/// Timeout for the reason of a refusal, after a failed upload.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Files that an executor can load.
#[derive(Debug)]
pub struct StagedFiles {
    /// Path of the files on the executor's host.
    pub(in crate::executor) path: String,
    /// Path of the files in messages to the client; `None` if it is `path`.
    display_path: Option<String>,
    /// Connection that keeps the files on the other host; `None` on this host.
    _connection: Option<TlsTunnel>,
}

impl StagedFiles {
    /// Returns files in the store of this host.
    pub(in crate::executor) fn here(path: &Path) -> Self {
        Self { path: path.display().to_string(), display_path: None, _connection: None }
    }

    /// Returns the same files, named `display_path` in errors, which must not reveal the store's path.
    #[must_use]
    pub(crate) fn displayed_as(self, display_path: &Path) -> Self {
        Self { display_path: Some(display_path.display().to_string()), ..self }
    }

    /// Replaces the path of the files in an executor's message by the client's name for them.
    pub(in crate::executor) fn with_display_path(&self, message: &str) -> String {
        self.display_path
            .as_ref()
            .map_or_else(|| message.to_owned(), |display_path| message.replace(&self.path, display_path))
    }
}

impl RemoteEndpoint {
    /// Uploads the adapter at `path`. Each step has the timeout `patience`.
    pub(in crate::executor) async fn upload_files(
        &self,
        path: &Path,
        patience: Duration,
    ) -> Result<StagedFiles, RemoteError> {
        let files = files(path).await.map_err(RemoteError::File)?;
        let silent = |_| RemoteError::Silent(self.0.to.clone());
        let mut stream =
            timeout(patience, self.open(&RemoteRequest::Lend(files.clone()))).await.map_err(silent)??;
        if let Err(error) = self.send(&mut stream, path, &files, patience).await {
            return Err(match timeout(LAST_WORD, self.answer(&mut stream)).await {
                Ok(Ok(RemoteReply::Refused(why))) => RemoteError::Refused { address: self.0.to.clone(), why },
                _ => error,
            });
        }
        match timeout(patience, self.answer(&mut stream)).await.map_err(silent)?? {
            RemoteReply::Lent(path) => {
                Ok(StagedFiles { path, display_path: None, _connection: Some(stream) })
            }
            RemoteReply::Refused(why) => Err(RemoteError::Refused { address: self.0.to.clone(), why }),
            RemoteReply::Admitted => Err(RemoteError::Protocol(self.0.to.clone())),
        }
    }

    /// Sends the bytes of the files, and their common digest.
    async fn send(
        &self,
        stream: &mut TlsTunnel,
        path: &Path,
        files: &[StagedFile],
        patience: Duration,
    ) -> Result<(), RemoteError> {
        let silent = |_| RemoteError::Silent(self.0.to.clone());
        let (mut hasher, mut chunk) = (blake3::Hasher::new(), vec![0; CHUNK_BYTES]);
        for file in files {
            let mut rest =
                File::open(place(path, file.name)).await.map_err(RemoteError::File)?.take(file.bytes);
            loop {
                let count = rest.read(&mut chunk).await.map_err(RemoteError::File)?;
                if count == 0 {
                    break;
                }
                hasher.update(&chunk[..count]);
                let sent = timeout(patience, stream.write_all(&chunk[..count])).await.map_err(silent)?;
                sent.map_err(|cause| self.failed(cause))?;
            }
        }
        let digest = *hasher.finalize().as_bytes();
        timeout(patience, self.write_bytes(stream, &digest)).await.map_err(silent)?
    }
}

/// Returns the files of the adapter at `path`: a PEFT directory, or one GGUF file.
async fn files(path: &Path) -> std::io::Result<Vec<StagedFile>> {
    let names = match fs::metadata(path).await?.is_dir() {
        true => &[FileName::Config, FileName::Weights][..],
        false => &[FileName::Gguf],
    };
    let mut files = Vec::new();
    for name in names {
        files.push(StagedFile { name: *name, bytes: fs::metadata(place(path, *name)).await?.len() });
    }
    Ok(files)
}

fn place(path: &Path, name: FileName) -> std::path::PathBuf {
    if name == FileName::Gguf { path.to_owned() } else { path.join(name.text()) }
}
