//! An adapter on its way to the device, or there.
//!
//! One thread brings its blocks of ranks, layer by layer in the order of a pass, from the last block of a layer to the
//! first; the compute thread goes on with whatever has arrived.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use kernels::{
    Arena,
    cuda::{
        CudaError,
        lora::{AdapterMemory, CopyLane, RegisteredBytes, StagedMatrix as CudaMatrix},
    },
    lora::{LoraMatrix, StagedMatrix},
};

use crate::{prepared_adapter::PreparedAdapter, source::Target};

/// Where the device's copies are made.
#[derive(Debug, Clone)]
pub enum DeviceMemory {
    /// The device is the CPU: huge pages beside the host tier.
    Cpu,
    /// A GPU, through a lane of its own.
    Cuda(Arc<CopyLane>),
}

impl DeviceMemory {
    /// Memory for `adapter`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn copy_of(&self, adapter: &PreparedAdapter) -> Result<DeviceCopy, NoRoom> {
        match self {
            Self::Cpu => Ok(DeviceCopy::new(adapter)?),
            Self::Cuda(lane) => Ok(DeviceCopy::on_cuda(adapter, lane)?),
        }
    }
}

/// Why there is no memory for an adapter on the device.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// The machine has none.
    #[error(transparent)]
    Host(#[from] io::Error),
    /// The GPU has none.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The device's copy of an adapter.
#[derive(Debug)]
pub struct DeviceCopy {
    /// In the order of a pass.
    matrices: Vec<Staged>,
    /// `[layer][target]`: index in `matrices`.
    layers: Vec<[Option<u32>; 7]>,
    head: Option<u32>,
    /// The first of `matrices` that is not complete, or wholly on its way: those before it are.
    next: AtomicUsize,
    arrived_bytes: AtomicU64,
    bytes: u64,
    way: Way,
    /// The device refused a copy: no more come.
    is_broken: AtomicBool,
}

/// How blocks travel.
#[derive(Debug)]
enum Way {
    /// They are there when their copying returns.
    Cpu,
    /// They are on their way then, several at a time.
    Cuda {
        lane: Arc<CopyLane>,
        /// The adapter's bytes, known to the GPU; `None` if it refuses: then the lane stages them. Found out by whoever
        /// copies, since locking memory takes its time.
        registered: OnceLock<Option<Arc<RegisteredBytes>>>,
    },
}

#[derive(Debug)]
struct Staged {
    layer: usize,
    target: Target,
    matrix: StagedLayer,
}

/// The device's part of a linear layer.
#[derive(Debug)]
enum StagedLayer {
    Cpu(StagedMatrix),
    Cuda(CudaMatrix),
}

impl StagedLayer {
    fn next_bytes(&self) -> Option<usize> {
        match self {
            Self::Cpu(matrix) => matrix.next_bytes(),
            Self::Cuda(matrix) => matrix.next_bytes(),
        }
    }

    /// Ranks from this one on are on the device.
    fn first_rank(&self) -> usize {
        match self {
            Self::Cpu(matrix) => matrix.first_rank(),
            Self::Cuda(matrix) => matrix.first_rank(),
        }
    }
}

/// Has the GPU know the adapter's bytes, if it can.
fn register(adapter: &PreparedAdapter, lane: &CopyLane) -> Option<Arc<RegisteredBytes>> {
    let registered = RegisteredBytes::new(lane.cuda(), adapter.image_bytes()?);
    registered
        .inspect_err(|error| tracing::debug!(%error, "an adapter's bytes are staged"))
        .ok()
        .map(Arc::new)
}

impl DeviceCopy {
    /// Memory of this process for `adapter`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(adapter: &PreparedAdapter) -> io::Result<Self> {
        let arena = Arena::new(adapter.device_bytes());
        let stage = |host: &LoraMatrix| Ok(StagedLayer::Cpu(StagedMatrix::new(&arena, host)?));
        Self::with(adapter, Way::Cpu, stage)
    }

    /// Memory of a GPU for `adapter`, of which nothing is there yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn on_cuda(adapter: &PreparedAdapter, lane: &Arc<CopyLane>) -> Result<Self, CudaError> {
        let matrices = || adapter.matrices().map(|(_, _, matrix)| matrix);
        let memory = AdapterMemory::new(lane.cuda(), AdapterMemory::bytes_for(matrices()))?;
        let way = Way::Cuda { lane: Arc::clone(lane), registered: OnceLock::new() };
        Self::with(adapter, way, |host| Ok(StagedLayer::Cuda(CudaMatrix::new(&memory, host))))
    }

    fn with<E>(
        adapter: &PreparedAdapter,
        way: Way,
        stage: impl Fn(&LoraMatrix) -> Result<StagedLayer, E>,
    ) -> Result<Self, E> {
        let mut copy = Self {
            matrices: Vec::new(),
            layers: Vec::new(),
            head: None,
            next: AtomicUsize::new(0),
            arrived_bytes: AtomicU64::new(0),
            bytes: adapter.device_bytes() as u64,
            way,
            is_broken: AtomicBool::new(false),
        };
        for (layer, target, matrix) in adapter.matrices() {
            let index = u32::try_from(copy.matrices.len()).ok();
            if target == Target::LmHead {
                copy.head = index;
            } else {
                copy.layers.resize(copy.layers.len().max(layer + 1), [None; 7]);
                copy.layers[layer][target as usize] = index;
            }
            copy.matrices.push(Staged { layer, target, matrix: stage(matrix)? });
        }
        Ok(copy)
    }

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are there, or as good as there.
    #[must_use]
    pub fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of it is there.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.next.load(Ordering::Relaxed) == self.matrices.len()
            && (matches!(self.way, Way::Cpu)
                || self.matrices.iter().all(|staged| staged.matrix.first_rank() == 0))
    }

    /// Bytes of the next block; `None` if nothing is left to be copied.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        if self.is_broken.load(Ordering::Relaxed) {
            return None;
        }
        self.matrices.get(self.next.load(Ordering::Relaxed))?.matrix.next_bytes()
    }

    /// Copies the next block of `adapter`, which this is the copy of. Blocks come from one thread. After the last of them
    /// all of it is there, unless the device refused one.
    pub fn copy_next(&self, adapter: &PreparedAdapter) {
        let index = self.next.load(Ordering::Relaxed);
        let Some(staged) = self.matrices.get(index) else { return };
        let Some(host) = adapter.matrix(staged.layer, staged.target) else { return };
        match self.copy(adapter, &staged.matrix, host) {
            Ok(bytes) => self.arrived_bytes.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, "an adapter does not get to the GPU");
                self.is_broken.store(true, Ordering::Relaxed);
                return;
            }
        };
        if staged.matrix.next_bytes().is_none() {
            self.next.store(index + 1, Ordering::Relaxed);
        }
    }

    /// Copies a block, and waits for all that is on its way if it is the last.
    fn copy(
        &self,
        adapter: &PreparedAdapter,
        staged: &StagedLayer,
        host: &LoraMatrix,
    ) -> Result<usize, CudaError> {
        match (staged, &self.way) {
            (StagedLayer::Cpu(matrix), _) => Ok(matrix.copy_next(host)),
            (StagedLayer::Cuda(_), Way::Cpu) => unreachable!("matrices are where their way leads"),
            (StagedLayer::Cuda(matrix), Way::Cuda { lane, registered }) => {
                let registered = registered.get_or_init(|| register(adapter, lane));
                let bytes = matrix.copy_next(lane, host, registered.as_ref())?;
                let is_last = self.next.load(Ordering::Relaxed) + 1 == self.matrices.len();
                if is_last && matrix.next_bytes().is_none() {
                    lane.finish()?;
                }
                Ok(bytes)
            }
        }
    }

    fn staged(&self, layer: usize, target: Target) -> Option<&StagedLayer> {
        let index = match target {
            Target::LmHead => self.head?,
            target => self.layers.get(layer)?[target as usize]?,
        };
        Some(&self.matrices.get(index as usize)?.matrix)
    }

    /// The CPU's part of a linear layer.
    pub(crate) fn matrix(&self, layer: usize, target: Target) -> Option<&StagedMatrix> {
        match self.staged(layer, target)? {
            StagedLayer::Cpu(matrix) => Some(matrix),
            StagedLayer::Cuda(_) => None,
        }
    }

    /// The GPU's part of a linear layer.
    pub(crate) fn cuda(&self, layer: usize, target: Target) -> Option<&CudaMatrix> {
        match self.staged(layer, target)? {
            StagedLayer::Cpu(_) => None,
            StagedLayer::Cuda(matrix) => Some(matrix),
        }
    }

    /// Ranks of a linear layer that are missing, from the first.
    pub(crate) fn missing_ranks(&self, host: &LoraMatrix, layer: usize, target: Target) -> usize {
        self.staged(layer, target).map_or(host.rank(), StagedLayer::first_rank)
    }
}
