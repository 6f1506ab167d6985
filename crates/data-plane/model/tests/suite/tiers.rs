//! Equal bits from every tier: for any part of an adapter on the device, and any process that sums the rest.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};
use testkit::paths::golden;

use kernels::{
    Activations,
    blocks::BlockMemory,
    lora::{LoraPrecision, sum_ranks},
};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    cpu::Compute,
    deltas::{
        assist::{Assist, PartialSum},
        cpu_copy::CpuMemory,
        device_copy::{DeviceCopy, DeviceMemory as _},
        prepared::PreparedAdapter,
    },
    forward::{ForwardPass, LogitRows, SequenceSlice},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        layout::{BLOCK_TARGETS, linear_shape},
        source::Target,
    },
    sources::open::open,
};
use serde::Deserialize;
use types::{AdapterVersion, BlockId};

const BLOCKS: u32 = 4;

fn config(name: &str) -> ModelConfig {
    open(&golden("models").join(name)).unwrap().config().clone()
}

fn resident(name: &str, threads: usize) -> ResidentModel {
    let source = open(&golden("models").join(name)).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let options =
        ResidentOptions { cores: vec![0; threads], kv_bytes: 16 << 20, kv_dtype: Some(KvPrecision::F32) };
    ResidentModel::new(weights, &options).unwrap()
}

fn golden_adapter(model: &str, name: &str, precision: LoraPrecision) -> Arc<PreparedAdapter> {
    let config = config(model);
    let adapter = Adapter::read(&golden("adapters").join(model).join(name), &config).unwrap();
    Arc::new(PreparedAdapter::new(&adapter, &config, precision).unwrap())
}

/// Adapter of every linear layer and the head, with ranks from `ranks` in turn.
fn adapter_of_everything(
    config: &ModelConfig,
    ranks: &[usize],
    precision: LoraPrecision,
) -> Arc<PreparedAdapter> {
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
    let generation = AdapterVersion([7; 32]);
    let adapter = Adapter {
        generation,
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    };
    Arc::new(PreparedAdapter::new(&adapter, config, precision).unwrap())
}

fn numbers(salt: usize, count: usize) -> Vec<f32> {
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

/// Puts the first `blocks` blocks of the adapter, in copy order, on the device.
fn stage(adapter: &PreparedAdapter, blocks: usize) -> Arc<DeviceCopy> {
    let copy = Arc::new(copy_of(adapter));
    (0..blocks).for_each(|_| copy.copy_next(adapter.host()));
    adapter.set_device(Some(Arc::clone(&copy)));
    copy
}

fn blocks_of(adapter: &PreparedAdapter) -> usize {
    adapter.matrices().map(|(_, _, matrix)| matrix.rank().div_ceil(kernels::lora::RANK_BLOCK)).sum()
}

/// Calls of the test doubles below.
#[derive(Debug, Default)]
struct Log {
    passes: usize,
    /// Sum of rows times ranks.
    rank_rows: u64,
}

/// Sums every head at the end, on the calling thread, as a worker would.
#[derive(Debug, Default)]
struct Serial {
    log: Arc<Mutex<Log>>,
    /// Adapter that gains a block at every call, and its copy.
    travels: Option<(Arc<PreparedAdapter>, Arc<DeviceCopy>)>,
    in_pass: bool,
    asked: usize,
}

impl Serial {
    fn block_arrives(&self) {
        if let Some((adapter, copy)) = &self.travels {
            copy.copy_next(adapter.host());
        }
    }
}

impl Assist for Serial {
    fn helpers(&mut self) -> usize {
        1
    }

    fn begin_pass(&mut self) {
        assert!(!self.in_pass, "a pass ends before the next begins");
        self.in_pass = true;
        self.log.lock().unwrap().passes += 1;
    }

    fn end_pass(&mut self) {
        assert!(self.in_pass, "what ends has begun");
        self.in_pass = false;
    }

    fn begin(&mut self, _: &Activations, asks: &[PartialSum<'_>]) {
        assert!(self.in_pass && !asks.is_empty());
        self.asked = asks.len();
        self.log.lock().unwrap().rank_rows += asks.iter().map(PartialSum::rank_rows).sum::<u64>();
        self.block_arrives();
    }

    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]) {
        assert_eq!(asks.len(), self.asked, "the asks are those of the beginning");
        let mut end = 0;
        for ask in asks {
            assert_eq!(ask.offset, end, "sums lie one after the other");
            end += ask.elements();
            let rows = &x.values()[ask.first_row * x.width()..][..ask.rows * x.width()];
            sum_ranks(compute.isa, rows, ask.matrix, 0..ask.ranks, &mut sums[ask.offset..end]);
        }
        assert_eq!(end, sums.len());
        self.block_arrives();
    }
}

