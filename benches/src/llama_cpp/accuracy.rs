//! Cost of rounding: next-token distributions beside those of the same weights without rounding, ours and
//! llama.cpp's, each compared with its own f32 pass over the dequantized file.
//!
//! The metric is KL(f32 || rounded) over the whole vocabulary, at the positions of `llama-perplexity
//! --kl-divergence`: the second half of each window of [`STRETCH`] tokens. The text is unknown to any model:
//! this repository's own guides.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    precision::Precision,
    resident::{KvDtype, LoadedWeights, ResidentModel, ResidentOptions},
    sources::{dequantized::Dequantized, gguf::GgufSource},
};
use model_files::gguf::GgufFile;
use text::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use types::BlockId;

use super::setup::Setup;
use crate::{
    holobiont_runner::{BenchProgram, HolobiontRunner as _, SyntheticLoad, TokenRates},
    measure::{Samples, alternate},
    peer::PeerWeights,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const STRETCH: usize = 512;
const STRETCHES: usize = 8;

const TEXT: &str = concat!(
    include_str!("../../../docs/guides/security.md"),
    include_str!("../../../docs/guides/services.md"),
    include_str!("../../../docs/guides/split.md"),
    include_str!("../../../docs/guides/streaming.md"),
);

/// Formats that llama.cpp's tool makes of the shipped one.
const FORMATS: [&str; 4] = ["Q4_0", "Q4_K_M", "Q6_K", "Q8_0"];

/// Maximum divergence of the default as a share of llama.cpp's, and minimum speed as a share of `int8`.
const MAX_DIVERGENCE: f64 = 0.25;
const MIN_DECODE: f64 = 0.95;
const MIN_PREFILL: f64 = 0.85;
/// Minimum prefill speed with an 8-bit KV cache, as a share.
const MIN_KV: f64 = 0.95;

const ADAPTERS: [(&str, &str); 3] =
    [("LoRA", "../examples/adapters/pirate"), ("IA3", "adapters/ia3"), ("prefix tuning", "adapters/prefix")];

/// Rounding of activations, and dtype of the KV cache.
type NumericConfig = (Precision, KvDtype);

const NUMBERS: [(&str, NumericConfig); 6] = [
    ("int8", (Precision::Int8, KvDtype::Auto)),
    ("mixed", (Precision::Mixed, KvDtype::Auto)),
    ("bf16", (Precision::Bf16, KvDtype::Auto)),
    ("bf16, keys and values f16", (Precision::Bf16, KvDtype::F16)),
    ("int15", (Precision::Int15, KvDtype::Auto)),
    ("mixed, keys and values int8", (Precision::Mixed, KvDtype::Int8)),
];

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let shipped = setup.peer.shipped.clone();
    let others = FORMATS.map(|format| setup.peer.requantized(&setup.config, format));
    let mut comparisons = Vec::new();
    for weights in [Ok(shipped)].into_iter().chain(others) {
        comparisons.extend(divergences(setup, &weights?)?);
    }
    comparisons.extend(adapted(setup)?);
    comparisons.extend(rates(setup)?);
    Ok(comparisons)
}

/// Our divergence with each precision, beside llama.cpp on the same file.
fn divergences(setup: &Setup, weights: &PeerWeights) -> Result<Vec<Comparison>> {
    let text = setup.temporary("held-out.txt");
    std::fs::write(&text, TEXT).with_context(|| format!("cannot write {}", text.display()))?;
    let exact = setup.peer.dequantized(&setup.config, weights)?;
    let theirs = setup.peer.divergence(weights, &exact, &text, [STRETCH, STRETCHES])?;
    let judge = AccuracyReference::new(&weights.file, setup.config.threads, None)?;
    let row = |(name, numbers)| {
        let ours = Samples::new(vec![1000.0 * judge.divergence(numbers)?])?;
        let samples = Samples::new(vec![1000.0 * theirs])?;
        let rival =
            PeerSamples { name: "llama-perplexity".to_owned(), format: weights.format.clone(), samples };
        let is_default = numbers == (Precision::default(), KvDtype::Auto);
        let target = is_default.then_some(BenchTarget::ShareAtMost(MAX_DIVERGENCE));
        let case = format!("divergence from f32, {name}");
        Ok(Comparison {
            bench: "accuracy",
            case,
            unit: "nats/1000",
            better: Better::Lower,
            ours,
            rival,
            target,
        })
    };
    NUMBERS.into_iter().map(row).collect()
}

