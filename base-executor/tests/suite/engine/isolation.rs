//! A request gets the tokens that it would get alone, whatever runs beside it, is preempted or cancelled.

use super::*;

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
