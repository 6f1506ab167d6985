//! The prefix cache: cached tokens are not computed again, change nothing, and are shared by nobody else.

use super::*;

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
