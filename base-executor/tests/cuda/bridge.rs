//! The bridge with a real stream: rows leave the device by the fused operator and by the native path, workers
//! sum, and the stream waits for the sums and adds them.

use std::{fs::Permissions, os::unix::fs::PermissionsExt as _, sync::Arc, time::Duration};

use base_executor::{
    adapter_images::{ImageRegistry, publish},
    workers::{BridgeSetup, JobRows, WorkerListener, Workers},
};
use kernels::{
    Isa,
    cuda::{
        Cuda, CudaError, CudaStream, Matrix,
        board::{
            NativeCopy, RowSpans, SumsTarget, WaitMethod, add_sums, await_value, copy_and_signal, copy_native,
        },
    },
    lora::{ElementKind, LoraPrecision, sum_ranks},
};
use kv_cache::ledger::MemoryAccount;
use model::{
    cuda::assist::{DeviceAssist, Invocation},
    deltas::{
        assist::{AssistJob, OwnedPartialSum},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, source::Target},
    sources::open::open,
};
use tempfile::TempDir;

use crate::{
    cuda,
    worker::{WorkerThreads, adapter_of_everything, golden, honest, numbers, until},
};

/// Rows of x; jobs need those of 5..9 and 20..50.
const ROWS: usize = 64;
const SPANS: [(usize, usize); 2] = [(5, 4), (20, 30)];

const TARGETS: [Target; 3] = [Target::Q, Target::K, Target::V];

struct CudaBridgeFixture {
    assist: Box<dyn DeviceAssist>,
    stream: CudaStream,
    spans: RowSpans,
    room: NativeCopy,
    adapter: Arc<PreparedAdapter>,
    config: ModelConfig,
    workers: Workers,
    _staff: WorkerThreads,
    _directory: TempDir,
}

impl CudaBridgeFixture {
    fn new(cuda: &Arc<Cuda>, workers: usize, invocation: Invocation) -> Self {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        let (socket, library) = (directory.path().join("workers.sock"), ImageRegistry::new().unwrap());
        let config = open(&golden("models").join("llama-tied")).unwrap().config().clone();
        let (memory, rows) = (MemoryAccount::default(), JobRows { pass: ROWS, head: 1 });
        let listener = WorkerListener { socket: &socket, most: workers, memory: &memory };
        let bridging = BridgeSetup { cuda, cores: vec![0], invocation };
        let (known, assist) =
            Workers::start_on_device(Some(listener), rows, &config, library.clone(), bridging).unwrap();
        let adapter = adapter_of_everything(&config, &[24]);
        let encoded = EncodedAdapter::new(&adapter, &config, LoraPrecision::Exact);
        let adapter = publish(encoded, &config, &library).unwrap();
        let mut staff = WorkerThreads::default();
        (0..workers).for_each(|_| staff.hire(&socket, honest));
        until(|| known.cores().len() == workers, || "workers are seated".to_owned());
        let stream = CudaStream::new(cuda).unwrap();
        let mut spans = RowSpans::new(cuda).unwrap();
        spans.upload(&stream, &SPANS).unwrap();
        let room = NativeCopy::new(cuda, ROWS * config.hidden_size).unwrap();
        Self {
            assist,
            stream,
            spans,
            room,
            adapter,
            config,
            workers: known,
            _staff: staff,
            _directory: directory,
        }
    }

    /// Slices of queries, keys and values of the jobs' rows.
    fn job(&self, layer: usize) -> AssistJob {
        let (mut asks, mut sums) = (Vec::new(), 0);
        let mut slab_row = 0;
        for (_, rows) in SPANS {
            for target in TARGETS {
                let adapter = Arc::clone(&self.adapter);
                let matrix = adapter.matrix(layer, target).unwrap();
                let (ranks, outputs) = (matrix.rank() - layer % 3, matrix.rows());
                asks.push(OwnedPartialSum {
                    adapter,
                    layer,
                    target,
                    first_row: slab_row,
                    rows,
                    ranks,
                    offset: sums,
                });
                sums += rows * outputs;
            }
            slab_row += rows;
        }
        AssistJob { asks, width: self.config.hidden_size, x_rows: slab_row, sums }
    }

    /// Expected values on the device: zeros in rows without a job.
    fn wanted(&self, job: &AssistJob, x: &[f32], stride: usize) -> Vec<f32> {
        let mut out = vec![0.0; ROWS * stride];
        for (at, owned) in job.asks.iter().enumerate() {
            let (ask, (first, rows)) = (owned.ask().unwrap(), SPANS[at / TARGETS.len()]);
            let mut sums = vec![0.0; ask.elements()];
            let x = &x[first * job.width..][..rows * job.width];
            sum_ranks(Isa::best(), x, ask.matrix, 0..ask.ranks, &mut sums);
            let column = self.column(owned.layer, owned.target);
            for (row, sums) in sums.chunks(ask.matrix.rows()).enumerate() {
                out[(first + row) * stride + column..][..sums.len()].copy_from_slice(sums);
            }
        }
        out
    }

