//! The CPU workers that compute adapters through shared memory (CaraServe §4).
//!
//! # Layout
//!
//! - `service`: the thread that admits workers, offers images and detects lost workers.
//! - `work_dispatcher`: the executor's side of the board, which a pass on the CPU uses directly.
//! - [`gpu_bridge`]: the thread that uses the board for a GPU.
//!
//! # Invariants
//!
//! - No thread waits for a worker longer than its slice should take; the waiting thread then computes it.
//! - A worker that is gone, stuck or misbehaving is fenced: its later writes are never read.

pub mod gpu_bridge;
mod service;
mod work_dispatcher;

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::Context as _;
use kernels::{Isa, ThreadPool, cuda::Cuda};
use kv_cache::ledger::MemoryAccount;
use model::{
    cpu::Compute,
    cuda::assist::{DeviceAssist, Invocation},
    deltas::assist::Assist,
    shape::config::ModelConfig,
};
use shmproto::{
    board::{ActivationSlab, Board, Geometry, MAX_ELEMENTS, MAX_SLICES, Producer, SUMS_ALIGN},
    fd_passing::BoardListener,
    message::{Stats, WorkerStats},
};

use self::{
    gpu_bridge::{
        Bridge, BridgeMemory,
        cuda::{CudaBridge, CudaBridgeMemory},
    },
    service::Service,
    work_dispatcher::WorkDispatcher,
};
use crate::adapter_images::ImageRegistry;

/// Maximum number of elements of a job's sums for a pass on the CPU; the executor computes the rest.
const MAX_SUMS: usize = 8 << 20;

/// Maximum number of elements of a job's rows for a pass on the CPU.
const MAX_X: usize = 8 << 20;

/// Maximum number of slices of a job.
const SLICES: usize = if MAX_SLICES < 512 { MAX_SLICES } else { 512 };

/// The workers of one executor. Clones share them; the last one to be dropped dismisses the workers.
#[derive(Debug, Clone, Default)]
pub struct Workers(Option<Arc<ServiceThread>>);

/// Ends the workers' thread on drop and waits for it, since it owns the socket.
#[derive(Debug)]
struct ServiceThread {
    shared: Arc<SharedWorkerState>,
    library: ImageRegistry,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.shared.is_let_go.store(true, Ordering::Relaxed);
        self.library.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct SharedWorkerState {
    board: Board,
    is_let_go: AtomicBool,
    lost: AtomicU64,
    /// Number of workers that the active cold requests need; 0 for all.
    wanted: Arc<AtomicUsize>,
    waits: Arc<WaitTime>,
    /// Core and process id of the admitted workers, by worker number.
    seated: Mutex<Vec<AttachedWorker>>,
}

#[derive(Debug, Clone, Copy)]
struct AttachedWorker {
    worker: u32,
    core: u32,
    pid: u32,
}

/// The socket for workers.
#[derive(Debug, Clone, Copy)]
pub struct WorkerListener<'a> {
    pub socket: &'a Path,
    /// Maximum number of workers, 1 to 64.
    pub most: usize,
    /// Account for the board and the workers' sums.
    pub memory: &'a MemoryAccount,
}

/// Rows of the largest jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobRows {
    /// Rows of a pass, at any linear layer of a block.
    pub pass: usize,
    /// Rows whose logits are computed at a time, at the head.
    pub head: usize,
}

/// Settings of a GPU bridge.
#[derive(Debug)]
pub struct BridgeSetup<'a> {
    pub cuda: &'a Arc<Cuda>,
    /// Cores that sum what no worker does: the first for the bridge's thread, the others for helpers.
    pub cores: Vec<usize>,
    pub invocation: Invocation,
}

/// Time that the compute thread, or the bridge, waited for workers.
#[derive(Debug, Default)]
struct WaitTime {
    us: AtomicU64,
}

impl WaitTime {
    fn note(&self, waited: Duration) {
        let us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        self.us.fetch_add(us, Ordering::Relaxed);
    }
}

