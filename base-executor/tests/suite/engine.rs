//! The engine at its interface: events in, messages out, over a forward pass without weights.

mod activated;
mod block_updates;
mod classification;
mod drafts;
mod embeddings;
mod grammars;
mod limits;
mod memory;
mod precision;
mod replay;
mod virtual_tokens;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base_executor::{
    adapters::{AdapterLoadOutcome, AdapterRole, Budget, ResidentAdapter},
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
use types::{AdapterId, AdapterVersion};

use crate::common::{
    FALLS_SHORT, FakeAdapter, FakePass, HIDDEN, HOPELESS, Log, PANICS, THIRSTY, Tick, VOCAB, prompt, request,
};

const GATEWAY: ConnectionId = ConnectionId(1);
const ROOMY: EngineLimits = EngineLimits {
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
                let adapter = Arc::new(FakeAdapter(tag.into()));
                let generation = AdapterVersion([100 + tag; 32]);
                let virtual_tokens = virtual_tokens(tag);
                let invocation = (tag == ACTIVATED).then(|| Invocation::new(Some(vec![7]), VOCAB).unwrap());
                AdapterLoadOutcome::New(ResidentAdapter {
                    adapter,
                    claim,
                    generation,
                    rank: 4,
                    modules: 2,
                    virtual_tokens,
                    invocation,
                    role: match tag {
                        CLASSIFIER => AdapterRole::Classifies(head()),
                        _ => AdapterRole::Answers,
                    },
                    warnings: Vec::new(),
                })
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_request_gets_what_it_would_get_alone(
        mut requests in prop::collection::vec((any_request(), 0..6usize), 1..17),
        limits in any_limits(),
    ) {
        let mut bench = EngineHarness::new(limits);
        [1, 2, PREFIX, ACTIVATED].into_iter().for_each(|tag| bench.load(tag));
        for (id, (request, steps_before)) in (1..).zip(&mut requests) {
            request.request = id;
            (0..*steps_before).for_each(|_| bench.step());
            bench.send(request.clone());
        }
        bench.finish();
        let requests: Vec<_> = requests.into_iter().map(|(request, _)| request).collect();
        assert_as_if_alone(&bench, &requests);
        assert_nothing_held(&bench);
    }

    #[test]
    fn three_hundred_requests_cancelled_at_any_moment_leave_nothing_behind(
        moments in prop::collection::vec((any_request(), 0..3usize, 0..20usize), 300),
        limits in any_limits(),
    ) {
        let mut bench = EngineHarness::new(limits);
        [1, 2, PREFIX, ACTIVATED].into_iter().for_each(|tag| bench.load(tag));
        for (id, (mut request, steps, age)) in (1..).zip(moments) {
            request.request = id;
            bench.send(request);
            (0..steps).for_each(|_| bench.step());
            bench.cancel(id.saturating_sub(age as u64));
        }
        (1..=300).for_each(|id| bench.cancel(id));
        prop_assert!(bench.engine.is_idle());
        assert_nothing_held(&bench);
    }
}

#[test]
fn sixteen_requests_on_three_adapters_get_what_they_would_get_alone() {
    let mut bench = EngineHarness::new(ROOMY);
    (1..4).for_each(|tag| bench.load(tag));
    let mut requests = Vec::new();
    for id in 1..=16 {
        let mut one = request(id, prompt(id, 100 + id as usize), 32);
        one.sampling.temperature = (id % 2) as f32;
        one.adapter = (id % 4 > 0).then_some([(id % 4) as u8; 32]);
        bench.send(one.clone());
        requests.push(one);
    }
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_eq!(bench.stats().preemptions, 0);
}

#[test]
fn a_preempted_request_goes_on_bit_for_bit_and_repeats_no_token() {
    let limits = EngineLimits { kv_blocks: 12, ..ROOMY };
    let mut bench = EngineHarness::new(limits);
    let requests: Vec<_> = (1..=4)
        .map(|id| {
            let mut one = request(id, prompt(id, 20), 100);
            one.sampling.temperature = 1.0;
            one.logprobs = Some(1);
            one
        })
        .collect();
    requests.iter().for_each(|one| bench.send(one.clone()));
    bench.finish();
    assert!(bench.stats().preemptions > 0, "the pool is too small for all four");
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
}

#[test]
fn a_cached_prefix_is_not_computed_again_and_changes_nothing() {
    let mut bench = EngineHarness::new(ROOMY);
    let first = request(1, prompt(5, 50), 20);
    let second = Generate { request: 2, ..first.clone() };
    bench.send(first.clone());
    bench.finish();
    bench.send(second.clone());
    bench.finish();
    assert_eq!(bench.answer(1).cached_tokens, 0);
    assert_eq!(bench.answer(2).cached_tokens, 48, "three full blocks of the prompt");
    assert_as_if_alone(&bench, &[first, second]);
    assert_eq!(bench.stats().prompt_tokens, 52);
}

#[test]
fn a_prompt_that_is_cached_as_a_whole_has_its_last_token_computed() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(5, 32), 1));
    bench.finish();
    bench.send(request(2, prompt(5, 32), 1));
    bench.finish();
    assert_eq!(bench.answer(2).cached_tokens, 16);
    assert_eq!(bench.answer(2).tokens, bench.answer(1).tokens);
}

