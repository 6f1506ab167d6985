//! Drafted tokens: no answer is another for them, and nothing of them stays.

use super::*;
use crate::planted::Planted;

/// An engine whose steps take equally long, however many rows they have.
fn drafting(limits: Limits, requests: &[Generate], right: f64) -> Bench {
    let answers = requests.iter().map(|request| {
        (request.prompt.clone(), alone(request).tokens.iter().map(|token| token.token).collect())
    });
    let answers = Arc::new(Mutex::new(answers.collect()));
    Bench::drafting(limits, Planted::drafts(&answers, right, Duration::ZERO))
}

fn numbered(requests: impl IntoIterator<Item = Generate>) -> Vec<Generate> {
    (1..).zip(requests).map(|(id, request)| Generate { request: id, ..request }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_drafted_a_request_gets_what_it_would_get_alone(
        moments in prop::collection::vec((any_request(), 0..6usize), 1..17),
        limits in any_limits(),
        right in 0.0..1.0f64,
    ) {
        let requests = numbered(moments.iter().map(|(request, _)| request.clone()));
        let mut bench = drafting(limits, &requests, right);
        [1, 2, PREFIX].into_iter().for_each(|tag| bench.load(tag));
        for (request, (_, steps_before)) in requests.iter().zip(&moments) {
            (0..*steps_before).for_each(|_| bench.step());
            bench.send(request.clone());
        }
        bench.finish();
        assert_as_if_alone(&bench, &requests);
        assert_nothing_held(&bench);
    }

    #[test]
    fn requests_cancelled_while_something_is_drafted_leave_nothing_behind(
        moments in prop::collection::vec((any_request(), 0..3usize, 0..20usize), 60),
        limits in any_limits(),
    ) {
        let requests = numbered(moments.iter().map(|(request, ..)| request.clone()));
        let mut bench = drafting(limits, &requests, 0.8);
        [1, 2, PREFIX].into_iter().for_each(|tag| bench.load(tag));
        for (request, (_, steps, age)) in requests.iter().zip(&moments) {
            bench.send(request.clone());
            (0..*steps).for_each(|_| bench.step());
            bench.cancel(request.request.saturating_sub(*age as u64));
        }
        requests.iter().for_each(|request| bench.cancel(request.request));
        prop_assert!(bench.engine.is_idle());
        assert_nothing_held(&bench);
    }
}

#[test]
fn drafts_that_come_true_are_verified_many_at_once_and_counted() {
    let requests = numbered([request(1, prompt(5, 40), 60)]);
    let mut bench = drafting(ROOMY, &requests, 1.0);
    bench.send(requests[0].clone());
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let stats = bench.stats();
    assert!(stats.steps < 30, "60 tokens in {} steps", stats.steps);
    let speculation = stats.speculation;
    assert_eq!(speculation.accepted + stats.steps, 60, "a step gives what was accepted and one more");
    assert!(speculation.drafted >= speculation.accepted && speculation.verifications < stats.steps);
    assert!(speculation.ahead > speculation.kept && speculation.kept > 0, "{speculation:?}");
    assert_nothing_held(&bench);
}

#[test]
fn who_finds_no_memory_for_drafts_goes_on_without_them() {
    let mut thirsty = prompt(5, 10);
    thirsty.push(THIRSTY);
    let others = (2..18).map(|salt| request(1, prompt(salt, 20), 40));
    let requests = numbered(std::iter::once(request(1, thirsty, 40)).chain(others));
    let mut bench = drafting(ROOMY, &requests, 0.9);
    requests.iter().for_each(|request| bench.send(request.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
}
