//! Models and an in-process executor for the client's tests.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod oracle_draft;
pub mod remote_loopback;
pub mod ring;
pub mod test_endpoint;
pub mod training;

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};
pub use testkit::paths::{example_adapter, golden, golden_model as tiny, real_model};

use client::{
    generate::{GenerateRequest, Generated},
    masking::Masking,
    session::{ClientSettings, Session},
    split_model::{ClientAdapter, SplitModel, SplitOptions},
    transport::{Connect, loopback::Loopback},
};
use model::{
    client_weights::{ClientWeightsPlan, client_base::ClientBase},
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass as _, LogitRows, SequenceSlice},
    linear_sites::{EvaluateSites as _, catalog_sites},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sampling::{Sampling, SamplingParams, TokenCounts, sample},
    sources::open::open,
};
use shmproto::layer::{
    SitePath,
    control::{self, AdapterDtype, Catalog, ClientFileEntry, Site},
};
use testkit::WATCHDOG;
use types::BlockId;

pub const OFF: Masking = Masking::Off { path: SitePath::Fast };

/// A resident model of the same weights, and whether its arithmetic is exact.
pub fn resident(path: &Path) -> (ResidentModel, bool) {
    let source = open(path).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let is_exact = weights.adapter_precision() == kernels::lora::LoraPrecision::Exact;
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 32 << 20, kv_dtype: None };
    (ResidentModel::new(weights, &options).unwrap(), is_exact)
}

/// In-process executor of the model at `path`, which gives out no files.
pub fn executor(path: &Path) -> Loopback {
    let (base, is_exact) = resident(path);
    let catalog = catalog(&base, base.sites(), is_exact);
    Loopback::new(Box::new(base), &catalog, Vec::new())
}

/// In-process executor with a commitment to its weights, hence with a ring path.
pub fn committed_executor(path: &Path) -> Loopback {
    let (mut base, is_exact) = resident(path);
    base.commit();
    let catalog = catalog(&base, base.sites(), is_exact);
    Loopback::new(Box::new(base), &catalog, Vec::new())
}

/// In-process executor of the model file at `path`, which gives out client weights.
pub fn giving_executor(path: &Path) -> Loopback {
    let (base, is_exact) = resident(path);
    let plan = ClientWeightsPlan::of(path).unwrap();
    let listed = |file: &model::client_weights::ClientWeightsFile| ClientFileEntry {
        name: file.name.clone(),
        bytes: file.bytes,
        ranges: file.ranges.iter().map(|range| (range.start, range.end - range.start)).collect(),
    };
    let base_hash = model::sources::identity::of_model(path).unwrap();
    let files = plan.files().iter().map(listed).collect();
    let catalog = Catalog { base_hash, files, ..catalog(&base, base.sites(), is_exact) };
    Loopback::new(Box::new(base), &catalog, vec![std::fs::read(path).unwrap()])
}

fn catalog(base: &ResidentModel, sites: &[model::linear_sites::Site], is_exact: bool) -> Catalog {
    Catalog {
        model: "tested".to_owned(),
        architecture: base.config().architecture.clone(),
        base_hash: [7; 32],
        context_length: 0,
        kv_dtype: if is_exact { control::KvDtype::F32 } else { control::KvDtype::F16 },
        adapter_dtype: if is_exact { AdapterDtype::Exact } else { AdapterDtype::F16 },
        sites: catalog_sites(sites),
        files: Vec::new(),
    }
}

pub fn widths(executor: &Loopback) -> Vec<(usize, usize)> {
    let session = Session::open(Box::new(executor.clone()), settings()).unwrap();
    let outputs = |site: &Site| site.parts.iter().map(|part| part.rows as usize).sum();
    session.catalog().sites.iter().map(|site| (site.columns as usize, outputs(site))).collect()
}

pub fn settings() -> ClientSettings {
    ClientSettings { patience: WATCHDOG, ..ClientSettings::default() }
}

