//! Training files that clients upload: synced to disk, or stored in a fleet's bucket, before they are
//! acknowledged.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    runtime::Handle,
};

use super::{
    Training, TrainingError, failed, fresh_id,
    records::{FileRecord, JobRecord, Purpose},
    shown,
    table::{FileAdded, ListedPage, Page},
};
use crate::{clock::seconds_since_1970, random::random_u64, tenant_slots::TenantSlots, thread};

/// File extension of an incomplete upload.
const PARTIAL: &str = "partial";

/// Bytes that are read at once from a file that this server produced.
const PIECE_BYTES: usize = 256 << 10;

/// Description of a new file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSpec {
    pub(crate) name: String,
    pub(crate) purpose: Purpose,
    /// Time of the deletion in seconds since 1970; `None` for a file that is kept.
    pub(crate) expires_at: Option<u64>,
}

impl FileSpec {
    /// Describes a file that is kept.
    pub(crate) fn new(name: String, purpose: Purpose) -> Self {
        Self { name, purpose, expires_at: None }
    }
}

/// Upload in progress; dropping it removes the received bytes unless the file was kept.
#[derive(Debug)]
pub struct Upload<'a> {
    training: &'a Training,
    id: String,
    file: File,
    bytes: u64,
    hasher: blake3::Hasher,
    is_kept: bool,
}

