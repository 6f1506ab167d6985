//! The engine at its interface: events in, messages out, over a forward pass without weights.

mod activated;
mod batching;
mod block_updates;
mod classification;
mod drafts;
mod embeddings;
mod grammars;
mod isolation;
mod limits;
mod memory;
mod outputs;
mod precision;
mod prefix_cache;
mod replay;
mod virtual_tokens;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base_executor::{
    adapters::{AdapterLoadOutcome, AdapterRole, Budget},
    engine::{
        Engine, EngineLimits,
        drafts::Drafts,
        event::{ConnectionId, EngineEvent, RequestKey},
    },
};
use kv_cache::ledger::MemoryAccount;
use model::{
    adapter::{ClassificationHead, Invocation},
    forward::LogitRows,
};
use proptest::prelude::*;
use scheduling::clock::Clock;
use shmproto::message::{
    AdapterUnloaded, ColdStart, DeviceFacts, ErrorCode, Finish, Generate, Output, Pooling, Stats, ToGateway,
    TokenOutput, UnloadAdapter, Welcome,
};
use tokio::sync::mpsc;
use types::AdapterId;

use crate::common::{
    FALLS_SHORT, FakeAdapter, FakePass, HIDDEN, HOPELESS, Log, PANICS, THIRSTY, Tick, VOCAB, prompt, request,
    resident,
};

const GATEWAY: ConnectionId = ConnectionId(1);
pub(crate) const ROOMY: EngineLimits = EngineLimits {
    max_running: 64,
    max_waiting: 256,
    max_waiting_tokens: 1 << 20,
    chunk_tokens: 512,
    kv_blocks: 4096,
    context_length: 2048,
};

#[derive(Debug, Clone)]
struct TestClock(Arc<Mutex<Instant>>);

impl Clock for TestClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
struct RequestTranscript {
    tokens: Vec<TokenOutput>,
    prompt: Vec<TokenOutput>,
    pooled: Vec<f32>,
    cached_tokens: u32,
    queued_us: u64,
    finish: Option<Finish>,
    error: Option<ErrorCode>,
    provisional: ProvisionalTokens,
}

/// Draft tokens that were streamed before their verification.
#[derive(Debug, Clone, Default, PartialEq)]
struct ProvisionalTokens {
    standing: Vec<u32>,
    came_true: usize,
    in_vain: usize,
}

impl ProvisionalTokens {
    fn verified(&mut self, tokens: &[TokenOutput]) {
        let told = std::mem::take(&mut self.standing);
        let true_ones = told.iter().zip(tokens).take_while(|(told, said)| **told == said.token).count();
        self.came_true += true_ones;
        self.in_vain += told.len() - true_ones;
    }
}

impl RequestTranscript {
    fn add(&mut self, mut output: Output) {
        assert!(self.finish.is_none() && self.error.is_none(), "nothing follows the last output");
        if !output.provisional.is_empty() {
            assert!(self.provisional.standing.is_empty(), "what was told before has been verified");
            self.provisional.standing = std::mem::take(&mut output.provisional);
            assert_eq!(
                output,
                Output { request: output.request, ..Output::default() },
                "it says nothing else"
            );
            return;
        }
        self.provisional.verified(&output.tokens);
        self.tokens.extend(output.tokens);
        self.prompt.extend(output.prompt);
        self.pooled.extend(output.pooled);
        self.cached_tokens += output.cached_tokens;
        self.queued_us += output.queued_us;
        self.finish = output.finish;
        self.error = output.error.map(|error| error.code);
    }

    /// Content that must not depend on other requests.
    fn content(&self) -> Self {
        let Self { tokens, prompt, pooled, finish, error, .. } = self.clone();
        Self { tokens, prompt, pooled, finish, error, ..Self::default() }
    }
}

struct EngineHarness {
    engine: Engine<FakePass>,
    queue: mpsc::Receiver<ToGateway>,
    clock: TestClock,
    log: Log,
    tick: Tick,
    budget: Budget,
    answers: HashMap<u64, RequestTranscript>,
    others: Vec<ToGateway>,
    steps: usize,
}

impl EngineHarness {
    fn new(limits: EngineLimits) -> Self {
        let (pass, log) = FakePass::new(limits.kv_blocks);
        Self::over(pass, log, limits, Drafts::default())
    }

