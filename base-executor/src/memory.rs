//! The tiers of the KV cache, as configured.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use kv_cache::{
    Cache, CacheSettings,
    ledger::MemoryAccount,
    replacement::Variant,
    store::{BlockStore, OpenError, OpenedStore, StoreContents, StoreLayout},
};
use model::forward::{BLOCK_TOKENS, ForwardPass};
use scheduling::background_io::ForegroundIo;
use settings::{CachePolicy, CacheWeight};
use types::TenantId;

use crate::{
    config::ExecutorConfig,
    device_memory_split::DeviceBytes,
    kv_offload::{CopyNotifier, KvOffload},
    model_loader::ModelInfo,
    startup,
};

/// Name of the disk tier's file.
const FILE: &str = "history.kv";

/// Time to wait until a previous executor releases the file.
const LOCK_WAIT: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// Opens the tiers around `pass`, charged to `account`, with the blocks that an earlier process left.
///
/// # Errors
/// If the disk tier's file cannot be opened.
pub(crate) fn open<P: ForwardPass>(
    config: &ExecutorConfig,
    pass: &P,
    info: &ModelInfo,
    context_length: usize,
    account: &MemoryAccount,
    on_copied: CopyNotifier,
) -> anyhow::Result<(Cache, KvOffload)> {
    let block_bytes = pass.block_bytes();
    let blocks = |bytes: u64| u32::try_from(bytes / (block_bytes as u64).max(1)).unwrap_or(u32::MAX);
    let (host, disk) = (blocks(config.host_bytes.0), blocks(config.disk_bytes.0));
    let context = u32::try_from(context_length.div_ceil(BLOCK_TOKENS)).unwrap_or(u32::MAX);
    let mut cache = Cache::new(CacheSettings {
        host,
        disk,
        variant: variant(config.cache_policy),
        tau: Duration::from_millis(config.cache_decay_ms),
        ..DeviceBytes::of(config).divide(info.kv_blocks, context, block_bytes)
    });
    cache.weigh(&weights(&config.cache_weights));
    let offload = KvOffload::new(block_bytes, host, account);
    if disk == 0 {
        anyhow::ensure!(
            config.disk_bytes.0 == 0,
            "--disk-bytes is smaller than a KV block of {block_bytes} bytes; raise it"
        );
        return Ok((cache, offload));
    }
    let fingerprint = fingerprint(info).context("cannot read the file of this program")?;
    let layout = StoreLayout { fingerprint, block_bytes, block_tokens: BLOCK_TOKENS, slots: disk };
    let path = config.disk_directory().join(FILE);
    let OpenedStore { store, found, blocks, damaged } =
        when_free(&path, &layout).context("--disk-bytes: cannot open the file for KV blocks")?;
    let restored = cache.restore(blocks);
    log_store(&path, found, restored.blocks, damaged + restored.dropped);
    let first = pass.sweep_figures().map(|figures| figures as Arc<dyn ForegroundIo>);
    let offload =
        offload.with_store(store, on_copied, first).context("cannot start the thread of the disk tier")?;
    Ok((cache, offload))
}

/// Opens the file as soon as the previous process has released it.
fn when_free(path: &Path, layout: &StoreLayout) -> Result<OpenedStore, OpenError> {
    let begin = Instant::now();
    loop {
        match BlockStore::open(path, layout) {
            Err(OpenError::InUse(_)) if begin.elapsed() < LOCK_WAIT => thread::sleep(LOCK_RETRY),
            opened => return opened,
        }
    }
}

fn log_store(path: &Path, found: StoreContents, blocks: usize, dropped: usize) {
    match found {
        StoreContents::Same => {
            tracing::info!(file = %path.display(), blocks, dropped, "offloaded KV blocks of an earlier \
                run are available")
        }
        StoreContents::Nothing => {
            tracing::info!(file = %path.display(), "KV blocks will be offloaded to this file")
        }
        other => tracing::warn!(
            file = %path.display(), found = ?other,
            "the file's KV blocks belong to another model or program and are dropped"
        ),
    }
}

/// Hashes all that decides a block's bits: the base, the device, the data types, and this program.
fn fingerprint(info: &ModelInfo) -> io::Result<[u8; 32]> {
    let program = startup::program_hash()?;
    let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv fingerprint v1");
    hasher.update(&info.base_hash).update(&program);
    let words =
        format!("{:?} {:?} {} {}", info.device.kind, kernels::Isa::vectors(), info.device.name, info.numbers);
    hasher.update(words.as_bytes());
    Ok(*hasher.finalize().as_bytes())
}

fn weights(weights: &[CacheWeight]) -> HashMap<TenantId, u32> {
    weights.iter().map(|part| (TenantId::of(Some(&part.tenant)), part.weight.get())).collect()
}

fn variant(policy: CachePolicy) -> Variant {
    match policy {
        CachePolicy::Elora => Variant::Elora,
        CachePolicy::Eq4Printed => Variant::Eq4Printed,
        CachePolicy::Eq5Printed => Variant::Eq5Printed,
        CachePolicy::Lru => Variant::Lru,
        CachePolicy::Rrip => Variant::Rrip,
        CachePolicy::Static => Variant::Static,
        CachePolicy::NoHistory => Variant::NoHistory,
        CachePolicy::NoDependencies => Variant::NoDependencies,
        CachePolicy::NoAdapterFactor => Variant::NoAdapterFactor,
        CachePolicy::NoCost => Variant::NoCost,
        CachePolicy::NoVisits => Variant::NoVisits,
        CachePolicy::NoRecency => Variant::NoRecency,
        CachePolicy::Branches => Variant::Branches,
    }
}
