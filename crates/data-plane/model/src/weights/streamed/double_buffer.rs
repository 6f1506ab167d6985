//! Double buffer of streamed weights: two layer chunks in memory, which follow the pass up and down.
//!
//! ```text
//! pass    | chunk 3       | chunk 4       |            owns the chunk that it computes
//! reader  |   reads 4     |   reads 5     |            owns the chunk that it fills
//! ```
//!
//! A slab belongs to either the pass or the reader, so no thread writes where another reads.

use std::{
    collections::VecDeque,
    io,
    num::NonZeroU64,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use failpoint::FailpointOutcome;
use kernels::{PackedMatrix, PageSlab};

use super::file::{PackedFile, WeightReadError};
use crate::{
    weight_stream_stats::{PendingWeights, WeightStreamStats},
    weights::host::WaitCallback,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassDirection {
    /// From the first block to the head, then again from the first: forward calls.
    Up,
    /// The head, then from the last block to the first: backward calls.
    Down,
}

/// Amount of reading ahead of the pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readahead {
    /// Reads the next chunk while the pass computes the current one (the pipeline of EdgeLLM §4.3).
    #[default]
    Next,
    /// Reads each chunk on demand, for comparison.
    Nothing,
}

pub(super) const SLABS: usize = 2;

/// Weight of the latest read in the moving average of read times.
const LATEST: f64 = 0.25;

#[derive(Debug)]
struct ReadChunk {
    chunk: usize,
    slab: PageSlab,
    outcome: Result<(), WeightReadError>,
}

#[derive(Debug, Default)]
struct ReadQueue {
    wanted: VecDeque<(usize, PageSlab)>,
    read: Vec<ReadChunk>,
    /// Chunk, bytes and start of the read in progress.
    reading: Option<(usize, u64, Instant)>,
    /// Moving average of seconds per byte; 0 before the first read.
    byte_s: f64,
    is_closed: bool,
}

impl ReadQueue {
    /// Returns the expected time to read `bytes` bytes.
    fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 * self.byte_s)
    }

    /// Returns the expected remaining time until a chunk of `bytes` bytes is read.
    fn left_of(&self, chunk: usize, bytes: u64) -> Duration {
        let Some((reading, read_bytes, since)) = self.reading else { return self.time_of(bytes) };
        let first = self.time_of(read_bytes).saturating_sub(since.elapsed());
        if reading == chunk { first } else { first + self.time_of(bytes) }
    }

    /// Records a finished read of `bytes` bytes.
    fn note(&mut self, bytes: u64, since: Instant) {
        let byte_s = since.elapsed().as_secs_f64() / (bytes.max(1) as f64);
        self.byte_s += (byte_s - self.byte_s) * if self.byte_s > 0.0 { LATEST } else { 1.0 };
        self.reading = None;
    }
}

struct AwaitedChunk<'a> {
    shared: &'a ReaderShared,
    chunk: usize,
    bytes: u64,
    /// Bytes of the following chunk of the pass, or 0 for the last one.
    next_bytes: u64,
}

impl PendingWeights for AwaitedChunk<'_> {
    fn is_over(&self) -> bool {
        let desk = self.shared.desk();
        !desk.read.is_empty() || desk.is_closed
    }

    /// Returns the time until this chunk and three quarters of the following one are read. The reader
    /// continues meanwhile, so such a pause costs no time; the last quarter is for computing this chunk.
    fn left(&self) -> Duration {
        let desk = self.shared.desk();
        desk.left_of(self.chunk, self.bytes) + desk.time_of(self.next_bytes) * 3 / 4
    }
}

#[derive(Debug, Default)]
struct ReaderShared {
    desk: Mutex<ReadQueue>,
    changed: Condvar,
}

impl ReaderShared {
    fn desk(&self) -> MutexGuard<'_, ReadQueue> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.desk().is_closed = true;
        self.changed.notify_all();
    }
}

#[derive(Debug)]
struct LoadedChunk {
    chunk: usize,
    // The field order drops the matrices before their slab.
    matrices: Vec<PackedMatrix>,
    slab: PageSlab,
}

#[derive(Debug)]
pub(super) struct DoubleBuffer {
    file: Arc<PackedFile>,
    stats: Arc<WeightStreamStats>,
    shared: Arc<ReaderShared>,
    reader: Option<JoinHandle<()>>,
    readahead: Readahead,
    /// Streamed chunks in the order of an upward and a downward sweep.
    orders: [Vec<usize>; 2],
    spare: Vec<PageSlab>,
    loaded: Vec<LoadedChunk>,
    /// Chunks that were requested from the reader.
    asked: Vec<usize>,
}