#[test]
fn generated_tokens_are_cached_for_the_next_turn_of_a_conversation() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(5, 20), 30));
    bench.finish();
    let mut turn = prompt(5, 20);
    turn.extend(bench.answer(1).tokens.iter().map(|output| output.token));
    turn.extend(prompt(6, 5));
    bench.send(request(2, turn, 1));
    bench.finish();
    assert_eq!(bench.answer(2).cached_tokens, 48, "49 tokens were computed");
}

#[test]
fn tenants_and_adapters_share_no_prefix() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(1);
    let base = request(1, prompt(5, 50), 4);
    let tenant = Generate { request: 2, namespace: [1; 32], ..base.clone() };
    // A gateway that forgot to hash the adapter version into the namespace.
    let adapted = Generate { request: 3, adapter: Some([1; 32]), ..base.clone() };
    let requests = [base, tenant, adapted];
    for one in &requests {
        bench.send(one.clone());
        bench.finish();
        assert_eq!(bench.answer(one.request).cached_tokens, 0);
    }
    assert_as_if_alone(&bench, &requests);
}

#[test]
fn eight_prompts_of_128_tokens_take_two_steps() {
    let mut bench = EngineHarness::new(ROOMY);
    (1..=8).for_each(|id| bench.send(request(id, prompt(id, 128), 4)));
    bench.step();
    assert_eq!((1..=8).filter(|id| bench.answers.contains_key(id)).count(), 4, "first come, first served");
    bench.step();
    assert!((1..=8).all(|id| bench.answers.contains_key(&id)));
}

#[test]
fn logits_are_computed_for_the_last_chunk_of_a_prompt_only() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 64, ..ROOMY });
    bench.send(request(1, prompt(1, 150), 2));
    bench.finish();
    let seen: Vec<_> =
        bench.log.lock().unwrap().iter().map(|batch| (batch[0].tokens, batch[0].logits)).collect();
    let expected =
        [(64, LogitRows::None), (64, LogitRows::None), (22, LogitRows::Last), (1, LogitRows::Last)];
    assert_eq!(seen, expected);
}

#[test]
fn a_long_prompt_keeps_neither_short_prompts_nor_generation_waiting() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 10), 100));
    bench.step();
    bench.send(request(2, prompt(2, 1900), 4));
    bench.send(request(3, prompt(3, 100), 4));
    bench.step();
    assert_eq!(bench.answer(1).tokens.len(), 2, "generation goes on in every step");
    assert!(bench.answers.contains_key(&3), "the short prompt is done");
    assert!(!bench.answers.contains_key(&2));
    assert_eq!(bench.log.lock().unwrap()[1].iter().map(|seen| seen.tokens).sum::<usize>(), 1 + 384 + 100);
}

#[test]
fn a_request_that_must_wait_for_room_is_not_overtaken_for_ever() {
    let mut bench = EngineHarness::new(EngineLimits { kv_blocks: 16, ..ROOMY });
    bench.send(request(1, prompt(1, 100), 20));
    bench.step();
    // This request fits only alone, while small requests keep coming.
    bench.send(request(2, prompt(2, 200), 40));
    for id in 3..100 {
        bench.send(request(id, prompt(id, 10), 5));
        bench.step();
    }
    assert_eq!(bench.answer(2).finish, Some(Finish::Length));
    bench.finish();
    assert_nothing_held(&bench);
}