impl Workers {
    /// Admits workers at `listener`, for jobs of at most `rows` rows; also returns the dispatcher of their
    /// jobs.
    ///
    /// # Errors
    /// If there is no memory for the board, or the socket cannot be bound.
    pub fn start(
        listener: WorkerListener<'_>,
        rows: usize,
        config: &ModelConfig,
        library: ImageRegistry,
    ) -> anyhow::Result<(Self, Box<dyn Assist>)> {
        let geometry = geometry(config, rows, listener.most);
        let (board, producer) = Board::new(geometry).context("no memory for the workers' board")?;
        let shared = SharedWorkerState::new(&board);
        let assistant = shared.assistant(producer);
        Ok((Self::open(listener, &geometry, shared, library)?, Box::new(assistant)))
    }

    /// Admits workers for a GPU: rows go from the GPU to the workers and sums back, without the compute
    /// thread. Without a listener, the executor's own cores sum everything.
    ///
    /// The slab holds all rows of a pass at any linear layer, and the sums hold the outputs of any group. For
    /// a 7B model (inputs of up to 11,008, outputs of up to 22,016) and the default of 576 rows, these are 25
    /// MB and 51 MB of locked memory. Each worker's sums take 51 MB more.
    ///
    /// # Errors
    /// If there is no memory, the driver does not lock it, or the socket cannot be bound.
    pub fn start_on_device(
        listener: Option<WorkerListener<'_>>,
        rows: JobRows,
        config: &ModelConfig,
        library: ImageRegistry,
        bridging: BridgeSetup<'_>,
    ) -> anyhow::Result<(Self, Box<dyn DeviceAssist>)> {
        let BridgeSetup { cuda, cores, invocation } = bridging;
        let wire = |slab, sums_elements| CudaBridgeMemory::new(cuda, slab, sums_elements);
        let (workers, bridge) = Self::start_bridged(listener, rows, config, library, &cores, wire)?;
        Ok((workers, Box::new(CudaBridge::new(bridge, invocation))))
    }

    /// Admits workers for any device. `wire` gets the slab and the number of elements of sums.
    ///
    /// # Errors
    /// If there is no memory for the board, the socket cannot be bound, or `wire` fails.
    pub fn start_bridged<W: BridgeMemory>(
        listener: Option<WorkerListener<'_>>,
        rows: JobRows,
        config: &ModelConfig,
        library: ImageRegistry,
        cores: &[usize],
        wire: impl FnOnce(ActivationSlab, usize) -> anyhow::Result<W>,
    ) -> anyhow::Result<(Self, Bridge<W>)> {
        let listener = listener.filter(|listener| listener.most > 0);
        let geometry = device_geometry(config, rows, listener.map_or(1, |listener| listener.most));
        let too_large =
            "cannot make the workers' board; lower --chunk-tokens or --max-running if it is too large";
        let (board, producer) = Board::new(geometry).context(too_large)?;
        let wire = wire(board.x_slab(), device_sums(config, rows))?;
        let shared = SharedWorkerState::new(&board);
        let pool = ThreadPool::new(cores).context("cannot start the threads that compute slices")?;
        let compute = Compute { pool, isa: Isa::best() };
        let slab = board.x_slab();
        let bridge = Bridge::new(shared.assistant(producer), compute, slab, geometry.x_elements, wire)?;
        let workers =
            listener.map(|listener| Self::open(listener, &geometry, shared, library)).transpose()?;
        Ok((workers.unwrap_or_default(), bridge))
    }

    /// Opens the socket of `listener` for a board of this geometry.
    fn open(
        listener: WorkerListener<'_>,
        geometry: &Geometry,
        shared: Arc<SharedWorkerState>,
        library: ImageRegistry,
    ) -> anyhow::Result<Self> {
        let WorkerListener { socket, memory, .. } = listener;
        let board_bytes = geometry.control_bytes() + geometry.x_bytes();
        let board = memory.charge(board_bytes as u64);
        let board =
            board.context("no memory for the workers' board; lower --chunk-tokens or --max-running")?;
        let listener = BoardListener::bind(socket)
            .with_context(|| format!("cannot accept workers at {}", socket.display()))?;
        let service = Service::new(listener, Arc::clone(&shared), board, library.clone());
        let spawned = std::thread::Builder::new().name("workers".to_owned()).spawn(move || service.run());
        let thread = Some(spawned.context("cannot start the workers' thread")?);
        Ok(Self(Some(Arc::new(ServiceThread { shared, library, thread }))))
    }

