//! Cost of structured output: grammar-constrained answers beside free ones, for the constrained requests and
//! for the others in the batch.
//!
//! Sixteen streams decode together in this process's own engine. The grammar is a list of objects without an
//! end, so that all streams write as many tokens.

use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use base_executor::{
    constrained_decoding::GrammarWorkers,
    engine::{
        Engine, EngineLimits,
        event::{ConnectionId, EngineEvent},
    },
};
use model::{
    forward::BLOCK_TOKENS,
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sources::open::open,
    weights::served::ServedLayers,
};
use scheduling::clock::SystemClock;
use shmproto::message::{Generate, ToGateway};
use text::{grammar::Grammar, sandbox::OWN_PROGRAM};
use tokio::sync::mpsc;

use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    requests::{CONTEXT, greedy, welcome},
    workload::form,
};

const GATEWAY: ConnectionId = ConnectionId(1);
const STREAMS: usize = 16;
const TOKENS: usize = 64;
const PROMPT_TOKENS: u32 = 16;

struct GrammarEngine {
    engine: Engine<ResidentModel<ServedLayers>>,
    queue: mpsc::Receiver<ToGateway>,
    requests: u64,
}

impl GrammarEngine {
    fn open(config: &SuiteConfig, cores: &Cores, helpers: Option<GrammarWorkers>) -> Result<Self> {
        let weights = LoadedWeights::open(&*open(&config.model)?, None, cores.numbers().len(), &|_| {})?;
        let options =
            ResidentOptions { cores: cores.numbers().to_vec(), kv_bytes: 256 << 20, kv_dtype: None };
        let limits = EngineLimits {
            max_running: STREAMS,
            max_waiting: STREAMS,
            max_waiting_tokens: STREAMS * CONTEXT,
            chunk_tokens: 512,
            kv_blocks: (STREAMS * CONTEXT / BLOCK_TOKENS) as u32,
            context_length: CONTEXT,
        };
        let model = ResidentModel::new(weights, &options)?;
        let mut engine = Engine::new(model, limits, welcome(), Box::new(SystemClock));
        if let Some(helpers) = helpers {
            engine = engine.with_grammars(helpers);
        }
        let (outbox, queue) = mpsc::channel(1024);
        engine.handle(EngineEvent::Connected { connection: GATEWAY, outbox });
        Ok(Self { engine, queue, requests: 0 })
    }

    /// Tokens per second of all streams, from the moment when each has its first token; the first `formed`
    /// streams have a grammar.
    fn decode(&mut self, grammar: &str, formed: usize) -> Result<f64> {
        for stream in 0..STREAMS {
            self.requests += 1;
            let first = 1000 + 100 * stream as u32;
            let prompt: Vec<u32> = (first..first + PROMPT_TOKENS).collect();
            let grammar = (stream < formed).then(|| grammar.to_owned());
            let request = Generate { grammar, ..greedy(self.requests, &prompt, TOKENS) };
            self.engine.handle(EngineEvent::Generate {
                connection: GATEWAY,
                request,
                received_at: Instant::now(),
            });
        }
        let (mut said, mut begun) = (0, None);
        while !self.engine.is_idle() {
            self.engine.step();
            said += self.said()?;
            if begun.is_none() && said >= 2 * STREAMS {
                begun = Some((Instant::now(), said));
            }
        }
        let (at, before) = begun.context("no stream has begun")?;
        Ok((said - before) as f64 / at.elapsed().as_secs_f64())
    }

    fn said(&mut self) -> Result<usize> {
        let mut said = 0;
        while let Ok(message) = self.queue.try_recv() {
            let ToGateway::Outputs(outputs) = message else { continue };
            for output in outputs {
                if let Some(error) = output.error {
                    bail!("the engine says: {}", error.message);
                }
                said += output.tokens.len();
            }
        }
        Ok(said)
    }
}

/// Measures all streams with a grammar, half of them, and none, beside an engine without grammars.
///
/// # Errors
/// If the model cannot be read, or the engine fails.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let grammar = Grammar::Json(form()).source()?;
    let helpers = GrammarWorkers::of_model(config.model.clone(), OWN_PROGRAM.into(), || {})?;
    let (mut knows, mut plain) =
        (GrammarEngine::open(config, cores, Some(helpers))?, GrammarEngine::open(config, cores, None)?);
    let (mut all, mut half, mut none, mut free) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // Warm-up: the first round reads the vocabulary.
    knows.decode(&grammar, STREAMS)?;
    for _ in 0..config.runs {
        all.push(knows.decode(&grammar, STREAMS)?);
        free.push(plain.decode(&grammar, 0)?);
        none.push(knows.decode(&grammar, 0)?);
        half.push(knows.decode(&grammar, STREAMS / 2)?);
    }
    let row = |case: &str, ours: &[f64], least: f64| -> Result<Comparison> {
        Ok(Comparison {
            bench: "grammar",
            case: format!("{STREAMS} streams, {case}"),
            unit: "tokens/s",
            better: Better::Higher,
            ours: Samples::new(ours.to_vec())?,
            rival: PeerSamples {
                name: "none of a form".to_owned(),
                format: "the same".to_owned(),
                samples: Samples::new(free.clone())?,
            },
            target: Some(BenchTarget::ShareAtLeast(least)),
        })
    };
    Ok(vec![
        row("all of a form", &all, 0.95)?,
        row("half of them of a form", &half, 0.95)?,
        row("none of a form, where there might be some", &none, 0.99)?,
    ])
}
