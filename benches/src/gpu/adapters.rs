//! Random adapters on the device, without files.
//!
//! On the host the layers of an adapter, and all adapters of a rank, are the same numbers; on the device each has blocks
//! of its own, as adapters that differ would have.

use std::sync::Arc;

use anyhow::{Context, Result};
use ids::{BlockId, Generation};
use kernels::{
    cuda::{
        BlockMemory,
        lora::{CopyLane, StagedAdapter},
    },
    lora::{FACTOR_ALIGNMENT, LoraMatrix, LoraPrecision, SharedBytes},
};
use model::{
    adapter::{Adapter, LoraModule, Method},
    cuda::copies::CudaMemory,
    deltas::{
        device_copy::{DeviceCopy, DeviceMemory as _},
        matrices::{ImageNumber, ModuleLayout},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use shmproto::region::SealedBytes;

/// Bytes of a block: of keys and values of a model of 8e9 weights in 16 bits.
pub(super) const BLOCK_BYTES: usize = 2 << 20;

/// What is adapted of attention.
pub(super) const ATTENTION: [Target; 4] = [Target::Q, Target::K, Target::V, Target::O];

/// An adapter of `rank` on `targets` of every layer, encoded as beside weights of bf16. Its layers share their numbers.
fn encoded(config: &ModelConfig, rank: usize, targets: &[Target]) -> EncodedAdapter {
    let mut random = StdRng::seed_from_u64(rank as u64);
    let mut numbers = |count, bound: f32| (0..count).map(|_| random.random_range(-bound..bound)).collect();
    let module = |&target| {
        let [rows, columns] = linear_shape(config, target);
        let (a, b) = (numbers(rank * columns, 0.05), numbers(rows * rank, 0.01));
        LoraModule { layer: 0, target, rank, scale: 1.0, a, b }
    };
    let method = Method::Lora(targets.iter().map(module).collect());
    let generation = Generation([0; 32]);
    let adapter = Adapter { generation, method, base_model: None, stored_in_16_bits: false };
    let mut encoded = EncodedAdapter::new(&adapter, config, LoraPrecision::Compact);
    let first = std::mem::take(&mut encoded.modules);
    let in_layer = |layer| first.iter().map(move |module| ModuleLayout { layer, ..*module });
    encoded.modules = (0..config.layers).flat_map(in_layer).collect();
    encoded
}

/// `count` adapters of `rank` on attention, all of them on the device.
///
/// # Errors
/// If the device has no room.
pub(super) fn on_device(
    config: &ModelConfig,
    lane: &Arc<CopyLane>,
    rank: usize,
    count: usize,
) -> Result<Vec<Arc<PreparedAdapter>>> {
    let mut encoded = encoded(config, rank, &ATTENTION);
    let bytes: SharedBytes = Arc::new(std::mem::take(&mut encoded.bytes));
    (0..count)
        .map(|_| {
            let adapter = PreparedAdapter::over(&encoded, config, ImageNumber::NONE, &bytes)?;
            bring(&adapter, lane)?;
            Ok(Arc::new(adapter))
        })
        .collect()
}

/// Brings all of `adapter` to the device; its bytes.
///
/// # Errors
/// If the device has no room, or refuses.
pub(super) fn bring(adapter: &PreparedAdapter, lane: &Arc<CopyLane>) -> Result<u64> {
    let copy = room(adapter, lane)?;
    travel(adapter, &copy)?;
    let bytes = copy.bytes();
    adapter.set_device(Some(Arc::new(copy)));
    Ok(bytes)
}

/// Room for `adapter` on the device.
///
/// # Errors
/// If the device has none.
pub(super) fn room(adapter: &PreparedAdapter, lane: &Arc<CopyLane>) -> Result<DeviceCopy> {
    let matrices = adapter.host().iter().map(|(_, _, matrix)| matrix);
    let (pool, blocks) = pool_of(lane, matrices, BLOCK_BYTES)?;
    let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId).collect();
    Ok(CudaMemory { pool, lane: Arc::clone(lane) }.copy_of(adapter.host(), &blocks))
}

/// A pool of just the blocks that `matrices` take, and their numbers.
///
/// # Errors
/// If the device has no room.
pub(super) fn pool_of<'a>(
    lane: &CopyLane,
    matrices: impl IntoIterator<Item = &'a LoraMatrix>,
    block_bytes: usize,
) -> Result<(Arc<BlockMemory>, Vec<u32>)> {
    let blocks = StagedAdapter::blocks_for(matrices, block_bytes).context("blocks hold no piece")?;
    Ok((BlockMemory::new(lane.cuda(), block_bytes, blocks as usize)?, (0..blocks).collect()))
}

/// Copies all blocks of `adapter`.
///
/// # Errors
/// If the device refuses one.
pub(super) fn travel(adapter: &PreparedAdapter, copy: &DeviceCopy) -> Result<()> {
    while copy.next_bytes().is_some() {
        copy.copy_next(adapter.host());
    }
    anyhow::ensure!(copy.is_complete(), "the device refused an adapter");
    Ok(())
}

/// An adapter whose every layer has numbers of its own, in sealed shared memory, as an executor keeps it. The number says
/// whether the device is told of that memory (any but 0), or bytes are staged on their way (0).
///
/// # Errors
/// If there is no memory.
pub(super) fn in_image(config: &ModelConfig, rank: usize, number: ImageNumber) -> Result<PreparedAdapter> {
    let mut encoded = encoded(config, rank, &ATTENTION);
    let mut layer = std::mem::take(&mut encoded.bytes);
    layer.resize(layer.len().next_multiple_of(FACTOR_ALIGNMENT), 0);
    for module in &mut encoded.modules {
        module.matrix.a.offset += module.layer * layer.len();
        module.matrix.b.offset += module.layer * layer.len();
    }
    let layers = vec![layer.as_slice(); config.layers];
    let image = SealedBytes::build("holobiont-bench", &layers).context("no memory for an adapter")?;
    let bytes: SharedBytes = Arc::new(image);
    Ok(PreparedAdapter::over(&encoded, config, number, &bytes)?)
}
