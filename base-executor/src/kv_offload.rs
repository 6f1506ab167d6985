//! KV blocks below the device: bytes of the host tier, and the file of the disk tier.
//!
//! The compute thread moves a block's bytes from and to the device between two steps; a separate thread reads
//! and writes the file. The crate `kv-cache` decides which block goes where. A block stays in memory until it
//! is written, so it can be fetched in between.

use std::{
    collections::{HashMap, VecDeque},
    io,
    ops::{Deref, DerefMut, RangeInclusive},
    sync::Arc,
    time::{Duration, Instant},
};

use kv_cache::{
    NodeId, Tier,
    copy::{CopyEngine, CopyPriority, CopySource, Ticket},
    ledger::{MemoryAccount, MemoryReservation},
    manager::CopyOutcome,
    store::{BlockRecord, BlockStore, StoreError, StoreSlot},
};
use scheduling::background_io::ForegroundIo;
use types::BlockId;

/// Maximum bytes in transit to the file, all in memory; an evicted block beyond the limit is lost.
const MAX_WRITE_BYTES: usize = 64 << 20;
/// Bounds of the number of blocks in transit to the file, for any block size.
const WRITES: RangeInclusive<usize> = 16..=1024;
/// Maximum number of blocks in transit from the file.
const MAX_READS: usize = 32;

/// Pause of writing after a failure, so that a full disk is not tried for every block.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);

/// A finished copy from or to the file.
#[derive(Debug)]
pub enum FileCopy {
    Written {
        node: NodeId,
        slot: u32,
        outcome: CopyOutcome,
    },
    Read {
        node: NodeId,
        /// Block of the device that gets the bytes.
        block: BlockId,
        /// Bytes of the block; `None` after a failure.
        bytes: Option<BlockBytes>,
    },
}

/// Bytes of a block outside the device, charged to the memory budget.
#[derive(Debug)]
pub struct BlockBytes {
    bytes: Box<[u8]>,
    _held: MemoryReservation,
}

impl BlockBytes {
    /// Returns zeroed bytes; `None` if the budget is exhausted.
    fn new(bytes: usize, account: &MemoryAccount) -> Option<Self> {
        let held = account.charge(bytes as u64).ok()?;
        Some(Self { bytes: vec![0; bytes].into(), _held: held })
    }
}

impl Deref for BlockBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for BlockBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// Notifies the engine that a copy from or to the file has ended.
#[derive(Clone)]
pub struct CopyNotifier(Arc<dyn Fn(FileCopy) + Send + Sync>);

impl CopyNotifier {
    /// Calls `on_copied` on a thread that may wait.
    pub fn new(on_copied: impl Fn(FileCopy) + Send + Sync + 'static) -> Self {
        Self(Arc::new(on_copied))
    }
}

impl std::fmt::Debug for CopyNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileCopies")
    }
}

/// Notifies the engine once, with a failure if the copy is dropped.
struct CompletionGuard {
    on_copied: CopyNotifier,
    copy: Option<FileCopy>,
}

impl CompletionGuard {
    fn end(&mut self, ended: FileCopy) {
        if self.copy.take().is_some() {
            (self.on_copied.0)(ended);
        }
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if let Some(copy) = self.copy.take() {
            (self.on_copied.0)(copy);
        }
    }
}

struct WriteRequest {
    store: Arc<BlockStore>,
    node: NodeId,
    slot: u32,
    record: BlockRecord,
    bytes: Arc<BlockBytes>,
    asked: CompletionGuard,
}

impl CopySource for WriteRequest {
    fn next_bytes(&self) -> Option<usize> {
        self.asked.copy.is_some().then_some(self.bytes.len())
    }

    fn copy_next(&mut self) {
        failpoint::pass("executor.block_written");
        let written = self.store.write(StoreSlot(self.slot), &self.record, &self.bytes);
        let is_written = written.map_err(|error| log_store_error(&error)).is_ok();
        let outcome = if is_written { CopyOutcome::Done } else { CopyOutcome::Failed };
        self.asked.end(FileCopy::Written { node: self.node, slot: self.slot, outcome });
    }
}

struct Reading {
    store: Arc<BlockStore>,
    node: NodeId,
    block: BlockId,
    slot: u32,
    record: BlockRecord,
    capacity: OffloadCapacity,
    asked: CompletionGuard,
}

impl CopySource for Reading {
    fn next_bytes(&self) -> Option<usize> {
        self.asked.copy.is_some().then_some(self.capacity.block_bytes)
    }