    fn column(&self, layer: usize, target: Target) -> usize {
        let before = TARGETS.iter().take_while(|&&other| other != target);
        before.map(|&target| self.adapter.matrix(layer, target).unwrap().rows()).sum()
    }

    fn enqueue(&mut self, layer: usize, x: &Matrix, out: &mut Matrix) {
        let job = self.job(layer);
        let asks = job.asks.clone();
        let number = self.assist.post(job);
        let (stream, slab, asked) = (&self.stream, self.assist.slab(), self.assist.asked());
        match self.assist.invocation() {
            Invocation::Fused => copy_and_signal(stream, x, &self.spans, slab, 0, asked, number).unwrap(),
            Invocation::Native => {
                copy_native(stream, x, &self.spans, &mut self.room, slab, 0, asked, number).unwrap();
            }
        }
        await_value(stream, self.assist.answered(), number, WaitMethod::StreamMemory).unwrap();
        for (at, ask) in asks.iter().enumerate() {
            let width = self.adapter.matrix(layer, ask.target).unwrap().rows();
            let (first_row, column) = (SPANS[at / TARGETS.len()].0, self.column(layer, ask.target));
            let place = SumsTarget { at: ask.offset, rows: ask.rows, width, first_row, column };
            add_sums(stream, self.assist.sums(), place, out).unwrap();
        }
    }

    /// Runs a pass over all layers; each adds to an output of its own.
    fn pass(&mut self, cuda: &Arc<Cuda>, salt: usize) {
        let stride = TARGETS.iter().map(|&target| self.adapter.matrix(0, target).unwrap().rows()).sum();
        let layers = self.config.layers;
        let matrix = |values: &[f32], width: usize| {
            let mut matrix = Matrix::new(cuda, ElementKind::F32).unwrap();
            matrix.reshape(ROWS, width).unwrap();
            matrix.upload(&self.stream, 0, values).unwrap();
            matrix
        };
        let x: Vec<Vec<f32>> =
            (0..layers).map(|layer| numbers(salt * 7 + layer, ROWS * self.config.hidden_size)).collect();
        let on_device: Vec<Matrix> = x.iter().map(|x| matrix(x, self.config.hidden_size)).collect();
        let mut outs: Vec<Matrix> = (0..layers).map(|_| matrix(&vec![0.0; ROWS * stride], stride)).collect();
        self.assist.begin_pass();
        for layer in 0..layers {
            self.enqueue(layer, &on_device[layer], &mut outs[layer]);
        }
        self.stream.synchronize().unwrap();
        assert_eq!(self.assist.end_pass(), Ok(()));
        for layer in 0..layers {
            let found = outs[layer].to_vec(&self.stream).unwrap();
            let wanted = self.wanted(&self.job(layer), &x[layer], stride);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&wanted), "layer {layer} of pass {salt}");
        }
    }
}

#[test]
fn sums_of_workers_reach_the_device_in_both_ways_of_asking() {
    let Some(cuda) = cuda() else { return };
    for invocation in [Invocation::Fused, Invocation::Native] {
        for workers in 0..3 {
            let mut scene = CudaBridgeFixture::new(&cuda, workers, invocation);
            (0..20).for_each(|salt| scene.pass(&cuda, salt));
            let [device, by_workers, executor] = scene.adapter.tally().read();
            assert!(device == 0 && (by_workers > 0 || executor > 0));
        }
    }
}

#[test]
fn a_stream_that_waits_for_what_was_never_asked_is_let_go_when_the_pass_ends() {
    let Some(cuda) = cuda() else { return };
    let mut scene = CudaBridgeFixture::new(&cuda, 1, Invocation::Fused);
    scene.pass(&cuda, 1);
    scene.assist.begin_pass();
    let number = scene.assist.post(scene.job(0));
    await_value(&scene.stream, scene.assist.answered(), number, WaitMethod::StreamMemory).unwrap();
    assert_eq!(scene.assist.end_pass(), Err(CudaError::Unanswered));
    scene.stream.synchronize().unwrap();
    (2..5).for_each(|salt| scene.pass(&cuda, salt));
}

#[test]
fn a_bridge_that_is_dropped_in_the_middle_of_a_pass_lets_the_stream_go_before_its_memory() {
    let Some(cuda) = cuda() else { return };
    for delay_us in [0, 300, 2000] {
        let mut scene = CudaBridgeFixture::new(&cuda, 1, Invocation::Fused);
        let stream = scene.stream.clone();
        scene.assist.begin_pass();
        let number = scene.assist.post(scene.job(0));
        await_value(&stream, scene.assist.answered(), number, WaitMethod::StreamMemory).unwrap();
        std::thread::sleep(Duration::from_micros(delay_us));
        assert_eq!(scene.workers.cores().len(), 1);
        drop(scene);
        stream.synchronize().unwrap();
    }
}
