//! Requests of the engine whose adapter is not on the device, over a fake placement that the test controls.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use base_executor::{
    adapters::{AdapterLoadOutcome, Budget},
    engine::{
        Engine, EngineLimits,
        event::{ConnectionId, EngineEvent, RequestKey},
    },
    kv_offload::KvOffload,
    placement::{AdapterAvailability, LoadCompletion, Placement, PlacementError},
};
use kv_cache::ledger::MemoryAccount;
use kv_cache::{Cache, CacheSettings};
use model::forward::BLOCK_TOKENS;
use scheduling::clock::{Clock, SystemClock};
use shmproto::message::{
    ColdStart, ErrorCode, Finish, Generate, Output, Stats, ToGateway, UnloadAdapter, Welcome,
};
use testkit::WATCHDOG;
use tokio::sync::mpsc;
use types::AdapterId;

use crate::{
    common::{FakeAdapter, FakePass, PANICS, prompt, request, resident},
    engine::{ROOMY, welcome},
};

const GATEWAY: ConnectionId = ConnectionId(1);

/// State of the fake placement, and the engine's calls to it.
#[derive(Debug, Default)]
struct FakePlacementState {
    there: HashSet<u8>,
    /// Whether a request with a missing adapter starts; otherwise it waits.
    starts_cold: bool,
    /// Maximum number of adapters that requests hold; 0 means unlimited.
    room: usize,
    loads: Option<Result<LoadCompletion, PlacementError>>,
    held: BTreeMap<u8, u32>,
    /// Pending tokens of every request that called the placement.
    asked: Vec<usize>,
    /// Adapters in the order in which requests acquired them.
    entered: Vec<u8>,
    loaded: Vec<u8>,
    unloaded: Vec<u8>,
}

#[derive(Debug, Clone, Default)]
struct FakeTier(Arc<Mutex<FakePlacementState>>);

impl FakeTier {
    fn world(&self) -> MutexGuard<'_, FakePlacementState> {
        self.0.lock().unwrap()
    }
}

impl Placement<FakeAdapter> for FakeTier {
    fn blocks_of(&self, _: AdapterId, _: &FakeAdapter) -> Option<u32> {
        Some(1)
    }

    fn loaded(
        &mut self,
        _: &mut Cache,
        id: AdapterId,
        _: &Arc<FakeAdapter>,
    ) -> Result<LoadCompletion, PlacementError> {
        let mut world = self.world();
        world.loaded.push(id.0[0]);
        world.loads.unwrap_or(Ok(LoadCompletion::Now))
    }

    fn unloaded(&mut self, _: &mut Cache, id: AdapterId) {
        let mut world = self.world();
        assert_eq!(world.held.get(&id.0[0]), None, "what is unloaded has no users");
        world.unloaded.push(id.0[0]);
    }

    fn arrived(&mut self, _: &mut Cache, id: AdapterId) {
        self.world().there.insert(id.0[0]);
    }

    fn begin_use(
        &mut self,
        _: &mut Cache,
        id: AdapterId,
        adapter: &Arc<FakeAdapter>,
        tokens: usize,
    ) -> AdapterAvailability {
        assert_eq!(u64::from(id.0[0]), adapter.0);
        let (mut world, id) = (self.world(), id.0[0]);
        world.asked.push(tokens);
        let is_full = world.room > 0 && world.held.len() >= world.room && !world.held.contains_key(&id);
        let found = match (world.there.contains(&id), world.starts_cold) {
            _ if is_full => return AdapterAvailability::MustWait,
            (true, _) => AdapterAvailability::OnDevice,
            (false, true) => AdapterAvailability::Missing,
            (false, false) => return AdapterAvailability::MustWait,
        };
        *world.held.entry(id).or_default() += 1;
        world.entered.push(id);
        found
    }

    fn end_use(&mut self, _: &mut Cache, id: AdapterId) {
        let mut world = self.world();
        let users = world.held.get_mut(&id.0[0]).expect("who leaves has entered");
        *users -= 1;
        if *users == 0 {
            world.held.remove(&id.0[0]);
        }
    }
}

