//! An adapter's files, brought to an executor that does not share our store.
//!
//! They lie there under a path of the executor's as long as the connection lasts that brought them: long enough to be loaded. An
//! adapter that is loaded needs no files, and one that comes back is brought again, as it would be read again from a disk.

use std::{path::Path, time::Duration};

use shmproto::remote_executor::{FileName, RemoteReply, RemoteRequest, StagedFile};
use tokio::{
    fs::{self, File},
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use super::{RemoteEndpoint, RemoteError, TlsTunnel};

/// Bytes sent at once.
const CHUNK_BYTES: usize = 256 << 10;
/// How long it is waited for why somebody hung up.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Files that an executor may load.
#[derive(Debug)]
pub struct StagedFiles {
    /// Where they are for the executor.
    pub(in crate::executor) path: String,
    /// What whoever asked for them calls them, for messages; `None` is the same.
    told: Option<String>,
    /// What keeps them there; `None` on this host.
    _connection: Option<TlsTunnel>,
}

impl StagedFiles {
    /// Files in the store of this host.
    pub(in crate::executor) fn here(path: &Path) -> Self {
        Self { path: path.display().to_string(), told: None, _connection: None }
    }

    /// The same files, called `told` in errors: where the store of a host lies is nobody's business.
    #[must_use]
    pub fn told_as(self, told: &Path) -> Self {
        Self { told: Some(told.display().to_string()), ..self }
    }

    /// The message of an executor in the words of whoever asked for the files.
    pub(in crate::executor) fn retold(&self, message: &str) -> String {
        self.told.as_ref().map_or_else(|| message.to_owned(), |told| message.replace(&self.path, told))
    }
}

impl RemoteEndpoint {
    /// Brings the adapter at `path` there. Each step may take as long as `patience`.
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
            RemoteReply::Lent(path) => Ok(StagedFiles { path, told: None, _connection: Some(stream) }),
            RemoteReply::Refused(why) => Err(RemoteError::Refused { address: self.0.to.clone(), why }),
            RemoteReply::Admitted => Err(RemoteError::Protocol(self.0.to.clone())),
        }
    }

    /// Sends the files' bytes, and the digest of all of them.
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

/// The files of the adapter at `path`: PEFT's directory, or a GGUF file.
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
