//! The ring path of single sites: compared with the linear path within rounding, exact in itself, and with
//! guarantees about the weights.

use std::{borrow::Cow, fs};

use crate::files_support::{numbers, tiny_entries, tiny_json, write_model};
use kernels::{Activations, Isa, Modulus, TensorType};
use model::{
    linear_sites::{
        EvaluateError, EvaluateSites, ModularRange, ModularSite, SiteCall, SiteId, SiteOp, SitePath,
    },
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        source::{Target, Tensor, TensorId, WeightSource},
    },
    site_model::SiteModel,
    sources::{open::open, random::RandomSource},
};

/// Models with 32-bit and 16-bit weights, with biases and with head norms.
const MODELS: [&str; 6] = ["llama-tied", "llama-bf16", "qwen2-bias", "qwen2-f16", "qwen3-qknorm", "qwen3moe"];

const KINDS: [TensorType; 8] = [
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

/// Error of the linear path's float sums, relative to the norms of row and weights.
const TOLERANCE: f64 = 2e-6;

fn resident_of(source: &(dyn WeightSource + Sync), cores: &[usize]) -> ResidentModel {
    let weights = LoadedWeights::load(source, 1).unwrap();
    let options = ResidentOptions { cores: cores.to_vec(), kv_bytes: 8 << 20, kv_dtype: None };
    ResidentModel::new(weights, &options).unwrap()
}

fn golden(name: &str) -> Box<dyn WeightSource + Sync> {
    open(&testkit::paths::golden_model(name)).unwrap()
}

/// A small model with meaningless weights, whose linear layers have one format.
struct LayerFormatSource {
    random: RandomSource,
    kind: TensorType,
    /// Tensor with one changed byte.
    bent: Option<TensorId>,
}

impl LayerFormatSource {
    fn new(kind: TensorType) -> Self {
        let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false}"#;
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.json"), config).unwrap();
        Self { random: RandomSource::open(directory.path(), 3).unwrap(), kind, bent: None }
    }

    fn is_linear(id: TensorId) -> bool {
        matches!(id, TensorId::TokenEmbedding | TensorId::Weight(..))
    }
}

impl WeightSource for LayerFormatSource {
    fn config(&self) -> &ModelConfig {
        self.random.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.random.tensor(id)?;
        if !Self::is_linear(id) {
            return Some(tensor);
        }
        let Tensor { rows, cols, .. } = tensor;
        let bytes = rows * self.kind.row_bytes(cols).unwrap();
        let salt = format!("{id:?}").bytes().map(usize::from).sum::<usize>();
        // Small bytes give small floats of any width.
        let mut data: Vec<u8> = (0..bytes).map(|at| ((at * 31 + at / 7 + salt) % 0x2C) as u8).collect();
        if self.bent == Some(id) {
            // The last byte of a block belongs to codes; in one format, to a scale.
            data[bytes - 1] ^= 1;
        }
        Some(Tensor { kind: self.kind, rows, cols, data: Cow::Owned(data) })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.random.kind(id).map(|kind| if Self::is_linear(id) { self.kind } else { kind })
    }
}

fn sources() -> impl Iterator<Item = (String, bool, Box<dyn WeightSource + Sync>)> {
    let floats = MODELS.into_iter().map(|name| (name.to_owned(), false, golden(name)));
    let kind = |kind| {
        let source: Box<dyn WeightSource + Sync> = Box::new(LayerFormatSource::new(kind));
        (format!("{kind:?}"), true, source)
    };
    floats.chain(KINDS.into_iter().map(kind))
}

fn call(site: usize, op: SiteOp, path: SitePath) -> SiteCall {
    SiteCall { site: SiteId(site as u32), part: None, op, path }
}

fn evaluate(base: &mut impl EvaluateSites, call: SiteCall, x: &[f32]) -> Vec<f32> {
    let (inputs, outputs) = base.sites()[call.site.0 as usize].words(call).unwrap();
    let mut rows = Activations::default();
    rows.reshape(0, inputs);
    rows.append(x);
    let mut out = vec![f32::NAN; rows.rows() * outputs];
    base.evaluate(call, &mut rows, &mut out).unwrap();
    out
}

