//! Rejections, timeouts and survived faults of the engine: full queues, deadlines, panics, lost gateways,
//! shutdown.

use scheduling::clock::Clock as _;

use super::{
    AdapterUnloaded, ConnectionId, Duration, EngineEvent, EngineHarness, EngineLimits, ErrorCode,
    FALLS_SHORT, Finish, Generate, HOPELESS, PANICS, ROOMY, THIRSTY, ToGateway, VOCAB, assert_as_if_alone,
    assert_nothing_held, mpsc, prompt, request,
};

#[test]
fn a_full_queue_is_an_answer() {
    let mut bench = EngineHarness::new(EngineLimits { max_running: 2, max_waiting: 3, ..ROOMY });
    (1..=7).for_each(|id| bench.send(request(id, prompt(id, 10), 5)));
    bench.finish();
    let full: Vec<u64> = (1..=7).filter(|id| bench.error(*id) == Some(ErrorCode::QueueFull)).collect();
    assert_eq!(full, [6, 7]);
    assert!((1..=5).all(|id| bench.answer(id).finish.is_some()));
    bench.send(request(8, prompt(8, 10), 5));
    bench.finish();
    assert_eq!(bench.error(8), None);
}

#[test]
fn prompts_that_wait_are_bounded_in_tokens_but_one_alone_is_never_too_long() {
    let mut bench = EngineHarness::new(EngineLimits { max_running: 1, max_waiting_tokens: 100, ..ROOMY });
    bench.send(request(1, prompt(1, 10), 5));
    bench.step();
    (2..=4).for_each(|id| bench.send(request(id, prompt(id, 40), 5)));
    bench.finish();
    assert_eq!((bench.error(3), bench.error(4)), (None, Some(ErrorCode::QueueFull)), "80 tokens wait");
    bench.send(request(5, prompt(5, 200), 5));
    bench.finish();
    assert_eq!(bench.error(5), None);
}

#[test]
fn a_deadline_ends_what_waits_and_what_runs() {
    let mut bench = EngineHarness::new(EngineLimits { max_running: 1, ..ROOMY });
    bench.send(Generate { deadline_ms: 100, ..request(1, prompt(1, 10), 50) });
    bench.send(Generate { deadline_ms: 100, ..request(2, prompt(2, 10), 50) });
    bench.send(request(3, prompt(3, 10), 5));
    bench.step();
    *bench.clock.0.lock().unwrap() += Duration::from_millis(99);
    bench.step();
    assert_eq!(bench.answer(1).tokens.len(), 2);
    *bench.clock.0.lock().unwrap() += Duration::from_millis(1);
    bench.finish();
    assert_eq!(bench.error(1), Some(ErrorCode::DeadlineExceeded));
    assert_eq!(bench.answer(1).tokens.len(), 2, "what was generated in time stands");
    assert_eq!(bench.error(2), Some(ErrorCode::DeadlineExceeded));
    assert_eq!(bench.answer(3).finish, Some(Finish::Length));
    assert_nothing_held(&bench);
}

#[test]
fn a_panic_about_one_request_is_that_requests_error() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 10), 20));
    bench.step();
    // The row of this request is the last of the step, and so the one that is too short.
    bench.send(request(2, vec![1, 2, FALLS_SHORT], 20));
    bench.finish();
    assert_eq!(bench.error(2), Some(ErrorCode::Internal));
    assert_as_if_alone(&bench, &[request(1, prompt(1, 10), 20)]);
    assert_nothing_held(&bench);
}

#[test]
fn a_panic_of_the_forward_pass_fails_its_batch_and_the_engine_goes_on() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, vec![1, 2, PANICS], 20));
    bench.step();
    assert_eq!(bench.error(1), Some(ErrorCode::Internal));
    let after = request(2, prompt(2, 40), 20);
    bench.send(after.clone());
    bench.finish();
    assert_as_if_alone(&bench, &[after]);
    assert_nothing_held(&bench);
}

#[test]
fn a_step_without_memory_is_done_in_parts_and_who_needs_more_alone_is_refused() {
    let mut bench = EngineHarness::new(ROOMY);
    let others: Vec<_> = (1..=6).map(|id| request(id, prompt(id, 30), 12)).collect();
    others.iter().for_each(|other| bench.send(other.clone()));
    bench.step();
    // The token is at the end of a prompt that fits in parts.
    let thirsty = request(7, [prompt(7, 90), vec![THIRSTY], prompt(8, 9)].concat(), 12);
    bench.send(thirsty.clone());
    bench.send(request(8, [prompt(9, 40), vec![HOPELESS]].concat(), 12));
    bench.send(request(9, prompt(10, 40), 12));
    bench.finish();
    assert_eq!(bench.error(8), Some(ErrorCode::NoMemory));
    assert_eq!(bench.answer(8).tokens, []);
    assert_eq!(bench.answer(7).finish, Some(Finish::Length));
    assert_as_if_alone(&bench, &others);
    assert_as_if_alone(&bench, &[thirsty, request(9, prompt(10, 40), 12)]);
    assert_nothing_held(&bench);
}

