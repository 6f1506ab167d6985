//! Fetches contents from the bucket to this host, and publishes new contents to the bucket.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use control_protocol::status::shared::SharedStoreStatus;
use types::TenantId;

use super::{
    AdapterStore, INCOMING, PARTIAL, Remote, StoreError,
    address::BucketAddress,
    bucket::Bucket,
    cache::{Cache, CacheHold},
    content::{self, ContentId},
    failed, remove,
};
use crate::{random::random_u64, thread};

/// Maximum number of downloads of a content that does not match its hash.
const ATTEMPTS: usize = 2;

#[derive(Debug, Default)]
pub(super) struct BucketCounters {
    fetched: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    evicted: AtomicU64,
}

impl AdapterStore {
    /// Turns the store into a cache of a bucket, with a budget of `budget_bytes`. May block.
    ///
    /// # Errors
    /// If the store cannot be listed, or the bucket's client cannot be created.
    pub(crate) fn of_bucket(mut self, address: BucketAddress, budget_bytes: u64) -> Result<Self, StoreError> {
        let cache = Arc::new(Cache::new(budget_bytes, found(&self.directory)?));
        let remote =
            Remote { bucket: Arc::new(Bucket::open(address)?), cache, counters: BucketCounters::default() };
        self.remote = Some(Arc::new(remote));
        Ok(self)
    }

    /// Whether this host has the content.
    #[must_use]
    pub(crate) fn has(&self, content: ContentId) -> bool {
        self.directory(content).exists()
    }

    pub(crate) fn bucket(&self) -> Option<&Arc<Bucket>> {
        self.remote.as_ref().map(|remote| &remote.bucket)
    }

    #[must_use]
    pub(crate) fn bucket_status(&self) -> Option<SharedStoreStatus> {
        let Remote { bucket, cache, counters } = &**self.remote.as_ref()?;
        Some(SharedStoreStatus {
            address: bucket.address().to_string(),
            fetched: counters.fetched.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            damaged: counters.damaged.load(Relaxed),
            evicted: counters.evicted.load(Relaxed),
            cached_bytes: cache.bytes(),
        })
    }

    /// Uploads a content to the bucket, if there is one. The caller holds the content on this host.
    pub(crate) async fn publish(&self, content: ContentId) -> Result<(), StoreError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        Ok(remote.bucket.upload(content, &self.directory(content)).await?)
    }

    /// Uploads a content again if it is missing in the bucket. A sweep may have removed it while it was being
    /// registered ([`crate::adapters::records::cleanup`]); a registered content is never removed.
    pub(crate) async fn assure(&self, content: ContentId) -> Result<(), StoreError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        match remote.bucket.written(content).await? {
            Some(_) => Ok(()),
            None => self.publish(content).await,
        }
    }

    /// Fetches a content of `owner` to this host unless it is here. The content stays until the returned hold
    /// is dropped.
    pub(crate) async fn fetch(&self, content: ContentId, owner: TenantId) -> Result<CacheHold, StoreError> {
        let Some(remote) = &self.remote else { return Ok(CacheHold::by_nobody()) };
        if self.ephemeral.find(content).is_some() {
            return Ok(CacheHold::by_nobody());
        }
        let _turn = remote.cache.arriving.lock(content).await;
        if let Some(held) = remote.cache.acquire(content) {
            return Ok(held);
        }
        let fetched = self.download(remote, content, owner).await;
        let counted = if fetched.is_ok() { &remote.counters.fetched } else { &remote.counters.failed };
        counted.fetch_add(1, Relaxed);
        fetched
    }

    async fn download(
        &self,
        remote: &Remote,
        content: ContentId,
        owner: TenantId,
    ) -> Result<CacheHold, StoreError> {
        let partial = self.directory.join(format!("{PARTIAL}{content}"));
        for _ in 0..ATTEMPTS {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&partial);
            made.map_err(failed("creating", &partial))?;
            remote.bucket.download(content, &partial, self.max_file_bytes).await?;
            let Some(bytes) = whole(partial.clone(), content, owner).await? else {
                tracing::error!(%content, bucket = %remote.bucket.address(), "a fetched adapter does not \
                    match its hash");
                remote.counters.damaged.fetch_add(1, Relaxed);
                continue;
            };
            let path = self.directory(content);
            fs::rename(&partial, &path).map_err(failed("renaming", &path))?;
            return Ok(remote.cache.admit(content, bytes));
        }
        Err(StoreError::Damaged(remote.bucket.address().clone()))
    }

    /// Removes contents that exceed the cache's budget, except those in `keep`. May block.
    pub(crate) fn trim(&self, keep: &HashSet<ContentId>) {
        let Some(remote) = &self.remote else { return };
        let mut gone = Vec::new();
        let evicted = remote.cache.evict(keep, |content| {
            let path = self.directory.join(format!("{INCOMING}{:016x}", random_u64()));
            if fs::rename(self.directory(content), &path).is_ok() {
                gone.push(path);
            }
        });
        remote.counters.evicted.fetch_add(evicted as u64, Relaxed);
        gone.iter().for_each(|path| remove(path));
    }
}

/// Returns the bytes of the downloaded files if they match `content`; otherwise removes them.
async fn whole(partial: PathBuf, content: ContentId, owner: TenantId) -> Result<Option<u64>, StoreError> {
    let looked_at = thread::run("adapter-check", move || {
        let (found, bytes) = content::of_directory(&partial, owner).map_err(failed("reading", &partial))?;
        if found == content {
            return Ok(Some(bytes));
        }
        remove(&partial);
        Ok(None)
    });
    looked_at.await.map_err(|error| StoreError::Stopped(error.to_string()))?
}

/// Returns the contents in `directory` with their bytes, oldest first.
fn found(directory: &Path) -> Result<Vec<(ContentId, u64)>, StoreError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed("listing", directory))? {
        let entry = entry.map_err(failed("listing", directory))?;
        let Some(content) = entry.file_name().to_str().and_then(ContentId::named) else { continue };
        let changed = entry.metadata().and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let files = fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let bytes = files.filter_map(|file| file.metadata().ok()).map(|about| about.len()).sum::<u64>();
        found.push((changed, content, bytes));
    }
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, content, bytes)| (content, bytes)).collect())
}
