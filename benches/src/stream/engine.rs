//! The engine in this process over a base streamed from disk, with one request at a time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base_executor::engine::{
    Engine, EngineLimits,
    drafts::Drafts,
    event::{ConnectionId, EngineEvent},
};
use model::{forward::BLOCK_TOKENS, resident::ResidentModel, weights::served::ServedLayers};
use scheduling::clock::SystemClock;
use shmproto::message::{SpeculationStats, ToGateway};
use tokio::sync::mpsc;

use crate::requests::{CONTEXT, greedy, welcome};

const GATEWAY: ConnectionId = ConnectionId(1);

pub(super) struct StreamedEngine {
    engine: Engine<ResidentModel<ServedLayers>>,
    queue: mpsc::Receiver<ToGateway>,
    requests: u64,
}

#[derive(Debug, Clone)]
pub(super) struct EngineAnswer {
    pub(super) tokens: Vec<u32>,
    /// Seconds per token after the first.
    pub(super) token_s: f64,
    pub(super) drafted: SpeculationStats,
}

impl StreamedEngine {
    pub(super) fn new(model: ResidentModel<ServedLayers>, drafts: Drafts) -> Self {
        let limits = EngineLimits {
            max_running: 1,
            max_waiting: 1,
            max_waiting_tokens: CONTEXT,
            chunk_tokens: 512,
            kv_blocks: (2 * CONTEXT / BLOCK_TOKENS) as u32,
            context_length: CONTEXT,
        };
        let mut engine = Engine::new(model, limits, welcome(), Box::new(SystemClock)).with_drafts(drafts);
        let (outbox, queue) = mpsc::channel(64);
        engine.handle(EngineEvent::Connected { connection: GATEWAY, outbox });
        Self { engine, queue, requests: 0 }
    }

    /// Returns the greedy answer of `tokens` tokens.
    ///
    /// # Errors
    /// If the engine rejects or fails.
    pub(super) fn answer(&mut self, prompt: &[u32], tokens: usize) -> Result<EngineAnswer> {
        self.requests += 1;
        let (request, received_at) = (greedy(self.requests, prompt, tokens), Instant::now());
        self.engine.handle(EngineEvent::Generate { connection: GATEWAY, request, received_at });
        let before = self.engine.stats(0).speculation;
        let (mut said, mut begun, mut first) = (Vec::new(), Instant::now(), 0);
        while !self.engine.is_idle() {
            self.engine.step();
            while let Ok(message) = self.queue.try_recv() {
                let ToGateway::Outputs(outputs) = message else { continue };
                for output in outputs {
                    if let Some(error) = output.error {
                        bail!("the engine says: {}", error.message);
                    }
                    said.extend(output.tokens.iter().map(|token| token.token));
                }
            }
            if first == 0 && !said.is_empty() {
                (first, begun) = (said.len(), Instant::now());
            }
        }
        let took = begun.elapsed();
        let behind = said.len().checked_sub(first).filter(|behind| *behind > 0);
        let token_s = took.as_secs_f64() / behind.context("an answer of one token has no pace")? as f64;
        let drafted = since(self.engine.stats(0).speculation, before);
        Ok(EngineAnswer { tokens: said, token_s, drafted })
    }
}

fn since(now: SpeculationStats, before: SpeculationStats) -> SpeculationStats {
    SpeculationStats {
        verifications: now.verifications - before.verifications,
        drafted: now.drafted - before.drafted,
        accepted: now.accepted - before.accepted,
        ahead: now.ahead - before.ahead,
        kept: now.kept - before.kept,
        hidden_us: now.hidden_us - before.hidden_us,
        ..now
    }
}

impl EngineAnswer {
    /// Drafting time per token that was hidden behind reading.
    pub(super) fn hidden(&self) -> Duration {
        Duration::from_micros(self.drafted.hidden_us) / u32::try_from(self.tokens.len().max(1)).unwrap_or(1)
    }
}