    /// Returns the cores to which the workers are pinned, one per worker.
    #[must_use]
    pub fn cores(&self) -> Vec<u32> {
        self.0.as_ref().map_or_else(Vec::new, |service| {
            service.shared.seated().iter().map(|seated| seated.core).collect()
        })
    }

    /// Sets the number of workers that the active cold requests need (C-09); 0 for all.
    pub(crate) fn want(&self, workers: usize) {
        if let Some(ServiceThread { shared, .. }) = self.0.as_deref() {
            shared.wanted.store(workers, Ordering::Relaxed);
        }
    }

    /// Fills in the stats of the workers.
    pub fn stats(&self, stats: &mut Stats) {
        let Some(ServiceThread { shared, .. }) = self.0.as_deref() else { return };
        stats.worker_wait_us = shared.waits.us.load(Ordering::Relaxed);
        stats.workers_lost = shared.lost.load(Ordering::Relaxed);
        let seated = shared.seated();
        for slot in shared.board.stats().seats {
            let known = seated.iter().find(|seated| seated.worker == slot.worker.get());
            let Some(AttachedWorker { core, pid, .. }) = known.copied() else { continue };
            stats.workers.push(WorkerStats {
                core,
                pid,
                slices: slot.slices,
                rank_rows: slot.rank_rows,
                taken_back: slot.taken_back,
            });
        }
        stats.workers.sort_by_key(|worker| (worker.core, worker.pid));
    }
}

impl SharedWorkerState {
    fn new(board: &Board) -> Arc<Self> {
        Arc::new(Self {
            board: board.clone(),
            is_let_go: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            wanted: Arc::default(),
            waits: Arc::default(),
            seated: Mutex::default(),
        })
    }

    fn assistant(&self, producer: Producer) -> WorkDispatcher {
        WorkDispatcher::new(self.board.clone(), producer, Arc::clone(&self.waits), Arc::clone(&self.wanted))
    }

    fn seated(&self) -> std::sync::MutexGuard<'_, Vec<AttachedWorker>> {
        // Each change of the list is one call, so the list is consistent even after a panic of a lock holder.
        self.seated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self, seated: AttachedWorker) {
        self.seated().push(seated);
    }

    fn left(&self, worker: u32) {
        self.seated().retain(|seated| seated.worker != worker);
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the widest input and output of a linear group, except the head's.
fn widest(config: &ModelConfig) -> [usize; 2] {
    let queries = config.heads * config.head_dim;
    let qkv = queries + 2 * config.kv_heads * config.head_dim;
    let inputs = config.hidden_size.max(queries).max(config.intermediate_size);
    [inputs, qkv.max(config.hidden_size).max(2 * config.intermediate_size)]
}

/// Returns the geometry for jobs of `rows` rows of any linear layer except the head, within limits.
fn geometry(config: &ModelConfig, rows: usize, seats: usize) -> Geometry {
    let [inputs, outputs] = widest(config);
    Geometry {
        x_elements: rows.saturating_mul(inputs).min(MAX_X),
        sums_elements: rows.saturating_mul(outputs).min(MAX_SUMS),
        slices: SLICES,
        seats,
    }
}

/// Returns the geometry for a device, which writes rows without asking, so every job must fit. The executor
/// computes sums of the head that exceed a worker's memory.
fn device_geometry(config: &ModelConfig, rows: JobRows, seats: usize) -> Geometry {
    let [inputs, outputs] = widest(config);
    let x_elements = rows.pass.saturating_mul(inputs).max(rows.head.saturating_mul(config.hidden_size));
    // Each slice begins on a cache line.
    let sums_elements = rows.pass.saturating_mul(outputs).saturating_add(SLICES * SUMS_ALIGN);
    Geometry { x_elements, sums_elements: sums_elements.min(MAX_ELEMENTS), slices: SLICES, seats }
}

/// Returns the number of elements of the largest job's sums.
fn device_sums(config: &ModelConfig, rows: JobRows) -> usize {
    let [_, outputs] = widest(config);
    rows.pass.saturating_mul(outputs).max(rows.head.saturating_mul(config.vocab_size))
}