#[derive(Debug, Clone)]
struct TestClock(Arc<Mutex<Instant>>);

impl Clock for TestClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }
}

struct ColdStartHarness {
    engine: Engine<FakePass>,
    queue: mpsc::Receiver<ToGateway>,
    clock: TestClock,
    tier: FakeTier,
    budget: Budget,
    outputs: Vec<Output>,
    others: Vec<ToGateway>,
}

impl ColdStartHarness {
    /// Creates an engine with adapters 1 to 4 in the host tier, and none on the device.
    fn new(limits: EngineLimits) -> Self {
        let clock = TestClock(Arc::new(Mutex::new(Instant::now())));
        let tier = FakeTier::default();
        let engine = engine(limits, Box::new(clock.clone()), &tier);
        let (queue, budget, outputs, others) =
            (mpsc::channel(1).1, Budget::new(MemoryAccount::new("adapters", 1000)), Vec::new(), Vec::new());
        let mut bench = Self { engine, queue, clock, tier, budget, outputs, others };
        bench.queue = bench.connect(GATEWAY);
        (1..=4).for_each(|tag| bench.load(tag));
        bench.step();
        bench
    }

    fn connect(&mut self, connection: ConnectionId) -> mpsc::Receiver<ToGateway> {
        let (outbox, queue) = mpsc::channel(1024);
        self.engine.handle(EngineEvent::Connected { connection, outbox });
        queue
    }

    fn load(&mut self, tag: u8) {
        let event = load(&self.budget, tag);
        self.engine.handle(event);
    }

    fn unload(&mut self, tag: u8) {
        let call = UnloadAdapter { request: 200 + u64::from(tag), adapter: [tag; 32] };
        self.engine.handle(EngineEvent::UnloadAdapter { connection: GATEWAY, call });
    }

    fn send(&mut self, request: Generate) {
        let received_at = self.clock.now();
        self.engine.handle(EngineEvent::Generate { connection: GATEWAY, request, received_at });
    }

    fn arrive(&mut self, tag: u8) {
        self.engine.handle(EngineEvent::AdapterArrived(AdapterId([tag; 32])));
    }

    fn pass_ms(&self, ms: u64) {
        *self.clock.0.lock().unwrap() += Duration::from_millis(ms);
    }