/// Evaluates rows of words on the ring path; the result is signed.
fn through(base: &mut impl EvaluateSites, call: SiteCall, x: &[u64]) -> Vec<u64> {
    let modulus = base.sites()[call.site.0 as usize].modular_range(call.op).unwrap().modulus;
    let bytes: Vec<u8> =
        x.iter().flat_map(|word| word.to_le_bytes().into_iter().take(modulus.bytes())).collect();
    let packed: Vec<f32> = bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect();
    let out: Vec<u8> = evaluate(base, call, &packed).into_iter().flat_map(f32::to_le_bytes).collect();
    let word = |number: &[u8]| number.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    out.chunks(modulus.bytes()).map(|number| signed(modulus, word(number))).collect()
}

/// Signed value of a word under another modulus than 2^64.
fn signed(modulus: Modulus, word: u64) -> u64 {
    let above = 64 - modulus.bits();
    ((word << above).cast_signed() >> above).cast_unsigned()
}

fn words(count: usize, seed: u64) -> Vec<u64> {
    let mut state = seed;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state ^ state >> 29
    };
    (0..count).map(|_| word()).collect()
}

fn modular_site(base: &impl EvaluateSites, site: usize) -> ModularSite {
    base.sites()[site].ring.expect("the site has a ring path")
}

