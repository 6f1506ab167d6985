//! The pass of a split client: its own embedding, norms, adapters and KV cache; remote linear layers.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::Arc,
};
use testkit::paths::{golden, real_model as smollm2};

use kernels::{Activations, Isa, ThreadPool, attention::KvPrecision, lora::LoraPrecision};
use model::{
    adapter::{Adapter, AdapterKind, merge::sum},
    client_weights::{ClientWeightsPlan, SparseCopy, client_base::ClientBase},
    cpu::{Compute, kv::PagedKv},
    deltas::{
        adapter_rows::AdapterRows,
        batch::{BatchDeltas, DeltaScratch},
        prepared::PreparedAdapter,
    },
    forward::{BaseLayers, ForwardPass, LinearGroup, LogitRows, Scratch, SequenceSlice, run},
    linear_sites::{EvaluateSites, SiteCall, SiteId, SiteOp, SitePath},
    resident::{LoadedWeights, ResidentModel, ResidentOptions, kv_shape},
    shape::{config::ModelConfig, source::WeightSource},
    site_model::SiteModel,
    sources::{dequantized::Dequantized, gguf::GgufSource, open::open},
    weights::embedding::Embedding,
};
use types::BlockId;

const KV: Option<KvPrecision> = None;

fn resident(source: &(dyn WeightSource + Sync), kv_dtype: Option<KvPrecision>) -> ResidentModel {
    let options = ResidentOptions { cores: vec![], kv_bytes: 16 << 20, kv_dtype };
    ResidentModel::new(LoadedWeights::load(source, 2).unwrap(), &options).unwrap()
}

fn sparse_copy(model: &Path, into: &Path) -> PathBuf {
    let plan = ClientWeightsPlan::of(model).unwrap();
    let mut copy = SparseCopy::create(&into.join("copy"), plan.files(), 1 << 30).unwrap();
    while let Some(wanted) = copy.wanted() {
        copy.write(&plan.read(wanted.file, wanted.offset, 1 << 16).unwrap()).unwrap();
    }
    copy.finish().unwrap()
}

/// Base layers behind a boundary that only rows of values cross, as for a client.
struct RemoteBase<'a, E> {
    base: &'a mut E,
    embedding: &'a Embedding,
    config: &'a ModelConfig,
    path: SitePath,
}

impl<E: EvaluateSites> BaseLayers<Compute> for RemoteBase<'_, E> {
    type Error = Infallible;

    fn linear(
        &mut self,
        _compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let site = SiteId::of(self.config, layer, group);
        let call = SiteCall { site, part: None, op: SiteOp::Forward, path: self.path };
        // Only values travel, without prepared forms.
        let mut sent = Activations::default();
        sent.reshape(0, x.width());
        sent.append(x.values());
        self.base.evaluate(call, &mut sent, out).unwrap();
        Ok(())
    }

    fn embed(
        &self,
        _compute: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        self.embedding.embed(tokens, out);
        Ok(())
    }
}

struct SplitPass<'a, E> {
    base: &'a mut E,
    client: &'a ClientBase,
    kv: PagedKv,
    path: SitePath,
}

impl<'a, E: EvaluateSites> SplitPass<'a, E> {
    fn new(base: &'a mut E, client: &'a ClientBase, path: SitePath, kv: KvPrecision) -> Self {
        let kv = PagedKv::new(kv_shape(client.config(), kv), 64, &client.frame).unwrap();
        Self { base, client, kv, path }
    }