/// Prompt and adapter of a request; its blocks follow from its position in the batch.
struct TierRequest {
    prompt: Vec<u32>,
    adapter: Option<Arc<PreparedAdapter>>,
}

fn request(salt: u32, length: usize, adapter: Option<&Arc<PreparedAdapter>>) -> TierRequest {
    let prompt = (0..length as u32).map(|i| (i * 37 + salt * 101 + i * i) % 300).collect();
    TierRequest { prompt, adapter: adapter.cloned() }
}

/// Bits of the last logits of all requests, after their prompts and after each of two more tokens.
fn bits(model: &mut ResidentModel, requests: &[TierRequest]) -> Vec<u32> {
    let blocks: Vec<Vec<BlockId>> = (0..requests.len() as u32)
        .map(|at| (at * BLOCKS..(at + 1) * BLOCKS).map(BlockId).collect())
        .collect();
    let mut texts: Vec<Vec<u32>> = requests.iter().map(|request| request.prompt.clone()).collect();
    let (mut starts, mut bits, mut logits) = (vec![0; requests.len()], Vec::new(), Vec::new());
    for _ in 0..3 {
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
        for (at, row) in logits.chunks(model.vocab_size()).enumerate() {
            starts[at] = texts[at].len();
            texts[at].push(best(row) as u32);
        }
    }
    bits
}