    fn step(&mut self) {
        self.engine.step();
        while let Ok(message) = self.queue.try_recv() {
            match message {
                ToGateway::Outputs(batch) => self.outputs.extend(batch),
                other => self.others.push(other),
            }
        }
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    /// Steps until there is no request; then no adapter is held.
    fn finish(&mut self) {
        let end = Instant::now() + WATCHDOG;
        while !self.engine.is_idle() {
            self.step();
            assert!(Instant::now() < end, "the engine makes no progress: {:?}", self.engine);
        }
        self.step();
        self.assert_nothing_held();
    }

    fn assert_nothing_held(&self) {
        let stats = self.stats();
        assert_eq!((stats.waiting, stats.running, stats.kv_blocks_used), (0, 0, 0));
        assert!(self.tier.world().held.is_empty(), "who entered has left: {:?}", self.tier.world());
    }

    fn stats(&self) -> Stats {
        self.engine.stats(0)
    }

    fn of(&self, request: u64) -> impl Iterator<Item = &Output> {
        self.outputs.iter().filter(move |output| output.request == request)
    }

    fn tokens(&self, request: u64) -> Vec<u32> {
        self.of(request).flat_map(|output| &output.tokens).map(|output| output.token).collect()
    }

    fn error(&self, request: u64) -> Option<ErrorCode> {
        self.of(request).last()?.error.as_ref().map(|error| error.code)
    }

    fn order(&self) -> Vec<u64> {
        let mut order = Vec::new();
        self.outputs.iter().for_each(|output| {
            if !order.contains(&output.request) {
                order.push(output.request);
            }
        });
        order
    }
}

fn engine(limits: EngineLimits, clock: Box<dyn Clock>, tier: &FakeTier) -> Engine<FakePass> {
    let welcome = Welcome { cold_start: ColdStart::OnDemand, ..welcome() };
    Engine::new(FakePass::new(limits.kv_blocks).0, limits, welcome, clock)
        .with_placement(Box::new(tier.clone()))
}

/// Event of the loader for adapter `tag`; its call has the number 100 + `tag`.
fn load(budget: &Budget, tag: u8) -> EngineEvent<FakeAdapter> {
    let id = AdapterId([tag; 32]);
    let caller = RequestKey { connection: GATEWAY, request: 100 + u64::from(tag) };
    let Ok(claim) = budget.claim(id, 10) else {
        return EngineEvent::AdapterLoaded { caller: Some(caller), loaded: AdapterLoadOutcome::Known(id) };
    };
    let loaded = AdapterLoadOutcome::New(resident(Arc::new(FakeAdapter(tag.into())), claim));
    EngineEvent::AdapterLoaded { caller: Some(caller), loaded }
}

fn on(tag: u8, id: u64) -> Generate {
    Generate { adapter: Some([tag; 32]), ..request(id, prompt(id, 20), 4) }
}

/// Tokens of the request with its adapter on the device from the start.
fn warm_tokens(request: &Generate) -> Vec<u32> {
    let mut bench = ColdStartHarness::new(ROOMY);
    (1..=4).for_each(|tag| bench.arrive(tag));
    bench.send(request.clone());
    bench.finish();
    assert_eq!(bench.stats().cold_starts, 0);
    bench.tokens(request.request)
}

#[test]
fn a_request_waits_for_its_adapter_and_its_neighbours_go_on() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 20), 30));
    bench.step();
    bench.send(on(1, 2));
    bench.send(on(2, 3));
    bench.arrive(2);
    bench.steps(10);
    assert_eq!(bench.tokens(1).len(), 11, "a token in every step");
    assert_eq!(bench.tokens(3), warm_tokens(&on(2, 3)), "another adapter is there, and serves");
    assert_eq!((bench.of(2).count(), bench.stats().waiting), (0, 1));
    bench.arrive(1);
    bench.finish();
    assert_eq!(bench.tokens(2), warm_tokens(&on(1, 2)), "as if it had not waited");
    assert_eq!(bench.tokens(1).len(), 30);
}

#[test]
fn a_request_that_starts_while_its_adapter_travels_does_not_wait() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.tier.world().starts_cold = true;
    bench.send(on(1, 1));
    bench.step();
    assert_eq!(bench.tokens(1).len(), 1);
    bench.finish();
    assert_eq!(bench.tokens(1), warm_tokens(&on(1, 1)));
    assert_eq!((bench.stats().cold_starts, bench.stats().load_wait_us), (1, 0));
}

#[test]
fn an_adapter_that_was_asked_for_is_brought_back_while_there_is_nothing_to_do() {
    let mut bench = ColdStartHarness::new(ROOMY);
    // A pool shared with adapters, although none of these has blocks in it.
    let blocks = CacheSettings::device_alone(ROOMY.kv_blocks, BLOCK_TOKENS);
    let pool = Cache::new(CacheSettings { max_adapter_blocks: 100, ..blocks });
    bench.engine = bench.engine.with_memory(pool, KvOffload::default());
    (1..=2).for_each(|tag| bench.arrive(tag));
    bench.send(on(2, 1));
    bench.finish();
    bench.step();
    let offered = |bench: &ColdStartHarness| bench.tier.world().loaded.clone();
    assert_eq!(offered(&bench).iter().filter(|tag| **tag == 1).count(), 1, "nobody asked for it");
    assert!(offered(&bench).iter().filter(|tag| **tag == 2).count() > 1);
}