    /// Creates an engine that drafts; each pass takes a millisecond.
    fn drafting(limits: EngineLimits, drafts: Drafts) -> Self {
        let (pass, log) = FakePass::new(limits.kv_blocks);
        let bench = Self::over(pass, log, limits, drafts);
        let clock = bench.clock.clone();
        let tick = move || *clock.0.lock().unwrap() += Duration::from_millis(1);
        *bench.tick.lock().unwrap() = Some(Box::new(tick));
        bench
    }

    fn over(pass: FakePass, log: Log, limits: EngineLimits, drafts: Drafts) -> Self {
        let clock = TestClock(Arc::new(Mutex::new(Instant::now())));
        let tick = pass.tick();
        let mut engine = Engine::new(pass, limits, welcome(), Box::new(clock.clone())).with_drafts(drafts);
        let (outbox, queue) = mpsc::channel(1024);
        engine.handle(EngineEvent::Connected { connection: GATEWAY, outbox });
        let (answers, others) = (HashMap::new(), Vec::new());
        let mut bench = Self {
            engine,
            queue,
            clock,
            log,
            tick,
            budget: Budget::new(MemoryAccount::new("adapters", 1000)),
            answers,
            others,
            steps: 0,
        };
        bench.step();
        bench
    }

    fn send(&mut self, request: Generate) {
        let received_at = self.clock.now();
        self.engine.handle(EngineEvent::Generate { connection: GATEWAY, request, received_at });
    }

    fn cancel(&mut self, request: u64) {
        self.engine.handle(EngineEvent::Cancel(RequestKey { connection: GATEWAY, request }));
    }

    fn step(&mut self) {
        self.engine.step();
        self.steps += 1;
        let mut outputs = 0;
        while let Ok(message) = self.queue.try_recv() {
            match message {
                ToGateway::Outputs(batch) => {
                    outputs += usize::from(batch.iter().any(|output| output.provisional.is_empty()));
                    batch.into_iter().for_each(|one| self.answers.entry(one.request).or_default().add(one));
                }
                other => self.others.push(other),
            }
        }
        assert!(outputs <= 1, "a step's outputs are one message");
        let mut answers = self.answers.values();
        assert!(
            answers.all(|answer| answer.provisional.standing.is_empty()),
            "a step leaves nothing provisional"
        );
        let stats = self.stats();
        assert!(stats.kv_blocks_used + stats.kv_blocks_cached <= stats.kv_blocks_total);
    }

    fn finish(&mut self) {
        while !self.engine.is_idle() {
            self.step();
            assert!(self.steps < 20_000, "the engine makes no progress: {:?}", self.engine);
        }
        self.step();
    }

    fn stats(&self) -> Stats {
        self.engine.stats(0)
    }

    fn load(&mut self, tag: u8) {
        let id = AdapterId([tag; 32]);
        let loaded = match self.budget.claim(id, 10) {
            Ok(claim) => {
                let mut loaded = resident(Arc::new(FakeAdapter(tag.into())), claim);
                loaded.virtual_tokens = virtual_tokens(tag);
                loaded.invocation =
                    (tag == ACTIVATED).then(|| Invocation::new(Some(vec![7]), VOCAB).unwrap());
                if tag == CLASSIFIER {
                    loaded.role = AdapterRole::Classifies(head());
                }
                AdapterLoadOutcome::New(loaded)
            }
            Err(_) => AdapterLoadOutcome::Known(id),
        };
        let caller = RequestKey { connection: GATEWAY, request: tag.into() };
        self.engine.handle(EngineEvent::AdapterLoaded { caller: Some(caller), loaded });
    }

    fn unload(&mut self, tag: u8) {
        let call = UnloadAdapter { request: tag.into(), adapter: [tag; 32] };
        self.engine.handle(EngineEvent::UnloadAdapter { connection: GATEWAY, call });
    }

    fn answer(&self, request: u64) -> &RequestTranscript {
        self.answers.get(&request).unwrap_or_else(|| panic!("request {request} was not answered"))
    }

    fn error(&self, request: u64) -> Option<ErrorCode> {
        self.answer(request).error
    }
}

/// Adapter whose prefix is longer than a block.
const PREFIX: u8 = 20;

/// Adapter that applies from the last token 7 of a prompt on.
const ACTIVATED: u8 = 30;

/// Tag of the adapter with a classification head.
const CLASSIFIER: u8 = 31;