impl DoubleBuffer {
    /// Creates a buffer for the `streamed` chunks of `file`, in ascending order. With `bytes_per_s`, reads
    /// take at least as long as from a disk of that many bytes per second.
    ///
    /// # Errors
    /// Memory or a thread is missing.
    pub(super) fn new(
        file: &Arc<PackedFile>,
        stats: &Arc<WeightStreamStats>,
        streamed: Vec<usize>,
        readahead: Readahead,
        bytes_per_s: Option<NonZeroU64>,
    ) -> io::Result<Self> {
        let (below, head): (Vec<usize>, Vec<usize>) =
            streamed.iter().partition(|chunk| **chunk < file.layout().blocks);
        // Sums over the head's outputs start with the first, so its chunks ascend in both directions.
        let down = head.into_iter().chain(below.into_iter().rev()).collect();
        let bytes = streamed.iter().map(|&chunk| file.chunk(chunk).bytes()).max().unwrap_or(0);
        let spare = (0..SLABS).map(|_| PageSlab::new(bytes)).collect::<io::Result<_>>()?;
        let shared = Arc::new(ReaderShared::default());
        let reader = ChunkReader { file: Arc::clone(file), stats: Arc::clone(stats), bytes_per_s };
        let desk = Arc::clone(&shared);
        let reader = thread::Builder::new().name("weights".to_owned()).spawn(move || reader.serve(&desk))?;
        Ok(Self {
            file: Arc::clone(file),
            stats: Arc::clone(stats),
            shared,
            reader: Some(reader),
            readahead,
            orders: [streamed, down],
            spare,
            loaded: Vec::new(),
            asked: Vec::new(),
        })
    }

    /// Requests the chunks that a pass at `chunk` needs next; `chunk` itself may be pinned.
    pub(super) fn approach(&mut self, chunk: usize, heading: PassDirection) {
        let wanted = self.wanted(chunk, heading);
        let shared = Arc::clone(&self.shared);
        // A pass that needs a failed chunk requests it again.
        drop(self.collect_reads(&mut shared.desk()));
        self.arrange(&wanted);
    }

    /// Returns the matrices of a streamed chunk after they are read; calls `meanwhile` before each wait.
    ///
    /// # Errors
    /// The chunk cannot be read.
    pub(super) fn reach(
        &mut self,
        chunk: usize,
        heading: PassDirection,
        meanwhile: WaitCallback<'_>,
    ) -> Result<&[PackedMatrix], WeightReadError> {
        let wanted = self.wanted(chunk, heading);
        let bytes = |chunk| self.file.chunk(chunk).bytes() as u64;
        let ahead = wanted.get(1).filter(|next| self.place(**next, heading) > self.place(chunk, heading));
        let next_bytes = ahead.map_or(0, |next| bytes(*next));
        let (shared, bytes) = (Arc::clone(&self.shared), bytes(chunk));
        let awaited = AwaitedChunk { shared: &shared, chunk, bytes, next_bytes };
        loop {
            let failed = self.collect_reads(&mut shared.desk());
            if let Some((_, error)) = failed.into_iter().find(|(failed, _)| *failed == chunk) {
                return Err(error);
            }
            self.arrange(&wanted);
            if let Some(at) = self.loaded.iter().position(|loaded| loaded.chunk == chunk) {
                return Ok(&self.loaded[at].matrices);
            }
            self.stats.waiting(|| {
                meanwhile(&awaited);
                let mut desk = shared.desk();
                while desk.read.is_empty() && !desk.is_closed {
                    desk = shared.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
                }
                if desk.read.is_empty() { Err(WeightReadError::ReaderEnded) } else { Ok(()) }
            })?;
        }
    }

    /// Returns the chunk and its successors, up to the size of the buffer.
    fn wanted(&self, chunk: usize, heading: PassDirection) -> Vec<usize> {
        let most = match self.readahead {
            Readahead::Next => SLABS,
            Readahead::Nothing => 1,
        };
        let (order, place) = (&self.orders[heading as usize], |chunk| self.place(chunk, heading));
        let ahead = order.iter().filter(|other| place(**other) >= place(chunk));
        // An upward sweep is followed by another one; after a downward sweep the next one is unknown.
        let again = order.iter().filter(|_| heading == PassDirection::Up);
        let mut wanted: Vec<usize> = Vec::with_capacity(most);
        for &next in ahead.chain(again) {
            let is_due = self.readahead == Readahead::Next || next == chunk;
            if wanted.len() < most && is_due && !wanted.contains(&next) {
                wanted.push(next);
            }
        }
        wanted
    }

    /// Returns a sort key for the order of chunks in a sweep.
    fn place(&self, chunk: usize, heading: PassDirection) -> (bool, usize) {
        match (heading, chunk < self.file.layout().blocks) {
            (PassDirection::Down, true) => (true, usize::MAX - chunk),
            _ => (false, chunk),
        }
    }