/// Divergence of one adapter per method on the shipped file, by precision, beside `int8`.
fn adapted(setup: &Setup) -> Result<Vec<Comparison>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let weights = &setup.peer.shipped;
    let mut comparisons = Vec::new();
    for (kind, place) in ADAPTERS {
        let adapter = folder.join(place);
        let judge = AccuracyReference::new(&weights.file, setup.config.threads, Some(&adapter))?;
        let samples = |numbers| Samples::new(vec![1000.0 * judge.divergence(numbers)?]);
        let [(_, int8), others @ ..] = NUMBERS;
        let int8 = samples(int8)?;
        for (name, numbers) in others {
            let rival = PeerSamples {
                name: "int8".to_owned(),
                format: weights.format.clone(),
                samples: int8.clone(),
            };
            comparisons.push(Comparison {
                bench: "accuracy",
                case: format!("divergence from f32, {kind}, {name}"),
                unit: "nats/1000",
                better: Better::Lower,
                ours: samples(numbers)?,
                rival,
                target: None,
            });
        }
    }
    Ok(comparisons)
}

/// Cost of each format: `mixed` beside `int8`, and 8-bit KV cache beside 16-bit.
fn rates(setup: &Setup) -> Result<Vec<Comparison>> {
    const PROMPT: SyntheticLoad = SyntheticLoad { prompt_tokens: 512, generated_tokens: 0, streams: 1 };
    const ALONE: SyntheticLoad = SyntheticLoad { prompt_tokens: 16, generated_tokens: 128, streams: 1 };
    const EIGHT: SyntheticLoad = SyntheticLoad { streams: 8, ..ALONE };
    const BEHIND: SyntheticLoad = SyntheticLoad { prompt_tokens: 512, ..EIGHT };
    const LONG: SyntheticLoad = SyntheticLoad { prompt_tokens: 1920, ..ALONE };
    let mut comparisons = beside(
        setup,
        ("int8", &["--precision", "int8"]),
        ("mixed", &["--precision", "mixed"]),
        [
            ("a prompt of 512", PROMPT, MIN_PREFILL),
            ("one stream", ALONE, MIN_DECODE),
            ("8 streams", EIGHT, MIN_DECODE),
        ],
    )?;
    comparisons.extend(beside(
        setup,
        ("keys and values f16", &["--kv-dtype", "f16"]),
        ("keys and values int8", &["--kv-dtype", "int8"]),
        [
            ("a prompt of 512", PROMPT, MIN_KV),
            ("one stream behind 1,920", LONG, 1.0),
            ("8 streams behind 512", BEHIND, 1.0),
        ],
    )?);
    Ok(comparisons)
}

