//! Device copies where the device is the CPU: huge pages in the KV pool, besides the host tier. A block is
//! present as soon as its copy function returns.

use std::sync::Arc;

use kernels::{
    blocks::{BlockLease, BlockMemory},
    lora::{LoraMatrix, Packing, PieceTable, StagedMatrix},
};
use types::BlockId;

use super::{
    device_copy::{CopyError, DeviceCopy, DeviceMemory, StagedMatrices},
    matrices::HostMatrices,
};
use crate::shape::source::Target;

/// KV pool blocks in this process's memory, for adapter copies.
#[derive(Debug, Clone)]
pub struct CpuMemory(pub Arc<BlockMemory>);

impl CpuMemory {
    /// Returns the place of each matrix's pieces and the number of blocks.
    fn pack(&self, host: &HostMatrices) -> Option<(Vec<PieceTable>, u32)> {
        let mut packing = Packing::new(self.0.block_bytes());
        let places = host.iter().map(|(_, _, matrix)| PieceTable::pack(matrix.layout(), &mut packing));
        Some((places.collect::<Option<_>>()?, packing.blocks()))
    }
}

impl DeviceMemory for CpuMemory {
    fn blocks_for(&self, host: &HostMatrices) -> Option<u32> {
        self.pack(host).map(|(_, blocks)| blocks)
    }

    fn copy_of(&self, host: &HostMatrices, blocks: &[BlockId]) -> DeviceCopy {
        let (places, _) = self.pack(host).expect("what fits no block was given none");
        let loan = self.0.lease(&blocks.iter().map(|block| block.0).collect::<Vec<_>>());
        let staged = host.iter().zip(&places);
        let matrices = staged.map(|((_, _, matrix), places)| StagedMatrix::new(&loan, matrix, places));
        DeviceCopy::new(host, Box::new(OnCpu { matrices: matrices.collect(), loan }))
    }
}

#[derive(Debug)]
struct OnCpu {
    matrices: Vec<StagedMatrix>,
    loan: Arc<BlockLease>,
}

impl StagedMatrices for OnCpu {
    fn next_bytes(&self, index: usize) -> Option<usize> {
        self.matrices[index].next_bytes()
    }

    fn first_rank(&self, index: usize) -> usize {
        self.matrices[index].first_rank()
    }

    fn copy_next(&self, index: usize, _host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        Ok(self.matrices[index].copy_next(matrix))
    }

    fn finish(&self) -> Result<(), CopyError> {
        Ok(())
    }

    fn has_arrived(&self) -> bool {
        true
    }

    fn revoke(&self) {
        self.loan.end();
    }
}

impl DeviceCopy {
    pub(crate) fn matrix(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        let (OnCpu { matrices, .. }, number) = self.staged(layer, target)?;
        matrices.get(number)
    }
}
