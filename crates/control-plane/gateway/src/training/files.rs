//! Files that people send: on disk, synced, or in a fleet's bucket, before they are acknowledged.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{fs::File, io::AsyncWriteExt as _, runtime::Handle};

use super::{
    Training, TrainingError, failed, fresh_id,
    records::{FileRecord, JobRecord, Purpose},
    shown,
    table::{FileAdded, ListedPage, Page},
};
use crate::{clock::seconds_since_1970, random::random_u64, tenant_slots::TenantSlots, thread};

/// What a file is called until all of it has come.
const PARTIAL: &str = "partial";

/// A file that is being taken in; what has come of it goes away with it, unless it is kept.
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
    /// Begins to take a file in.
    ///
    /// # Errors
    /// The system refuses.
    pub async fn upload(&self) -> Result<Upload<'_>, TrainingError> {
        self.upload_as(fresh_id("file")).await
    }

    async fn upload_as(&self, id: String) -> Result<Upload<'_>, TrainingError> {
        let path = self.partial(&id);
        let file = File::create(&path).await.map_err(failed("creating", &path))?;
        Ok(Upload { training: self, id, file, bytes: 0, hasher: blake3::Hasher::new(), is_kept: false })
    }

    /// Who may send a file takes a slot here first.
    #[must_use]
    pub fn upload_slots(&self) -> &Arc<TenantSlots> {
        &self.uploads
    }

    /// Who may read a file takes a slot here first, and has it until the file is read.
    #[must_use]
    pub fn download_slots(&self) -> &Arc<TenantSlots> {
        &self.downloads
    }

    /// Longest file, in bytes.
    #[must_use]
    pub fn max_file_bytes(&self) -> u64 {
        self.limits.max_file_bytes
    }

    /// Where a file's bytes are.
    #[must_use]
    pub fn file_path(&self, id: &str) -> PathBuf {
        self.directory.join("files").join(id)
    }

    fn partial(&self, id: &str) -> PathBuf {
        self.file_path(id).with_extension(PARTIAL)
    }

    /// Files of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn files(&self, tenant: &str, page: &Page) -> Result<ListedPage<FileRecord>, TrainingError> {
        Ok(self.table.files(tenant, page).await?)
    }

    /// What is in a file.
    ///
    /// # Errors
    /// It cannot be read, or does not come.
    pub async fn content(&self, file: &FileRecord) -> Result<File, TrainingError> {
        let path = self.file_path(&file.id);
        let Some(fleet) = &self.fleet else {
            return File::open(&path).await.map_err(failed("reading", &path));
        };
        let path = path.with_extension(format!("{:016x}", random_u64()));
        fleet.download(&file.object(""), &path).await?;
        let opened = File::open(&path).await.map_err(failed("reading", &path));
        // Whoever reads it has it open.
        let _ = tokio::fs::remove_file(&path).await;
        opened
    }

    /// Removes a file. Jobs that were created with it keep what they need of it.
    ///
    /// # Errors
    /// There is none, or it cannot be removed.
    pub async fn remove_file(&self, id: &str, tenant: &str) -> Result<FileRecord, TrainingError> {
        let removed = self.table.remove_file(id, tenant).await?;
        let file = removed.ok_or_else(|| TrainingError::NoFile(shown(id)))?;
        match &self.fleet {
            // If this fails, the next start does it.
            None => drop(tokio::fs::remove_file(self.file_path(&file.id)).await),
            Some(fleet) => fleet.litter.notify_one(),
        }
        Ok(file)
    }

    /// Keeps `text`, which a job has measured; returns the file's id. However often a job ends, there is one such file of it.
    pub(super) async fn keep_results(&self, job: &JobRecord, text: &str) -> Result<String, TrainingError> {
        let id = job.results_id();
        if self.table.file(&id, &job.tenant).await?.is_some() {
            return Ok(id);
        }
        let mut upload = self.upload_as(id).await?;
        upload.write(text.as_bytes()).await?;
        Ok(upload.keep(&job.tenant, format!("{}.csv", job.id), Purpose::FineTuneResults).await?.id)
    }
}

impl Upload<'_> {
    /// Takes in some more.
    ///
    /// # Errors
    /// The system refuses.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), TrainingError> {
        self.bytes += bytes.len() as u64;
        self.hasher.update(bytes);
        let written = self.file.write_all(bytes).await;
        written.map_err(failed("writing", &self.training.partial(&self.id)))
    }

    /// Bytes that have come.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Keeps what has come as a file of `tenant`. Durable when this returns.
    ///
    /// # Errors
    /// The tenant has too much already, or the system refuses; then there is no file.
    pub async fn keep(
        mut self,
        tenant: &str,
        name: String,
        purpose: Purpose,
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
        };
        self.put(&record).await?;
        let limit = training.limits.tenant_bytes;
        let limits_it = (purpose == Purpose::FineTune).then_some(limit);
        match training.table.add_file(&record, limits_it).await {
            Ok(FileAdded::Kept) => {
                // In a fleet nothing of it needs to stay here.
                self.is_kept = training.fleet.is_none();
                Ok(record)
            }
            refused => {
                if let Some(fleet) = &training.fleet {
                    fleet.discard(&record.path()).await;
                }
                let FileAdded::TooManyBytes(bytes) = refused? else { return Ok(record) };
                Err(TrainingError::TooManyBytes { bytes, limit })
            }
        }
    }

    /// Puts what has come where it is to lie.
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
        // Removing a large file takes its time. What is not removed now is swept at the next start.
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Makes a directory with links to the files of a job, and its own copy of the adapter it goes on from.
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

/// Copies the files of a directory.
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

/// Removes a job's directory.
pub(super) async fn remove(directory: PathBuf) {
    let removed = thread::run("training-files", move || (fs::remove_dir_all(&directory), directory)).await;
    if let Ok((Err(error), directory)) = removed
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, directory = %directory.display(), "a job's directory could not be removed");
    }
}

/// Makes the directory `place` if it is not there, and removes what is in it but for `keep`.
pub(super) fn sweep(place: &Path, keep: &HashSet<String>) -> Result<(), TrainingError> {
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
