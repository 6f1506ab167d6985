//! Copies where the device is the CPU: huge pages beside the host tier. A block is there when its copying returns.

use std::io;

use kernels::{
    Arena,
    lora::{LoraMatrix, StagedMatrix},
};

use super::{
    device_copy::{CopyError, DeviceCopy, DeviceMemory, NoRoom, StagedMatrices},
    matrices::HostMatrices,
};
use crate::shape::source::Target;

/// Memory of this process.
#[derive(Debug, Clone, Copy)]
pub struct CpuMemory;

impl DeviceMemory for CpuMemory {
    fn copy_of(&self, host: &HostMatrices) -> Result<DeviceCopy, NoRoom> {
        DeviceCopy::on_cpu(host).map_err(|error| NoRoom(error.into()))
    }
}

#[derive(Debug)]
struct OnCpu(Vec<StagedMatrix>);

impl StagedMatrices for OnCpu {
    fn next_bytes(&self, index: usize) -> Option<usize> {
        self.0[index].next_bytes()
    }

    fn first_rank(&self, index: usize) -> usize {
        self.0[index].first_rank()
    }

    fn copy_next(&self, index: usize, _host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        Ok(self.0[index].copy_next(matrix))
    }

    fn finish(&self) -> Result<(), CopyError> {
        Ok(())
    }

    fn has_arrived(&self) -> bool {
        true
    }
}

impl DeviceCopy {
    /// Memory of this process for `host`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn on_cpu(host: &HostMatrices) -> io::Result<Self> {
        let arena = Arena::new(host.bytes());
        let staged = host.iter().map(|(_, _, matrix)| StagedMatrix::new(&arena, matrix));
        let staged = staged.collect::<Result<_, _>>()?;
        Ok(Self::new(host, Box::new(OnCpu(staged))))
    }

    /// The CPU's part of a linear layer.
    pub(crate) fn matrix(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        let (OnCpu(matrices), number) = self.staged(layer, target)?;
        matrices.get(number)
    }
}
