//! Cost of secrecy and verified answers for a client over TLS, beside the fastest mode without masking.
//!
//! Each executor has one core: `shares` uses two executors, the others one. Pads are made in advance, and
//! timed then.

use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result};
use client::{
    masking::{
        Direction, Exact, Masking, RowProtection,
        one_time_pads::{Pads, maker::PadGenerator, pool::PadPool},
        secret_sharing::SecondExecutor,
        verify::Verifier,
    },
    session::ClientSettings,
};
use model::site_model::SiteModel;
use shmproto::layer::SitePath;
use tempfile::TempDir;

use super::{
    SplitRow,
    executor::{CallTransport, SplitExecutor},
    model::{Decoder, time_of_a_token},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison},
};

/// Tokens of a prompt whose rows go through every site in one call.
const PROMPT: usize = 128;
const TOKENS: usize = 32;
const WARMING: usize = 4;
/// Maximum bytes of pads: enough for some turns.
const POOL_BYTES: u64 = 8 << 30;

/// Maximum ratio of the time of a token.
const SHARES_MOST: f64 = 2.0;
const PADS_MOST: f64 = 1.43;
const VERIFY_MOST: f64 = 1.05;
/// Minimum speed of a prompt, and of making pads, as shares of the speed of an unmasked prompt.
const PROMPT_LEAST: f64 = 0.35;
const MAKING_LEAST: f64 = 0.5;

#[derive(Debug, Clone, Copy)]
struct TurnTiming {
    /// Prompt tokens per second.
    prompt: f64,
    /// Milliseconds per generated token.
    token: f64,
}

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (first, last) = (&cores.numbers()[..1], &cores.numbers()[cores.numbers().len() - 1..]);
    let (one, other) =
        (SplitExecutor::start_exact(config, first)?, SplitExecutor::start_exact(config, last)?);
    let own = MaskingMaterial::new(config)?;
    let second = SecondExecutor {
        connector: Arc::from(other.connector(CallTransport::Tls)?),
        settings: ClientSettings::default(),
    };
    let ring = || Masking::Off { path: SitePath::Ring };
    let checked =
        Masking::Exact(Exact { cover: RowProtection::Bare, verifier: Some(own.verifier), pad_rows: false });
    let decoder = |masking: Masking| {
        let session = one.session(CallTransport::Tls, masking.as_str(), None)?;
        anyhow::Ok(contestant(Decoder::new(&config.model, session, masking)?))
    };
    let contestants = [
        decoder(Masking::Off { path: SitePath::Fast })?,
        decoder(ring())?,
        decoder(checked)?,
        decoder(RowProtection::Shares(Arc::new(second)).into())?,
        decoder(RowProtection::Pads(own.pads).into())?,
    ];
    let [fast, ring, checked, shares, pads] =
        alternate(config.runs, contestants)?.each_ref().map(|turns| TurnSamples::of(turns));
    let (fast, ring, checked, shares, pads) = (fast?, ring?, checked?, shares?, pads?);
    let off = "masking off, fast path";
    Ok(vec![
        token("masking shares", SHARES_MOST).beside(&shares.token, off, &fast.token),
        token("masking pads", PADS_MOST).beside(&pads.token, off, &fast.token),
        token("path ring, checked", VERIFY_MOST).beside(&checked.token, "path ring", &ring.token),
        prompt("masking shares").beside(&shares.prompt, off, &fast.prompt),
        prompt("masking pads").beside(&pads.prompt, off, &fast.prompt),
        prompt("path ring").beside(&ring.prompt, off, &fast.prompt),
        SplitRow {
            case: format!("making pads, {:.2} MB a token", own.token_bytes as f64 / 1e6),
            target: Some(BenchTarget::RatioAtLeast(MAKING_LEAST)),
            ..prompt("")
        }
        .beside(&own.made, "a prompt, masking off, fast path", &fast.prompt),
    ])
}

fn token(masking: &str, most: f64) -> SplitRow {
    SplitRow {
        bench: "split-masking",
        case: format!("a token over loopback TLS, {masking}"),
        unit: "ms",
        better: Better::Lower,
        target: Some(BenchTarget::ShareAtMost(most)),
    }
}

fn prompt(masking: &str) -> SplitRow {
    SplitRow {
        bench: "split-masking",
        case: format!("a prompt of {PROMPT} tokens over loopback TLS, {masking}"),
        unit: "tokens/s",
        better: Better::Higher,
        target: Some(BenchTarget::RatioAtLeast(PROMPT_LEAST)),
    }
}

fn contestant<'a>(mut decoder: Decoder) -> Contestant<'a, TurnTiming> {
    Box::new(move |round| {
        let seed = 2 * round as u64;
        decoder.generate(seed, WARMING, WARMING)?;
        let generated = decoder.generate(seed + 1, PROMPT, TOKENS)?;
        Ok(TurnTiming {
            prompt: PROMPT as f64 / generated.first_token.as_secs_f64(),
            token: time_of_a_token(&generated).as_secs_f64() * 1000.0,
        })
    })
}

struct TurnSamples {
    prompt: Samples,
    token: Samples,
}

impl TurnSamples {
    fn of(turns: &[TurnTiming]) -> Result<Self> {
        let prompt = Samples::of(turns, |turn| turn.prompt)?;
        Ok(Self { prompt, token: Samples::of(turns, |turn| turn.token)? })
    }
}

/// Pads that this client makes from weights of its own.
struct MaskingMaterial {
    verifier: Arc<Verifier>,
    pads: Pads,
    /// Tokens whose pads were made, per second.
    made: Samples,
    token_bytes: u64,
    _folder: TempDir,
}

impl MaskingMaterial {
    fn new(config: &SuiteConfig) -> Result<Self> {
        let mut base = SiteModel::open(&config.model, &[]).context("no weights to make pads of")?;
        base.commit();
        let verifier = Verifier::new(&mut base, &mut |_, _| {}).context("answers cannot be checked")?;
        let mut maker = PadGenerator::new(Box::new(base), POOL_BYTES);
        let folder = tempfile::tempdir().context("no folder for pads")?;
        let mut pool = PadPool::create(&folder.path().join("pads"), maker.commitment()?, &maker.shapes())?;
        let made = (0..config.runs).map(|_| make(&mut maker, &mut pool)).collect::<Result<_>>()?;
        let token_bytes = pool.token_bytes(Direction::Forward);
        let pads = Pads::new(pool, None);
        Ok(Self {
            verifier: Arc::new(verifier),
            pads,
            made: Samples::new(made)?,
            token_bytes,
            _folder: folder,
        })
    }
}

/// Makes the pads of a turn and returns the tokens per second.
fn make(maker: &mut PadGenerator, pool: &mut PadPool) -> Result<f64> {
    let tokens = PROMPT + TOKENS + 2 * WARMING;
    let begun = Instant::now();
    maker.prepare(pool, tokens as u64, &[Direction::Forward], &mut |_, _| {}).context("no pads")?;
    Ok(tokens as f64 / begun.elapsed().as_secs_f64())
}