fn length(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// A row as integers, and their exponent.
fn whole(row: &[f32], bits: u32) -> (Vec<u64>, i32) {
    let largest = f64::from(row.iter().fold(0.0f32, |largest, x| largest.max(x.abs())));
    let exponent = largest.log2().floor() as i32 + 2 - bits as i32;
    let word = |&x: &f32| ((f64::from(x) * 2.0f64.powi(-exponent)).round_ties_even() as i64).cast_unsigned();
    (row.iter().map(word).collect(), exponent)
}

/// Weights `[inputs, outputs]` of a site: the outputs of unit rows.
fn weights(base: &mut impl EvaluateSites, site: usize) -> Vec<f32> {
    let columns = base.sites()[site].columns;
    let ones: Vec<f32> =
        (0..columns * columns).map(|at| if at / columns == at % columns { 1.0 } else { 0.0 }).collect();
    evaluate(base, call(site, SiteOp::ForwardNoBias, SitePath::Linear), &ones)
}

#[test]
fn it_is_the_linear_path_within_the_rounding_of_weights_and_rows() {
    for (name, is_integer, source) in sources() {
        let mut model = resident_of(&*source, &[0, 0]);
        model.commit();
        for site in 0..model.sites().len() {
            let (weights, columns) = (weights(&mut model, site), model.sites()[site].columns);
            let outputs = weights.len() / columns;
            let promised = modular_site(&model, site);
            for (op, width) in [(SiteOp::ForwardNoBias, columns), (SiteOp::Backward, outputs)] {
                let of = |at: usize| -> Vec<f32> {
                    match op {
                        SiteOp::Backward => weights[at * outputs..][..outputs].to_vec(),
                        _ => weights.iter().skip(at).step_by(outputs).copied().collect(),
                    }
                };
                let x = numbers(width, 1 + site);
                let ModularRange { bits, .. } = model.sites()[site].modular_range(op).unwrap();
                let (x_whole, exponent) = whole(&x, bits);
                let found = through(&mut model, call(site, op, SitePath::Ring), &x_whole);
                let linear = evaluate(&mut model, call(site, op, SitePath::Linear), &x);
                let weight_unit = 2.0f64.powi(promised.weight_exponent);
                let unit = 2.0f64.powi(exponent) * weight_unit;
                let sum: f64 = x.iter().map(|&x| f64::from(x.abs())).sum();
                for (at, (&found, &linear)) in found.iter().zip(&linear).enumerate() {
                    let of_row = 2.0f64.powi(2 - bits as i32) * (width as f64).sqrt();
                    // Scales of very different size are off by half a unit, times a code of at most 128, and
                    // minima.
                    let of_weight = if is_integer { 64.5 * weight_unit } else { 2.0f64.powi(-25) };
                    let of_weights = sum * of_weight;
                    let most = (TOLERANCE + of_row) * length(&x) * length(&of(at)) + of_weights;
                    let value = found.cast_signed() as f64 * unit;
                    let off = (value - f64::from(linear)).abs();
                    assert!(
                        off <= most,
                        "{name}, {site}, {op:?}, {at}: {value}, not {linear}: {off:e} > {most:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_words_in_any_batch_with_any_threads_and_instructions_and_by_parts() {
    for (name, _, source) in sources() {
        let mut model = resident_of(&*source, &[0, 0]);
        model.commit();
        let mut other = resident_of(&*source, &[0]).with_isa(Isa::Portable);
        other.commit();
        assert_eq!(model.sites(), other.sites(), "{name}");
        for (site, shape) in other.sites().to_vec().into_iter().enumerate() {
            let (inputs, outputs) = shape.widths(None, SiteOp::ForwardNoBias).unwrap();
            let (x, g) = (words(3 * inputs, 1), words(3 * outputs, 2));
            let forward = call(site, SiteOp::ForwardNoBias, SitePath::Ring);
            let backward = call(site, SiteOp::Backward, SitePath::Ring);
            let together = through(&mut model, forward, &x);
            let back = through(&mut model, backward, &g);
            let alone: Vec<u64> = x.chunks(inputs).flat_map(|x| through(&mut other, forward, x)).collect();
            assert!(together == alone, "{name}, {site}");
            let alone: Vec<u64> = g.chunks(outputs).flat_map(|g| through(&mut other, backward, g)).collect();
            assert!(back == alone, "{name}, {site}");
            let mut column = 0;
            let mut sums = vec![0u64; 3 * inputs];
            for (part, of) in shape.parts.iter().enumerate() {
                let slice = |rows: &[u64]| -> Vec<u64> {
                    rows.chunks(outputs).flat_map(|row| &row[column..column + of.rows]).copied().collect()
                };
                let part = Some(part as u8);
                assert!(through(&mut model, SiteCall { part, ..forward }, &x) == slice(&together), "{name}");
                let back = through(&mut model, SiteCall { part, ..backward }, &slice(&g));
                sums.iter_mut().zip(back).for_each(|(sum, part)| *sum = sum.wrapping_add(part));
                column += of.rows;
            }
            let modulus = shape.modular_range(SiteOp::Backward).unwrap().modulus;
            sums.iter_mut().for_each(|sum| *sum = signed(modulus, *sum));
            assert!(sums == back, "{name}, {site}: parts of gradients");
        }
    }
}

#[test]
fn what_is_added_to_a_row_comes_off_again_to_the_last_bit() {
    let mut model = resident_of(&LayerFormatSource::new(TensorType::Q4_1), &[0]);
    model.commit();
    for op in [SiteOp::ForwardNoBias, SiteOp::Backward] {
        let call = call(0, op, SitePath::Ring);
        let width = model.sites()[0].widths(None, op).unwrap().0;
        let (x, pad) = (words(width, 5), words(width, 6));
        let masked: Vec<u64> = x.iter().zip(&pad).map(|(x, pad)| x.wrapping_add(*pad)).collect();
        let [plain, pad, masked] = [x, pad, masked].map(|x| through(&mut model, call, &x));
        let modulus = model.sites()[0].modular_range(op).unwrap().modulus;
        let off = masked.iter().zip(&pad).map(|(sum, pad)| signed(modulus, sum.wrapping_sub(*pad)));
        let off: Vec<u64> = off.collect();
        assert_eq!(off, plain);
    }
}

#[test]
fn sums_of_magnitudes_are_those_of_the_weights() {
    for (name, _, source) in sources() {
        let mut model = resident_of(&*source, &[0]);
        model.commit();
        for site in 0..model.sites().len() {
            let (weights, promised) = (weights(&mut model, site), modular_site(&model, site));
            let outputs = weights.len() / model.sites()[site].columns;
            let sum =
                |weights: &mut dyn Iterator<Item = &f32>| weights.map(|w| f64::from(w.abs())).sum::<f64>();
            let forward = (0..outputs).map(|o| sum(&mut weights.iter().skip(o).step_by(outputs)));
            let backward = weights.chunks(outputs).map(|column| sum(&mut column.iter()));
            let wanted = [forward.fold(0.0, f64::max), backward.fold(0.0, f64::max)];
            for (found, wanted) in promised.l1.into_iter().zip(wanted) {
                let found = found as f64 * 2.0f64.powi(promised.weight_exponent);
                assert!((found - wanted).abs() <= 1e-4 * wanted, "{name}, {site}: {found}, not {wanted}");
            }
        }
    }
}

#[test]
fn commitments_differ_where_a_weight_does() {
    for kind in KINDS {
        let committed = |source: &LayerFormatSource, cores: &[usize]| {
            let mut model = resident_of(source, cores);
            model.commit();
            (0..model.sites().len()).map(|site| modular_site(&model, site).commitment).collect::<Vec<_>>()
        };
        let mut source = LayerFormatSource::new(kind);
        let (one, two) = (committed(&source, &[0]), committed(&source, &[0, 0]));
        assert_eq!(one, two, "{kind:?}");
        source.bent = Some(TensorId::Weight(0, Target::Up));
        let bent = committed(&source, &[0]);
        let differ: Vec<usize> = (0..one.len()).filter(|&site| one[site] != bent[site]).collect();
        assert_eq!(differ, [2], "{kind:?}: gate and up are site 2");
    }
}

#[test]
fn what_it_cannot_do_is_refused_by_name() {
    let mut model = resident_of(&*golden("qwen2-bias"), &[0]);
    let mut refused = |call: SiteCall, is_committed: bool| {
        if is_committed {
            model.commit();
        }
        // Without a ring path rows have their plain width.
        let (inputs, outputs) = model.sites()[0].words(call).unwrap_or((1, 1));
        let mut x = Activations::default();
        x.reshape(1, inputs);
        model.evaluate(call, &mut x, &mut vec![0.0; outputs]).unwrap_err()
    };
    let plain = call(0, SiteOp::ForwardNoBias, SitePath::Ring);
    assert!(matches!(refused(plain, false), EvaluateError::NoRing(SiteId(0))));
    let with_bias = SiteCall { op: SiteOp::Forward, ..plain };
    assert!(matches!(refused(with_bias, true), EvaluateError::RingBias(SiteId(0))));
}

#[test]
fn a_base_of_an_unknown_architecture_has_it_and_a_weight_beyond_its_range_takes_it_from_one_site() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = tiny_json();
    config["model_type"] = "gpt_bigcode".into();
    config["architectures"] = vec!["GPTBigCodeForCausalLM"].into();
    let mut entries = tiny_entries(&[]);
    write_model(directory.path(), &config, &entries);
    let mut model = SiteModel::open(directory.path(), &[]).unwrap();
    model.commit();
    assert!(model.sites().iter().all(|site| site.ring.is_some() && site.parts.len() == 1));
    let (number, name) = (0..)
        .zip(model.sites())
        .find(|(_, site)| site.parts[0].name.contains("up_proj"))
        .map(|(number, site)| (number, site.parts[0].name.clone()))
        .unwrap();
    let entry = entries.iter_mut().find(|entry| entry.0.starts_with(&name)).unwrap();
    entry.3[..4].copy_from_slice(&64.0f32.to_le_bytes());
    write_model(directory.path(), &config, &entries);
    let mut model = SiteModel::open(directory.path(), &[]).unwrap();
    model.commit();
    for (at, site) in model.sites().iter().enumerate() {
        assert_eq!(site.ring.is_none(), at == number, "{}", site.parts[0].name);
    }
}

#[test]
fn weights_leave_as_many_bits_as_no_answer_wraps_around_with() {
    let range = |l1, is_even| ModularRange::new(l1, is_even).map(|range| (range.modulus.bits(), range.bits));
    let narrow = [(0, 30), (1, 30), (1 << 16, 30), ((1 << 16) + 1, 29), (1 << 28, 18)];
    for (l1, wanted) in narrow {
        assert_eq!(range(l1, true), Some((48, wanted)), "{l1}");
        assert_eq!(range(l1, false), Some((64, 30)), "{l1}: rows that are no whole words otherwise");
    }
    let wide = [((1 << 28) + 1, 30), (1 << 32, 30), ((1 << 32) + 1, 29), (1 << 40, 22), (1 << 50, 12)];
    for (l1, wanted) in wide {
        assert_eq!([true, false].map(|is_even| range(l1, is_even)), [Some((64, wanted)); 2], "{l1}");
    }
    assert_eq!([(1 << 50) + 1, 1 << 63, u64::MAX].map(|l1| range(l1, true)), [None; 3]);
}