#[test]
fn unloading_drains_then_frees_blocks_and_bytes_then_answers() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(1);
    bench.send(Generate { adapter: Some([1; 32]), ..request(1, prompt(1, 40), 10) });
    bench.step();
    bench.unload(1);
    bench.send(Generate { adapter: Some([1; 32]), ..request(2, prompt(1, 40), 10) });
    bench.step();
    assert_eq!(bench.error(2), Some(ErrorCode::AdapterNotFound));
    let gone = ToGateway::AdapterUnloaded(AdapterUnloaded { request: 1, adapter: [1; 32], freed_bytes: 10 });
    assert!(!bench.others.contains(&gone), "a request still runs");
    bench.finish();
    assert_eq!(bench.answer(1).tokens.len(), 10);
    assert!(bench.others.contains(&gone));
    let stats = bench.stats();
    assert_eq!((stats.kv_blocks_cached, stats.adapter_bytes, bench.budget.held_bytes()), (0, 0, 0));
    bench.unload(1);
    bench.step();
    assert!(
        matches!(bench.others.last(), Some(ToGateway::Failed(failed)) if failed.error.code == ErrorCode::AdapterNotFound)
    );
}

#[test]
fn loading_an_adapter_again_answers_and_changes_nothing() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(1);
    bench.load(1);
    bench.step();
    let loaded = bench.others.iter().filter(|message| {
        matches!(message, ToGateway::AdapterLoaded(loaded) if loaded.adapter == [1; 32] && loaded.generation == [101; 32])
    });
    assert_eq!(loaded.count(), 2);
    assert_eq!((bench.stats().adapters.len(), bench.budget.held_bytes()), (1, 10));
}

#[test]
fn a_gateway_that_is_gone_leaves_nothing_behind_and_the_others_undisturbed() {
    let mut bench = EngineHarness::new(ROOMY);
    let (outbox, queue) = mpsc::channel(8);
    bench.engine.handle(EngineEvent::Connected { connection: ConnectionId(2), outbox });
    let received_at = bench.clock.now();
    let theirs = request(1, prompt(1, 40), 50);
    bench.engine.handle(EngineEvent::Generate { connection: ConnectionId(2), request: theirs, received_at });
    let ours = request(1, prompt(2, 40), 50);
    bench.send(ours.clone());
    bench.step();
    assert_eq!(bench.stats().running, 2);
    drop(queue);
    bench.step();
    assert_eq!((bench.stats().running, bench.stats().cancelled), (1, 1));
    bench.finish();
    assert_as_if_alone(&bench, &[ours]);
    assert_nothing_held(&bench);
}

#[test]
fn a_gateway_that_does_not_read_is_given_up() {
    let mut bench = EngineHarness::new(ROOMY);
    let (outbox, queue) = mpsc::channel(4);
    bench.engine.handle(EngineEvent::Connected { connection: ConnectionId(2), outbox });
    let received_at = bench.clock.now();
    let request = request(1, prompt(1, 40), 50);
    bench.engine.handle(EngineEvent::Generate { connection: ConnectionId(2), request, received_at });
    (0..10).for_each(|_| bench.step());
    assert_eq!((bench.stats().running, bench.stats().cancelled), (0, 1));
    assert_eq!(queue.len(), 4, "what was queued is still theirs");
    assert!(queue.is_closed());
}

#[test]
fn draining_refuses_what_is_new_finishes_what_runs_and_gives_up_at_the_end_of_the_grace() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(request(1, prompt(1, 10), 3));
    bench.send(request(2, prompt(2, 10), 1000));
    bench.step();
    let until = bench.clock.now() + Duration::from_secs(1);
    bench.engine.handle(EngineEvent::Drain { until });
    bench.send(request(3, prompt(3, 10), 3));
    (0..5).for_each(|_| bench.step());
    assert_eq!(bench.error(3), Some(ErrorCode::ShuttingDown));
    assert_eq!(bench.answer(1).finish, Some(Finish::Length));
    assert_eq!(bench.stats().running, 1);
    *bench.clock.0.lock().unwrap() = until;
    bench.step();
    assert_eq!(bench.error(2), Some(ErrorCode::ShuttingDown));
    assert!(bench.engine.is_idle());
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
fn as_many_requests_are_taken_as_may_run_and_wait_even_if_blocks_are_short() {
    let mut bench =
        EngineHarness::new(EngineLimits { max_running: 3, max_waiting: 1, kv_blocks: 8, ..ROOMY });
    (1..=5).for_each(|id| bench.send(request(id, prompt(id, 80), 5)));
    bench.finish();
    let full: Vec<u64> = (1..=5).filter(|id| bench.error(*id) == Some(ErrorCode::QueueFull)).collect();
    assert_eq!(full, [5], "gateways count on it");
    assert_nothing_held(&bench);
}
