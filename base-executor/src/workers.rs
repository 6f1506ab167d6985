//! The CPU workers that compute adapters through shared memory (CaraServe §4).
//!
//! # Layout
//!
//! - `service`: the thread that seats them, offers images and notices who is gone.
//! - `assistant`: the compute thread's side of the board.
//!
//! # Invariants
//!
//! - The compute thread waits for a worker only so long as the worker's slice should take, then computes it itself.
//! - A worker that is gone, stuck or in breach of the protocol is fenced: nothing it writes is read any more.

mod assistant;
mod service;

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
use model::{assist::Assist, config::ModelConfig};
use shmproto::{
    board::{Board, Geometry, MAX_SLICES},
    handover::Listener,
    message::{Stats, WorkerStats},
};

use self::{assistant::Assistant, service::Service};
use crate::images::Library;

/// Most elements of a job's sums; what is beyond is computed without workers.
const MOST_SUMS: usize = 8 << 20;

/// Most elements of a job's rows.
const MOST_X: usize = 8 << 20;

/// Slices of a job.
const SLICES: usize = if MAX_SLICES < 512 { MAX_SLICES } else { 512 };

/// The workers of one executor. Clones are the same; with the last of them the workers are let go.
#[derive(Debug, Clone, Default)]
pub struct Workers(Option<Arc<Employer>>);

/// Ends the workers' thread when it is dropped, and waits for that: the socket goes with it.
#[derive(Debug)]
struct Employer {
    staff: Arc<Staff>,
    library: Library,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Employer {
    fn drop(&mut self) {
        self.staff.is_let_go.store(true, Ordering::Relaxed);
        self.library.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Staff {
    board: Board,
    is_let_go: AtomicBool,
    lost: AtomicU64,
    /// Workers that the cold requests under way keep busy; 0: all.
    wanted: Arc<AtomicUsize>,
    waits: Arc<Waits>,
    /// Core and process by generation, of those who are seated.
    seated: Mutex<Vec<Seated>>,
}

#[derive(Debug, Clone, Copy)]
struct Seated {
    generation: u32,
    core: u32,
    pid: u32,
}

/// What the compute thread waited for workers.
#[derive(Debug, Default)]
struct Waits {
    us: AtomicU64,
}

impl Waits {
    fn note(&self, waited: Duration) {
        let us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        self.us.fetch_add(us, Ordering::Relaxed);
    }
}

impl Workers {
    /// Takes workers in at `socket`, at most so many, for jobs of at most so many rows of a model. Also returns who asks
    /// them for the compute thread.
    ///
    /// # Errors
    /// If there is no memory for the board, or the socket cannot be bound.
    pub fn start(
        socket: &Path,
        most: usize,
        rows: usize,
        config: &ModelConfig,
        library: Library,
    ) -> anyhow::Result<(Self, Box<dyn Assist>)> {
        let (board, poster) =
            Board::new(geometry(config, rows, most)).context("no memory for the workers' board")?;
        let listener = Listener::bind(socket)
            .with_context(|| format!("workers cannot be taken in at {}", socket.display()))?;
        let staff = Arc::new(Staff {
            board: board.clone(),
            is_let_go: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            wanted: Arc::default(),
            waits: Arc::default(),
            seated: Mutex::default(),
        });
        let service = Service::new(listener, Arc::clone(&staff), board.clone(), library.clone());
        let spawned = std::thread::Builder::new().name("workers".to_owned()).spawn(move || service.run());
        let thread = Some(spawned.context("cannot start the workers' thread")?);
        let assistant = Assistant::new(board, poster, Arc::clone(&staff.waits), Arc::clone(&staff.wanted));
        Ok((Self(Some(Arc::new(Employer { staff, library, thread }))), Box::new(assistant)))
    }

    /// The cores they are pinned to, one for each of them.
    #[must_use]
    pub fn cores(&self) -> Vec<u32> {
        self.0.as_ref().map_or_else(Vec::new, |employer| {
            employer.staff.seated().iter().map(|seated| seated.core).collect()
        })
    }

    /// So many of them keep up with the cold requests under way (C-09); 0 means all.
    pub fn want(&self, workers: usize) {
        if let Some(Employer { staff, .. }) = self.0.as_deref() {
            staff.wanted.store(workers, Ordering::Relaxed);
        }
    }

    /// Fills in what they have done.
    pub fn stats(&self, stats: &mut Stats) {
        let Some(Employer { staff, .. }) = self.0.as_deref() else { return };
        stats.worker_wait_us = staff.waits.us.load(Ordering::Relaxed);
        stats.workers_lost = staff.lost.load(Ordering::Relaxed);
        let seated = staff.seated();
        for figures in staff.board.figures().seats {
            let known = seated.iter().find(|seated| seated.generation == figures.generation.get());
            let Some(Seated { core, pid, .. }) = known.copied() else { continue };
            stats.workers.push(WorkerStats {
                core,
                pid,
                slices: figures.slices,
                rank_rows: figures.rank_rows,
                taken_back: figures.taken_back,
            });
        }
        stats.workers.sort_by_key(|worker| (worker.core, worker.pid));
    }
}

impl Staff {
    fn seated(&self) -> std::sync::MutexGuard<'_, Vec<Seated>> {
        // Every change is one call, so the list is whole even if a holder of the lock panicked.
        self.seated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self, seated: Seated) {
        self.seated().push(seated);
    }

    fn left(&self, generation: u32) {
        self.seated().retain(|seated| seated.generation != generation);
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// A board for jobs of `rows` rows of any linear layer but the head, as far as that is reasonable.
fn geometry(config: &ModelConfig, rows: usize, seats: usize) -> Geometry {
    let queries = config.heads * config.head_dim;
    let qkv = queries + 2 * config.kv_heads * config.head_dim;
    let widest_in = config.hidden_size.max(queries).max(config.intermediate_size);
    let widest_out = qkv.max(config.hidden_size).max(2 * config.intermediate_size);
    Geometry {
        x_elements: rows.saturating_mul(widest_in).min(MOST_X),
        sums_elements: rows.saturating_mul(widest_out).min(MOST_SUMS),
        slices: SLICES,
        seats,
    }
}
