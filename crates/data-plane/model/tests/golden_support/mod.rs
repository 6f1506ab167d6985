//! Golden values of transformers and PEFT (`tests/golden/README.md`), and their comparison with a pass on any
//! device.

mod asked;
mod classification;

use std::{path::Path, sync::Arc};

use model::{
    adapter::AnyAdapter,
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    sources::open::open,
};
use serde::{Deserialize, de::DeserializeOwned};
use types::BlockId;

pub(crate) use self::{
    asked::{GoldenAdapter, summed},
    classification::check_classification,
};

#[derive(Deserialize)]
struct Index {
    models: Vec<IndexedModel>,
}

#[derive(Deserialize)]
struct IndexedModel {
    name: String,
    adapters: Vec<String>,
    /// Several adapters at once, each with a weight behind a colon.
    sums: Vec<String>,
    /// Method and name of other adapters: DoRA, embeddings, VeRA with drawn matrices.
    others: Vec<String>,
}

#[derive(Deserialize)]
struct GoldenFile {
    cases: Vec<GoldenCase>,
}

#[derive(Deserialize)]
struct GoldenCase {
    prompt: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
    margins: Vec<f32>,
}

/// Golden values of a large vocabulary: the largest logits, and some others.
#[derive(Deserialize)]
pub(crate) struct RealGolden {
    probe_ids: Vec<usize>,
    pub(crate) cases: Vec<RealCase>,
}

#[derive(Deserialize)]
pub(crate) struct RealCase {
    pub(crate) prompt: Vec<u32>,
    top: Vec<(u32, f32)>,
    probes: Vec<f32>,
    pub(crate) greedy: Vec<u32>,
    margins: Vec<f32>,
}

impl RealGolden {
    pub(crate) fn errors(&self, case: &RealCase, logits: &[f32]) -> Vec<f32> {
        let tops = case.top.iter().map(|&(id, value)| (id as usize, value));
        let probes = self.probe_ids.iter().copied().zip(case.probes.iter().copied());
        tops.chain(probes).map(|(id, value)| (logits[id] - value).abs()).collect()
    }
}

impl RealCase {
    /// Number of `tokens` as expected; the first other one must be a near tie.
    pub(crate) fn same(&self, name: &str, tokens: &[u32], tolerance: f32) -> usize {
        let same = tokens.iter().zip(&self.greedy).take_while(|(a, b)| a == b).count();
        assert!(
            same == tokens.len() || self.margins[same] <= 2.0 * tolerance,
            "{name}: token {same} differs though its margin is {}",
            self.margins[same]
        );
        same
    }
}

pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) fn generate<P: ForwardPass<Adapter = PreparedAdapter>>(
    pass: &mut P,
    adapter: Option<&Arc<PreparedAdapter>>,
    prompt: &[u32],
    count: usize,
) -> (Vec<f32>, Vec<u32>) {
    let mut input = vec![0; adapter.map_or(0, |adapter| adapter.virtual_tokens())];
    input.extend(prompt);
    let blocks: Vec<BlockId> = (0..(input.len() + count).div_ceil(16) as u32).map(BlockId).collect();
    let (mut logits, mut first, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
    let begin =
        adapter.and_then(|adapter| adapter.invocation()).map_or(0, |invocation| invocation.begin(prompt));
    let applied = |start: usize| adapter.filter(|_| start >= begin);
    let mut start = 0;
    if (1..input.len()).contains(&begin) {
        let tokens = &input[..begin];
        let slice = SequenceSlice {
            trunk: &[],
            tokens,
            start,
            blocks: &blocks,
            adapter: None,
            logits: LogitRows::None,
        };
        pass.forward(&[slice], &mut logits).unwrap();
        input.drain(..begin);
        start = begin;
    }
    for _ in 0..count {
        let slice = SequenceSlice {
            trunk: &[],
            tokens: &input,
            start,
            blocks: &blocks,
            adapter: applied(start),
            logits: LogitRows::Last,
        };
        pass.forward(&[slice], &mut logits).unwrap();
        if first.is_empty() {
            first.clone_from(&logits);
        }
        start += input.len();
        tokens.push(best(&logits));
        input = vec![best(&logits)];
    }
    (first, tokens)
}

/// Compares with one golden file and prints the errors of the logits.
fn check<P: ForwardPass<Adapter = PreparedAdapter>>(
    pass: &mut P,
    adapter: Option<&Arc<PreparedAdapter>>,
    file: &Path,
    tolerance: f32,
) {
    let (golden, name): (GoldenFile, _) = (read(file), file.display());
    let mut worst = 0.0f32;
    for case in &golden.cases {
        let (logits, tokens) = generate(pass, adapter, &case.prompt, case.greedy.len());
        let error = error(&logits, &case.logits);
        assert!(error <= tolerance, "{name}, prompt of {}: logit error {error}", case.prompt.len());
        worst = worst.max(error);
        // If the two best logits are closer than the error, either may win, and then the texts differ.
        let sure =
            case.margins.iter().position(|&margin| margin <= 2.0 * tolerance).unwrap_or(case.margins.len());
        assert_eq!(tokens[..sure], case.greedy[..sure], "{name}, prompt of {}", case.prompt.len());
        assert!(sure > 0 || tolerance > 1e-2, "{name}: the first token is decided");
    }
    println!("{name}: logit error {worst:.2e}");
}

/// Checks every model in the folder `golden`: without an adapter, with each of its own, with sums and with
/// other methods. `load` takes a model's path; `prepare` takes the loaded model, the path and an adapter, and
/// returns `None` for methods that its device does not compute.
pub(crate) fn check_all<P: ForwardPass<Adapter = PreparedAdapter>>(
    golden: &Path,
    tolerance: impl Fn(&str) -> f32,
    load: impl Fn(&Path) -> Option<P>,
    prepare: impl Fn(&P, &Path, GoldenAdapter) -> Option<Arc<PreparedAdapter>>,
) {
    let index: Index = read(&golden.join("index.json"));
    for model in &index.models {
        let name = &model.name;
        let (path, expected) = (golden.join("models").join(name), golden.join("expected").join(name));
        let (Some(mut pass), tolerance) = (load(&path), tolerance(name)) else { continue };
        check(&mut pass, None, &expected.join("base.json"), tolerance);
        for (file, adapter) in model.all(golden) {
            let Some(prepared) = prepare(&pass, &path, GoldenAdapter::of(&path, adapter)) else { continue };
            check(&mut pass, Some(&prepared), &expected.join(format!("{file}.json")), tolerance);
        }
    }
}

impl IndexedModel {
    /// All adapters of the model, each with its golden file.
    fn all(&self, golden: &Path) -> Vec<(String, AnyAdapter)> {
        let source = open(&golden.join("models").join(&self.name)).unwrap();
        let (config, adapters) = (source.config(), golden.join("adapters"));
        let read = |path: &Path| AnyAdapter::read(path, config).unwrap();
        let plain =
            self.adapters.iter().map(|name| (name.clone(), read(&adapters.join(&self.name).join(name))));
        let sums = self.sums.iter().enumerate();
        let sums = sums.map(|(nth, asked)| {
            (format!("sum/{nth}"), summed(&adapters.join(&self.name), asked, config).into())
        });
        let others = self.others.iter().map(|other| {
            let (kind, name) = other.split_once('/').unwrap();
            (other.clone(), read(&adapters.join(kind).join(&self.name).join(name)))
        });
        plain.chain(sums).chain(others).collect()
    }
}

pub(crate) fn best(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

/// Largest difference; NaN if any value is NaN.
pub(crate) fn error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |worst, error| if error <= worst { worst } else { error })
}