    fn copy_next(&mut self) {
        failpoint::pass("executor.block_read");
        let bytes = self.capacity.block().and_then(|mut bytes| {
            let read = self.store.read(StoreSlot(self.slot), &self.record, &mut bytes);
            read.map_err(|error| log_store_error(&error)).ok().map(|_| bytes)
        });
        self.asked.end(FileCopy::Read { node: self.node, block: self.block, bytes });
    }
}

fn log_store_error(error: &StoreError) {
    tracing::warn!(%error, "cannot offload KV blocks; they are computed again if needed");
}

/// Bytes in memory with their node, since a slot may be reused.
type HeldBlock = (NodeId, Arc<BlockBytes>);

/// A block to be read from the file.
#[derive(Debug)]
pub struct ReadRequest {
    pub node: NodeId,
    /// Block of the device that gets the bytes.
    pub block: BlockId,
    /// Slot of the file.
    pub slot: u32,
    /// Expected record of the block.
    pub record: BlockRecord,
    pub class: CopyPriority,
}

/// The file, and the thread that reads and writes it.
#[derive(Debug)]
struct Disk {
    store: Arc<BlockStore>,
    copies: CopyEngine,
    on_copied: CopyNotifier,
    writing: HashMap<u32, HeldBlock>,
    /// Reads not yet started: urgent ones, and others.
    unread: [VecDeque<ReadRequest>; 2],
    reading: Vec<(NodeId, Ticket)>,
    paused_until: Option<Instant>,
}

/// Memory for blocks outside the device.
#[derive(Debug, Clone, Default)]
struct OffloadCapacity {
    block_bytes: usize,
    account: MemoryAccount,
}

impl OffloadCapacity {
    fn block(&self) -> Option<BlockBytes> {
        BlockBytes::new(self.block_bytes, &self.account)
    }
}

/// KV blocks of the host tier and the disk tier.
#[derive(Debug, Default)]
pub struct KvOffload {
    host: HashMap<u32, HeldBlock>,
    disk: Option<Disk>,
    capacity: OffloadCapacity,
}

impl KvOffload {
    /// Creates a host tier of `host_blocks`, which grows by use. All bytes are charged to `account`.
    #[must_use]
    pub fn new(block_bytes: usize, host_blocks: u32, account: &MemoryAccount) -> Self {
        let blocks = host_blocks as usize + max_writes(block_bytes) + MAX_READS;
        let account = account.part("offloaded KV blocks", (blocks * block_bytes) as u64);
        Self { capacity: OffloadCapacity { block_bytes, account }, ..Self::default() }
    }

    /// Adds a disk tier. If `first` is set, background copies yield to its disk reads.
    ///
    /// # Errors
    /// If the thread of the file cannot be started.
    pub fn with_store(
        mut self,
        store: BlockStore,
        on_copied: CopyNotifier,
        first: Option<Arc<dyn ForegroundIo>>,
    ) -> io::Result<Self> {
        self.disk = Some(Disk {
            store: Arc::new(store),
            copies: first.map_or_else(|| CopyEngine::start(None), CopyEngine::start_behind)?,
            on_copied,
            writing: HashMap::new(),
            unread: Default::default(),
            reading: Vec::new(),
            paused_until: None,
        });
        Ok(self)
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.capacity.block_bytes
    }

    /// Returns memory for one more block; `None` if the budget is exhausted.
    #[must_use]
    pub fn block(&self) -> Option<BlockBytes> {
        self.capacity.block()
    }

    /// Returns the number of blocks that may be offloaded now.
    #[must_use]
    pub fn free_blocks(&self, now: Instant) -> usize {
        match &self.disk {
            None => *WRITES.end(),
            Some(disk) if disk.is_paused(now) => 0,
            Some(disk) => max_writes(self.block_bytes()).saturating_sub(disk.writing.len()),
        }
    }

    /// Stops writing for a while, after a lack of memory or a disk error.
    pub fn pause(&mut self, now: Instant) {
        if let Some(disk) = &mut self.disk {
            disk.paused_until = Some(now + PAUSE_AFTER_FAILURE);
        }
    }

    /// Whether an exit loses nothing: no write is pending, and `waiting` is 0 or writing is paused.
    #[must_use]
    pub fn is_kept(&self, waiting: usize, now: Instant) -> bool {
        // Without a file, all blocks end with the process.
        let Some(disk) = &self.disk else { return true };
        disk.writing.is_empty() && (waiting == 0 || disk.is_paused(now))
    }