/// Split model over `connector` with its own copy of norms and embedding.
pub fn split_over(connector: Box<dyn Connect>, path: &Path, masking: Masking) -> SplitModel {
    let options = SplitOptions { kv_bytes: 32 << 20, chunk_tokens: 7, ..SplitOptions::default() };
    split_masked(connector, path, masking, &options)
}

pub fn split_masked(
    connector: Box<dyn Connect>,
    path: &Path,
    masking: Masking,
    options: &SplitOptions,
) -> SplitModel {
    let settings = ClientSettings { masking: masking.as_str().to_owned(), ..settings() };
    let mut session = Session::open(connector, settings).unwrap();
    let mask = masking.prepare(&mut session, &mut |_, _| {}).unwrap();
    SplitModel::new(ClientBase::open(path).unwrap(), session, mask, options).unwrap()
}

pub fn split(path: &Path, masking: Masking) -> SplitModel {
    split_over(Box::new(executor(path)), path, masking)
}

pub fn split_of(connector: Box<dyn Connect>, path: &Path, options: &SplitOptions) -> SplitModel {
    split_masked(connector, path, OFF, options)
}

pub fn tokens(count: u32, vocab_size: usize) -> Vec<u32> {
    let vocabulary = u32::try_from(vocab_size).unwrap();
    (0..count).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) % vocabulary).collect()
}

pub fn sampling(vocab_size: usize, temperature: f32, seed: u64) -> SamplingParams {
    let request = Sampling { temperature, seed, ..Sampling::default() };
    SamplingParams::new(request, vocab_size).unwrap()
}

pub fn generate(
    model: &mut SplitModel,
    task: &GenerateRequest,
    adapter: Option<&ClientAdapter>,
) -> Generated {
    model.generate(task, adapter, &mut |_| ControlFlow::Continue(())).unwrap()
}

pub fn blocks() -> Vec<BlockId> {
    (0..16).map(BlockId).collect()
}

/// Tokens of the resident engine's loop, without its scheduler.
pub fn resident_tokens(
    model: &mut ResidentModel,
    task: &GenerateRequest,
    adapter: Option<&Arc<PreparedAdapter>>,
) -> Vec<u32> {
    let before = adapter.map_or(0, |adapter| adapter.virtual_tokens());
    let mut tokens = vec![0; before];
    tokens.extend(&task.prompt);
    let (blocks, mut logits, mut computed) = (blocks(), Vec::new(), 0);
    let first = tokens.len();
    while tokens.len() < first + task.max_tokens {
        let slice = SequenceSlice {
            trunk: &[],
            tokens: &tokens[computed..],
            start: computed,
            blocks: &blocks,
            adapter,
            logits: LogitRows::Last,
        };
        model.forward(&[slice], &mut logits);
        computed = tokens.len();
        tokens.push(sample(&mut logits, &task.sampling, &TokenCounts::default(), computed as u64, &[]));
    }
    tokens.split_off(first)
}

pub fn resident_logits(
    model: &mut ResidentModel,
    prompt: &[u32],
    adapter: Option<&Arc<PreparedAdapter>>,
) -> Vec<f32> {
    let (blocks, mut logits) = (blocks(), Vec::new());
    model.forward(&[slice(prompt, &blocks, adapter)], &mut logits);
    logits
}

pub fn split_logits(
    model: &mut SplitModel,
    prompt: &[u32],
    adapter: Option<&Arc<PreparedAdapter>>,
) -> Vec<f32> {
    let (blocks, mut logits) = (blocks(), Vec::new());
    model.forward(&[slice(prompt, &blocks, adapter)], &mut logits).unwrap();
    logits
}

fn slice<'a>(
    tokens: &'a [u32],
    blocks: &'a [BlockId],
    adapter: Option<&'a Arc<PreparedAdapter>>,
) -> SequenceSlice<'a, PreparedAdapter> {
    SequenceSlice { trunk: &[], tokens, start: 0, blocks, adapter, logits: LogitRows::All }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
