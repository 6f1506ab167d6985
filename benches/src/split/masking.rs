//! `split-masking`: cost of obfuscation over TLS, beside no masking with the same arithmetic
//! and beside the fastest mode without masking; then the cost of secrecy.

use std::time::Instant;

use anyhow::Result;
use client::masking::{Masking, NoiseSettings};
use shmproto::layer::SitePath;

use super::{
    SplitRow, exact,
    executor::{BatchingFlag, CallTransport, SplitExecutor},
    model::{Decoder, time_of_a_token},
    ring,
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison},
};

const PROMPT: usize = 16;
const TOKENS: usize = 64;
/// Maximum ratio of the time of a token.
const MOST: f64 = 1.15;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let executor = SplitExecutor::start(config, cores.numbers(), BatchingFlag::Opportunistic)?;
    let paper = Masking::Paper(NoiseSettings::default());
    let decoder = |masking: Masking| {
        let (begun, word) = (Instant::now(), masking.as_str());
        let session = executor.session(CallTransport::Tls, word, None)?;
        let decoder = Decoder::new(&config.model, session, masking)?;
        eprintln!("holobiont-bench: {}: ready after {:.2} s", word, begun.elapsed().as_secs_f64());
        anyhow::Ok(contestant(decoder))
    };
    let [paper, linear, fast] =
        [paper, Masking::Off { path: SitePath::Linear }, Masking::Off { path: SitePath::Fast }].map(decoder);
    let measured = alternate(config.runs, [paper?, linear?, fast?])?;
    let [paper, linear, fast] = measured.map(Samples::new);
    let (paper, linear, fast) = (paper?, linear?, fast?);
    let row = || SplitRow {
        bench: "split-masking",
        case: "a token over loopback TLS, masking paper (obfuscation)".to_owned(),
        unit: "ms",
        better: Better::Lower,
        target: Some(BenchTarget::ShareAtMost(MOST)),
    };
    let mut comparisons = vec![
        row().beside(&paper, "masking off, linear path", &linear),
        row().beside(&paper, "masking off, fast path", &fast),
    ];
    drop(executor);
    comparisons.extend(exact::run(config, cores)?);
    comparisons.extend(ring::run(config, cores)?);
    Ok(comparisons)
}

fn contestant<'a>(mut decoder: Decoder) -> Contestant<'a, f64> {
    Box::new(move |round| {
        let seed = 2 * round as u64;
        decoder.generate(seed, PROMPT, TOKENS / 8)?;
        let generated = decoder.generate(seed + 1, PROMPT, TOKENS)?;
        Ok(time_of_a_token(&generated).as_secs_f64() * 1000.0)
    })
}