    fn forward(&mut self, batch: &[SequenceSlice<'_, PreparedAdapter>]) -> Vec<f32> {
        let mut compute = Compute { pool: ThreadPool::new(&[]).unwrap(), isa: Isa::best() };
        let (config, mut scratch, mut logits) = (self.client.config(), DeltaScratch::default(), Vec::new());
        let found = AdapterRows::of(batch);
        let mut deltas = BatchDeltas::new(config, None, &mut scratch, &found);
        let mut base =
            RemoteBase { base: &mut *self.base, embedding: &self.client.embedding, config, path: self.path };
        let parts = (&mut base, &mut deltas, &mut self.kv);
        let Ok(()) = run(&self.client.frame, parts, &mut compute, &mut Scratch::empty(), batch, &mut logits);
        logits
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

const BLOCKS: [BlockId; 4] = [BlockId(3), BlockId(0), BlockId(2), BlockId(1)];

fn slice<'a>(
    tokens: &'a [u32],
    start: usize,
    adapter: Option<&'a Arc<PreparedAdapter>>,
) -> SequenceSlice<'a, PreparedAdapter> {
    SequenceSlice { trunk: &[], tokens, start, blocks: &BLOCKS, adapter, logits: LogitRows::All }
}

fn prompt(length: u32, vocab: usize) -> Vec<u32> {
    (0..length).map(|i| (i * 37 + i * i * 11 + 5) % u32::try_from(vocab.min(300)).unwrap()).collect()
}

/// Adapters in the subfolders of `directory`, if there are any, and two of them at once.
fn adapters(directory: &Path, config: &ModelConfig, precision: LoraPrecision) -> Vec<Arc<PreparedAdapter>> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: PathBuf| Adapter::read(&path, config).unwrap();
    let mut all: Vec<Adapter> = paths.into_iter().filter(|path| path.is_dir()).map(read).collect();
    let mut low_rank = all.iter().filter(|adapter| adapter.method.kind() == AdapterKind::Lora).cloned();
    if let Some((one, other)) = low_rank.next().zip(low_rank.next()) {
        all.push(sum(vec![(one.into(), 0.75), (other.into(), -0.5)]).unwrap());
    }
    let prepare = |adapter| Arc::new(PreparedAdapter::new(adapter, config, precision).unwrap());
    all.iter().map(prepare).collect()
}

/// Compares passes over a prompt and two more tokens: resident, and split with the sites of the resident
/// model and of a model with linear layers only.
fn same_bits(model: &Path, adapter_directory: &Path) {
    let directory = tempfile::tempdir().unwrap();
    let client = ClientBase::open(&sparse_copy(model, directory.path())).unwrap();
    let weights = LoadedWeights::load(&*open(model).unwrap(), 2).unwrap();
    let (kv, precision) = (weights.kv_shape(KV).precision, weights.adapter_precision());
    let mut whole = resident(&*open(model).unwrap(), KV);
    let mut lent = resident(&*open(model).unwrap(), KV);
    let mut bare = SiteModel::open(model, &[]).unwrap();
    let tokens = prompt(21, client.config().vocab_size);
    let adapters = adapters(adapter_directory, client.config(), precision);
    for adapter in [None].into_iter().chain(adapters.iter().map(Some)) {
        let steps = [
            slice(&tokens[..19], 0, adapter),
            slice(&tokens[19..20], 19, adapter),
            slice(&tokens[20..], 20, adapter),
        ];
        let mut from_lent = SplitPass::new(&mut lent, &client, SitePath::Fast, kv);
        let mut from_bare = SplitPass::new(&mut bare, &client, SitePath::Fast, kv);
        for step in &steps {
            let mut expected = Vec::new();
            let step = std::slice::from_ref(step);
            whole.forward(step, &mut expected);
            assert_eq!(bits(&from_lent.forward(step)), bits(&expected), "{}", model.display());
            assert_eq!(bits(&from_bare.forward(step)), bits(&expected), "{}", model.display());
        }
    }
}

#[test]
fn a_split_pass_over_every_golden_model_has_the_bits_of_the_resident_one() {
    for entry in std::fs::read_dir(golden("models")).unwrap() {
        let model = entry.unwrap().path();
        let adapters = golden("adapters");
        same_bits(&model, &adapters.join(model.file_name().unwrap()));
        let of_experts = adapters.join("experts").join(model.file_name().unwrap());
        if of_experts.exists() {
            same_bits(&model, &of_experts);
        }
    }
}

#[test]
fn a_split_pass_over_the_real_model_has_the_bits_of_the_resident_one() {
    same_bits(&smollm2(), &golden("../../examples/adapters"));
}

#[test]
fn on_the_linear_path_the_real_model_is_its_dequantized_weights() {
    let path = smollm2();
    let client = ClientBase::open(&path).unwrap();
    let tokens = prompt(17, client.config().vocab_size);
    let mut expected = Vec::new();
    let mut exact = resident(&Dequantized(GgufSource::open(&path).unwrap()), Some(KvPrecision::F32));
    exact.forward(&[slice(&tokens, 0, None)], &mut expected);
    drop(exact);
    let mut base = SiteModel::open(&path, &[]).unwrap();
    let found = SplitPass::new(&mut base, &client, SitePath::Linear, KvPrecision::F32)
        .forward(&[slice(&tokens, 0, None)]);
    let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-3, "a logit differs by {worst}");
    let fast = SplitPass::new(&mut base, &client, SitePath::Fast, KvPrecision::F32)
        .forward(&[slice(&tokens, 0, None)]);
    let rounded = fast.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(rounded > 1e-3, "the fast path rounds activations, or this test compares nothing");
}
