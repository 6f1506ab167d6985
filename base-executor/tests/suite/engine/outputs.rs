//! Outputs of a request: log-probabilities of its prompt, and where its tokens end.

use super::*;

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
