//! Requests for the linear path, beside others.

use shmproto::message::Precision;

use super::{
    Drafts, EngineHarness, ErrorCode, FakePass, Generate, ROOMY, assert_as_if_alone, assert_nothing_held,
    prompt, request,
};

fn exact(request: Generate) -> Generate {
    Generate { precision: Precision::Exact, ..request }
}

#[test]
fn requests_of_either_precision_take_turns_and_answer_as_if_they_were_alone() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(1);
    let requests: Vec<_> = (1..=8)
        .map(|id| {
            let adapter = (id % 3 == 0).then_some([1; 32]);
            let one = Generate { adapter, ..request(id, prompt(id, 20 + 9 * id as usize), 12) };
            if id % 2 == 0 { exact(one) } else { one }
        })
        .collect();
    requests.iter().for_each(|one| bench.send(one.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
    // Twice the steps of one kind of request, and not one step per request.
    assert!(bench.log.lock().unwrap().len() <= 2 * 14, "{} steps", bench.log.lock().unwrap().len());
}

#[test]
fn what_is_computed_exactly_is_shared_with_exact_requests_alone() {
    let mut bench = EngineHarness::new(ROOMY);
    let plain = request(1, prompt(5, 50), 4);
    let first = exact(Generate { request: 2, ..plain.clone() });
    let second = Generate { request: 3, ..first.clone() };
    let cached = [&plain, &first, &second].map(|one| {
        bench.send(one.clone());
        bench.finish();
        bench.answer(one.request).cached_tokens
    });
    assert_eq!(cached, [0, 0, 48]);
    assert_ne!(bench.answer(1).content(), bench.answer(2).content(), "the fake's paths differ");
    assert_as_if_alone(&bench, &[plain, first, second]);
}

#[test]
fn a_device_of_one_path_refuses_exact_requests_and_serves_the_others() {
    let (pass, log) = FakePass::new(ROOMY.kv_blocks);
    let mut bench = EngineHarness::over(pass.of_one_path(), log, ROOMY, Drafts::default());
    let plain = request(1, prompt(1, 20), 4);
    bench.send(exact(Generate { request: 2, ..plain.clone() }));
    bench.send(plain.clone());
    bench.finish();
    assert_eq!(bench.error(2), Some(ErrorCode::InvalidRequest));
    assert_as_if_alone(&bench, &[plain]);
    assert_nothing_held(&bench);
}
