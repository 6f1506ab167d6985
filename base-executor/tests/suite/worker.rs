//! Workers as threads of the tests, at the executor's real listener: they shake hands, map and compute as
//! processes do.

use std::{
    collections::BTreeMap,
    fs::Permissions,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
pub(crate) use testkit::paths::golden;

use base_executor::{
    adapter_images::{ImageRegistry, publish},
    workers::{WorkerListener, Workers},
};
use kernels::{
    Activations, Isa,
    blocks::BlockMemory,
    lora::{ElementKind, FactorLayout, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes, sum_ranks},
};
use kv_cache::ledger::MemoryAccount;
use model::{
    adapter::{Adapter, AnyAdapter, LoraModule, MethodWeights, merge::sum},
    cpu::Compute,
    deltas::{
        assist::{Assist, PartialSum},
        cpu_copy::CpuMemory,
        device_copy::{DeviceCopy, DeviceMemory as _},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    forward::{ForwardPass as _, LogitRows, SequenceSlice},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        layout::{BLOCK_TARGETS, linear_shape},
        source::Target,
    },
    sources::open::open,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shmproto::{
    board::{Consumer, ConsumerFds, SlotNumber, WakeReason, WorkerNumber},
    fd_passing::{FromWorker, ToWorker, WorkerEnd, WorkerHello, connect},
    image::Image,
    message::Stats,
    region::{Access, Region},
};
use tempfile::TempDir;
use types::{AdapterVersion, BlockId};

pub(crate) use testkit::WATCHDOG;

const ROWS: usize = 256;

pub(crate) struct WorkerFixture {
    pub(crate) model: ResidentModel,
    pub(crate) workers: Workers,
    pub(crate) library: ImageRegistry,
    socket: PathBuf,
    _directory: TempDir,
}

/// Whether the pass gives its workers time to compute first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassSpeed {
    Swift,
    Slow,
}

impl WorkerFixture {
    pub(crate) fn new(model: &str, seats: usize, speed: PassSpeed) -> Self {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        let (socket, library) = (directory.path().join("workers.sock"), ImageRegistry::new().unwrap());
        let model = resident(model, 2);
        let (workers, assist) = Workers::start(
            WorkerListener { socket: &socket, most: seats, memory: &MemoryAccount::default() },
            ROWS,
            model.config(),
            library.clone(),
        )
        .unwrap();
        let assist = if speed == PassSpeed::Slow { Box::new(DelayedAssist(assist)) } else { assist };
        Self { model: model.with_assist(assist), workers, library, socket, _directory: directory }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) fn publish(&self, adapter: &Adapter, precision: LoraPrecision) -> Arc<PreparedAdapter> {
        let config = self.model.config();
        publish(EncodedAdapter::new(adapter, config, precision), config, &self.library).unwrap()
    }

    pub(crate) fn golden_adapter(&self, model: &str, name: &str) -> Arc<PreparedAdapter> {
        let path = golden("adapters").join(model).join(name);
        self.publish(&Adapter::read(&path, self.model.config()).unwrap(), LoraPrecision::Exact)
    }

    /// Sum of several adapters, each with a weight behind a colon.
    pub(crate) fn golden_sum(&self, model: &str, asked: &str) -> Arc<PreparedAdapter> {
        let part = |part: &str| {
            let (name, weight) = part.split_once(':').unwrap();
            let path = golden("adapters").join(model).join(name);
            (AnyAdapter::read(&path, self.model.config()).unwrap(), weight.parse().unwrap())
        };
        self.publish(&sum(asked.split('+').map(part).collect()).unwrap(), LoraPrecision::Exact)
    }

    pub(crate) fn golden_dora(&self, model: &str, name: &str) -> Arc<PreparedAdapter> {
        let path = golden("adapters/dora").join(model).join(name);
        let config = self.model.config();
        let AnyAdapter::Decomposed(dora) = AnyAdapter::read(&path, config).unwrap() else {
            panic!("{name} is a DoRA")
        };
        let source = open(&golden("models").join(model)).unwrap();
        let base = LoadedWeights::open(&*source, None, 1, &|_| {}).unwrap().shared();
        let (adapter, scales) = dora.over(config, |layer, target| base.linear_layer(layer, target)).unwrap();
        let encoded = EncodedAdapter::new(&adapter, config, LoraPrecision::Exact).with_scales(scales);
        publish(encoded, config, &self.library).unwrap()
    }

    pub(crate) fn golden_saved(&self, model: &str, name: &str) -> Arc<PreparedAdapter> {
        let path = golden("adapters/saved").join(model).join(name);
        let config = self.model.config();
        let AnyAdapter::Vocabulary(it) = AnyAdapter::read(&path, config).unwrap() else {
            panic!("{name} has saved modules")
        };
        let encoded = EncodedAdapter::new(&it.adapter, config, LoraPrecision::Exact);
        publish(encoded.with_vocabulary(it.changes), config, &self.library).unwrap()
    }

    /// Starts a thread with `behaviour`, which runs until the threads are dropped.
    pub(crate) fn hire(&self, staff: &mut WorkerThreads, behaviour: fn(&Path, &AtomicBool)) {
        staff.hire(&self.socket, behaviour);
    }

    pub(crate) fn until_seated(&self, count: usize) {
        until(|| self.workers.cores().len() == count, || format!("{count} workers: {:?}", self.stats()));
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.workers.stats(&mut stats);
        stats
    }
}

pub(crate) fn until(mut is_so: impl FnMut() -> bool, what: impl Fn() -> String) {
    let end = Instant::now() + WATCHDOG;
    while !is_so() {
        assert!(Instant::now() < end, "never: {}", what());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Gives workers time before every answer is read.
#[derive(Debug)]
struct DelayedAssist(Box<dyn Assist>);

impl Assist for DelayedAssist {
    fn helpers(&mut self) -> usize {
        self.0.helpers()
    }

    fn begin_pass(&mut self) {
        self.0.begin_pass();
    }

    fn end_pass(&mut self) {
        self.0.end_pass();
    }

    fn begin(&mut self, x: &Activations, asks: &[PartialSum<'_>]) {
        self.0.begin(x, asks);
    }

    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]) {
        thread::sleep(Duration::from_micros(500));
        self.0.finish(compute, x, asks, sums);
    }
}

pub(crate) fn resident(name: &str, threads: usize) -> ResidentModel {
    let source = open(&golden("models").join(name)).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let options =
        ResidentOptions { cores: vec![0; threads], kv_bytes: 16 << 20, kv_dtype: Some(KvPrecision::F32) };
    ResidentModel::new(weights, &options).unwrap()
}

/// Adapter of every linear layer and the head, with ranks from `ranks` in turn.
pub(crate) fn adapter_of_everything(config: &ModelConfig, ranks: &[usize]) -> Adapter {
    let blocks = (0..config.layers).flat_map(|layer| BLOCK_TARGETS.map(|target| (layer, target)));
    // By layer, then target: the head counts as of the first layer.
    let mut layers: Vec<_> = blocks.chain([(0, Target::LmHead)]).collect();
    layers.sort();
    let module = |((layer, target), &rank): ((usize, Target), &usize)| {
        let [rows, columns] = linear_shape(config, target);
        let salt = layer * 8 + target.index_in_block().unwrap_or(7);
        let (a, b) = (numbers(salt, rank * columns), numbers(salt + 1000, rows * rank));
        LoraModule { layer, target, rank, scale: 0.5, a, b }
    };
    let modules = layers.into_iter().zip(ranks.iter().cycle()).map(module).collect();
    Adapter {
        generation: AdapterVersion([7; 32]),
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    }
}

pub(crate) fn numbers(salt: usize, count: usize) -> Vec<f32> {
    let number = |index: usize| {
        let hash = (index as u32 ^ (salt as u32) << 16).wrapping_mul(2_654_435_761);
        ((hash ^ hash >> 15).wrapping_mul(0x2c1b_3c6d) >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(number).collect()
}

/// Empty copy of the adapter in a private pool of small blocks, where its blocks are nearly contiguous.
fn copy_of(adapter: &PreparedAdapter) -> DeviceCopy {
    const BLOCK_BYTES: usize = 1 << 14;
    let blocks = CpuMemory(BlockMemory::new(BLOCK_BYTES, 0).unwrap()).blocks_for(adapter.host()).unwrap();
    let memory = CpuMemory(BlockMemory::new(BLOCK_BYTES, blocks as usize).unwrap());
    memory.copy_of(adapter.host(), &(0..blocks).rev().map(BlockId).collect::<Vec<_>>())
}

/// Puts `part` of eight parts of the adapter's blocks on the device.
pub(crate) fn stage(adapter: &PreparedAdapter, part: usize) -> Arc<DeviceCopy> {
    let blocks: usize = adapter.matrices().map(|(_, _, matrix)| matrix.rank().div_ceil(16)).sum();
    let copy = Arc::new(copy_of(adapter));
    (0..blocks * part / 8).for_each(|_| copy.copy_next(adapter.host()));
    adapter.set_device(Some(Arc::clone(&copy)));
    copy
}

/// Request of the tests; its blocks follow from its position in the batch.
#[derive(Clone)]
pub(crate) struct BatchRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) adapter: Option<Arc<PreparedAdapter>>,
}

pub(crate) fn request(salt: u32, length: usize, adapter: Option<&Arc<PreparedAdapter>>) -> BatchRequest {
    let prompt = (0..length as u32).map(|i| (i * 37 + salt * 101 + i * i) % 300).collect();
    BatchRequest { prompt, adapter: adapter.cloned() }
}

/// Number of passes in [`bits`].
pub(crate) const PASSES: usize = 3;

/// Bits of the last logits of all requests, after their prompts and after each of two more tokens.
pub(crate) fn bits(model: &mut ResidentModel, requests: &[BatchRequest]) -> Vec<u32> {
    let place = |at: u32| (at * 5..(at + 1) * 5).map(BlockId).collect();
    let blocks: Vec<Vec<BlockId>> = (0..requests.len() as u32).map(place).collect();
    let mut texts: Vec<Vec<u32>> = requests.iter().map(|request| request.prompt.clone()).collect();
    let (mut starts, mut bits, mut logits) = (vec![0; requests.len()], Vec::new(), Vec::new());
    for _ in 0..PASSES {
        let slice = |at: usize| SequenceSlice {
            trunk: &[],
            tokens: &texts[at][starts[at]..],
            start: starts[at],
            blocks: &blocks[at],
            adapter: requests[at].adapter.as_ref(),
            logits: LogitRows::Last,
        };
        let batch: Vec<_> = (0..requests.len()).map(slice).collect();
        model.forward(&batch, &mut logits);
        bits.extend(logits.iter().map(|logit| logit.to_bits()));
        for (at, row) in logits.chunks(logits.len() / requests.len()).enumerate() {
            starts[at] = texts[at].len();
            texts[at]
                .push((0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32);
        }
    }
    bits
}

#[derive(Default)]
pub(crate) struct WorkerThreads {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerThreads {
    pub(crate) fn hire(&mut self, socket: &Path, behaviour: fn(&Path, &AtomicBool)) {
        let (socket, over) = (socket.to_owned(), Arc::clone(&self.over));
        self.threads.push(thread::spawn(move || behaviour(&socket, &over)));
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            // During another panic this one would abort the process.
            assert!(ended.is_ok() || thread::panicking(), "a test's worker panicked");
        }
    }
}

/// Seat of a worker at the board, and its mapped images.
pub(crate) struct TestWorker {
    pub(crate) consumer: Consumer,
    pub(crate) connection: WorkerEnd,
    pub(crate) images: BTreeMap<u64, BTreeMap<u32, LoraMatrix>>,
    /// Second descriptor of the control region, to write arbitrary words.
    control: OwnedFd,
    x: Vec<f32>,
    sums: Vec<f32>,
}

impl TestWorker {
    /// Connects; `None` if there is no free worker slot.
    pub(crate) fn sit(socket: &Path) -> Option<Self> {
        let connection = connect(socket).ok()?;
        connection.send(&FromWorker::Hello(WorkerHello::new(1, 7)), &[]).ok()?;
        let (ToWorker::Seated(seated), fds) = connection.receive().ok()?? else { return None };
        let [control, x, sums] = <[OwnedFd; 3]>::try_from(fds).unwrap();
        let again = control.try_clone().unwrap();
        let number = WorkerNumber::new(seated.worker).unwrap();
        // A board with invalid words cannot be joined.
        let consumer =
            Consumer::join(ConsumerFds { control, x, sums }, SlotNumber(seated.seat), number).ok()?;
        let geometry = consumer.geometry();
        let (x, sums) = (vec![0.0; geometry.x_elements], vec![0.0; geometry.sums_elements]);
        Some(Self { consumer, connection, images: BTreeMap::new(), control: again, x, sums })
    }

    pub(crate) fn control(&self) -> Region {
        Region::map(self.control.try_clone().unwrap(), 1..=1 << 30, Access::ReadWrite).unwrap()
    }

    /// Reads the executor's messages; false if it has disconnected.
    pub(crate) fn news(&mut self) -> bool {
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::IN)];
            if !poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0) {
                return true;
            }
            match self.connection.receive() {
                Ok(Some((ToWorker::AdapterOffered(offered), mut fds))) => {
                    let image = Image::map(fds.pop().unwrap(), 1 << 30).unwrap();
                    assert!(self.images.insert(offered.image, matrices(&image)).is_none(), "offered once");
                    let _ = self.connection.send(&FromWorker::AdapterMapped(offered.image), &[]);
                }
                Ok(Some((ToWorker::AdapterWithdrawn(image), _))) => {
                    assert!(self.images.remove(&image).is_some(), "what is withdrawn was on offer");
                }
                Ok(_) | Err(_) => return false,
            }
        }
    }

    pub(crate) fn serve(&mut self) {
        let Self { consumer, images, x, sums, .. } = self;
        let knows = |image, module| images.get(&image).is_some_and(|image| image.contains_key(&module));
        while let Some(claim) = consumer.claim(knows) {
            let slice = *claim.slice();
            let matrix = &images[&slice.image][&slice.module];
            let (x, sums) = (&mut x[..slice.x_elements()], &mut sums[..slice.sums_elements as usize]);
            let fits = slice.width as usize == matrix.columns()
                && slice.last_rank as usize <= matrix.rank()
                && slice.rows as usize * matrix.rows() == sums.len();
            if !fits {
                continue;
            }
            claim.read_x(x);
            sum_ranks(Isa::best(), x, matrix, slice.first_rank as usize..slice.last_rank as usize, sums);
            claim.done(sums);
        }
    }
}