#[test]
fn those_that_waited_for_their_adapter_go_ahead_of_newcomers_in_their_own_order() {
    let mut bench = ColdStartHarness::new(EngineLimits { max_running: 1, ..ROOMY });
    bench.send(on(1, 1));
    bench.send(on(2, 2));
    bench.send(on(1, 3));
    bench.step();
    assert_eq!(bench.stats().waiting, 3, "cold ones keep no place among those that run");
    (4..=6).for_each(|id| bench.send(request(id, prompt(id, 20), 4)));
    bench.step();
    bench.arrive(1);
    bench.arrive(2);
    bench.finish();
    assert_eq!(bench.order(), [4, 1, 2, 3, 5, 6], "the fourth ran already");
}

#[test]
fn one_whose_adapter_is_still_missing_holds_up_nobody_who_waited_with_it() {
    let mut bench = ColdStartHarness::new(ROOMY);
    [on(1, 1), on(2, 2), on(1, 3), on(3, 4)].into_iter().for_each(|one| bench.send(one));
    bench.step();
    bench.arrive(2);
    bench.steps(6);
    assert_eq!((bench.tokens(2).len(), bench.stats().waiting), (4, 3));
    bench.arrive(3);
    bench.steps(6);
    assert_eq!((bench.tokens(4).len(), bench.stats().waiting), (4, 2));
    bench.arrive(1);
    bench.finish();
    let mut finished: Vec<_> =
        bench.outputs.iter().filter(|output| output.finish == Some(Finish::Length)).collect();
    finished.dedup_by_key(|output| output.request);
    assert_eq!(finished.len(), 4);
}

#[test]
fn the_first_output_and_the_figures_say_what_was_waited_for_the_adapter() {
    let mut bench = ColdStartHarness::new(EngineLimits { max_running: 1, ..ROOMY });
    bench.send(request(9, prompt(9, 20), 3));
    bench.step();
    bench.send(on(1, 1));
    bench.pass_ms(5);
    bench.step();
    bench.pass_ms(5);
    bench.step();
    // With a free slot, the engine checks the request, which begins to wait for its adapter.
    bench.step();
    bench.pass_ms(7);
    bench.step();
    bench.pass_ms(13);
    bench.arrive(1);
    bench.finish();
    let waits: Vec<_> = bench.of(1).map(|output| (output.queued_us, output.load_wait_us)).collect();
    assert_eq!(waits, [(30_000, 20_000), (0, 0), (0, 0), (0, 0)]);
    bench.send(on(1, 2));
    bench.finish();
    let stats = bench.stats();
    assert_eq!((stats.cold_starts, stats.load_wait_us), (1, 20_000), "the second found it on the device");
    let lines: Vec<_> = stats.adapters.iter().map(|line| (line.cold_starts, line.load_wait_us)).collect();
    assert_eq!(lines, [(1, 20_000), (0, 0), (0, 0), (0, 0)]);
    assert_eq!(bench.tier.world().asked[0], 20, "the placement is told the pending tokens");
}

#[test]
fn a_cold_request_that_is_cancelled_or_whose_gateway_is_gone_leaves_nothing_behind() {
    let mut bench = ColdStartHarness::new(ROOMY);
    let theirs = ConnectionId(2);
    let queue = bench.connect(theirs);
    bench.send(on(1, 1));
    bench.send(on(1, 2));
    let received_at = bench.clock.now();
    bench.engine.handle(EngineEvent::Generate { connection: theirs, request: on(2, 1), received_at });
    bench.step();
    assert_eq!(bench.stats().waiting, 3);
    bench.engine.handle(EngineEvent::Cancel(RequestKey { connection: GATEWAY, request: 1 }));
    bench.engine.handle(EngineEvent::Disconnected(theirs));
    drop(queue);
    bench.step();
    assert_eq!((bench.stats().waiting, bench.stats().cancelled), (1, 2));
    bench.arrive(1);
    bench.finish();
    assert_eq!((bench.of(1).count(), bench.tokens(2).len()), (0, 4));
    assert_eq!(bench.tier.world().entered, [1], "who has left holds nothing");
}

