//! Copies of adapters to blocks of a GPU's pool, several rank blocks at a time, parallel to computation.

use std::sync::{Arc, OnceLock};

use kernels::{
    cuda::{
        BlockMemory,
        lora::{RegisteredBytes, StagedAdapter, StagedMatrix, UploadQueue},
    },
    lora::LoraMatrix,
};
use types::BlockId;

use crate::{
    deltas::{
        device_copy::{CopyError, DeviceCopy, DeviceMemory, StagedMatrices},
        matrices::HostMatrices,
    },
    shape::source::Target,
};

/// The pool of a GPU, and the queue that uploads adapters to its blocks.
#[derive(Debug, Clone)]
pub struct CudaMemory {
    /// Blocks of the pool; those that are not leased hold the KV cache.
    pub pool: Arc<BlockMemory>,
    /// Upload queue, whose arrivals the compute thread polls.
    pub lane: Arc<UploadQueue>,
}

impl DeviceMemory for CudaMemory {
    fn blocks_for(&self, host: &HostMatrices) -> Option<u32> {
        StagedAdapter::blocks_for(matrices(host), self.pool.block_bytes())
    }

    fn copy_of(&self, host: &HostMatrices, blocks: &[BlockId]) -> DeviceCopy {
        let blocks: Vec<u32> = blocks.iter().map(|block| block.0).collect();
        let adapter = StagedAdapter::new(&self.lane, self.pool.lease(&blocks), matrices(host));
        DeviceCopy::new(host, Box::new(OnCuda { adapter, registered: OnceLock::new() }))
    }

    fn poll_arrivals(&self) {
        let _ = self.lane.poll_arrivals();
    }
}

fn matrices(host: &HostMatrices) -> impl Iterator<Item = &LoraMatrix> {
    host.iter().map(|(_, _, matrix)| matrix)
}

#[derive(Debug)]
struct OnCuda {
    adapter: StagedAdapter,
    /// The adapter's bytes, registered with the GPU; `None` if registration failed and the queue stages them.
    /// The copying thread registers them, because locking memory takes time.
    registered: OnceLock<Option<Arc<RegisteredBytes>>>,
}

impl OnCuda {
    fn register(&self, host: &HostMatrices) -> Option<Arc<RegisteredBytes>> {
        let registered = RegisteredBytes::new(self.adapter.cuda(), host.image_bytes()?);
        registered
            .inspect_err(|error| tracing::debug!(%error, "an adapter's bytes are staged"))
            .ok()
            .map(Arc::new)
    }
}

impl StagedMatrices for OnCuda {
    fn next_bytes(&self, index: usize) -> Option<usize> {
        self.adapter.next_bytes(index)
    }

    fn first_rank(&self, index: usize) -> usize {
        self.adapter.matrices()[index].first_rank()
    }

    fn copy_next(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        let registered = self.registered.get_or_init(|| self.register(host));
        let copied = self.adapter.copy_next(index, matrix, registered.as_ref());
        copied.map_err(|error| CopyError(error.into()))
    }

    fn finish(&self) -> Result<(), CopyError> {
        self.adapter.finish().map_err(|error| CopyError(error.into()))
    }

    fn has_arrived(&self) -> bool {
        self.adapter.has_arrived()
    }

    fn revoke(&self) {
        self.adapter.revoke();
    }
}

impl DeviceCopy {
    pub(super) fn cuda(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        let (staged, number) = self.staged::<OnCuda>(layer, target)?;
        staged.adapter.matrices().get(number)
    }
}