    /// Keeps a block in a slot of the host tier.
    pub(crate) fn keep(&mut self, node: NodeId, slot: u32, bytes: Arc<BlockBytes>) {
        self.host.insert(slot, (node, bytes));
    }

    /// Starts writing a block to a slot of the file.
    pub fn write(&mut self, node: NodeId, slot: u32, record: BlockRecord, bytes: Arc<BlockBytes>) {
        let Some(disk) = &mut self.disk else { return };
        disk.writing.insert(slot, (node, Arc::clone(&bytes)));
        let failed = FileCopy::Written { node, slot, outcome: CopyOutcome::Failed };
        let asked = CompletionGuard { on_copied: disk.on_copied.clone(), copy: Some(failed) };
        let write = WriteRequest { store: Arc::clone(&disk.store), node, slot, record, bytes, asked };
        // The submission succeeds, because fewer writes are in transit than the queue holds.
        let _ = disk.copies.submit(CopyPriority::Preload, Box::new(write), Box::new(|_| {}));
    }

    /// Returns a block's bytes, if they are in memory.
    #[must_use]
    pub(crate) fn at_hand(&self, node: NodeId, tier: Tier, slot: u32) -> Option<Arc<BlockBytes>> {
        let held = match tier {
            Tier::Device => None,
            Tier::Host => self.host.get(&slot),
            Tier::Disk => self.disk.as_ref()?.writing.get(&slot),
        };
        held.filter(|(whose, _)| *whose == node).map(|(_, bytes)| Arc::clone(bytes))
    }

    /// Queues a block to be read from the file.
    pub fn read(&mut self, wanted: ReadRequest) {
        if let Some(disk) = &mut self.disk {
            disk.unread[usize::from(wanted.class != CopyPriority::Demand)].push_back(wanted);
            disk.read_on(&self.capacity);
        }
    }

    /// Makes a pending read urgent, because a sequence waits for it now.
    pub(crate) fn raise_priority(&mut self, node: NodeId) {
        let Some(disk) = &mut self.disk else { return };
        let [urgent, others] = &mut disk.unread;
        let (wanted, left) =
            std::mem::take(others).into_iter().partition(|wanted: &ReadRequest| wanted.node == node);
        *others = left;
        let wanted: VecDeque<ReadRequest> = wanted;
        urgent.extend(wanted.into_iter().map(|wanted| ReadRequest { class: CopyPriority::Demand, ..wanted }));
        let reading = disk.reading.iter().filter(|(reading, _)| *reading == node);
        reading.for_each(|(_, ticket)| ticket.raise(CopyPriority::Demand));
    }

    /// Records the end of a copy.
    pub fn ended(&mut self, copy: &FileCopy, now: Instant) {
        let Some(disk) = &mut self.disk else { return };
        match copy {
            FileCopy::Written { node, slot, outcome } => {
                // The slot may belong to another block by now.
                if disk.writing.get(slot).is_some_and(|(writing, _)| writing == node) {
                    disk.writing.remove(slot);
                }
                if *outcome == CopyOutcome::Failed {
                    self.pause(now);
                }
            }
            FileCopy::Read { node, .. } => {
                if let Some(at) = disk.reading.iter().position(|(reading, _)| reading == node) {
                    disk.reading.swap_remove(at);
                }
                disk.read_on(&self.capacity);
            }
        }
    }
}

/// Returns the maximum number of blocks in transit to the file.
fn max_writes(block_bytes: usize) -> usize {
    (MAX_WRITE_BYTES / block_bytes.max(1)).clamp(*WRITES.start(), *WRITES.end())
}

impl Disk {
    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Starts as many reads as allowed, urgent ones first.
    fn read_on(&mut self, capacity: &OffloadCapacity) {
        while self.reading.len() < MAX_READS {
            let next = self.unread.iter_mut().find_map(VecDeque::pop_front);
            let Some(ReadRequest { node, block, slot, record, class }) = next else { return };
            let failed = FileCopy::Read { node, block, bytes: None };
            let asked = CompletionGuard { on_copied: self.on_copied.clone(), copy: Some(failed) };
            let (store, capacity) = (Arc::clone(&self.store), capacity.clone());
            let read = Reading { store, node, block, slot, record, capacity, asked };
            // The submission succeeds, as for writes.
            let taken = self.copies.submit(class, Box::new(read), Box::new(|_| {}));
            self.reading.extend(taken.map(|ticket| (node, ticket)));
        }
    }
}
