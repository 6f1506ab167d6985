//! Random adapters on the device, each in blocks of its own, as distinct adapters would have.

use std::sync::Arc;

use anyhow::{Context, Result};
use kernels::{
    cuda::{
        BlockMemory,
        lora::{StagedAdapter, UploadQueue},
    },
    lora::{LoraMatrix, LoraPrecision, SharedBytes},
};
use model::{
    cuda::copies::CudaMemory,
    deltas::{
        device_copy::{DeviceCopy, DeviceMemory as _},
        matrices::ImageNumber,
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, source::Target},
};
use types::BlockId;

use crate::adapters::{self, PaddedRank};

/// Bytes of a block: a KV block of a model with 8e9 weights of 16 bits.
pub(super) const BLOCK_BYTES: usize = 2 << 20;

pub(super) const ATTENTION: [Target; 4] = [Target::Q, Target::K, Target::V, Target::O];

fn on_attention(config: &ModelConfig, rank: usize) -> EncodedAdapter {
    // Precision of adapters over a bf16 base.
    adapters::encoded(config, PaddedRank::true_rank(rank), &ATTENTION, LoraPrecision::Compact)
}

/// Loads `count` adapters of `rank` on attention onto the device.
///
/// # Errors
/// If the device lacks memory.
pub(super) fn on_device(
    config: &ModelConfig,
    lane: &Arc<UploadQueue>,
    rank: usize,
    count: usize,
) -> Result<Vec<Arc<PreparedAdapter>>> {
    let mut encoded = on_attention(config, rank);
    let bytes: SharedBytes = Arc::new(std::mem::take(&mut encoded.bytes));
    (0..count)
        .map(|_| {
            let adapter = PreparedAdapter::over(&encoded, config, ImageNumber::NONE, &bytes)?;
            upload(&adapter, lane)?;
            Ok(Arc::new(adapter))
        })
        .collect()
}

/// Copies `adapter` to the device and returns its bytes.
///
/// # Errors
/// If the device lacks memory, or a copy fails.
pub(super) fn upload(adapter: &PreparedAdapter, lane: &Arc<UploadQueue>) -> Result<u64> {
    let copy = room(adapter, lane)?;
    travel(adapter, &copy)?;
    let bytes = copy.bytes();
    adapter.set_device(Some(Arc::new(copy)));
    Ok(bytes)
}

/// Reserves memory for `adapter` on the device.
///
/// # Errors
/// If the device lacks memory.
pub(super) fn room(adapter: &PreparedAdapter, lane: &Arc<UploadQueue>) -> Result<DeviceCopy> {
    let matrices = adapter.host().iter().map(|(_, _, matrix)| matrix);
    let (pool, blocks) = pool_of(lane, matrices, BLOCK_BYTES)?;
    let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId).collect();
    Ok(CudaMemory { pool, lane: Arc::clone(lane) }.copy_of(adapter.host(), &blocks))
}

/// Pool of exactly the blocks that `matrices` take, and their numbers.
///
/// # Errors
/// If the device lacks memory.
pub(super) fn pool_of<'a>(
    lane: &UploadQueue,
    matrices: impl IntoIterator<Item = &'a LoraMatrix>,
    block_bytes: usize,
) -> Result<(Arc<BlockMemory>, Vec<u32>)> {
    let blocks = StagedAdapter::blocks_for(matrices, block_bytes).context("blocks hold no piece")?;
    Ok((BlockMemory::new(lane.cuda(), block_bytes, blocks as usize)?, (0..blocks).collect()))
}

/// Copies all blocks of `adapter`.
///
/// # Errors
/// If a copy fails.
pub(super) fn travel(adapter: &PreparedAdapter, copy: &DeviceCopy) -> Result<()> {
    while copy.next_bytes().is_some() {
        copy.copy_next(adapter.host());
    }
    anyhow::ensure!(copy.is_complete(), "the device refused an adapter");
    Ok(())
}

/// Adapter on attention with different values per layer, stored as an executor keeps it.
///
/// # Errors
/// If there is no memory.
pub(super) fn in_image(config: &ModelConfig, rank: usize, number: ImageNumber) -> Result<PreparedAdapter> {
    adapters::in_image(config, on_attention(config, rank), number)
}