fn best(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

/// Reference bits: the request alone, without a device.
fn host_bits(name: &str, request: &TierRequest) -> Vec<u32> {
    if let Some(adapter) = &request.adapter {
        adapter.set_device(None);
    }
    bits(&mut resident(name, 1), std::slice::from_ref(request))
}

/// Bits of a batch whose requests are each computed alone, from the host tier.
fn host_bits_of_all(name: &str, requests: &[TierRequest]) -> Vec<u32> {
    let alone: Vec<Vec<u32>> = requests.iter().map(|request| host_bits(name, request)).collect();
    let vocab = alone[0].len() / 3;
    (0..3)
        .flat_map(|step| alone.iter().flat_map(move |bits| &bits[step * vocab..][..vocab]))
        .copied()
        .collect()
}

/// Compares with this number of blocks on the device: first without an assistant, then with one.
fn check_every_prefix(name: &str, adapter: &Arc<PreparedAdapter>, label: &str) {
    let request = request(1, 11, Some(adapter));
    let expected = host_bits(name, &request);
    let log = Arc::default();
    let assist = Serial { log: Arc::clone(&log), ..Serial::default() };
    let mut models = [resident(name, 1), resident(name, 2).with_assist(Box::new(assist))];
    let all = blocks_of(adapter);
    let mut asked_before = u64::MAX;
    for blocks in 0..=all {
        let copy = stage(adapter, blocks);
        assert_eq!(copy.is_complete(), blocks == all, "{label}");
        *log.lock().unwrap() = Log::default();
        for (model, who) in models.iter_mut().zip(["nobody", "one"]) {
            let found = bits(model, std::slice::from_ref(&request));
            assert!(found == expected, "{label}: {blocks} of {all} blocks, {who} assists");
        }
        let asked = log.lock().unwrap();
        assert!(asked.rank_rows < asked_before, "{label}: with every block that arrives less is asked");
        assert_eq!(
            asked.passes,
            if blocks == all { 0 } else { 3 },
            "{label}: an adapter that is there asks nobody"
        );
        asked_before = asked.rank_rows;
    }
}

#[test]
fn every_number_of_arrived_blocks_gives_the_bits_of_the_host_tier() {
    let adapters = [
        ("llama-tied", "rank64-all-linear"),
        ("llama-tied", "rank16-all-linear"),
        ("llama-tied", "patterns"),
        ("llama-tied", "some-layers"),
        ("qwen3-qknorm", "rank64-all-linear"),
        ("llama-rope3", "lm-head"),
    ];
    for (model, name) in adapters {
        for precision in [LoraPrecision::Exact, LoraPrecision::Compact, LoraPrecision::Bf16] {
            let label = format!("{model}/{name}, {precision:?}");
            check_every_prefix(model, &golden_adapter(model, name, precision), &label);
        }
    }
}

#[test]
fn ranks_that_fill_no_block_and_the_head_of_the_model_give_the_same_bits() {
    for name in ["llama-bf16", "qwen2-f16", "llama-rope3"] {
        // Blocks of 16 ranks: a short one alone, a short last one, exactly one, one more than one.
        let adapter = adapter_of_everything(&config(name), &[5, 40, 16, 17, 33], LoraPrecision::Compact);
        check_every_prefix(name, &adapter, name);
    }
}

#[test]
fn adapters_of_many_ranks_in_one_batch_have_the_bits_they_have_alone() {
    let (name, precision) = ("llama-tied", LoraPrecision::Exact);
    let names = ["rank64-all-linear", "rank4-attention", "rank16-all-linear", "patterns", "rank8-bf16"];
    let mut adapters: Vec<_> = names.iter().map(|adapter| golden_adapter(name, adapter, precision)).collect();
    adapters.push(adapter_of_everything(&config(name), &[70, 3, 16], precision));
    let mut requests = vec![request(90, 9, None)];
    for (salt, adapter) in (0..).zip(&adapters) {
        requests.push(request(salt, 1 + 9 * salt as usize, Some(adapter)));
        // A second request of the same adapter, apart from the first, and sometimes a base request between.
        requests.extend((salt % 2 == 0).then(|| request(100 + salt, 6, None)));
        requests.push(request(50 + salt, 17, Some(adapter)));
    }
    let expected = host_bits_of_all(name, &requests);
    let mut models = [resident(name, 2), resident(name, 2).with_assist(Box::<Serial>::default())];
    for round in 0..24 {
        for (at, adapter) in adapters.iter().enumerate() {
            let all = blocks_of(adapter);
            match (round * 7 + at * 5) % 9 {
                0 => adapter.set_device(None),
                part => drop(stage(adapter, all * (part - 1) / 7)),
            }
        }
        for model in &mut models {
            assert!(bits(model, &requests) == expected, "round {round}");
        }
    }
}

#[test]
fn blocks_that_arrive_between_the_question_and_the_answer_change_no_bit() {
    let name = "llama-tied";
    let adapter = adapter_of_everything(&config(name), &[64, 40, 16], LoraPrecision::Exact);
    let request = request(3, 11, Some(&adapter));
    let expected = host_bits(name, &request);
    for blocks in 0..blocks_of(&adapter) {
        let copy = stage(&adapter, blocks);
        let travels = Some((Arc::clone(&adapter), Arc::clone(&copy)));
        let assist = Serial { travels, ..Serial::default() };
        let mut model = resident(name, 1).with_assist(Box::new(assist));
        assert!(bits(&mut model, std::slice::from_ref(&request)) == expected, "from {blocks} blocks on");
        assert!(copy.arrived_bytes() > 0);
    }
}

#[test]
fn an_adapter_that_arrives_while_passes_run_changes_no_bit() {
    let name = "llama-tied";
    let adapter = golden_adapter(name, "rank64-all-linear", LoraPrecision::Exact);
    let request = request(4, 40, Some(&adapter));
    let expected = host_bits(name, &request);
    let mut models = [resident(name, 1), resident(name, 2).with_assist(Box::<Serial>::default())];
    let mut partly = 0;
    for round in 0..60 {
        let copy = stage(&adapter, 0);
        let goes = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !goes.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                while copy.next_bytes().is_some() {
                    copy.copy_next(adapter.host());
                    // Without a delay all blocks of a tiny model would arrive before its first layer.
                    (0..round * 40).for_each(|_| std::hint::spin_loop());
                }
            });
            for model in &mut models {
                goes.store(true, Ordering::Release);
                partly += usize::from(!copy.is_complete());
                assert!(bits(model, std::slice::from_ref(&request)) == expected, "round {round}");
            }
        });
        assert!(copy.is_complete());
    }
    assert!(partly > 0, "no pass began with an adapter on its way");
}