/// Head of three labels, of which the last is the sum of the state.
fn head() -> Arc<ClassificationHead> {
    let labels = ["bad", "fair", "good"].map(str::to_owned).to_vec();
    let weight = (0..3 * HIDDEN).map(|at| if at < 2 * HIDDEN { at as f32 / 4.0 - 2.0 } else { 1.0 });
    Arc::new(ClassificationHead::new(labels, weight.collect(), Some(vec![0.5, -0.5, 0.0])))
}

fn virtual_tokens(tag: u8) -> usize {
    if tag == PREFIX { 20 } else { 0 }
}

fn with_prefix(request: Generate) -> Generate {
    Generate { adapter: Some([PREFIX; 32]), ..request }
}

pub(crate) fn welcome() -> Welcome {
    Welcome {
        version: 1,
        instance: 1,
        model_path: String::new(),
        base_hash: [0; 32],
        text_hash: [0; 32],
        device: DeviceFacts::default(),
        numbers: String::new(),
        context_length: 0,
        vocab_size: 0,
        adapter_budget_bytes: 0,
        device_budget_bytes: 0,
        cold_start: ColdStart::Cached,
        kv_blocks: 0,
        block_tokens: 0,
        max_running: 0,
        max_waiting: 0,
        chunk_tokens: 512,
        adapters: Vec::new(),
    }
}

fn alone(request: &Generate) -> RequestTranscript {
    let mut bench = EngineHarness::new(EngineLimits { kv_blocks: 128, ..ROOMY });
    request.adapter.iter().for_each(|id| bench.load(id[0]));
    bench.send(request.clone());
    bench.finish();
    bench.answer(request.request).clone()
}

fn assert_as_if_alone(bench: &EngineHarness, requests: &[Generate]) {
    for request in requests {
        assert_eq!(bench.answer(request.request).content(), alone(request).content(), "request {request:?}");
    }
}

fn assert_nothing_held(bench: &EngineHarness) {
    let stats = bench.stats();
    assert_eq!((stats.waiting, stats.running, stats.kv_blocks_used), (0, 0, 0));
    assert!(
        stats.adapters.iter().all(|adapter| adapter.running + adapter.waiting == 0),
        "{:?}",
        stats.adapters
    );
}

/// Arbitrary requests: greedy, sampled, with penalties, stops, logprobs and adapters, prompts with common
/// prefixes, and embeddings.
fn any_request() -> impl Strategy<Value = Generate> {
    let shape = (0..3u64, 0..70usize, 0..4u64, 1..6usize, 0..40u32);
    let choice = (prop::bool::ANY, 0..4u32, prop::bool::weighted(0.2), prop::bool::weighted(0.15), 0..5usize);
    (shape, choice, any::<u64>()).prop_map(|((head, head_len, tail, tail_len, max_tokens), choice, seed)| {
        let (sampled, stops, penalized, scored, adapter) = choice;
        let mut tokens = prompt(head, head_len);
        tokens.extend(prompt(100 + tail, tail_len));
        let mut request = request(0, tokens, max_tokens);
        request.sampling.seed = seed;
        request.sampling.temperature = if sampled { 1.0 } else { 0.0 };
        request.sampling.frequency_penalty = if penalized { 0.5 } else { 0.0 };
        request.sampling.repetition_penalty = if penalized { 1.2 } else { 1.0 };
        request.stop_tokens = (0..stops).map(|token| token * 7).collect();
        request.min_tokens = stops;
        request.logprobs = sampled.then_some(2);
        request.prompt_logprobs = scored.then_some(1);
        if seed % 8 < 2 {
            request.pooling = Some(match seed % 12 {
                0 => Pooling::Mean,
                4 => Pooling::Last,
                _ => Pooling::TokenLogits(vec![3, 59]),
            });
            (request.max_tokens, request.prompt_logprobs) = (0, None);
        }
        request.adapter =
            [None, Some(1), Some(2), Some(PREFIX), Some(ACTIVATED)][adapter].map(|tag| [tag; 32]);
        request
    })
}

fn any_limits() -> impl Strategy<Value = EngineLimits> {
    // The longest request has 20 + 75 + 40 tokens: 9 blocks.
    (1..20usize, 16..200usize, 9..60u32).prop_map(|(max_running, chunk_tokens, kv_blocks)| EngineLimits {
        max_running,
        chunk_tokens,
        kv_blocks,
        ..ROOMY
    })
}
