//! Cost of rounding, ours and llama.cpp's: each side's [`divergence`](crate::divergence) from its own f32
//! pass over the dequantized file, by format and by adapter, and the speed that rounding buys.

use std::path::Path;

use anyhow::{Context as _, Result};
use model::{precision::Precision, resident::KvPrecision};

use super::setup::Setup;
use crate::{
    divergence::{DivergenceReference, NUMBERS, TEXT, WINDOW, WINDOWS},
    holobiont_runner::{BenchProgram, HolobiontRunner as _, SyntheticLoad, TokenRates},
    measure::{Samples, alternate},
    peer::PeerWeights,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

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
    let theirs = setup.peer.divergence(weights, &exact, &text, [WINDOW, WINDOWS])?;
    let judge = DivergenceReference::new(&weights.file, setup.config.threads, None)?;
    let row = |(name, numbers)| {
        let ours = Samples::new(vec![1000.0 * judge.divergence(numbers)?])?;
        let samples = Samples::new(vec![1000.0 * theirs])?;
        let rival =
            PeerSamples { name: "llama-perplexity".to_owned(), format: weights.format.clone(), samples };
        let is_default = numbers == (Precision::default(), Some(KvPrecision::F16));
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
        let judge = DivergenceReference::new(&weights.file, setup.config.threads, Some(&adapter))?;
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