type ComputeOption = (&'static str, &'static [&'static str]);

/// Runs loads with two configurations in alternation; the target is a share of the first.
fn beside<const N: usize>(
    setup: &Setup,
    plain: ComputeOption,
    ours: ComputeOption,
    cases: [(&str, SyntheticLoad, f64); N],
) -> Result<Vec<Comparison>> {
    let rates = |(_, options): ComputeOption| {
        let helper =
            BenchProgram::new(&setup.config.ours, &setup.config.model, setup.config.threads).with(options);
        let loads = cases.map(|(_, load, _)| load);
        move |_| loads.iter().map(|&load| Ok(rate(&helper.rates(load)?, load))).collect()
    };
    let ways = [plain, ours].map(|way| Box::new(rates(way)) as Box<dyn FnMut(usize) -> Result<Vec<f64>>>);
    let [plain_rates, our_rates] = alternate(setup.config.runs, ways)?;
    let row = |(at, (case, _, least)): (usize, (&str, SyntheticLoad, f64))| {
        let format = setup.peer.shipped.format.clone();
        let samples = Samples::of(&plain_rates, |rates| rates[at])?;
        Ok(Comparison {
            bench: "accuracy",
            case: format!("{case}, {}", ours.0),
            unit: "tokens/s",
            better: Better::Higher,
            ours: Samples::of(&our_rates, |rates| rates[at])?,
            rival: PeerSamples { name: plain.0.to_owned(), format, samples },
            target: Some(BenchTarget::RatioAtLeast(least)),
        })
    };
    cases.into_iter().enumerate().map(row).collect()
}

/// Rate of a load: decode if it generates tokens, else prefill.
fn rate(rates: &TokenRates, load: SyntheticLoad) -> f64 {
    if load.generated_tokens == 0 { rates.prefill_tokens_per_s } else { rates.decode_tokens_per_s }
}

/// A file's dequantized weights, and their logits without rounding.
struct AccuracyReference<'a> {
    file: &'a Path,
    threads: usize,
    adapter: Option<&'a Path>,
    stretches: Vec<Vec<u32>>,
    /// Logits at the judged positions, per window.
    expected: Vec<Vec<f32>>,
}

impl<'a> AccuracyReference<'a> {
    fn new(file: &'a Path, threads: usize, adapter: Option<&'a Path>) -> Result<Self> {
        let tokenizer = Tokenizer::from_gguf(&GgufFile::open(file)?)?;
        let tokens = tokenizer.encode(TEXT, AddSpecial::No, ParseSpecial::No)?;
        let stretches: Vec<_> = tokens.chunks_exact(STRETCH).take(STRETCHES).map(<[u32]>::to_vec).collect();
        ensure!(stretches.len() == STRETCHES, "the text has only {} tokens", tokens.len());
        let weights = LoadedWeights::load(&Dequantized(GgufSource::open(file)?), threads)?;
        let mut adapted = AdaptedModel::new(weights, KvDtype::Auto, adapter)?;
        let expected = stretches.iter().map(|tokens| adapted.judged(tokens)).collect();
        Ok(Self { file, threads, adapter, stretches, expected })
    }

    /// Mean KL divergence of a numeric configuration, in nats.
    fn divergence(&self, (precision, kv): NumericConfig) -> Result<f64> {
        let weights = LoadedWeights::load(&GgufSource::open(self.file)?, self.threads)?;
        let mut adapted = AdaptedModel::new(weights.with_precision(precision), kv, self.adapter)?;
        let vocabulary = adapted.model.vocab_size();
        let (mut sum, mut places) = (0.0, 0);
        for (tokens, expected) in self.stretches.iter().zip(&self.expected) {
            let got = adapted.judged(tokens);
            for (got, expected) in got.chunks(vocabulary).zip(expected.chunks(vocabulary)) {
                sum += divergence(expected, got);
                places += 1;
            }
        }
        Ok(sum / f64::from(places))
    }
}

/// A model with an adapter for its rows.
struct AdaptedModel {
    model: ResidentModel,
    adapter: Option<Arc<PreparedAdapter>>,
}

impl AdaptedModel {
    fn new(weights: LoadedWeights, kv_dtype: KvDtype, adapter: Option<&Path>) -> Result<Self> {
        let (config, precision) = (weights.config(), weights.adapter_precision());
        let adapter = adapter.map(|path| Adapter::read(path, config)).transpose()?;
        let prepared = adapter.map(|adapter| PreparedAdapter::new(&adapter, config, precision));
        let adapter = prepared.transpose()?.map(Arc::new);
        let tokens = STRETCH + adapter.as_ref().map_or(0, |adapter| adapter.virtual_tokens());
        let kv_bytes = weights.kv_shape(kv_dtype).block_bytes() * tokens.div_ceil(BLOCK_TOKENS);
        let options = ResidentOptions { cores: Vec::new(), kv_bytes, kv_dtype };
        Ok(Self { model: ResidentModel::new(weights, &options)?, adapter })
    }

    /// Logits at the judged positions of `tokens`: the second half, without the last token, which has no
    /// successor.
    fn judged(&mut self, tokens: &[u32]) -> Vec<f32> {
        let virtual_tokens = self.adapter.as_ref().map_or(0, |adapter| adapter.virtual_tokens());
        let input = [&vec![0; virtual_tokens][..], tokens].concat();
        let blocks: Vec<BlockId> = (0..).map(BlockId).take(input.len().div_ceil(BLOCK_TOKENS)).collect();
        let mut logits = Vec::new();
        let slice = SequenceSlice {
            trunk: &[],
            tokens: &input,
            start: 0,
            blocks: &blocks,
            adapter: self.adapter.as_ref(),
            logits: LogitRows::All,
        };
        self.model.forward(&[slice], &mut logits);
        let vocabulary = self.model.vocab_size();
        let first = virtual_tokens + tokens.len() / 2;
        logits[first * vocabulary..(input.len() - 1) * vocabulary].to_vec()
    }
}

/// KL(expected || got) of two rows of logits, in nats.
fn divergence(expected: &[f32], got: &[f32]) -> f64 {
    let normalizer = |logits: &[f32]| {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(largest) + logits.iter().map(|&x| f64::from(x - largest).exp()).sum::<f64>().ln()
    };
    let (all, ours) = (normalizer(expected), normalizer(got));
    let of = |(&expected, &got): (&f32, &f32)| {
        let (expected, got) = (f64::from(expected) - all, f64::from(got) - ours);
        expected.exp() * (expected - got)
    };
    expected.iter().zip(got).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_is_that_of_the_distributions_and_not_of_the_logits() {
        assert!(divergence(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).abs() < 1e-12);
        // A certain token that gets probability one half: ln 2.
        let certain = divergence(&[50.0, 0.0], &[0.0, 0.0]);
        assert!((certain - 2.0f64.ln()).abs() < 1e-9, "{certain}");
    }
}
