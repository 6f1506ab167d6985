//! A thousand adapters are loaded, offered to workers over the real socket and unloaded: no descriptor and no
//! mapping leaks.
//!
//! The test has a process of its own, since it counts the process's resources.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base_executor::{
    adapter_images::{ImageRegistry, publish},
    device::{AdapterDeviceTier, ArrivalNotifier, DeviceSettings},
    placement::{AdapterAvailability, Placement},
    workers::{WorkerListener, Workers},
};
use kernels::{blocks::BlockMemory, lora::LoraPrecision};
use kv_cache::{Cache, CacheSettings, ledger::MemoryAccount};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    deltas::cpu_copy::CpuMemory,
    deltas::prepared::{EncodedAdapter, PreparedAdapter},
    shape::{
        config::{ArchFlags, ModelConfig, Rope, RopeScaling},
        source::Target,
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd as _,
};
use shmproto::{
    fd_passing::{FromWorker, ToWorker, WorkerHello, connect},
    image::Image,
    message::ColdStart,
};
use testkit::WATCHDOG;
use types::{AdapterId, AdapterVersion};

const WIDTH: usize = 64;

fn config() -> ModelConfig {
    ModelConfig {
        architecture: "llama".to_owned(),
        vocab_size: WIDTH,
        hidden_size: WIDTH,
        intermediate_size: WIDTH,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: WIDTH,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        qk_norm: false,
        tied_head: true,
        context_length: 64,
        sliding_window: None,
        traits: ArchFlags::default(),
        experts: None,
    }
}

fn encoded() -> EncodedAdapter {
    let (a, b) = (vec![0.5; 16 * WIDTH], vec![0.25; WIDTH * 16]);
    let modules = vec![LoraModule { layer: 0, target: Target::Q, rank: 16, scale: 1.0, a, b }];
    let generation = AdapterVersion([0; 32]);
    let adapter = Adapter {
        generation,
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    };
    EncodedAdapter::new(&adapter, &config(), LoraPrecision::Exact)
}

type Mapped = Arc<Mutex<BTreeMap<u64, Image>>>;

fn numbers(mapped: &Mapped) -> Vec<u64> {
    mapped.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
}

/// Worker that maps offered images and unmaps withdrawn ones.
fn reader(socket: &Path, over: &Arc<AtomicBool>) -> (Mapped, JoinHandle<()>) {
    let (mapped, over, socket) = (Mapped::default(), Arc::clone(over), socket.to_owned());
    let shelf = Arc::clone(&mapped);
    let thread = thread::spawn(move || {
        let connection = connect(&socket).unwrap();
        connection.send(&FromWorker::Hello(WorkerHello::new(1, 1)), &[]).unwrap();
        while !over.load(Ordering::Relaxed) {
            let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 })).unwrap() == 0 {
                continue;
            }
            let (message, mut fds) = connection.receive().unwrap().unwrap();
            let mut shelf = shelf.lock().unwrap();
            match message {
                ToWorker::Seated(_) => {}
                ToWorker::AdapterOffered(offered) => {
                    let image = Image::map(fds.pop().unwrap(), 1 << 30).unwrap();
                    assert!(shelf.insert(offered.image, image).is_none(), "offered once");
                }
                ToWorker::AdapterWithdrawn(number) => drop(shelf.remove(&number).unwrap()),
                ToWorker::Refused(_) | ToWorker::Closing => panic!("{message:?}"),
            }
        }
    });
    (mapped, thread)
}

/// Counts descriptors of this process, and its mappings of shared memory.
fn count() -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    (
        fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.lines().filter(|line| line.contains("/memfd:")).count(),
    )
}

fn until<T: PartialEq + std::fmt::Debug>(wanted: &T, mut now: impl FnMut() -> T) {
    let end = Instant::now() + WATCHDOG;
    while now() != *wanted {
        assert!(Instant::now() < end, "it stays at {:?}, not {wanted:?}", now());
        thread::sleep(Duration::from_millis(1));
    }
}

const BLOCK_BYTES: usize = 4096;

/// Image library, device tier and worker listener of an executor.
struct ImageLeakFixture {
    library: ImageRegistry,
    device: AdapterDeviceTier,
    pool: Cache,
    _directory: tempfile::TempDir,
}

impl ImageLeakFixture {
    fn new() -> (Self, PathBuf) {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        let (socket, library) = (directory.path().join("workers.sock"), ImageRegistry::new().unwrap());
        let (workers, _) = Workers::start(
            WorkerListener { socket: &socket, most: 2, memory: &MemoryAccount::default() },
            16,
            &config(),
            library.clone(),
        )
        .unwrap();
        let settings =
            DeviceSettings { block_bytes: BLOCK_BYTES as u64, cold_start: ColdStart::CpuAssist, link: None };
        let memory = CpuMemory(BlockMemory::new(BLOCK_BYTES, 20).unwrap());
        let device =
            AdapterDeviceTier::new(settings, Arc::new(memory), ArrivalNotifier::new(|_| {}), workers, None)
                .unwrap();
        (
            Self {
                library,
                device,
                pool: Cache::new(CacheSettings::device_alone(20, 16)),
                _directory: directory,
            },
            socket,
        )
    }

    fn load(&mut self, name: u64) -> (AdapterId, Arc<PreparedAdapter>) {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&name.to_le_bytes());
        let adapter = publish(encoded(), &config(), &self.library).unwrap();
        self.device.loaded(&mut self.pool, AdapterId(id), &adapter).unwrap();
        self.device.start_copies(&self.pool);
        (AdapterId(id), adapter)
    }
}

#[test]
fn a_thousand_adapters_come_and_go_and_nothing_of_them_stays() {
    let (mut house, socket) = ImageLeakFixture::new();
    let over = Arc::new(AtomicBool::new(false));
    let (first, first_thread) = reader(&socket, &over);
    let (kept_id, kept) = house.load(1_000_000);
    let only_kept = vec![kept.image().0];
    until(&only_kept, || numbers(&first));
    let before = count();
    for name in 0..1000 {
        let (id, adapter) = house.load(name);
        let image = adapter.image().0;
        assert_ne!(image, kept.image().0);
        // In some rounds the worker uses the image; in others the unload comes first.
        if name % 8 == 0 {
            until(&true, || numbers(&first).contains(&image));
        }
        if name % 3 == 0 {
            assert_ne!(
                house.device.begin_use(&mut house.pool, id, &adapter, 10),
                AdapterAvailability::MustWait
            );
            house.device.end_use(&mut house.pool, id);
        }
        house.device.unloaded(&mut house.pool, id);
        if name % 5 == 0 {
            let (bytes, users) = (adapter.bytes(), Arc::strong_count(&adapter));
            assert_eq!(users, 1, "nobody keeps one of {bytes} bytes that was unloaded");
        }
        drop(adapter);
    }
    until(&only_kept, || numbers(&first));
    until(&before, count);

    // A late worker is offered only the current images.
    let (second, second_thread) = reader(&socket, &over);
    until(&only_kept, || numbers(&second));
    house.device.unloaded(&mut house.pool, kept_id);
    drop(kept);
    until(&(vec![], vec![]), || (numbers(&first), numbers(&second)));
    over.store(true, Ordering::Relaxed);
    first_thread.join().unwrap();
    second_thread.join().unwrap();
}
