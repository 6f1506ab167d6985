//! Single sites of a resident model: their shapes and names, all ways to evaluate them, and calls that join a
//! pass.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use testkit::paths::golden;

use crate::files_support::{numbers, tiny_gguf};
use kernels::{Activations, quant::dequantize_row, reference};
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass, LinearGroup, LogitRows, SequenceSlice},
    linear_sites::{EvaluateSites, PassHooks, SiteCall, SiteId, SiteOp, SitePath},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        layout::{group_weights, model_groups, tensor_shape},
        source::{Target, TensorId, WeightSource},
    },
    sources::open::open,
};
use types::BlockId;

/// Models with 32-bit and 16-bit weights, with biases, with head norms and with experts.
const MODELS: [&str; 8] = [
    "llama-tied",
    "llama-bf16",
    "qwen2-bias",
    "qwen2-f16",
    "qwen3-qknorm",
    "mixtral-bf16",
    "qwen3moe",
    "gptoss",
];

fn resident_of(source: &(dyn WeightSource + Sync)) -> ResidentModel {
    let weights = LoadedWeights::load(source, 1).unwrap();
    let options = ResidentOptions { cores: vec![0, 0], kv_bytes: 8 << 20, kv_dtype: None };
    ResidentModel::new(weights, &options).unwrap()
}

fn resident(name: &str) -> ResidentModel {
    resident_of(&*open(&golden("models").join(name)).unwrap())
}

fn rows(values: &[f32], width: usize) -> Activations {
    let mut x = Activations::default();
    x.reshape(0, width);
    x.append(values);
    x
}

fn evaluate(base: &mut (impl EvaluateSites + ?Sized), call: SiteCall, x: &[f32]) -> Vec<f32> {
    let (inputs, outputs) = base.sites()[call.site.0 as usize].widths(call.part, call.op).unwrap();
    let mut x = rows(x, inputs);
    let mut out = vec![f32::NAN; x.rows() * outputs];
    base.evaluate(call, &mut x, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn call(site: u32, op: SiteOp, path: SitePath) -> SiteCall {
    SiteCall { site: SiteId(site), part: None, op, path }
}

/// Weights and biases of a site as floats, with its parts concatenated.
fn plain(name: &str, site: SiteId) -> (Vec<f32>, Vec<f32>) {
    let source = open(&golden("models").join(name)).unwrap();
    let (layer, group) = site.group(source.config()).unwrap();
    let floats = |id| {
        let tensor = source.tensor(id)?;
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        dequantize_row(tensor.kind, &tensor.data, &mut values);
        Some(values)
    };
    let (mut weights, mut biases) = (Vec::new(), Vec::new());
    for id in group_weights(layer, group) {
        weights.extend(floats(id).unwrap_or_else(|| floats(TensorId::TokenEmbedding).unwrap()));
        let none = || vec![0.0; tensor_shape(source.config(), id)[0]];
        let bias = match id {
            TensorId::Weight(layer, target) => floats(TensorId::Bias(layer, target)),
            TensorId::Expert(layer, expert, part) => floats(TensorId::ExpertBias(layer, expert, part)),
            _ => None,
        };
        biases.extend(bias.unwrap_or_else(none));
    }
    (weights, biases)
}

fn transposed(g: &[f32], w: &[f32], rows: usize, outputs: usize, width: usize) -> Vec<f32> {
    let dot = |r: usize, k: usize| {
        (0..outputs).map(|o| f64::from(g[r * outputs + o]) * f64::from(w[o * width + k])).sum::<f64>() as f32
    };
    (0..rows * width).map(|i| dot(i / width, i % width)).collect()
}

#[track_caller]
fn close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: {a} instead of {b} at {i}");
    }
}

#[test]
fn sites_are_numbered_and_named_as_the_hugging_face_layout_has_them() {
    let gguf = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    std::fs::write(gguf.path(), tiny_gguf("llama", &[Target::Q]).bytes()).unwrap();
    let model = resident_of(&*open(gguf.path()).unwrap());
    let sites = model.sites();
    assert_eq!(sites.len(), 2 * 4 + 1);
    let names = |site: usize| sites[site].parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>();
    let of = |name: &str| format!("model.layers.1.{name}");
    assert_eq!(names(4), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(of));
    assert_eq!(names(5), [of("self_attn.o_proj")]);
    assert_eq!(names(6), ["mlp.gate_proj", "mlp.up_proj"].map(of));
    assert_eq!(names(7), [of("mlp.down_proj")]);
    assert_eq!(names(8), ["lm_head"]);
    let rows: Vec<usize> = sites[4].parts.iter().map(|part| part.rows).collect();
    assert_eq!((sites[4].columns, rows), (32, vec![32, 16, 16]));
    let biases: Vec<bool> = sites[4].parts.iter().map(|part| part.has_bias).collect();
    assert_eq!(biases, [true, false, false]);
    assert!(sites.iter().all(|site| site.fast_is_linear), "weights of 32 bits round no activation");
    assert_eq!(sites[7].columns, 64);
}