#[derive(Deserialize)]
struct Embeddings {
    cases: Vec<Embedding>,
}

#[derive(Deserialize)]
struct Embedding {
    model: String,
    adapter: Option<String>,
    prompt: Vec<u32>,
    last: Vec<f32>,
    mean: Vec<f32>,
}

/// Checks the hidden states of prompts, computed in chunks beside a decoding sequence. `load` and `prepare`
/// as for [`check_all`].
pub(crate) fn check_embeddings<P: ForwardPass<Adapter = PreparedAdapter>>(
    golden: &Path,
    tolerance: f32,
    load: impl Fn(&Path) -> P,
    prepare: impl Fn(&P, &Path, &Path) -> Arc<PreparedAdapter>,
) {
    let all: Embeddings = read(&golden.join("expected/embeddings.json"));
    assert!(!all.cases.is_empty());
    for Embedding { model, adapter, prompt, last, mean } in &all.cases {
        let path = golden.join("models").join(model);
        let mut pass = load(&path);
        let prepared = adapter.as_ref().map(|name| {
            let files = golden.join("adapters").join(model).join(name);
            prepare(&pass, &path, &files)
        });
        let states = states(&mut pass, prepared.as_ref(), prompt);
        let rows: Vec<&[f32]> = states.chunks_exact(pass.hidden_size()).collect();
        assert_eq!(rows.len(), prompt.len());
        let column = |column: usize| rows.iter().map(|row| f64::from(row[column])).sum::<f64>();
        let found = (0..last.len()).map(|at| (column(at) / rows.len() as f64) as f32).collect::<Vec<_>>();
        let errors = [error(rows[rows.len() - 1], last), error(&found, mean)];
        println!("{model} {adapter:?}: state error {errors:.2?}");
        assert!(errors.iter().all(|error| *error <= tolerance), "{model} {adapter:?}: {errors:?}");
    }
}

fn states<P: ForwardPass<Adapter = PreparedAdapter>>(
    pass: &mut P,
    adapter: Option<&Arc<PreparedAdapter>>,
    prompt: &[u32],
) -> Vec<f32> {
    let skipped = adapter.map_or(0, |adapter| adapter.virtual_tokens());
    let mut input = vec![0; skipped];
    input.extend(prompt);
    let blocks: Vec<BlockId> = (1..=input.len().div_ceil(BLOCK_TOKENS) as u32).map(BlockId).collect();
    let (mut states, mut logits, mut start) = (Vec::new(), Vec::new(), 0);
    for tokens in input.chunks(skipped + 17) {
        let other = SequenceSlice {
            trunk: &[],
            tokens: &prompt[..1],
            start: 0,
            blocks: &[BlockId(0)],
            adapter: None,
            logits: LogitRows::Last,
        };
        let from = if start == 0 { skipped } else { 0 };
        let slice = SequenceSlice {
            trunk: &[],
            tokens,
            start,
            blocks: &blocks,
            adapter,
            logits: LogitRows::States { from },
        };
        let batch = if start == 0 { vec![other, slice] } else { vec![slice] };
        pass.forward(&batch, &mut logits).unwrap();
        assert_eq!(logits.len() / pass.vocab_size(), batch.len() - 1);
        states.extend_from_slice(pass.states());
        start += tokens.len();
    }
    states
}
