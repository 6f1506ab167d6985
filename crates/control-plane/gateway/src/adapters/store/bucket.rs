//! The bucket that many hosts share over the S3 protocol, or a directory that all hosts mount.
//!
//! ```text
//! PREFIX/<64 hexadecimal digits>/adapter_config.json, adapter_model.safetensors     or: adapter.gguf
//! PREFIX/training/...                                                               see `training::records`
//! ```
//!
//! Objects named by content never change, so they may be written twice and read in pieces. The caller checks
//! that the received bytes match the content id.

use std::{
    collections::HashMap,
    io::SeekFrom,
    path::Path as FilePath,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use axum::body::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use object_store::{
    BackoffConfig, GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, PutPayload, RetryConfig,
    WriteMultipart,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
};
use tokio::{
    fs::{File, OpenOptions},
    io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _},
    time::timeout,
};

use super::{
    address::{BucketAddress, BucketLocation},
    content::{self, ContentId},
    transport::{BucketTransport, PATIENCE},
};
use crate::adapters::jail::{CONFIG_FILE, GGUF_FILE, WEIGHT_FILE};

/// Maximum number of retries of a broken download without progress.
const ATTEMPTS: usize = 3;
/// Files longer than this are uploaded in parts of this size.
const PART_BYTES: usize = 8 << 20;
const FILES: [&str; 3] = [CONFIG_FILE, WEIGHT_FILE, GGUF_FILE];
/// Maximum number of concurrent part uploads.
const PARTS: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum BucketError {
    #[error("the bucket {address} cannot be used now ({reason})")]
    Refused { address: BucketAddress, reason: String },
    #[error("the bucket {address} has no file '{path}'")]
    Missing { address: BucketAddress, path: String },
    #[error("'{path}' in the bucket {address} has {found} bytes, not {bytes}: it was changed there")]
    Changed {
        address: BucketAddress,
        path: String,
        found: u64,
        /// Expected length in bytes.
        bytes: u64,
    },
    #[error("'{path}' in the bucket {address} has {bytes} bytes, more than --max-adapter-file-bytes allows")]
    TooLarge { address: BucketAddress, path: String, bytes: u64 },
    #[error("cannot read or write a local file of the store: {0}")]
    File(#[from] std::io::Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredContent {
    /// Total bytes of all files.
    pub(crate) bytes: u64,
    /// Time at which the last file was written.
    pub(crate) written: SystemTime,
}

#[derive(Debug)]
pub(crate) struct Bucket {
    address: BucketAddress,
    objects: Arc<dyn ObjectStore>,
}

impl Bucket {
    /// Opens the bucket at `address` without a request to it; a directory must exist.
    pub(crate) fn open(address: BucketAddress) -> Result<Self, BucketError> {
        let opened: object_store::Result<Arc<dyn ObjectStore>> = match &address.place {
            BucketLocation::Bucket { name, settings } => {
                s3(name, settings).map(|objects| Arc::new(objects) as _)
            }
            BucketLocation::Directory(path) => {
                let opened = LocalFileSystem::new_with_prefix(path);
                opened.map(|objects| Arc::new(objects.with_fsync(true).with_automatic_cleanup(true)) as _)
            }
        };
        let objects = opened.map_err(|error| refused(&address, &error))?;
        Ok(Self { address, objects })
    }

    pub(crate) fn address(&self) -> &BucketAddress {
        &self.address
    }

    pub(crate) async fn put(&self, name: &str, from: &FilePath) -> Result<(), BucketError> {
        self.send(&self.at(name), File::open(from).await?).await
    }

    /// Downloads the object `name` of `bytes` bytes to the file `to`, resuming after its existing bytes.
    pub(crate) async fn get(&self, name: &str, bytes: u64, to: &FilePath) -> Result<(), BucketError> {
        self.download_file(&self.at(name), bytes, to).await
    }

    /// Returns the bytes of the object `name`; `None` if there is no such object.
    pub(crate) async fn read(
        &self,
        name: &str,
    ) -> Result<Option<BoxStream<'static, Result<Bytes, BucketError>>>, BucketError> {
        let found = match self.objects.get(&self.at(name)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            found => found.map_err(|error| self.failed(error))?,
        };
        let address = self.address.clone();
        Ok(Some(found.into_stream().map_err(move |error| refused(&address, &error)).boxed()))
    }

    /// Removes the object `name`, if it exists.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), BucketError> {
        match self.objects.delete(&self.at(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Lists all contents, with their bytes and the time of their last write.
    pub(crate) async fn contents(&self) -> Result<HashMap<ContentId, StoredContent>, BucketError> {
        let prefix = Path::from(self.address.prefix());
        let mut found: HashMap<_, StoredContent> = HashMap::new();
        let mut listed = self.objects.list(Some(&prefix));
        while let Some(object) = listed.next().await {
            let object = object.map_err(|error| self.failed(error))?;
            let content = object
                .location
                .prefix_match(&prefix)
                .and_then(|mut inside| inside.next().and_then(|name| ContentId::named(name.as_ref())));
            let Some(content) = content else { continue };
            let written = SystemTime::from(object.last_modified);
            let lying = found.entry(content).or_insert(StoredContent { bytes: 0, written });
            lying.bytes += object.size;
            lying.written = lying.written.max(written);
        }
        Ok(found)
    }

    /// Time at which the last file of a content was written; `None` if the content does not exist.
    pub(crate) async fn written(&self, content: ContentId) -> Result<Option<SystemTime>, BucketError> {
        let mut last = None;
        for name in FILES {
            match self.objects.head(&self.path(content, name)).await {
                Ok(found) => last = last.max(Some(SystemTime::from(found.last_modified))),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(last)
    }

    /// Removes a content. The caller knows that no adapter refers to it.
    pub(crate) async fn remove(&self, content: ContentId) -> Result<(), BucketError> {
        for name in FILES {
            self.delete(&format!("{content}/{name}")).await?;
        }
        Ok(())
    }

    /// Writes, reads and removes a small test object.
    pub(super) async fn try_out(&self) -> Result<(), BucketError> {
        const PROBE: &[u8] = b"holobiont";
        let path = self.at(&format!("probe-{:016x}", crate::random::random_u64()));
        let asked = async {
            self.objects.put(&path, PutPayload::from_static(PROBE)).await?;
            let read = self.objects.get(&path).await?.bytes().await?;
            self.objects.delete(&path).await?;
            Ok::<_, object_store::Error>(read == PROBE)
        };
        match asked.await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let reason = "it returned other bytes than were written".to_owned();
                Err(BucketError::Refused { address: self.address.clone(), reason })
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Uploads the files in `directory`, and replaces existing ones, which may be corrupt.
    pub(super) async fn upload(&self, content: ContentId, directory: &FilePath) -> Result<(), BucketError> {
        for name in content::names(directory) {
            let file = File::open(directory.join(name)).await?;
            self.send(&self.path(content, name), file).await?;
        }
        Ok(())
    }

    async fn send(&self, path: &Path, mut file: File) -> Result<(), BucketError> {
        if file.metadata().await?.len() > PART_BYTES as u64 {
            return self.upload_parts(path, file).await;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).await?;
        self.objects.put(path, bytes.into()).await.map(drop).map_err(|error| self.failed(error))
    }

    async fn upload_parts(&self, path: &Path, mut file: File) -> Result<(), BucketError> {
        let failed = |error| self.failed(error);
        let upload = self.objects.put_multipart(path).await.map_err(failed)?;
        let mut parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
        let mut chunk = vec![0; content::CHUNK_BYTES];
        loop {
            let sent = match file.read(&mut chunk).await {
                Ok(0) => return parts.finish().await.map(drop).map_err(failed),
                Ok(count) => parts
                    .wait_for_capacity(PARTS)
                    .await
                    .map(|()| parts.write(&chunk[..count]))
                    .map_err(failed),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = sent {
                // Parts of an unfinished upload would cost storage.
                let _ = parts.abort().await;
                return Err(error);
            }
        }
    }

    /// Downloads an adapter's files into `directory`, and resumes after the bytes that are already there.
    pub(super) async fn download(
        &self,
        content: ContentId,
        directory: &FilePath,
        max_file_bytes: u64,
    ) -> Result<(), BucketError> {
        match self.bytes_of(content, CONFIG_FILE, max_file_bytes).await {
            Err(BucketError::Missing { .. }) => {
                let bytes = self.bytes_of(content, GGUF_FILE, max_file_bytes).await?;
                self.download_file(&self.path(content, GGUF_FILE), bytes, &directory.join(GGUF_FILE)).await
            }
            bytes => {
                self.download_file(&self.path(content, CONFIG_FILE), bytes?, &directory.join(CONFIG_FILE))
                    .await?;
                let bytes = self.bytes_of(content, WEIGHT_FILE, max_file_bytes).await?;
                self.download_file(&self.path(content, WEIGHT_FILE), bytes, &directory.join(WEIGHT_FILE))
                    .await
            }
        }
    }

    /// Returns the length of a file, and fails if it exceeds `limit`.
    async fn bytes_of(&self, content: ContentId, name: &str, limit: u64) -> Result<u64, BucketError> {
        let path = self.path(content, name);
        let bytes = self.objects.head(&path).await.map_err(|error| self.failed(error))?.size;
        if bytes > limit {
            return Err(BucketError::TooLarge {
                address: self.address.clone(),
                path: path.to_string(),
                bytes,
            });
        }
        Ok(bytes)
    }

    async fn download_file(&self, path: &Path, bytes: u64, to: &FilePath) -> Result<(), BucketError> {
        let mut file = OpenOptions::new();
        let mut file = file.create(true).write(true).truncate(false).open(to).await?;
        let mut have = file.metadata().await?.len();
        if have > bytes {
            file.set_len(0).await?;
            have = 0;
        }
        let mut attempts = 0;
        while have < bytes {
            let before = have;
            file.seek(SeekFrom::Start(have)).await?;
            let ended = self.append(path, &mut file, &mut have, bytes).await;
            file.flush().await?;
            attempts = if have > before { 0 } else { attempts + 1 };
            match ended {
                // A retry cannot help if the file was changed.
                Err(error @ BucketError::Changed { .. }) => return Err(error),
                Err(error) if attempts >= ATTEMPTS => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Downloads from byte `have` on, and advances `have`, until the file is complete or an error occurs.
    async fn append(
        &self,
        path: &Path,
        file: &mut File,
        have: &mut u64,
        bytes: u64,
    ) -> Result<(), BucketError> {
        let options = GetOptions { range: Some(GetRange::Bounded(*have..bytes)), ..GetOptions::default() };
        let found = self.objects.get_opts(path, options).await.map_err(|error| self.failed(error))?;
        if found.meta.size != bytes {
            let (address, path, found) = (self.address.clone(), path.to_string(), found.meta.size);
            return Err(BucketError::Changed { address, path, found, bytes });
        }
        let (mut stream, started) = (found.into_stream(), Instant::now());
        loop {
            match timeout(PATIENCE, stream.next()).await {
                Ok(Some(Ok(chunk))) if chunk.len() as u64 <= bytes - *have => {
                    file.write_all(&chunk).await?;
                    *have += chunk.len() as u64;
                }
                Ok(Some(Ok(_))) => return Err(self.broken("it sent more than was requested")),
                Ok(Some(Err(error))) => return Err(self.failed(error)),
                Ok(None) if *have == bytes => return Ok(()),
                Ok(None) => return Err(self.broken("it broke off")),
                Err(_) => return Err(self.broken(&format!("silent after {} s", started.elapsed().as_secs()))),
            }
        }
    }

    fn path(&self, content: ContentId, name: &str) -> Path {
        self.at(&format!("{content}/{name}"))
    }

    fn at(&self, inside: &str) -> Path {
        Path::from(format!("{}/{inside}", self.address.prefix()))
    }

    fn broken(&self, reason: &str) -> BucketError {
        BucketError::Refused { address: self.address.clone(), reason: reason.to_owned() }
    }

    fn failed(&self, error: object_store::Error) -> BucketError {
        match error {
            object_store::Error::NotFound { path, .. } => {
                BucketError::Missing { address: self.address.clone(), path }
            }
            error => refused(&self.address, &error),
        }
    }
}

fn s3(name: &str, settings: &[(AmazonS3ConfigKey, String)]) -> object_store::Result<AmazonS3> {
    let backoff = BackoffConfig { max_backoff: Duration::from_secs(1), ..BackoffConfig::default() };
    let retry = RetryConfig { max_retries: 2, retry_timeout: 2 * PATIENCE, backoff };
    let builder = AmazonS3Builder::new().with_http_connector(BucketTransport).with_retry(retry);
    let add = |builder: AmazonS3Builder, (key, value): &(_, String)| builder.with_config(*key, value);
    settings.iter().fold(builder, add).with_bucket_name(name).build()
}

fn refused(address: &BucketAddress, error: &object_store::Error) -> BucketError {
    BucketError::Refused { address: address.clone(), reason: settings::exit::in_one_line(error) }
}
