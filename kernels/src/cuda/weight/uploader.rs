//! Uploads many weights as fast as the host reads them.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Weight, number_kind};
use crate::{
    TensorType,
    cuda::{Cuda, CudaError, CudaEvent, CudaStream, DeviceVec, Pinned, error::check},
};

/// Bytes per slot: a piece long enough that the start of its copy costs nothing.
const SLOT_BYTES: usize = 16 << 20;

/// Number of slots: the host fills one while the device empties the other.
const SLOTS: usize = 2;

struct UploadSlot {
    pinned: Pinned<u8>,
    /// Device buffer for block formats before repacking; allocated on first use.
    raw: Option<DeviceVec<u8>>,
    /// Recorded after the last use of the slot.
    emptied: CudaEvent,
}

/// A ring of page-locked memory for uploads: the host copies each piece once. One thread uses it at a time.
pub struct WeightUploader {
    stream: CudaStream,
    slots: Vec<UploadSlot>,
    next: usize,
}

impl std::fmt::Debug for WeightUploader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WeightUploader")
    }
}

impl WeightUploader {
    /// Allocates a ring of two slots of 16 MiB, with a stream of its own.
    ///
    /// # Errors
    /// Fails if the host cannot lock the memory.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let slot = || {
            Ok(UploadSlot {
                pinned: Pinned::new(cuda, SLOT_BYTES)?,
                raw: None,
                emptied: CudaEvent::new(cuda)?,
            })
        };
        let slots = (0..SLOTS).map(|_| slot()).collect::<Result<_, CudaError>>()?;
        Ok(Self { stream: CudaStream::new(cuda)?, slots, next: 0 })
    }

    /// Uploads like [`Weight::upload`], but returns while the last pieces are in flight; [`Self::finish`]
    /// waits for them. `bytes` may be dropped at once.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    ///
    /// # Panics
    /// Panics if `bytes` is not `rows` rows of `columns` elements of `kind`.
    pub fn upload(
        &mut self,
        kind: TensorType,
        bytes: &[u8],
        rows: usize,
        columns: usize,
    ) -> Result<Weight, CudaError> {
        let mut weight = Weight::unwritten(&self.stream, kind, rows, columns)?;
        let row_bytes = weight.stored_row_bytes();
        assert_eq!(bytes.len(), rows * row_bytes, "{rows} rows of {columns} {kind:?}");
        if number_kind(kind).is_some() {
            for (index, piece) in bytes.chunks(SLOT_BYTES).enumerate() {
                self.send(piece, &mut weight.bytes, index * SLOT_BYTES)?;
            }
        } else if row_bytes > SLOT_BYTES {
            return Weight::upload(&self.stream, kind, bytes, rows, columns);
        } else {
            let rows_a_slot = SLOT_BYTES.checked_div(row_bytes).unwrap_or(1);
            for (index, piece) in bytes.chunks((rows_a_slot * row_bytes).max(1)).enumerate() {
                self.send_blocks(piece, &mut weight, index * rows_a_slot, piece.len() / row_bytes)?;
            }
        }
        Ok(weight)
    }

    /// Waits until all weights have arrived.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn finish(&mut self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }

    fn send(&mut self, piece: &[u8], to: &mut DeviceVec<u8>, at: usize) -> Result<(), CudaError> {
        let index = self.fill(piece)?;
        let slot = &self.slots[index];
        copy(&self.stream, &slot.pinned, piece.len(), to, at)?;
        slot.emptied.record(&self.stream)
    }

    /// Copies `piece` to the device and repacks it there as rows `first..first + rows`.
    fn send_blocks(
        &mut self,
        piece: &[u8],
        weight: &mut Weight,
        first: usize,
        rows: usize,
    ) -> Result<(), CudaError> {
        let index = self.fill(piece)?;
        let slot = &mut self.slots[index];
        let raw = match &mut slot.raw {
            Some(raw) => raw,
            none => none.insert(DeviceVec::new(self.stream.cuda(), SLOT_BYTES)?),
        };
        copy(&self.stream, &slot.pinned, piece.len(), raw, 0)?;
        weight.repack(&self.stream, raw, first, rows)?;
        slot.emptied.record(&self.stream)
    }

    /// Waits until the next slot is empty, writes `piece` to it, and returns its index.
    fn fill(&mut self, piece: &[u8]) -> Result<usize, CudaError> {
        let index = self.next;
        self.next = (index + 1) % self.slots.len();
        let slot = &self.slots[index];
        slot.emptied.synchronize()?;
        slot.pinned.write(0, piece);
        Ok(index)
    }
}

/// Enqueues the copy of the first `bytes` bytes of `from` to the bytes of `to` from `at` on. The caller
/// changes neither until the copy is done.
fn copy(
    stream: &CudaStream,
    from: &Pinned<u8>,
    bytes: usize,
    to: &mut DeviceVec<u8>,
    at: usize,
) -> Result<(), CudaError> {
    assert!(bytes <= from.len() && at + bytes <= to.len(), "what is copied exists, and has room");
    stream.cuda().bind()?;
    // SAFETY: both ranges exist. The page-locked memory is not written before the event that follows this copy.
    let result =
        unsafe { sys::cuMemcpyHtoDAsync_v2(to.address_of(at), from.host_address(), bytes, stream.raw()) };
    check("copy weights", result)
}
