//! One model, any path, equal bits: a request's logits do not depend on other requests or on the order of
//! computation.

use std::{path::PathBuf, sync::Arc};
use testkit::paths::golden;

use kernels::Isa;
use model::{
    adapter::{Adapter, AnyAdapter},
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice, Trunk},
    precision::Precision,
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    sources::open::open,
};
use types::BlockId;

use crate::golden_support::{GoldenAdapter, summed};

/// Models with 32-bit and 16-bit weights, with biases, head norms and windows in some layers, of other
/// families, and with experts; some are also computed in bf16, as their names say.
const MODELS: [&str; 22] = [
    "llama-tied",
    "llama-bf16",
    "qwen2-f16",
    "qwen2-bias",
    "qwen3-qknorm",
    "gemma3",
    "gemma3-bf16",
    "granite",
    "olmo2",
    "phi3",
    "phi3-bf16",
    "gemma2",
    "mixtral",
    "mixtral-bf16",
    "qwen3moe",
    "gptoss",
    "gptoss-mxfp4",
    "llama-tied, in bf16",
    "qwen2-f16, in bf16",
    "gemma3-bf16, in bf16",
    "mixtral-bf16, in bf16",
    "gptoss-mxfp4, in bf16",
];

/// Returns the folder's name and the precision of a model in [`MODELS`].
fn model_of(name: &str) -> (&str, Precision) {
    let folder = name.strip_suffix(", in bf16");
    folder.map_or((name, Precision::default()), |folder| (folder, Precision::Bf16))
}

fn load(name: &str) -> LoadedWeights {
    let (folder, precision) = model_of(name);
    let source = open(&golden("models").join(folder)).unwrap();
    LoadedWeights::load(&*source, 1).unwrap().with_precision(precision)
}

fn resident(name: &str, threads: usize) -> ResidentModel {
    let weights = load(name);
    // One of the models has an 8-bit KV cache, which has scales.
    let kv_dtype =
        if name.starts_with("qwen2-f16") { Some(KvPrecision::Int8) } else { Some(KvPrecision::F16) };
    let options = ResidentOptions { cores: vec![0; threads], kv_bytes: 32 << 20, kv_dtype };
    ResidentModel::new(weights, &options).unwrap()
}

/// The base (`None`), every golden adapter that fits the model, and a sum of some.
fn adapters(name: &str) -> Vec<Option<Arc<PreparedAdapter>>> {
    let precision = load(name).adapter_precision();
    let (name, _) = model_of(name);
    let source = open(&golden("models").join(name)).unwrap();
    let mut adapters = vec![None];
    let prepare = |asked: GoldenAdapter| Some(Arc::new(asked.prepared(source.config(), precision)));
    if name == "llama-tied" {
        let asked = "rank4-attention:0.7+rank16-rslora:0.5+rank8-f16";
        let adapter = summed(&golden("adapters").join(name), asked, source.config());
        adapters.push(prepare(adapter.into()));
    }
    for kind in ["dora", "embedding", "saved", "experts"] {
        for path in std::fs::read_dir(golden("adapters").join(kind).join(name)).into_iter().flatten() {
            let other = AnyAdapter::read(&path.unwrap().path(), source.config()).unwrap();
            adapters.push(prepare(GoldenAdapter::of(&golden("models").join(name), other)));
        }
    }
    for other in ["prompt_tuning", "lora-tokens", "beft"] {
        let path = golden("adapters/peft").join(name).join(other);
        if path.exists() {
            let other = AnyAdapter::read(&path, source.config()).unwrap();
            adapters.push(prepare(GoldenAdapter::of(&golden("models").join(name), other)));
        }
    }
    if let Ok(entries) = std::fs::read_dir(golden("adapters").join(name)) {
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            let adapter = Adapter::read(&path, source.config()).unwrap();
            let prepared = PreparedAdapter::new(&adapter, source.config(), precision).unwrap();
            adapters.push(Some(Arc::new(prepared)));
        }
    }
    adapters
}

/// The last of `adapters` of each method: LoRA, LoRA of experts, LoRA with embedding, saved modules, trained
/// tokens, DoRA, IA3, biases, prefix tuning, prompt tuning, none.
fn one_of_each(adapters: &[Option<Arc<PreparedAdapter>>]) -> Vec<Option<&Arc<PreparedAdapter>>> {
    let method = |adapter: &Option<Arc<PreparedAdapter>>| {
        let has = |adapter: &PreparedAdapter| {
            let vocabulary = adapter.vocabulary().map(|changes| (changes.rank() > 0, changes.saved()));
            let scales = adapter.scales().map(|scales| scales.vectors().is_empty());
            let others = (scales, adapter.prefix().is_some(), adapter.prompt().is_some());
            (adapter.rank() > 0, !adapter.experts().is_empty(), vocabulary, others)
        };
        adapter.as_ref().map(|adapter| has(adapter))
    };
    let is_last = |at: usize| adapters[at + 1..].iter().all(|later| method(later) != method(&adapters[at]));
    (0..adapters.len()).filter(|&at| is_last(at)).map(|at| adapters[at].as_ref()).collect()
}