#[derive(Deserialize)]
struct TierGolden {
    cases: Vec<TierCase>,
}

#[derive(Deserialize)]
struct TierCase {
    prompt: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
    margins: Vec<f32>,
}

fn generate(
    model: &mut ResidentModel,
    adapter: &Arc<PreparedAdapter>,
    case: &TierCase,
) -> (Vec<f32>, Vec<u32>) {
    let count = case.greedy.len();
    let mut tokens = vec![0; adapter.virtual_tokens()];
    tokens.extend(&case.prompt);
    let begin = tokens.len();
    let blocks: Vec<BlockId> = (0..(begin + count).div_ceil(16) as u32).map(BlockId).collect();
    let (mut first, mut logits) = (Vec::new(), Vec::new());
    let mut start = 0;
    for _ in 0..count {
        let adapter = Some(adapter);
        let slice = SequenceSlice {
            trunk: &[],
            tokens: &tokens[start..],
            start,
            blocks: &blocks,
            adapter,
            logits: LogitRows::Last,
        };
        model.forward(&[slice], &mut logits);
        start = tokens.len();
        tokens.push(best(&logits) as u32);
        if first.is_empty() {
            first.clone_from(&logits);
        }
    }
    (first, tokens.split_off(begin))
}

#[test]
fn cold_adapters_give_the_logits_and_tokens_of_transformers() {
    const TOLERANCE: f32 = 1e-3;
    for model in ["llama-tied", "qwen3-qknorm", "llama-rope3"] {
        let mut cold = resident(model, 2).with_assist(Box::<Serial>::default());
        let mut names: Vec<_> =
            std::fs::read_dir(golden("adapters").join(model)).unwrap().map(|entry| entry.unwrap()).collect();
        names.sort_by_key(std::fs::DirEntry::file_name);
        assert!(!names.is_empty());
        for name in names.iter().map(|entry| entry.file_name().into_string().unwrap()) {
            let adapter = golden_adapter(model, &name, LoraPrecision::Exact);
            // Activated adapters depend on slices, which this test does not make.
            if adapter.invocation().is_some() {
                continue;
            }
            let text = std::fs::read(golden("expected").join(model).join(format!("{name}.json"))).unwrap();
            let golden: TierGolden = serde_json::from_slice(&text).unwrap();
            let all = blocks_of(&adapter);
            for case in &golden.cases {
                for blocks in [0, all / 3, all / 2, all] {
                    stage(&adapter, blocks);
                    let (logits, tokens) = generate(&mut cold, &adapter, case);
                    let error =
                        logits.iter().zip(&case.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(
                        error <= TOLERANCE,
                        "{model}/{name}, {blocks} of {all} blocks: logit error {error}"
                    );
                    // If the two best logits are closer than the error, either may win.
                    let is_close = |&margin: &f32| margin <= 2.0 * TOLERANCE;
                    let sure = case.margins.iter().position(is_close).unwrap_or(case.margins.len());
                    assert_eq!(
                        tokens[..sure],
                        case.greedy[..sure],
                        "{model}/{name}, {blocks} of {all} blocks"
                    );
                }
            }
        }
    }
}
