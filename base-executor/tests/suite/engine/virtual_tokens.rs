//! Requests of prefix adapters: their virtual tokens are computed and cached, but do not count as prompt.

use scheduling::clock::Clock as _;

use super::{
    ConnectionId, EngineEvent, EngineHarness, EngineLimits, ErrorCode, Finish, Generate, LogitRows, PREFIX,
    ROOMY, ToGateway, alone, assert_as_if_alone, assert_nothing_held, mpsc, prompt, request, with_prefix,
};

#[test]
fn virtual_tokens_are_computed_and_kept_but_are_nobodys_prompt() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(PREFIX);
    let first = with_prefix(request(1, prompt(5, 50), 5));
    let second = Generate { request: 2, ..first.clone() };
    bench.send(first.clone());
    bench.finish();
    let seen = bench.log.lock().unwrap()[0][0];
    assert_eq!((seen.start, seen.tokens), (0, 70), "the prefix is computed before the prompt");
    assert_eq!(bench.stats().prompt_tokens, 50);
    bench.send(second.clone());
    bench.finish();
    assert_eq!((bench.answer(1).cached_tokens, bench.answer(2).cached_tokens), (0, 44), "64 - 20");
    assert_eq!((bench.stats().prompt_tokens, bench.stats().cached_tokens), (56, 44));
    // Only the prefix is shared: one full block without tokens of the prompt.
    bench.send(with_prefix(request(3, prompt(6, 50), 5)));
    bench.finish();
    assert_eq!((bench.answer(3).cached_tokens, bench.stats().prompt_tokens), (0, 106));
    assert_as_if_alone(&bench, &[first, second]);
    assert_nothing_held(&bench);
}

#[test]
fn a_prefix_is_no_other_adapters_and_not_the_bases() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(PREFIX);
    let plain = request(1, [vec![0; 20], prompt(5, 50)].concat(), 5);
    let adapted = with_prefix(request(2, prompt(5, 50), 5));
    for one in [&plain, &adapted] {
        bench.send(one.clone());
        bench.finish();
        assert_eq!(bench.answer(one.request).cached_tokens, 0);
    }
    assert_as_if_alone(&bench, &[plain, adapted]);
}

#[test]
fn the_context_holds_virtual_tokens_too_and_its_refusal_says_so() {
    let mut bench = EngineHarness::new(EngineLimits { context_length: 64, ..ROOMY });
    bench.load(PREFIX);
    bench.send(with_prefix(request(1, prompt(1, 40), 1000)));
    bench.send(with_prefix(request(2, prompt(1, 44), 1)));
    let (outbox, mut queue) = mpsc::channel(8);
    let connection = ConnectionId(2);
    bench.engine.handle(EngineEvent::Connected { connection, outbox });
    let received_at = bench.clock.now();
    let request = with_prefix(request(3, prompt(1, 45), 0));
    bench.engine.handle(EngineEvent::Generate { connection, request, received_at });
    bench.finish();
    assert_eq!((bench.answer(1).tokens.len(), bench.answer(1).finish), (4, Some(Finish::Length)));
    assert_eq!(bench.error(2), Some(ErrorCode::ContextLengthExceeded), "44 + 20 + 1");
    let Some(ToGateway::Outputs(outputs)) = queue.blocking_recv() else { panic!("outputs come first") };
    let message = &outputs[0].error.as_ref().unwrap().message;
    assert!(message.contains("45 tokens beside the 20 virtual tokens of its adapter"), "{message}");
    assert!(message.contains("may have 64 together"), "{message}");
}

#[test]
fn a_preempted_request_with_a_prefix_goes_on_bit_for_bit() {
    let mut bench = EngineHarness::new(EngineLimits { kv_blocks: 14, ..ROOMY });
    bench.load(PREFIX);
    let requests: Vec<_> = (1..=4)
        .map(|id| {
            let mut one = with_prefix(request(id, prompt(id, 20), 100));
            one.sampling.temperature = 1.0;
            one.sampling.presence_penalty = 0.5;
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
fn a_request_with_a_prefix_that_is_continued_elsewhere_goes_on_as_if_it_had_not_been_cut() {
    let mut one = with_prefix(request(1, prompt(1, 20), 24));
    (one.sampling.temperature, one.sampling.repetition_penalty) = (1.0, 1.3);
    let whole: Vec<u32> = alone(&one).tokens.iter().map(|output| output.token).collect();
    let mut rest = Generate { generated: 7, max_tokens: 17, ..one };
    rest.prompt.extend_from_slice(&whole[..7]);
    let tokens: Vec<u32> = alone(&rest).tokens.iter().map(|output| output.token).collect();
    assert_eq!(tokens, whole[7..]);
}

#[test]
fn a_scored_prompt_with_a_prefix_is_owed_what_it_would_be_owed_without() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 16, ..ROOMY });
    bench.load(PREFIX);
    let mut one = with_prefix(request(1, prompt(1, 50), 2));
    one.prompt_logprobs = Some(3);
    bench.send(one.clone());
    bench.finish();
    let scored: Vec<u32> = bench.answer(1).prompt.iter().map(|output| output.token).collect();
    assert_eq!(scored, one.prompt[1..], "every token but the first, and no virtual one");
    let log: Vec<_> =
        bench.log.lock().unwrap().iter().map(|batch| (batch[0].tokens, batch[0].logits)).collect();
    assert_eq!(log[..3], [(16, LogitRows::None), (4, LogitRows::None), (16, LogitRows::All)]);
    assert_as_if_alone(&bench, &[one]);
}
