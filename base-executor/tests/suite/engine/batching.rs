//! Continuous batching and chunked prefill: which tokens of which requests a step computes.

use super::*;

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
