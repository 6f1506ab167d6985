//! Requests whose adapter applies from its invocation on (aLoRA).

use super::{
    ACTIVATED, EngineHarness, EngineLimits, Generate, ROOMY, RequestTranscript, assert_as_if_alone,
    assert_nothing_held, prompt, request,
};

/// Prompt of `len` tokens with the invocation only at `at`.
fn invoking(salt: u64, len: usize, at: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> =
        prompt(salt, len).into_iter().map(|token| if token == 7 { 8 } else { token }).collect();
    tokens[at] = 7;
    tokens
}

fn activated(request: Generate) -> Generate {
    Generate { adapter: Some([ACTIVATED; 32]), ..request }
}

fn ask(bench: &mut EngineHarness, request: &Generate) -> RequestTranscript {
    bench.send(request.clone());
    bench.finish();
    bench.answer(request.request).clone()
}

fn bench() -> EngineHarness {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(ACTIVATED);
    bench
}

#[test]
fn what_is_before_the_invocation_is_the_bases_and_found_by_either() {
    let mut bench = bench();
    let tokens = invoking(1, 100, 70);
    let base = request(1, tokens.clone(), 4);
    ask(&mut bench, &base);
    let adapted = activated(request(2, tokens.clone(), 4));
    let answer = ask(&mut bench, &adapted);
    assert_eq!(answer.cached_tokens, 64, "the base's blocks before the one in which it is invoked");
    assert_ne!(answer.tokens, bench.answer(1).tokens, "the fake's adapters say other things");
    // The request's own blocks are cached too, but not for other requests.
    assert_eq!(ask(&mut bench, &activated(request(3, tokens.clone(), 4))).cached_tokens, 96);
    let mut other = tokens;
    other[99] = 9;
    assert_eq!(ask(&mut bench, &request(4, other, 4)).cached_tokens, 96, "the base's own");
    assert_as_if_alone(&bench, &[base, adapted]);
    assert_nothing_held(&bench);
}

#[test]
fn the_base_finds_what_an_adapted_request_left_before_its_invocation() {
    let mut bench = bench();
    let tokens = invoking(2, 100, 50);
    ask(&mut bench, &activated(request(1, tokens.clone(), 4)));
    let base = request(2, tokens, 4);
    assert_eq!(ask(&mut bench, &base).cached_tokens, 48);
    assert_as_if_alone(&bench, &[base]);
}

#[test]
fn the_same_tokens_are_told_apart_by_where_the_last_invocation_is() {
    let mut bench = bench();
    let first = invoking(3, 60, 20);
    let mut longer = first.clone();
    longer.extend(invoking(4, 40, 10));
    let requests = [activated(request(1, first, 4)), activated(request(2, longer, 4))];
    let cached = requests.each_ref().map(|request| ask(&mut bench, request).cached_tokens);
    assert_eq!(cached, [0, 16], "behind the first invocation the longer one has the base's");
    assert_as_if_alone(&bench, &requests);
}

#[test]
fn who_never_invokes_it_hears_the_base() {
    let mut bench = bench();
    let tokens =
        invoking(5, 40, 10).into_iter().map(|token| if token == 7 { 8 } else { token }).collect::<Vec<_>>();
    let base = ask(&mut bench, &request(1, tokens.clone(), 30));
    let adapted = ask(&mut bench, &activated(request(2, tokens, 30)));
    assert_eq!(adapted.tokens, base.tokens, "not even where tokens that are said would invoke it");
    assert_eq!(adapted.cached_tokens, 32);
}

#[test]
fn an_invocation_anywhere_in_a_block_or_a_chunk_is_as_if_alone() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 24, kv_blocks: 60, ..ROOMY });
    bench.load(ACTIVATED);
    let places = [0, 1, 15, 16, 17, 23, 24, 31, 32, 49];
    let requests: Vec<_> =
        (1..).zip(places).map(|(id, at)| activated(request(id, invoking(6, 50, at), 20))).collect();
    requests.iter().for_each(|request| bench.send(request.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
}

#[test]
fn a_redo_begins_where_the_request_did() {
    let mut bench = bench();
    let one = activated(request(1, invoking(7, 40, 20), 24));
    let whole = ask(&mut bench, &one);
    let mut rest = Generate { request: 2, generated: 9, max_tokens: 15, ..one };
    rest.prompt.extend(whole.tokens[..9].iter().map(|token| token.token));
    // Generated tokens never invoke the adapter.
    *rest.prompt.last_mut().unwrap() = rest.prompt[48];
    assert_eq!(ask(&mut bench, &rest).tokens, whole.tokens[9..]);
}