fn prompt(salt: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i * 37 + salt * 101 + i * i) % 300).collect()
}

struct RoutedRequest<'a> {
    prompt: Vec<u32>,
    adapter: Option<&'a Arc<PreparedAdapter>>,
    blocks: Vec<BlockId>,
}

impl<'a> RoutedRequest<'a> {
    fn new(index: u32, length: usize, adapter: Option<&'a Arc<PreparedAdapter>>) -> Self {
        let count = (length + 8).div_ceil(BLOCK_TOKENS) as u32;
        let blocks = (0..count).map(|block| BlockId(index * 16 + block)).collect();
        Self { prompt: prompt(index, length), adapter, blocks }
    }

    fn slice<'s>(
        &'s self,
        range: std::ops::Range<usize>,
        logits: LogitRows,
    ) -> SequenceSlice<'s, PreparedAdapter> {
        let (start, tokens) = (range.start, &self.prompt[range]);
        SequenceSlice { trunk: &[], tokens, start, blocks: &self.blocks, adapter: self.adapter, logits }
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Bits of the last logits of a request that is alone and computed in one piece.
fn alone(model: &mut ResidentModel, request: &RoutedRequest<'_>) -> Vec<u32> {
    let mut logits = Vec::new();
    model.forward(&[request.slice(0..request.prompt.len(), LogitRows::Last)], &mut logits);
    bits(&logits)
}

fn requests(adapters: &[Option<Arc<PreparedAdapter>>]) -> Vec<RoutedRequest<'_>> {
    let lengths = [1, 7, 16, 17, 40, 33, 5, 64, 2, 15, 31, 48, 3, 9, 23, 80];
    let adapter = |i: usize| adapters[i % adapters.len()].as_ref();
    lengths.iter().enumerate().map(|(i, &length)| RoutedRequest::new(i as u32, length, adapter(i))).collect()
}

#[test]
fn a_request_among_fifteen_others_on_other_adapters_has_the_bits_it_has_alone() {
    for name in MODELS {
        let adapters = adapters(name);
        let requests = requests(&adapters);
        let expected: Vec<Vec<u32>> = {
            let mut model = resident(name, 1);
            requests.iter().map(|request| alone(&mut model, request)).collect()
        };
        for threads in [1, 2] {
            let mut model = resident(name, threads);
            let batch: Vec<_> = requests
                .iter()
                .map(|request| request.slice(0..request.prompt.len(), LogitRows::Last))
                .collect();
            let mut logits = Vec::new();
            model.forward(&batch, &mut logits);
            let vocab = model.vocab_size();
            for (i, (row, expected)) in logits.chunks(vocab).zip(&expected).enumerate() {
                assert_eq!(&bits(row), expected, "{name}, {threads} threads, request {i}");
            }
        }
    }
}

#[test]
fn a_decode_step_of_every_method_together_has_the_bits_each_has_alone() {
    for name in ["llama-tied", "llama-tied, in bf16", "qwen2-bias"] {
        let adapters = adapters(name);
        let each = one_of_each(&adapters);
        assert_eq!(
            each.len(),
            if name == "qwen2-bias" { 5 } else { 12 },
            "base, LoRA, one of the embedding, those with saved modules, tokens and biases where there are some, \
             DoRA, IA3, prefix, prompt"
        );
        let requests: Vec<_> =
            (0..).zip(&each).map(|(index, adapter)| RoutedRequest::new(index, 40, *adapter)).collect();
        for threads in [1, 2] {
            let mut model = resident(name, threads);
            let expected: Vec<_> = requests.iter().map(|request| alone(&mut model, request)).collect();
            let steps: Vec<_> =
                requests.iter().map(|request| request.slice(39..40, LogitRows::Last)).collect();
            let mut logits = Vec::new();
            model.forward(&steps, &mut logits);
            let rows: Vec<_> = logits.chunks(model.vocab_size()).map(bits).collect();
            assert_eq!(rows, expected, "{name}, {threads} threads");
        }
    }
}

