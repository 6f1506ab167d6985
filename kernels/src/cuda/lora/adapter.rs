//! An adapter's copy on the device.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    RegisteredBytes, UploadQueue,
    staged::{MatrixPieces, StagedMatrix},
    upload_queue::UploadPiece,
};
use crate::{
    cuda::{Cuda, CudaError, DeviceBlockLease},
    lora::{LoraMatrix, PIECE_ALIGNMENT, Packing},
};

/// Copies of all matrices of one adapter in blocks that were lent to it, and the lane on which they come.
#[derive(Debug)]
pub struct StagedAdapter {
    lane: Arc<UploadQueue>,
    lent: Arc<DeviceBlockLease>,
    matrices: Box<[StagedMatrix]>,
    /// What is not on its way yet of the tables of all matrices' pieces.
    tables: Mutex<Vec<AdapterTables>>,
}

/// Tables that lie side by side.
#[derive(Debug)]
struct AdapterTables {
    to: u64,
    bytes: Vec<u8>,
}

impl StagedAdapter {
    /// Blocks of `block_bytes` that copies of `matrices` take; `None` if a block is too small for the least piece of one.
    pub fn blocks_for<'a>(
        matrices: impl IntoIterator<Item = &'a LoraMatrix>,
        block_bytes: usize,
    ) -> Option<u32> {
        let mut packing = Packing::new(block_bytes);
        MatrixPieces::pack(matrices, &mut packing)?;
        Some(packing.blocks())
    }

    /// Room for `matrices`, of which no rank is there yet.
    ///
    /// # Panics
    ///
    /// If these are fewer blocks than [`StagedAdapter::blocks_for`] says, or of another device than the lane.
    pub fn new<'a>(
        lane: &Arc<UploadQueue>,
        lent: DeviceBlockLease,
        matrices: impl IntoIterator<Item = &'a LoraMatrix>,
    ) -> Self {
        assert!(Arc::ptr_eq(lane.cuda(), lent.cuda()), "blocks of the lane's device");
        let (mut packing, lent) = (Packing::new(lent.block_bytes()), Arc::new(lent));
        let hosts: Vec<&LoraMatrix> = matrices.into_iter().collect();
        let places = MatrixPieces::pack(hosts.iter().copied(), &mut packing);
        let places = places.expect("blocks hold a piece of every matrix");
        assert!(packing.blocks() as usize <= lent.count(), "as many blocks as the adapter takes");
        let stage = |(host, places)| StagedMatrix::new(&lent, places, host);
        let matrices: Box<[_]> = hosts.into_iter().zip(places).map(stage).collect();
        Self { lane: Arc::clone(lane), tables: Mutex::new(tables(&matrices)), lent, matrices }
    }

    /// The device.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.lane.cuda()
    }

    /// Its matrices, in the order in which they were given.
    #[must_use]
    pub fn matrices(&self) -> &[StagedMatrix] {
        &self.matrices
    }

    /// Bytes that the next [`Self::copy_next`] of matrix `index` enqueues; `None` once all ranks are on their way or here.
    ///
    /// # Panics
    ///
    /// If there is no such matrix.
    #[must_use]
    pub fn next_bytes(&self, index: usize) -> Option<usize> {
        self.matrices[index].next_bytes()
    }

    /// Enqueues the copy of the last rank block of matrix `index` that is not on its way yet, A's and B's part of it, and
    /// returns their bytes: 0 if there is none, or all were revoked. [`StagedMatrix::first_rank`] moves when the lane sees
    /// that they have arrived, not before. Waits only while the lane is full. `registered` is `host`'s memory if it could be
    /// registered; else its bytes are staged.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If there is no such matrix, or `host` is not what it is the copy of.
    pub fn copy_next(
        &self,
        index: usize,
        host: &LoraMatrix,
        registered: Option<&Arc<RegisteredBytes>>,
    ) -> Result<usize, CudaError> {
        self.copy_tables()?;
        self.matrices[index].copy_next(&self.lane, host, registered)
    }

    /// Enqueues the tables before the first rank block of any matrix. The lane keeps its order: they are there when a rank is.
    fn copy_tables(&self) -> Result<(), CudaError> {
        let mut tables = self.tables();
        if tables.is_empty() {
            return Ok(());
        }
        let pieces: Vec<UploadPiece<'_>> =
            tables.iter().map(|table| UploadPiece { to: table.to, from: &table.bytes }).collect();
        self.lane.enqueue(&pieces, None, &self.lent, None)?;
        *tables = Vec::new();
        Ok(())
    }

    fn tables(&self) -> MutexGuard<'_, Vec<AdapterTables>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all copies that are on the lane.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.lane.finish()
    }

    /// True if all of it is there.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        self.matrices.iter().all(|matrix| matrix.first_rank() == 0)
    }

    /// Gives the blocks back: from here on no rank is there, none comes, and nothing writes to the blocks. Waits for what is
    /// on the lane. Between two passes; plans that have this adapter are not launched again.
    pub fn revoke(&self) {
        drop(mem::take(&mut *self.tables()));
        self.matrices.iter().for_each(StagedMatrix::revoke);
        // A device that is lost writes nothing any more, and the next pass says so.
        let _ = self.lane.finish();
        self.lent.end();
    }
}

/// The tables of all matrices' pieces, those that lie side by side as one.
fn tables(matrices: &[StagedMatrix]) -> Vec<AdapterTables> {
    let mut tables: Vec<AdapterTables> = Vec::new();
    for matrix in matrices {
        let [to, _] = matrix.tables();
        let beside = tables.pop_if(|last| last.to + last.bytes.len() as u64 == to);
        let mut table = beside.unwrap_or(AdapterTables { to, bytes: Vec::new() });
        table.bytes.extend(matrix.addresses().flat_map(u64::to_le_bytes));
        table.bytes.resize(table.bytes.len().next_multiple_of(PIECE_ALIGNMENT), 0);
        tables.push(table);
    }
    tables
}