#[test]
fn a_deadline_ends_what_waits_for_its_adapter() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.send(Generate { deadline_ms: 100, ..on(1, 1) });
    bench.send(Generate { deadline_ms: 300, ..on(1, 2) });
    bench.step();
    bench.pass_ms(100);
    bench.step();
    assert_eq!((bench.error(1), bench.error(2)), (Some(ErrorCode::DeadlineExceeded), None));
    bench.arrive(1);
    bench.finish();
    assert_eq!(bench.tokens(2).len(), 4);
}

#[test]
fn draining_waits_for_a_cold_request_and_gives_it_up_at_the_end_of_the_grace() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.send(on(1, 1));
    bench.send(on(2, 2));
    bench.step();
    let until = bench.clock.now() + Duration::from_secs(1);
    bench.engine.handle(EngineEvent::Drain { until });
    bench.arrive(1);
    bench.steps(6);
    assert_eq!(bench.tokens(1).len(), 4, "it was accepted, so it is served");
    assert!(!bench.engine.is_idle());
    bench.pass_ms(1000);
    bench.step();
    assert_eq!(bench.error(2), Some(ErrorCode::ShuttingDown));
    bench.finish();
}

#[test]
fn cold_requests_count_among_those_that_wait() {
    let mut bench = ColdStartHarness::new(EngineLimits { max_running: 2, max_waiting: 1, ..ROOMY });
    (1..=3).for_each(|id| bench.send(on(1, id)));
    bench.step();
    bench.send(request(4, prompt(4, 20), 4));
    bench.step();
    assert_eq!(bench.error(4), Some(ErrorCode::QueueFull));
    bench.arrive(1);
    bench.finish();
    assert!((1..=3).all(|id| bench.tokens(id).len() == 4));
}

#[test]
fn one_that_gives_way_to_others_keeps_its_hold_on_the_adapter() {
    let mut bench = ColdStartHarness::new(EngineLimits { kv_blocks: 8, ..ROOMY });
    bench.arrive(1);
    (1..=3).for_each(|id| bench.send(Generate { max_tokens: 60, ..on(1, id) }));
    let end = Instant::now() + WATCHDOG;
    while bench.stats().preemptions == 0 {
        bench.step();
        assert!(Instant::now() < end, "nobody had to give way");
    }
    let users = bench.tier.world().held[&1];
    assert_eq!(users as usize, bench.tier.world().entered.len(), "nobody has left");
    assert!(bench.stats().waiting > 0);
    // Without the lease the adapter could leave the device, and the request would wait again.
    bench.tier.world().there.clear();
    bench.finish();
    assert_eq!(bench.tier.world().entered, [1, 1, 1], "everyone enters once");
    assert_eq!(bench.stats().cold_starts, 0);
    for id in 1..=3 {
        assert_eq!(bench.tokens(id), warm_tokens(&Generate { max_tokens: 60, ..on(1, id) }));
    }
}

#[test]
fn a_pass_that_fails_lets_go_of_its_adapters() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.arrive(1);
    bench.send(Generate { prompt: vec![1, 2, PANICS], ..on(1, 1) });
    bench.step();
    assert_eq!(bench.error(1), Some(ErrorCode::Internal));
    bench.finish();
}

#[test]
fn an_adapter_is_unloaded_after_the_last_request_that_waits_for_it() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.send(on(1, 1));
    bench.step();
    bench.unload(1);
    bench.send(on(1, 2));
    bench.step();
    assert_eq!(bench.error(2), Some(ErrorCode::AdapterNotFound));
    assert!(bench.tier.world().unloaded.is_empty());
    bench.arrive(1);
    bench.finish();
    assert_eq!(bench.tokens(1).len(), 4);
    assert_eq!(bench.tier.world().unloaded, [1]);
    let is_gone =
        |message: &ToGateway| matches!(message, ToGateway::AdapterUnloaded(gone) if gone.request == 201);
    assert!(bench.others.iter().any(is_gone));
}