    /// Takes finished reads into the buffer and returns the failed ones with their errors.
    fn collect_reads(&mut self, desk: &mut ReadQueue) -> Vec<(usize, WeightReadError)> {
        let mut failed = Vec::new();
        for ReadChunk { chunk, slab, outcome } in desk.read.drain(..) {
            self.asked.retain(|&asked| asked != chunk);
            match outcome {
                Ok(()) => {
                    let of = self.file.chunk(chunk);
                    let matrices = self.file.matrices(&of.pages, &of.parts, &slab, 0);
                    self.loaded.push(LoadedChunk { chunk, matrices, slab });
                }
                Err(error) => {
                    self.spare.push(slab);
                    failed.push((chunk, error));
                }
            }
        }
        failed
    }

    /// Drops unwanted chunks and requests the wanted ones.
    fn arrange(&mut self, wanted: &[usize]) {
        let missing = |window: &Self, chunk: &usize| {
            !window.asked.contains(chunk) && window.loaded.iter().all(|loaded| loaded.chunk != *chunk)
        };
        if !wanted.iter().any(|chunk| missing(self, chunk)) {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let mut desk = shared.desk();
        // The reader has not begun these reads.
        for (chunk, slab) in std::mem::take(&mut desk.wanted) {
            if wanted.contains(&chunk) {
                desk.wanted.push_back((chunk, slab));
            } else {
                self.asked.retain(|&asked| asked != chunk);
                self.spare.push(slab);
            }
        }
        for chunk in wanted {
            if !missing(self, chunk) {
                continue;
            }
            let Some(slab) = self.spare.pop().or_else(|| self.give_up(wanted)) else { break };
            self.asked.push(*chunk);
            match *chunk == wanted[0] {
                true => desk.wanted.push_front((*chunk, slab)),
                false => desk.wanted.push_back((*chunk, slab)),
            }
        }
        drop(desk);
        shared.changed.notify_all();
    }

    /// Frees the slab of an unwanted chunk.
    fn give_up(&mut self, wanted: &[usize]) -> Option<PageSlab> {
        let at = self.loaded.iter().position(|loaded| !wanted.contains(&loaded.chunk))?;
        let LoadedChunk { matrices, slab, .. } = self.loaded.swap_remove(at);
        drop(matrices);
        Some(slab)
    }
}

impl Drop for DoubleBuffer {
    fn drop(&mut self) {
        self.shared.close();
        // A panic of the reader was already reported by its thread.
        drop(self.reader.take().map(JoinHandle::join));
    }
}

struct ChunkReader {
    file: Arc<PackedFile>,
    stats: Arc<WeightStreamStats>,
    bytes_per_s: Option<NonZeroU64>,
}

impl ChunkReader {
    fn serve(&self, shared: &ReaderShared) {
        /// Closes the queue when the reader ends, even by a panic, so that no pass waits for it.
        struct ReaderGuard<'a>(&'a ReaderShared);
        impl Drop for ReaderGuard<'_> {
            fn drop(&mut self) {
                self.0.close();
            }
        }
        let _closing = ReaderGuard(shared);
        loop {
            let mut desk = shared.desk();
            while desk.wanted.is_empty() && !desk.is_closed {
                desk = shared.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
            }
            if desk.is_closed {
                return;
            }
            let Some((chunk, mut slab)) = desk.wanted.pop_front() else { continue };
            let (bytes, since) = (self.file.chunk(chunk).bytes() as u64, Instant::now());
            desk.reading = Some((chunk, bytes, since));
            drop(desk);
            self.stats.begin_read(since);
            let outcome = self.read(chunk, &mut slab, since);
            let mut desk = shared.desk();
            // The read is counted before the pass can see its result.
            self.stats.end_read(bytes, since);
            desk.note(bytes, since);
            desk.read.push(ReadChunk { chunk, slab, outcome });
            drop(desk);
            shared.changed.notify_all();
        }
    }

    fn read(&self, chunk: usize, slab: &mut PageSlab, begun: Instant) -> Result<(), WeightReadError> {
        let chunk = self.file.chunk(chunk);
        let into = slab.as_mut_slice().ok_or(WeightReadError::ReaderEnded)?;
        let outcome = match failpoint::hit("weights.read") {
            FailpointOutcome::Pass => self.file.load(&chunk.pages, &chunk.parts, into),
            FailpointOutcome::Fail => Err(self.file.unreadable(io::Error::other("a test wants it"))),
        };
        if let Some(bytes_per_s) = self.bytes_per_s {
            let due = begun + Duration::from_secs_f64(chunk.bytes() as f64 / bytes_per_s.get() as f64);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        outcome
    }
}