impl Training {
    /// Begins an upload.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub async fn upload(&self) -> Result<Upload<'_>, TrainingError> {
        self.upload_as(fresh_id("file")).await
    }

    async fn upload_as(&self, id: String) -> Result<Upload<'_>, TrainingError> {
        let path = self.partial(&id);
        let file = File::create(&path).await.map_err(failed("creating", &path))?;
        Ok(Upload { training: self, id, file, bytes: 0, hasher: blake3::Hasher::new(), is_kept: false })
    }

    /// Upload slots; a caller takes one before it sends a file.
    #[must_use]
    pub(crate) fn upload_slots(&self) -> &Arc<TenantSlots> {
        &self.uploads
    }

    /// Download slots; a caller takes one before it reads a file, and keeps it until the end.
    #[must_use]
    pub(crate) fn download_slots(&self) -> &Arc<TenantSlots> {
        &self.downloads
    }

    /// Maximum length of a file in bytes.
    #[must_use]
    pub(crate) fn max_file_bytes(&self) -> u64 {
        self.limits.max_file_bytes
    }

    #[must_use]
    pub(crate) fn file_path(&self, id: &str) -> PathBuf {
        self.directory.join("files").join(id)
    }

    fn partial(&self, id: &str) -> PathBuf {
        self.file_path(id).with_extension(PARTIAL)
    }

    /// Lists the files of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn files(&self, tenant: &str, page: &Page) -> Result<ListedPage<FileRecord>, TrainingError> {
        Ok(self.table.files(tenant, page).await?)
    }

    /// Returns the file `id` of `tenant`, after a check of its purpose.
    ///
    /// # Errors
    /// If the tenant has no such file, or has uploaded it for another purpose.
    pub(crate) async fn file_for(
        &self,
        purpose: Purpose,
        id: &str,
        tenant: &str,
    ) -> Result<FileRecord, TrainingError> {
        let file = self.file(id, tenant).await?;
        if file.purpose == purpose {
            return Ok(file);
        }
        Err(TrainingError::WrongPurpose { id: file.id, wanted: purpose.as_str() })
    }

    /// Puts the content of a file at `to`, where it stays if the file is removed.
    ///
    /// # Errors
    /// If the content cannot be linked or downloaded.
    pub(crate) async fn link(&self, file: &FileRecord, to: &Path) -> Result<(), TrainingError> {
        match &self.fleet {
            Some(fleet) => fleet.download(&file.object(""), to).await,
            None => tokio::fs::hard_link(self.file_path(&file.id), to).await.map_err(failed("linking", to)),
        }
    }

    /// Opens the content of a file.
    ///
    /// # Errors
    /// If the file cannot be read or downloaded.
    pub async fn content(&self, file: &FileRecord) -> Result<File, TrainingError> {
        let path = self.file_path(&file.id);
        let Some(fleet) = &self.fleet else {
            return File::open(&path).await.map_err(failed("reading", &path));
        };
        let path = path.with_extension(format!("{:016x}", random_u64()));
        fleet.download(&file.object(""), &path).await?;
        let opened = File::open(&path).await.map_err(failed("reading", &path));
        // The open file stays readable after its removal.
        let _ = tokio::fs::remove_file(&path).await;
        opened
    }

    /// Removes a file. Jobs that were created with it keep their own link or object.
    ///
    /// # Errors
    /// If the tenant has no such file, or it cannot be removed.
    pub async fn remove_file(&self, id: &str, tenant: &str) -> Result<FileRecord, TrainingError> {
        let removed = self.table.remove_file(id, tenant).await?;
        let file = removed.ok_or_else(|| TrainingError::NoFile(shown(id)))?;
        match &self.fleet {
            // If the removal fails, the sweep at the next start repeats it.
            None => drop(tokio::fs::remove_file(self.file_path(&file.id)).await),
            Some(fleet) => fleet.litter.notify_one(),
        }
        Ok(file)
    }

    /// Stores `text`, the metrics of a job, as a file; returns its id.
    pub(super) async fn keep_results(&self, job: &JobRecord, text: &str) -> Result<String, TrainingError> {
        let (id, name) = (job.results_id(), format!("{}.csv", job.id));
        let results = FileSpec::new(name, Purpose::FineTuneResults);
        self.keep_produced(id, &job.tenant, results, text.as_bytes()).await
    }

    /// Stores a file that this server produced; returns its id. A file with this id is stored once, even if
    /// its producer ends repeatedly.
    ///
    /// # Errors
    /// If `content` cannot be read, or the file cannot be stored.
    pub(crate) async fn keep_produced(
        &self,
        id: String,
        tenant: &str,
        spec: FileSpec,
        mut content: impl AsyncRead + Unpin,
    ) -> Result<String, TrainingError> {
        if self.table.file(&id, tenant).await?.is_some() {
            return Ok(id);
        }
        let path = self.file_path(&id);
        let mut upload = self.upload_as(id).await?;
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        loop {
            piece.clear();
            let read = (&mut content).take(PIECE_BYTES as u64).read_to_end(&mut piece).await;
            if read.map_err(failed("reading", &path))? == 0 {
                return Ok(upload.keep(tenant, spec).await?.id);
            }
            upload.write(&piece).await?;
        }
    }
}