#[test]
fn heads_of_their_own_have_the_same_bits_in_whatever_order_their_rows_lie() {
    let name = "llama-tied";
    let saved: Vec<_> = adapters(name).into_iter().flatten().collect();
    let saved: Vec<_> = saved
        .iter()
        .filter(|adapter| adapter.vocabulary().is_some_and(|changes| changes.own_head().is_some()))
        .collect();
    let [one, other] = saved[..] else { panic!("two have a head of their own") };
    let asked = [Some(one), None, Some(other), Some(one), Some(one), None, Some(other)];
    let mut requests: Vec<_> =
        (0..).zip(asked).map(|(index, adapter)| RoutedRequest::new(index, 20, adapter)).collect();
    for threads in [1, 2] {
        let mut model = resident(name, threads);
        for _ in 0..requests.len() {
            requests.rotate_left(1);
            let expected: Vec<_> = requests.iter().map(|request| alone(&mut model, request)).collect();
            let steps: Vec<_> =
                requests.iter().map(|request| request.slice(19..20, LogitRows::Last)).collect();
            let mut logits = Vec::new();
            model.forward(&steps, &mut logits);
            let rows: Vec<_> = logits.chunks(model.vocab_size()).map(bits).collect();
            assert_eq!(rows, expected, "{threads} threads");
        }
    }
}

