//! Copies of adapters on a GPU: blocks travel on a lane of their own, several at a time, beside what is computed.

use std::sync::{Arc, OnceLock};

use kernels::{
    cuda::{
        CudaError,
        lora::{AdapterMemory, CopyLane, RegisteredBytes, StagedMatrix},
    },
    lora::LoraMatrix,
};

use crate::{
    deltas::{
        device_copy::{CopyError, DeviceCopy, DeviceMemory, NoRoom, StagedMatrices},
        matrices::HostMatrices,
    },
    shape::source::Target,
};

/// Memory of a GPU, through a lane of its own.
#[derive(Debug, Clone)]
pub struct CudaMemory(pub Arc<CopyLane>);

impl DeviceMemory for CudaMemory {
    fn copy_of(&self, host: &HostMatrices) -> Result<DeviceCopy, NoRoom> {
        DeviceCopy::on_cuda(host, &self.0).map_err(|error| NoRoom(error.into()))
    }

    fn settle(&self) {
        let _ = self.0.settle();
    }
}

#[derive(Debug)]
struct OnCuda {
    matrices: Vec<StagedMatrix>,
    lane: Arc<CopyLane>,
    /// The adapter's bytes, known to the GPU; `None` if it refuses: then the lane stages them. Found out by whoever
    /// copies, since locking memory takes its time.
    registered: OnceLock<Option<Arc<RegisteredBytes>>>,
}

impl OnCuda {
    /// Has the GPU know the adapter's bytes, if it can.
    fn register(&self, host: &HostMatrices) -> Option<Arc<RegisteredBytes>> {
        let registered = RegisteredBytes::new(self.lane.cuda(), host.image_bytes()?);
        registered
            .inspect_err(|error| tracing::debug!(%error, "an adapter's bytes are staged"))
            .ok()
            .map(Arc::new)
    }
}

impl StagedMatrices for OnCuda {
    fn next_bytes(&self, index: usize) -> Option<usize> {
        self.matrices[index].next_bytes()
    }

    fn first_rank(&self, index: usize) -> usize {
        self.matrices[index].first_rank()
    }

    fn copy_next(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        let registered = self.registered.get_or_init(|| self.register(host));
        let copied = self.matrices[index].copy_next(&self.lane, matrix, registered.as_ref());
        copied.map_err(|error| CopyError(error.into()))
    }

    fn finish(&self) -> Result<(), CopyError> {
        self.lane.finish().map_err(|error| CopyError(error.into()))
    }

    fn has_arrived(&self) -> bool {
        self.matrices.iter().all(|matrix| matrix.first_rank() == 0)
    }
}

impl DeviceCopy {
    /// Memory of a GPU for `host`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn on_cuda(host: &HostMatrices, lane: &Arc<CopyLane>) -> Result<Self, CudaError> {
        let matrices = || host.iter().map(|(_, _, matrix)| matrix);
        let memory = AdapterMemory::new(lane.cuda(), AdapterMemory::bytes_for(matrices()))?;
        let matrices = matrices().map(|matrix| StagedMatrix::new(&memory, matrix)).collect();
        let staged = OnCuda { matrices, lane: Arc::clone(lane), registered: OnceLock::new() };
        Ok(Self::new(host, Box::new(staged)))
    }

    /// The GPU's part of a linear layer.
    pub(super) fn cuda(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        let (staged, number) = self.staged::<OnCuda>(layer, target)?;
        staged.matrices.get(number)
    }
}