fn matrices(image: &Image) -> BTreeMap<u32, LoraMatrix> {
    let bytes: SharedBytes = image.bytes();
    let size = |number: u64| usize::try_from(number).unwrap();
    let factor =
        |kind, offset| FactorLayout { kind: ElementKind::from_code(kind).unwrap(), offset: size(offset) };
    let entries = image.entries().iter().map(|entry| {
        let layout = MatrixLayout {
            rank: entry.rank as usize,
            columns: entry.columns as usize,
            rows: entry.rows as usize,
            scale: entry.scale,
            a: factor(entry.a_kind, entry.a_offset),
            b: factor(entry.b_kind, entry.b_offset),
        };
        (entry.module, LoraMatrix::over(&bytes, layout).unwrap())
    });
    entries.collect()
}

/// Takes a worker slot repeatedly, and runs `at_work` on each job while it returns true.
pub(crate) fn serve_jobs(socket: &Path, over: &AtomicBool, mut at_work: impl FnMut(&mut TestWorker) -> bool) {
    while !over.load(Ordering::Relaxed) {
        let Some(mut worker) = TestWorker::sit(socket) else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        while !over.load(Ordering::Relaxed) && worker.news() {
            match worker.consumer.wait(Duration::from_micros(50)) {
                WakeReason::Job if !at_work(&mut worker) => break,
                WakeReason::Fenced => break,
                WakeReason::Job | WakeReason::Rest => {}
            }
        }
    }
}

pub(crate) fn honest(socket: &Path, over: &AtomicBool) {
    serve_jobs(socket, over, |worker| {
        worker.news() && {
            worker.serve();
            true
        }
    });
}