#[test]
fn a_prompt_in_chunks_has_the_bits_it_has_in_one_piece() {
    for name in MODELS {
        let mut model = resident(name, 2);
        for adapter in one_of_each(&adapters(name)) {
            let request = RoutedRequest::new(0, 80, adapter);
            let expected = alone(&mut model, &request);
            for chunk in [1, 3, 16, 31, 79] {
                let mut logits = Vec::new();
                for start in (0..80).step_by(chunk) {
                    let end = (start + chunk).min(80);
                    model.forward(&[request.slice(start..end, LogitRows::Last)], &mut logits);
                }
                assert_eq!(bits(&logits), expected, "{name}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn a_prefix_from_another_requests_blocks_has_the_bits_of_one_computed_anew() {
    for name in MODELS {
        let mut model = resident(name, 1);
        for adapter in one_of_each(&adapters(name)) {
            let first = RoutedRequest::new(0, 64, adapter);
            let expected = alone(&mut model, &first);
            // The second request takes over three full blocks and computes the rest in its own.
            let mut second = RoutedRequest::new(0, 64, adapter);
            for (index, block) in second.blocks.iter_mut().enumerate().skip(3) {
                *block = BlockId(100 + index as u32);
            }
            let mut logits = Vec::new();
            model.forward(&[second.slice(48..64, LogitRows::Last)], &mut logits);
            assert_eq!(bits(&logits), expected, "{name}");
        }
    }
}

#[test]
fn a_prefix_that_came_as_bytes_from_another_model_has_the_bits_of_one_computed_here() {
    for name in MODELS {
        let (mut first, mut second) = (resident(name, 1), resident(name, 2));
        for adapter in one_of_each(&adapters(name)) {
            let here = RoutedRequest::new(0, 80, adapter);
            let expected = alone(&mut first, &here);
            let mut there = RoutedRequest::new(0, 80, adapter);
            there.blocks.iter_mut().for_each(|block| block.0 = 100 - 7 * block.0);
            let mut bytes = vec![0; first.block_bytes()];
            for (from, to) in here.blocks.iter().zip(&there.blocks).take(3) {
                first.read_block(*from, &mut bytes);
                second.write_block(*to, &bytes);
            }
            let mut logits = Vec::new();
            second.forward(&[there.slice(48..79, LogitRows::None)], &mut logits);
            second.forward(&[there.slice(79..80, LogitRows::Last)], &mut logits);
            assert_eq!(bits(&logits), expected, "{name}");
        }
    }
}

#[test]
fn the_logits_of_all_rows_are_those_of_each_row_as_the_last() {
    for name in MODELS {
        let adapters = adapters(name);
        let request = RoutedRequest::new(0, 40, adapters.last().unwrap().as_ref());
        let mut model = resident(name, 2);
        let mut all = Vec::new();
        model.forward(&[request.slice(0..40, LogitRows::All)], &mut all);
        for (row, logits) in all.chunks(model.vocab_size()).enumerate() {
            let mut last = Vec::new();
            resident(name, 1).forward(&[request.slice(0..row + 1, LogitRows::Last)], &mut last);
            assert_eq!(bits(&last), bits(logits), "{name}, row {row}");
        }
    }
}

#[test]
fn every_instruction_set_agrees_to_a_rounding_error() {
    let request = RoutedRequest::new(0, 40, None);
    let mut logits = Vec::new();
    for isa in Isa::available() {
        let mut model = resident("llama-tied", 1).with_isa(isa);
        let mut row = Vec::new();
        model.forward(&[request.slice(0..40, LogitRows::Last)], &mut row);
        logits.push(row);
    }
    for other in &logits[1..] {
        for (a, b) in logits[0].iter().zip(other) {
            assert!((a - b).abs() <= 1e-3, "{a} and {b}");
        }
    }
}

/// A token tree after a prompt: a trunk of two tokens, two branches from it, and one branch of a branch.
const FORKS: [(Option<(usize, usize)>, usize); 4] =
    [(None, 7), (Some((0, 2)), 5), (Some((0, 4)), 3), (Some((1, 2)), 20)];

/// A branch: its path from the pending token on, and the number of its own rows.
struct TreeBranch {
    path: Vec<u32>,
    own: usize,
    /// First row in the batch, and the ancestors' rows: first, count, depth.
    first_row: usize,
    ancestors: Vec<(usize, usize, usize)>,
}

fn branches() -> Vec<TreeBranch> {
    let mut branches: Vec<TreeBranch> = Vec::new();
    let mut rows = 0;
    for (index, (fork, own)) in FORKS.into_iter().enumerate() {
        let (mut path, mut ancestors) = (Vec::new(), Vec::new());
        if let Some((parent, kept)) = fork {
            let parent = &branches[parent];
            let depth = parent.path.len() - parent.own;
            path.extend(&parent.path[..depth + kept]);
            ancestors.clone_from(&parent.ancestors);
            ancestors.push((parent.first_row, kept, depth));
        }
        path.extend((0..own as u32).map(|i| (i * 29 + 31 * index as u32 + 5) % 300));
        branches.push(TreeBranch { path, own, first_row: rows, ancestors });
        rows += own;
    }
    branches
}

#[test]
fn a_tree_of_drafted_tokens_has_in_each_row_the_bits_of_its_path_alone() {
    for name in MODELS {
        let adapters = adapters(name);
        for (adapter, length) in one_of_each(&adapters).into_iter().zip([37, 32, 15, 1].into_iter().cycle()) {
            let request = RoutedRequest::new(0, length, adapter);
            let mut model = resident(name, 2);
            let mut logits = Vec::new();
            model.forward(&[request.slice(0..length, LogitRows::None)], &mut logits);
            let tree = branches();
            // Each branch has its own blocks from the one on in which the prompt ends.
            let shared = length / BLOCK_TOKENS;
            let blocks: Vec<Vec<BlockId>> = (0..tree.len() as u32)
                .map(|branch| {
                    let own = (0..3).map(|block| BlockId(20 + 3 * branch + block));
                    request.blocks[..shared].iter().copied().chain(own).collect()
                })
                .collect();
            for blocks in &blocks {
                model.copy_block(request.blocks[shared], blocks[shared]).unwrap();
            }
            let trunks: Vec<Vec<Trunk>> = tree
                .iter()
                .map(|branch| {
                    let trunk = |&(first, rows, depth): &(usize, usize, usize)| Trunk {
                        back: branch.first_row - first,
                        rows,
                        start: length + depth,
                    };
                    branch.ancestors.iter().map(trunk).collect()
                })
                .collect();
            let slices: Vec<_> = tree
                .iter()
                .zip(&blocks)
                .zip(&trunks)
                .map(|((branch, blocks), trunk)| SequenceSlice {
                    tokens: &branch.path[branch.path.len() - branch.own..],
                    start: length + branch.path.len() - branch.own,
                    blocks,
                    trunk,
                    adapter,
                    logits: LogitRows::All,
                })
                .collect();
            model.forward(&slices, &mut logits);
            let rows: Vec<_> = logits.chunks(model.vocab_size()).map(bits).collect();
            for (index, branch) in tree.iter().enumerate() {
                let mut alone = RoutedRequest::new(4, length + branch.path.len(), adapter);
                alone.prompt = [&request.prompt[..], &branch.path].concat();
                let mut logits = Vec::new();
                model.forward(&[alone.slice(0..alone.prompt.len(), LogitRows::All)], &mut logits);
                let expected: Vec<_> = logits.chunks(model.vocab_size()).map(bits).collect();
                assert_eq!(
                    rows[branch.first_row..][..branch.own],
                    expected[expected.len() - branch.own..],
                    "{name}, branch {index} behind {length} tokens"
                );
            }
        }
    }
}