#[test]
fn every_part_of_every_site_agrees_with_plain_loops_forward_and_backward() {
    for name in MODELS {
        let mut model = resident(name);
        for site in 0..model.sites().len() as u32 {
            let shape = model.sites()[site as usize].clone();
            let outputs = shape.widths(None, SiteOp::Forward).unwrap().1;
            let (weights, biases) = plain(name, SiteId(site));
            let (x, g) = (numbers(3 * shape.columns, 1), numbers(2 * outputs, 2));
            let what = |op: &str| format!("{name}, site {site}, {op}");
            let without = reference::linear(&x, &weights, 3, outputs, shape.columns);
            let with: Vec<f32> =
                without.iter().enumerate().map(|(i, value)| value + biases[i % outputs]).collect();
            let found = evaluate(&mut model, call(site, SiteOp::Forward, SitePath::Linear), &x);
            close(&found, &with, 1e-4, &what("forward"));
            let found = evaluate(&mut model, call(site, SiteOp::ForwardNoBias, SitePath::Linear), &x);
            close(&found, &without, 1e-4, &what("forward without bias"));
            let found = evaluate(&mut model, call(site, SiteOp::Backward, SitePath::Linear), &g);
            let expected = transposed(&g, &weights, 2, outputs, shape.columns);
            close(&found, &expected, 1e-4, &what("backward"));
            let found = evaluate(&mut model, call(site, SiteOp::Forward, SitePath::Fast), &x);
            close(&found, &with, 2e-2, &what("fast"));
        }
    }
}

#[test]
fn a_part_has_the_bits_it_has_among_the_others() {
    for name in MODELS {
        let mut model = resident(name);
        for path in [SitePath::Fast, SitePath::Linear] {
            for site in [0, 2] {
                let all = call(site, SiteOp::Forward, path);
                let shape = model.sites()[site as usize].clone();
                let x = numbers(2 * shape.columns, 5);
                let together = evaluate(&mut model, all, &x);
                let stride = shape.widths(None, SiteOp::Forward).unwrap().1;
                let mut column = 0;
                for (part, of) in shape.parts.iter().enumerate() {
                    let found = evaluate(&mut model, SiteCall { part: Some(part as u8), ..all }, &x);
                    let expected: Vec<f32> = together
                        .chunks(stride)
                        .flat_map(|row| &row[column..column + of.rows])
                        .copied()
                        .collect();
                    assert_eq!(bits(&found), bits(&expected), "{name}, site {site}, part {part}");
                    column += of.rows;
                }
            }
        }
    }
}

#[test]
fn where_the_fast_path_rounds_nothing_both_paths_have_the_same_bits() {
    for name in MODELS {
        let mut model = resident(name);
        let shape = model.sites()[1].clone();
        let x = numbers(3 * shape.columns, 9).iter().map(|x| x / 3.0).collect::<Vec<_>>();
        let fast = evaluate(&mut model, call(1, SiteOp::Forward, SitePath::Fast), &x);
        let linear = evaluate(&mut model, call(1, SiteOp::Forward, SitePath::Linear), &x);
        assert_eq!(shape.fast_is_linear, !name.ends_with("bf16"), "{name}");
        assert_eq!(bits(&fast) == bits(&linear), shape.fast_is_linear, "{name}");
    }
}

/// Joins a pass at every site with this number of rows, and evaluates another call before some.
struct RowJoiningHooks {
    rows: usize,
    sites: Vec<(usize, usize)>,
    asked: Vec<SiteCall>,
    answers: Vec<Vec<f32>>,
    before: Vec<(SiteId, Vec<f32>)>,
}

impl RowJoiningHooks {
    fn of(model: &ResidentModel, rows: usize) -> Self {
        let sites = model.sites().iter().map(|site| site.widths(None, SiteOp::Forward).unwrap()).collect();
        Self { rows, sites, asked: Vec::new(), answers: Vec::new(), before: Vec::new() }
    }

    fn guest_rows(&self, site: SiteId) -> Vec<f32> {
        numbers(self.rows * self.sites[site.0 as usize].0, 31 + site.0 as usize)
    }
}

/// Call before a site is evaluated: another site, backward.
const BEFORE: SiteCall =
    SiteCall { site: SiteId(2), part: Some(1), op: SiteOp::Backward, path: SitePath::Linear };

impl PassHooks for RowJoiningHooks {
    fn is_waiting(&mut self) -> bool {
        true
    }

    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        if site.0.is_multiple_of(3) {
            let width = base.sites()[2].widths(BEFORE.part, BEFORE.op).unwrap().0;
            self.before.push((site, evaluate(base, BEFORE, &numbers(width, 3))));
        }
    }

    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize {
        x.append(&self.guest_rows(call.site));
        self.asked.push(call);
        self.rows
    }

    fn part(&mut self, out: &[f32]) {
        self.answers.push(out.to_vec());
    }
}

