//! Adapter files of a remote gateway, stored here while its connection lasts.
//!
//! ```text
//! DIRECTORY/                    private directory of this server
//!     0/  1/  ...               one for each connection, with a number of this server
//!         adapter_config.json, adapter_model.safetensors     or: adapter.gguf
//! ```
//!
//! A loaded adapter is in memory, so its files are not needed any more, and no store has to be kept. Files
//! are not synced: the next start removes what a crash left.

use std::{
    collections::BTreeSet,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use shmproto::remote_executor::{DIGEST_BYTES, FileName, RemoteReply, StagedFile};
use tokio::{
    fs::OpenOptions,
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::server::TlsStream;

use super::{GatewayAccess, refuse, reply};

/// Maximum size of a configuration, as in the gateway's store.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum time that files are lent, longer than any normal load.
const MAX_LENT_FOR: Duration = Duration::from_secs(600);

/// Creates the directory, empty and accessible only to this user.
pub(super) fn clear(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

#[derive(Debug, thiserror::Error)]
enum StagingError {
    #[error("an adapter must have one or two files, each once")]
    Files,
    #[error("{name} has {bytes} bytes, and the limit of this executor is {most} (--max-adapter-file-bytes)")]
    TooLarge { name: &'static str, bytes: u64, most: u64 },
    #[error("the received files do not match their hash; load the adapter again")]
    Digest,
    #[error("no data arrived for {0:?}")]
    Stalled(Duration),
    #[error("the connection ended in the middle of a file")]
    Cut(#[source] io::Error),
    #[error("the executor cannot store the adapter's files ({0}); check its disk")]
    Disk(#[source] io::Error),
}

/// Directory of lent files, which is removed when this is dropped.
#[derive(Debug)]
struct StagedDirectory(PathBuf);

impl StagedDirectory {
    fn below(directory: &Path) -> io::Result<Self> {
        static PLACES: AtomicU64 = AtomicU64::new(0);
        let path = directory.join(PLACES.fetch_add(1, Relaxed).to_string());
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// Returns the path to load: PEFT's directory, or the single GGUF file.
    fn path(&self, files: &[StagedFile]) -> String {
        let is_gguf = files.iter().any(|file| file.name == FileName::Gguf);
        let path = if is_gguf { self.0.join(FileName::Gguf.text()) } else { self.0.clone() };
        path.display().to_string()
    }
}

impl Drop for StagedDirectory {
    fn drop(&mut self) {
        // The next start removes files that are left.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Receives the files, reports their path, and keeps them until the gateway closes the connection.
pub(super) async fn serve(
    mut stream: TlsStream<TcpStream>,
    files: &[StagedFile],
    access: &GatewayAccess,
    patience: Duration,
) -> io::Result<()> {
    match receive_files(&mut stream, files, access, patience).await {
        Ok(place) => {
            reply(&mut stream, &RemoteReply::Lent(place.path(files))).await?;
            // The gateway sends no more: the end of the connection ends the lending.
            let _ = timeout(MAX_LENT_FOR, stream.read_u8()).await;
            Ok(())
        }
        Err(error) => {
            let why = error.to_string();
            refuse(stream, why.clone()).await;
            Err(io::Error::other(why))
        }
    }
}

async fn receive_files(
    stream: &mut TlsStream<TcpStream>,
    files: &[StagedFile],
    access: &GatewayAccess,
    patience: Duration,
) -> Result<StagedDirectory, StagingError> {
    check(files, access.max_file_bytes)?;
    let place = StagedDirectory::below(&access.lent).map_err(StagingError::Disk)?;
    reply(stream, &RemoteReply::Admitted).await.map_err(StagingError::Cut)?;
    let mut hasher = blake3::Hasher::new();
    for file in files {
        take_one(stream, *file, &place, &mut hasher, patience).await?;
    }
    let mut digest = [0; DIGEST_BYTES];
    let came = timeout(patience, stream.read_exact(&mut digest)).await;
    came.map_err(|_| StagingError::Stalled(patience))?.map_err(StagingError::Cut)?;
    if digest == *hasher.finalize().as_bytes() { Ok(place) } else { Err(StagingError::Digest) }
}

fn check(files: &[StagedFile], max_file_bytes: u64) -> Result<(), StagingError> {
    let names: BTreeSet<FileName> = files.iter().map(|file| file.name).collect();
    let is_adapter = [&[FileName::Config, FileName::Weights][..], &[FileName::Gguf]];
    if !is_adapter.iter().any(|wanted| names.iter().eq(*wanted)) || names.len() != files.len() {
        return Err(StagingError::Files);
    }
    for StagedFile { name, bytes } in files {
        let most = if *name == FileName::Config { MAX_CONFIG_BYTES } else { max_file_bytes };
        if *bytes > most {
            return Err(StagingError::TooLarge { name: name.text(), bytes: *bytes, most });
        }
    }
    Ok(())
}

async fn take_one(
    stream: &mut TlsStream<TcpStream>,
    file: StagedFile,
    place: &StagedDirectory,
    hasher: &mut blake3::Hasher,
    patience: Duration,
) -> Result<(), StagingError> {
    let path = place.0.join(file.name.text());
    let options = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).await;
    let mut copy = options.map_err(StagingError::Disk)?;
    let (mut left, mut chunk) = (file.bytes, vec![0; CHUNK_BYTES]);
    while left > 0 {
        let wanted = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        let came = timeout(patience, stream.read(&mut chunk[..wanted])).await;
        let count = came.map_err(|_| StagingError::Stalled(patience))?.map_err(StagingError::Cut)?;
        if count == 0 {
            return Err(StagingError::Cut(io::ErrorKind::UnexpectedEof.into()));
        }
        hasher.update(&chunk[..count]);
        copy.write_all(&chunk[..count]).await.map_err(StagingError::Disk)?;
        left -= count as u64;
    }
    // `flush` waits for writes in the background.
    copy.flush().await.map_err(StagingError::Disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: FileName, bytes: u64) -> StagedFile {
        StagedFile { name, bytes }
    }

    #[test]
    fn an_adapter_is_two_files_of_peft_or_one_and_none_too_large() {
        let config = file(FileName::Config, 1);
        let fits = |files: &[StagedFile]| check(files, 10);
        fits(&[config, file(FileName::Weights, 10)]).unwrap();
        fits(&[file(FileName::Gguf, 10)]).unwrap();
        for wrong in [&[][..], &[config], &[config, config], &[config, file(FileName::Gguf, 1)]] {
            assert!(matches!(fits(wrong), Err(StagingError::Files)), "{wrong:?}");
        }
        let large = [
            [config, file(FileName::Weights, 11)],
            [file(FileName::Config, MAX_CONFIG_BYTES + 1), file(FileName::Weights, 1)],
        ];
        for files in large {
            assert!(matches!(fits(&files), Err(StagingError::TooLarge { .. })), "{files:?}");
        }
    }

    #[test]
    fn what_a_crash_left_behind_is_removed_and_places_go_with_their_owners() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("lent");
        fs::create_dir_all(directory.join("7")).unwrap();
        clear(&directory).unwrap();
        let place = StagedDirectory::below(&directory).unwrap();
        fs::write(place.0.join("adapter.gguf"), "bytes").unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        assert!(place.path(&[file(FileName::Gguf, 5)]).ends_with("/adapter.gguf"));
        drop(place);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }
}