#[test]
fn a_load_is_answered_when_the_adapter_has_arrived_where_it_must_be_there() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.tier.world().loads = Some(Ok(LoadCompletion::Later));
    bench.load(5);
    bench.load(5);
    bench.step();
    let answers = |bench: &ColdStartHarness| {
        let is_answer =
            |message: &&ToGateway| matches!(message, ToGateway::AdapterLoaded(it) if it.request == 105);
        bench.others.iter().filter(is_answer).count()
    };
    assert_eq!((answers(&bench), bench.tier.world().loaded.iter().filter(|tag| **tag == 5).count()), (0, 1));
    bench.arrive(5);
    bench.step();
    assert_eq!(answers(&bench), 2, "both calls");
    bench.arrive(5);
    bench.step();
    assert_eq!(answers(&bench), 2, "and each once");
}

#[test]
fn a_load_that_cannot_be_placed_is_refused_and_keeps_no_bytes() {
    let mut bench = ColdStartHarness::new(ROOMY);
    let (asked_bytes, held_bytes, limit_bytes) = (30, 80, 100);
    bench.tier.world().loads = Some(Err(PlacementError::TierFull { asked_bytes, held_bytes, limit_bytes }));
    bench.load(5);
    bench.step();
    let Some(ToGateway::Failed(failed)) = bench.others.last() else { panic!("{:?}", bench.others) };
    assert_eq!((failed.request, failed.error.code), (105, ErrorCode::AdapterBudgetExceeded));
    let message = &failed.error.message;
    assert!(message.contains("30 bytes") && message.contains("80") && message.contains("100"), "{message}");
    assert_eq!((bench.stats().adapters.len(), bench.budget.held_bytes()), (4, 40));
    bench.tier.world().loads = None;
    bench.load(5);
    bench.step();
    assert!(matches!(bench.others.last(), Some(ToGateway::AdapterLoaded(_))), "there is room now");
}

#[test]
fn unloading_an_adapter_on_its_way_answers_who_loads_it_and_the_next_load_is_placed_anew() {
    let mut bench = ColdStartHarness::new(ROOMY);
    bench.tier.world().loads = Some(Ok(LoadCompletion::Later));
    bench.load(5);
    bench.unload(5);
    bench.load(5);
    bench.step();
    let failed: HashMap<_, _> = bench
        .others
        .iter()
        .filter_map(|message| match message {
            ToGateway::Failed(failed) => Some((failed.request, failed.error.code)),
            _ => None,
        })
        .collect();
    assert_eq!(failed, HashMap::from([(105, ErrorCode::AdapterNotFound)]));
    let world = bench.tier.world();
    assert_eq!(world.loaded.iter().filter(|tag| **tag == 5).count(), 2, "the second is another adapter");
}

#[test]
fn room_that_the_last_request_leaves_wakes_the_one_that_waits_for_it() {
    let tier = FakeTier::default();
    let engine = engine(ROOMY, Box::new(SystemClock), &tier);
    tier.world().room = 1;
    tier.world().there.extend([1, 2]);
    let (events_sender, events) = mpsc::channel(64);
    let (outbox, mut queue) = mpsc::channel(1024);
    events_sender.blocking_send(EngineEvent::Connected { connection: GATEWAY, outbox }).unwrap();
    let budget = Budget::new(MemoryAccount::new("adapters", 1000));
    for tag in [1, 2] {
        events_sender.blocking_send(load(&budget, tag)).unwrap();
        let request = on(tag, tag.into());
        let event = EngineEvent::Generate { connection: GATEWAY, request, received_at: Instant::now() };
        events_sender.blocking_send(event).unwrap();
    }
    let running = thread::spawn(move || engine.run(events).unwrap());
    let (told, finished) = std::sync::mpsc::channel();
    thread::spawn(move || {
        while let Some(message) = queue.blocking_recv() {
            let ToGateway::Outputs(outputs) = message else { continue };
            outputs
                .iter()
                .filter(|output| output.finish.is_some())
                .for_each(|it| told.send(it.request).unwrap());
        }
    });
    // The engine gets no further event.
    let finished: Vec<u64> = (0..2).map(|_| finished.recv_timeout(WATCHDOG).expect("it is stuck")).collect();
    assert_eq!(finished, [1, 2]);
    drop(events_sender);
    running.join().unwrap();
}