#[test]
fn a_penalized_request_that_is_continued_elsewhere_goes_on_as_if_it_had_not_been_cut() {
    let mut one = request(1, prompt(1, 20), 24);
    one.sampling.presence_penalty = 1.5;
    one.sampling.frequency_penalty = 0.7;
    let whole: Vec<u32> = alone(&one).tokens.iter().map(|output| output.token).collect();
    for cut in [1, 7, 23] {
        let mut rest = Generate { generated: cut, max_tokens: 24 - cut, ..one.clone() };
        rest.prompt.extend_from_slice(&whole[..cut as usize]);
        let tokens: Vec<u32> = alone(&rest).tokens.iter().map(|output| output.token).collect();
        assert_eq!(tokens, whole[cut as usize..], "cut after {cut}");
    }
    let nothing_asked = Generate { generated: 20, ..one };
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(nothing_asked);
    bench.finish();
    assert_eq!(bench.answer(1).error, Some(ErrorCode::InvalidRequest));
}

#[test]
fn prompt_log_probabilities_cover_every_prompt_token_but_the_first() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 40, ..ROOMY });
    let mut one = request(1, prompt(1, 150), 2);
    one.prompt_logprobs = Some(3);
    bench.send(Generate { request: 9, prompt_logprobs: None, ..one.clone() });
    bench.finish();
    bench.send(one.clone());
    bench.finish();
    let answer = bench.answer(1);
    assert_eq!(answer.cached_tokens, 0, "a cached token has no logits");
    assert_eq!(answer.prompt.iter().map(|output| output.token).collect::<Vec<_>>(), one.prompt[1..]);
    assert!(answer.prompt.iter().all(|output| output.top.len() == 3 && output.logprob < 0.0));
    assert_eq!(answer.tokens, bench.answer(9).tokens);
    assert_as_if_alone(&bench, &[one]);
}

#[test]
fn a_prompt_can_be_scored_without_generating() {
    let mut bench = EngineHarness::new(ROOMY);
    let mut one = request(1, prompt(1, 30), 0);
    one.prompt_logprobs = Some(0);
    bench.send(one);
    bench.finish();
    let answer = bench.answer(1);
    assert_eq!((answer.tokens.len(), answer.prompt.len(), answer.finish), (0, 29, Some(Finish::Length)));
}

#[test]
fn a_stop_token_ends_a_request_but_not_before_min_tokens() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 10), 20));
    bench.finish();
    let free: Vec<u32> = bench.answer(1).tokens.iter().map(|output| output.token).collect();

    let stopped = Generate { request: 2, stop_tokens: vec![free[3]], ..request(2, prompt(1, 10), 20) };
    bench.send(stopped.clone());
    bench.send(Generate { request: 3, min_tokens: 10, ..stopped });
    bench.finish();
    let first = free.iter().position(|token| *token == free[3]).unwrap();
    assert_eq!(bench.answer(2).tokens.len(), first + 1, "the stop token is the last token");
    assert_eq!(bench.answer(2).finish, Some(Finish::Stop));
    let tokens = &bench.answer(3).tokens;
    assert!(tokens.len() > 10 && tokens[..10].iter().all(|output| output.token != free[3]), "{tokens:?}");
}

#[test]
fn a_request_ends_where_the_context_does() {
    let mut bench = EngineHarness::new(EngineLimits { context_length: 64, ..ROOMY });
    bench.send(request(1, prompt(1, 60), 1000));
    bench.finish();
    assert_eq!((bench.answer(1).tokens.len(), bench.answer(1).finish), (4, Some(Finish::Length)));
}