impl Upload<'_> {
    /// Appends received bytes.
    ///
    /// # Errors
    /// Fails if the system cannot write the bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), TrainingError> {
        self.bytes += bytes.len() as u64;
        self.hasher.update(bytes);
        let written = self.file.write_all(bytes).await;
        written.map_err(failed("writing", &self.training.partial(&self.id)))
    }

    /// Number of received bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Stores the upload as a file of `tenant`. The file is durable when this returns.
    ///
    /// # Errors
    /// If the tenant's limit would be exceeded, or the system fails; there is no file then.
    pub(crate) async fn keep(
        mut self,
        tenant: &str,
        FileSpec { name, purpose, expires_at }: FileSpec,
    ) -> Result<FileRecord, TrainingError> {
        let training = self.training;
        let record = FileRecord {
            id: self.id.clone(),
            tenant: tenant.to_owned(),
            name,
            purpose,
            bytes: self.bytes,
            hash: self.hasher.finalize().to_string(),
            created_at: seconds_since_1970(),
            expires_at,
        };
        self.put(&record).await?;
        let limit = training.limits.tenant_bytes;
        // A cancelled caller may have added the row, so the content stays. Without a row, the next start removes
        // it. In a fleet the local copy is not needed, since the bucket has the file.
        self.is_kept = training.fleet.is_none();
        let is_uploaded = matches!(purpose, Purpose::FineTune | Purpose::Batch);
        let limits_it = is_uploaded.then_some(limit);
        match training.table.add_file(&record, limits_it).await {
            Ok(FileAdded::Kept) => Ok(record),
            refused => {
                self.is_kept = false;
                if let Some(fleet) = &training.fleet {
                    fleet.discard(&record.path()).await;
                }
                let FileAdded::TooManyBytes(bytes) = refused? else { return Ok(record) };
                Err(TrainingError::TooManyBytes { bytes, limit })
            }
        }
    }

    /// Moves the received bytes to their final place, on disk or in the bucket.
    async fn put(&mut self, record: &FileRecord) -> Result<(), TrainingError> {
        let (training, path) = (self.training, self.training.file_path(&self.id));
        self.file.flush().await.map_err(failed("writing", &path))?;
        if let Some(fleet) = &training.fleet {
            return fleet.send(&record.path(), &training.partial(&self.id)).await;
        }
        self.file.sync_all().await.map_err(failed("syncing", &path))?;
        let (partial, files) = (training.partial(&self.id), training.directory.join("files"));
        let name = move || {
            fs::rename(partial, &path).map_err(failed("renaming", &path))?;
            sync(&files)
        };
        thread::run("training-files", name).await?
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let paths = [self.training.partial(&self.id), self.training.file_path(&self.id)];
        let remove = move || paths.iter().for_each(|path| drop(fs::remove_file(path)));
        // Removing a large file takes long. The sweep at the next start removes what is left.
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Creates the directory of a job, with links to its files and a copy of the adapter that it trains further.
pub(super) async fn prepare(
    directory: PathBuf,
    links: Vec<(PathBuf, &'static str)>,
    from: Option<PathBuf>,
) -> Result<(), TrainingError> {
    let work = move || {
        fs::create_dir_all(&directory).map_err(failed("creating", &directory))?;
        for (file, name) in links {
            let to = directory.join(name);
            fs::hard_link(&file, &to).map_err(failed("linking", &to))?;
        }
        if let Some(from) = from {
            copy(&from, &directory.join(super::trainer_args::FROM))?;
        }
        sync(&directory)?;
        directory.parent().map_or(Ok(()), sync)
    };
    thread::run("training-files", work).await?
}

fn copy(from: &Path, to: &Path) -> Result<(), TrainingError> {
    fs::create_dir(to).map_err(failed("creating", to))?;
    for entry in fs::read_dir(from).map_err(failed("reading", from))? {
        let entry = entry.map_err(failed("reading", from))?;
        let copy = to.join(entry.file_name());
        fs::copy(entry.path(), &copy).map_err(failed("copying", &copy))?;
        fs::File::open(&copy).and_then(|file| file.sync_all()).map_err(failed("syncing", &copy))?;
    }
    sync(to)
}

pub(super) async fn remove(directory: PathBuf) {
    let removed = thread::run("training-files", move || (fs::remove_dir_all(&directory), directory)).await;
    if let Ok((Err(error), directory)) = removed
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, directory = %directory.display(), "cannot remove a job's directory");
    }
}

/// Creates the directory `place` if it is missing, and removes all its entries except `keep`.
pub(crate) fn sweep(place: &Path, keep: &HashSet<String>) -> Result<(), TrainingError> {
    fs::create_dir_all(place).map_err(failed("creating", place))?;
    for entry in fs::read_dir(place).map_err(failed("reading", place))? {
        let entry = entry.map_err(failed("reading", place))?;
        if entry.file_name().to_str().is_some_and(|name| keep.contains(name)) {
            continue;
        }
        let (path, is_directory) = (entry.path(), entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let removed = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(failed("removing", &path))?;
    }
    Ok(())
}

fn sync(directory: &Path) -> Result<(), TrainingError> {
    fs::File::open(directory).and_then(|file| file.sync_all()).map_err(failed("syncing", directory))
}
