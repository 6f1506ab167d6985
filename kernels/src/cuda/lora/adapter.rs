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

/// Copies of all matrices of one adapter in blocks lent to it, and the queue that uploads them.
#[derive(Debug)]
pub struct StagedAdapter {
    lane: Arc<UploadQueue>,
    lent: Arc<DeviceBlockLease>,
    matrices: Box<[StagedMatrix]>,
    /// Piece tables of the matrices that are not enqueued yet.
    tables: Mutex<Vec<AdapterTables>>,
}

/// Contiguous tables of one or more matrices.
#[derive(Debug)]
struct AdapterTables {
    to: u64,
    bytes: Vec<u8>,
}

impl StagedAdapter {
    /// Returns the blocks that copies of `matrices` take, or `None` if a block is too small for the smallest
    /// piece.
    pub fn blocks_for<'a>(
        matrices: impl IntoIterator<Item = &'a LoraMatrix>,
        block_bytes: usize,
    ) -> Option<u32> {
        let mut packing = Packing::new(block_bytes);
        MatrixPieces::pack(matrices, &mut packing)?;
        Some(packing.blocks())
    }

    /// Reserves blocks for `matrices`; no rank has arrived yet.
    ///
    /// # Panics
    /// Panics if `lent` has too few blocks ([`StagedAdapter::blocks_for`]) or another device than `lane`.
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

    /// Returns the device of the copy.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.lane.cuda()
    }

    /// Returns the matrices, in the order passed to [`Self::new`].
    #[must_use]
    pub fn matrices(&self) -> &[StagedMatrix] {
        &self.matrices
    }

    /// Returns the bytes of the next [`Self::copy_next`] of matrix `index`, or `None` once all ranks are
    /// enqueued.
    ///
    /// # Panics
    /// Panics if there is no such matrix.
    #[must_use]
    pub fn next_bytes(&self, index: usize) -> Option<usize> {
        self.matrices[index].next_bytes()
    }

    /// Enqueues the copy of the last rank block of matrix `index` that is not enqueued yet, both its A and
    /// its B part. Returns the bytes, 0 if no block is left or the copy was revoked.
    /// [`StagedMatrix::first_rank`] changes only when the queue observes the arrival. Waits only while the
    /// queue is full. `registered` is the pinned memory of `host`; with `None` the bytes are copied through a
    /// staging buffer.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if there is no such matrix, or `host` is not the matrix that was copied before.
    pub fn copy_next(
        &self,
        index: usize,
        host: &LoraMatrix,
        registered: Option<&Arc<RegisteredBytes>>,
    ) -> Result<usize, CudaError> {
        self.copy_tables()?;
        self.matrices[index].copy_next(&self.lane, host, registered)
    }

    /// Enqueues the tables before the first rank block, so that they arrive before any rank.
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

    /// Waits for all copies in the queue.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.lane.finish()
    }

    /// True if all ranks have arrived.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        self.matrices.iter().all(|matrix| matrix.first_rank() == 0)
    }

    /// Ends the lease of the blocks after waiting for the queue. From then on no rank is present, none
    /// arrives, and nothing writes the blocks. The caller revokes between two passes and launches no plan
    /// with this adapter again.
    pub fn revoke(&self) {
        drop(mem::take(&mut *self.tables()));
        self.matrices.iter().for_each(StagedMatrix::revoke);
        // A lost device writes nothing any more, and the next pass reports the loss.
        let _ = self.lane.finish();
        self.lent.end();
    }
}

/// Returns the tables of all matrices' pieces, joining contiguous ones.
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
