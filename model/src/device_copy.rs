//! An adapter on its way to the device, or there.
//!
//! One thread brings its blocks of ranks, layer by layer in the order of a pass, from the last block of a layer to the
//! first; the compute thread goes on with whatever has arrived.

use std::{
    io,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use kernels::{
    Arena,
    lora::{LoraMatrix, StagedMatrix},
};

use crate::{prepared_adapter::PreparedAdapter, source::Target};

/// The device's copy of an adapter.
#[derive(Debug)]
pub struct DeviceCopy {
    /// In the order of a pass.
    matrices: Vec<Staged>,
    /// `[layer][target]`: index in `matrices`.
    layers: Vec<[Option<u32>; 7]>,
    head: Option<u32>,
    /// The first of `matrices` that is not complete: those before it are.
    next: AtomicUsize,
    arrived_bytes: AtomicU64,
    bytes: u64,
}

#[derive(Debug)]
struct Staged {
    layer: usize,
    target: Target,
    matrix: StagedMatrix,
}

impl DeviceCopy {
    /// Memory for `adapter`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(adapter: &PreparedAdapter) -> io::Result<Self> {
        let arena = Arena::new(adapter.device_bytes());
        let mut copy = Self {
            matrices: Vec::new(),
            layers: Vec::new(),
            head: None,
            next: AtomicUsize::new(0),
            arrived_bytes: AtomicU64::new(0),
            bytes: adapter.device_bytes() as u64,
        };
        for (layer, target, matrix) in adapter.matrices() {
            let index = u32::try_from(copy.matrices.len()).ok();
            if target == Target::LmHead {
                copy.head = index;
            } else {
                copy.layers.resize(copy.layers.len().max(layer + 1), [None; 7]);
                copy.layers[layer][target as usize] = index;
            }
            copy.matrices.push(Staged { layer, target, matrix: StagedMatrix::new(&arena, matrix)? });
        }
        Ok(copy)
    }

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are there.
    #[must_use]
    pub fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of it is there.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.next.load(Ordering::Relaxed) == self.matrices.len()
    }

    /// Bytes of the next block; `None` if all of it is there.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        self.matrices.get(self.next.load(Ordering::Relaxed))?.matrix.next_bytes()
    }

    /// Copies the next block of `adapter`, which this is the copy of. Blocks come from one thread.
    pub fn copy_next(&self, adapter: &PreparedAdapter) {
        let index = self.next.load(Ordering::Relaxed);
        let Some(staged) = self.matrices.get(index) else { return };
        let Some(host) = adapter.matrix(staged.layer, staged.target) else { return };
        let bytes = staged.matrix.copy_next(host);
        self.arrived_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if staged.matrix.next_bytes().is_none() {
            self.next.store(index + 1, Ordering::Relaxed);
        }
    }

    /// The device's part of a linear layer.
    pub(crate) fn matrix(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        let index = match target {
            Target::LmHead => self.head?,
            target => self.layers.get(layer)?[target as usize]?,
        };
        Some(&self.matrices.get(index as usize)?.matrix)
    }

    /// Ranks of a linear layer that are missing, from the first.
    pub(crate) fn missing_ranks(&self, host: &LoraMatrix, layer: usize, target: Target) -> usize {
        self.matrix(layer, target).map_or(host.rank(), StagedMatrix::first_rank)
    }
}