#[test]
fn what_can_never_fit_is_refused_at_once_with_both_numbers() {
    let mut bench = EngineHarness::new(EngineLimits { kv_blocks: 4, context_length: 100, ..ROOMY });
    bench.send(request(1, prompt(1, 100), 1));
    bench.send(request(2, prompt(1, 60), 6));
    bench.send(request(3, prompt(1, 60), 5));
    let (outbox, mut queue) = mpsc::channel(8);
    bench.engine.handle(EngineEvent::Connected { connection: ConnectionId(2), outbox });
    let received_at = bench.clock.now();
    let request = request(4, prompt(1, 60), 40);
    bench.engine.handle(EngineEvent::Generate { connection: ConnectionId(2), request, received_at });
    bench.step();
    assert_eq!(bench.error(1), Some(ErrorCode::ContextLengthExceeded));
    assert_eq!(bench.error(2), Some(ErrorCode::ContextLengthExceeded));
    let Some(ToGateway::Outputs(outputs)) = queue.blocking_recv() else { panic!("outputs come first") };
    let message = &outputs[0].error.as_ref().unwrap().message;
    assert!(message.contains("need 7 KV blocks, but the pool has 4"), "{message}");
    bench.finish();
    assert_eq!(bench.answer(3).finish, Some(Finish::Length), "this one fits exactly");
}

#[test]
fn what_makes_no_sense_is_refused_and_the_others_go_on() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 10), 5));
    bench.send(request(2, Vec::new(), 5));
    bench.send(request(3, vec![VOCAB as u32], 5));
    bench.send(Generate { stop_tokens: vec![u32::MAX], ..request(4, prompt(1, 10), 5) });
    bench.send(Generate { logprobs: Some(21), ..request(5, prompt(1, 10), 5) });
    let mut hot = request(6, prompt(1, 10), 5);
    hot.sampling.temperature = f32::NAN;
    bench.send(hot);
    bench.send(Generate { adapter: Some([9; 32]), ..request(7, prompt(1, 10), 5) });
    bench.finish();
    assert!((2..7).all(|id| bench.error(id) == Some(ErrorCode::InvalidRequest)), "{:?}", bench.answers);
    assert_eq!(bench.error(7), Some(ErrorCode::AdapterNotFound), "never a silent answer of the base model");
    assert_eq!(bench.answer(1).finish, Some(Finish::Length));
}

#[test]
fn the_first_output_says_how_long_the_request_waited_for_its_turn() {
    let mut bench = EngineHarness::new(EngineLimits { max_running: 1, ..ROOMY });
    bench.send(request(1, prompt(1, 10), 3));
    bench.send(request(2, prompt(2, 10), 3));
    for _ in 0..8 {
        bench.step();
        *bench.clock.0.lock().unwrap() += Duration::from_millis(10);
    }
    assert_eq!(bench.answer(1).queued_us, 0);
    assert_eq!(bench.answer(2).queued_us, 30_000, "while the first took three steps");
}

#[test]
fn the_figures_say_for_each_adapter_how_many_run_and_how_many_wait() {
    let mut bench = EngineHarness::new(EngineLimits { max_running: 3, ..ROOMY });
    [1, 2].into_iter().for_each(|tag| bench.load(tag));
    for (id, adapter) in [(1, Some(1)), (2, Some(2)), (3, None), (4, Some(2)), (5, Some(2))] {
        let adapter = adapter.map(|tag| [tag; 32]);
        bench.send(Generate { adapter, ..request(id, prompt(id, 10), 5) });
    }
    bench.step();
    let stats = bench.stats();
    let lines: Vec<_> =
        stats.adapters.iter().map(|line| (line.adapter[0], line.running, line.waiting)).collect();
    assert_eq!(lines, [(1, 1, 0), (2, 1, 2)]);
    assert_eq!((stats.running, stats.waiting), (3, 2), "one of them on the base model alone");
    bench.finish();
    assert_nothing_held(&bench);
}

#[test]
fn as_many_requests_are_taken_as_may_run_and_wait_even_if_blocks_are_short() {
    let mut bench =
        EngineHarness::new(EngineLimits { max_running: 3, max_waiting: 1, kv_blocks: 8, ..ROOMY });
    (1..=5).for_each(|id| bench.send(request(id, prompt(id, 80), 5)));
    bench.finish();
    let full: Vec<u64> = (1..=5).filter(|id| bench.error(*id) == Some(ErrorCode::QueueFull)).collect();
    assert_eq!(full, [5], "gateways count on it");
    assert_nothing_held(&bench);
}
