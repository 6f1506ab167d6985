//! Cost of rounding: next-token distributions of each precision beside those of the same weights without
//! rounding.
//!
//! The metric is KL(f32 || rounded) over the whole vocabulary, at the positions of `llama-perplexity
//! --kl-divergence`: the second half of each window of [`WINDOW`] tokens. The text is unknown to any model:
//! this repository's own guides.

use std::{path::Path, sync::Arc};

use anyhow::{Result, ensure};
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    precision::Precision,
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    sources::{dequantized::Dequantized, gguf::GgufSource},
};
use model_files::gguf::GgufFile;
use text::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use types::BlockId;

use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{Better, Comparison, PeerSamples},
};

pub(crate) const WINDOW: usize = 512;
pub(crate) const WINDOWS: usize = 8;

pub(crate) const TEXT: &str = concat!(
    include_str!("../../docs/guides/security.md"),
    include_str!("../../docs/guides/services.md"),
    include_str!("../../docs/guides/split.md"),
    include_str!("../../docs/guides/streaming.md"),
);

/// Rounding of activations, and dtype of the KV cache.
pub(crate) type NumericConfig = (Precision, Option<KvPrecision>);

pub(crate) const NUMBERS: [(&str, NumericConfig); 7] = [
    ("int8", (Precision::Int8, Some(KvPrecision::F16))),
    ("mixed", (Precision::Mixed, Some(KvPrecision::F16))),
    ("bf16", (Precision::Bf16, Some(KvPrecision::F16))),
    ("bf16, keys and values bf16", (Precision::Bf16, Some(KvPrecision::Bf16))),
    ("int15", (Precision::Int15, Some(KvPrecision::F16))),
    ("mixed, keys and values bf16", (Precision::Mixed, Some(KvPrecision::Bf16))),
    ("mixed, keys and values int8", (Precision::Mixed, Some(KvPrecision::Int8))),
];

/// Measures each precision of the model, beside `int8`.
///
/// # Errors
/// If the model is no GGUF file.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let reference = DivergenceReference::new(&config.model, cores.numbers().len(), None)?;
    let samples = |numbers| Samples::new(vec![1000.0 * reference.divergence(numbers)?]);
    let [(name, int8), others @ ..] = NUMBERS;
    let int8 = samples(int8)?;
    let row = |(case, numbers)| {
        let format = config.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Comparison {
            bench: "divergence",
            case: format!("divergence from f32, {case}"),
            unit: "nats/1000",
            better: Better::Lower,
            ours: samples(numbers)?,
            rival: PeerSamples { name: name.to_owned(), format, samples: int8.clone() },
            target: None,
        })
    };
    others.into_iter().map(row).collect()
}

/// A file's dequantized weights, and their logits without rounding.
pub(crate) struct DivergenceReference<'a> {
    file: &'a Path,
    threads: usize,
    adapter: Option<&'a Path>,
    windows: Vec<Vec<u32>>,
    /// Logits at the judged positions, per window.
    expected: Vec<Vec<f32>>,
}

impl<'a> DivergenceReference<'a> {
    pub(crate) fn new(file: &'a Path, threads: usize, adapter: Option<&'a Path>) -> Result<Self> {
        let tokenizer = Tokenizer::from_gguf(&GgufFile::open(file)?)?;
        let tokens = tokenizer.encode(TEXT, AddSpecial::No, ParseSpecial::No)?;
        let windows: Vec<_> = tokens.chunks_exact(WINDOW).take(WINDOWS).map(<[u32]>::to_vec).collect();
        ensure!(windows.len() == WINDOWS, "the text has only {} tokens", tokens.len());
        let weights = LoadedWeights::load(&Dequantized(GgufSource::open(file)?), threads)?;
        let mut adapted = AdaptedModel::new(weights, Some(KvPrecision::F32), adapter)?;
        let expected = windows.iter().map(|tokens| adapted.judged(tokens)).collect();
        Ok(Self { file, threads, adapter, windows, expected })
    }

    /// Mean KL divergence of a numeric configuration, in nats.
    pub(crate) fn divergence(&self, (precision, kv): NumericConfig) -> Result<f64> {
        let weights = LoadedWeights::load(&GgufSource::open(self.file)?, self.threads)?;
        let mut adapted = AdaptedModel::new(weights.with_precision(precision), kv, self.adapter)?;
        let vocabulary = adapted.model.vocab_size();
        let (mut sum, mut places) = (0.0, 0);
        for (tokens, expected) in self.windows.iter().zip(&self.expected) {
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
    fn new(weights: LoadedWeights, kv_dtype: Option<KvPrecision>, adapter: Option<&Path>) -> Result<Self> {
        let (config, precision) = (weights.config(), weights.adapter_precision());
        let adapter = adapter.map(|path| Adapter::read(path, config)).transpose()?;
        let prepared = adapter.map(|adapter| PreparedAdapter::new(&adapter, config, precision));
        let adapter = prepared.transpose()?.map(Arc::new);
        let tokens = WINDOW + adapter.as_ref().map_or(0, |adapter| adapter.virtual_tokens());
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