fn batch<'a>(
    tokens: &'a [u32],
    blocks: &'a [BlockId],
    adapter: Option<&'a Arc<PreparedAdapter>>,
    logits: LogitRows,
) -> [SequenceSlice<'a, PreparedAdapter>; 1] {
    [SequenceSlice { trunk: &[], tokens, start: 0, blocks, adapter, logits }]
}

/// The base and the adapters in the subfolders of `directory`, if there are any.
fn adapters(source: &(dyn WeightSource + Sync), directory: &Path) -> Vec<Option<Arc<PreparedAdapter>>> {
    let precision = LoadedWeights::load(source, 1).unwrap().adapter_precision();
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.is_dir());
    paths.sort();
    let read = |path: &PathBuf| {
        let adapter = Adapter::read(path, source.config()).unwrap();
        Arc::new(PreparedAdapter::new(&adapter, source.config(), precision).unwrap())
    };
    [None].into_iter().chain(paths.iter().map(|path| Some(read(path)))).collect()
}

/// Compares passes over the base and its adapters, alone and with joined calls.
fn same_in_company(model: &Path, adapter_directory: &Path) {
    let (blocks, name) = ([BlockId(0), BlockId(1)], model.display());
    let tokens: Vec<u32> = (0..19).map(|i| (i * 41 + 7) % 300).collect();
    let source = open(model).unwrap();
    let mut model = resident_of(&*source);
    for adapter in adapters(&*source, adapter_directory).iter().map(Option::as_ref) {
        for wanted in [LogitRows::Last, LogitRows::All] {
            let (mut alone, mut together) = (Vec::new(), Vec::new());
            model.forward(&batch(&tokens, &blocks, adapter, wanted), &mut alone);
            let mut guests = RowJoiningHooks::of(&model, 5);
            model.forward_with_hooks(&batch(&tokens, &blocks, adapter, wanted), &mut together, &mut guests);
            assert_eq!(bits(&alone), bits(&together), "{name}");
            // Experts without any row are not evaluated.
            let asked = guests.asked.iter().map(|call| call.site);
            let left_out = (0..)
                .map(SiteId)
                .take(model.sites().len())
                .filter(|site| asked.clone().all(|of| of != *site));
            let groups = left_out.map(|site| site.group(source.config()).unwrap().1);
            let is_expert =
                |group| matches!(group, LinearGroup::ExpertGateUp(_) | LinearGroup::ExpertDown(_));
            assert!(groups.into_iter().all(is_expert), "{name}: every site is evaluated");
            assert!(asked.is_sorted_by(|one, next| one < next), "{name}: and each once");
            let width = model.sites()[2].widths(BEFORE.part, BEFORE.op).unwrap().0;
            let before = evaluate(&mut model, BEFORE, &numbers(width, 3));
            for (site, found) in &guests.before {
                assert_eq!(bits(found), bits(&before), "{name}, before {site:?}");
            }
            for (&asked, answer) in guests.asked.iter().zip(&guests.answers) {
                let expected = evaluate(&mut model, asked, &guests.guest_rows(asked.site));
                assert_eq!(bits(answer), bits(&expected), "{name}, {asked:?}");
            }
        }
    }
}

#[test]
fn a_pass_with_company_has_the_bits_of_one_alone_and_so_has_the_company() {
    for name in MODELS {
        same_in_company(&golden("models").join(name), &golden("adapters").join(name));
    }
}

#[test]
fn company_of_a_quantized_base_changes_no_bit_either() {
    let default = || golden("../../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let model = std::env::var_os("HOLOBIONT_TEST_MODEL").map_or_else(default, PathBuf::from);
    same_in_company(&model, &golden("../../examples/adapters"));
}

#[test]
fn a_pass_in_which_nobody_joins_asks_at_every_site_in_order() {
    let mut model = resident("llama-tied");
    let mut guests = RowJoiningHooks { rows: 0, ..RowJoiningHooks::of(&model, 0) };
    let mut logits = Vec::new();
    let one = batch(&[1], &[BlockId(0)], None, LogitRows::None);
    model.forward_with_hooks(&one, &mut logits, &mut guests);
    let config = model.config();
    let groups = model_groups(config).filter(|(_, group)| *group != LinearGroup::Head);
    let expected: Vec<SiteId> = groups.map(|(layer, group)| SiteId::of(config, layer, group)).collect();
    assert_eq!(guests.asked.iter().map(|call| call.site).collect::<Vec<_>>(), expected, "and no head");
    assert!(guests.answers.is_empty(), "nobody joined, so nobody is given rows");
}
