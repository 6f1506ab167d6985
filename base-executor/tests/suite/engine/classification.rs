//! Requests for the logits of tokens after their prompt, or of an adapter's labels.

use shmproto::message::Pooling;

use super::{
    CLASSIFIER, EngineHarness, EngineLimits, ErrorCode, Finish, Generate, ROOMY, RequestTranscript,
    assert_as_if_alone, assert_nothing_held, head, prompt, request,
};

fn tokens(id: u64, prompt: Vec<u32>, tokens: &[u32]) -> Generate {
    Generate { pooling: Some(Pooling::TokenLogits(tokens.to_vec())), ..request(id, prompt, 0) }
}

fn classes(id: u64, prompt: Vec<u32>) -> Generate {
    let adapter = Some([CLASSIFIER; 32]);
    Generate { adapter, pooling: Some(Pooling::ClassLogits), ..request(id, prompt, 0) }
}

fn ask(bench: &mut EngineHarness, request: &Generate) -> RequestTranscript {
    bench.send(request.clone());
    bench.finish();
    bench.answer(request.request).clone()
}

#[test]
fn token_logits_are_those_from_which_the_next_token_is_chosen() {
    let mut bench = EngineHarness::new(ROOMY);
    let prompt = prompt(1, 30);
    let all: Vec<u32> = (0..60).collect();
    let answer = ask(&mut bench, &tokens(1, prompt.clone(), &all));
    assert_eq!((answer.tokens.len(), answer.finish), (0, Some(Finish::Length)));
    let best = (0..60).fold(0, |best, at| if answer.pooled[at] > answer.pooled[best] { at } else { best });
    let next = ask(&mut bench, &request(2, prompt.clone(), 1));
    assert_eq!(next.tokens[0].token, best as u32);
    let some = ask(&mut bench, &tokens(3, prompt, &[17, 3, 17]));
    assert_eq!(some.pooled, [17, 3, 17].map(|token| answer.pooled[token]));
}

#[test]
fn class_logits_are_those_of_the_head_for_the_last_state() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(CLASSIFIER);
    let prompt = prompt(1, 30);
    let state = Generate { pooling: Some(Pooling::Last), ..classes(1, prompt.clone()) };
    let state = ask(&mut bench, &state).pooled;
    let found = ask(&mut bench, &classes(2, prompt)).pooled;
    assert_eq!(found, head().logits(&state));
    assert_eq!(found[2], state.iter().map(|value| f64::from(*value)).sum::<f64>() as f32);
}

#[test]
fn a_prompt_in_chunks_among_others_and_from_the_cache_has_the_same_logits() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 24, kv_blocks: 40, ..ROOMY });
    bench.load(1);
    bench.load(CLASSIFIER);
    let mut requests: Vec<_> = (1..=8)
        .map(|id| {
            let prompt = prompt(id, 15 * id as usize);
            let adapter = (id % 4 == 0).then_some([1; 32]);
            if id % 2 == 0 {
                Generate { adapter, ..tokens(id, prompt, &[5, 6]) }
            } else {
                classes(id, prompt)
            }
        })
        .collect();
    requests.push(request(10, prompt(10, 20), 30));
    requests.iter().for_each(|one| bench.send(one.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
    for (id, first) in [(20, &requests[6]), (21, &requests[7])] {
        let again = ask(&mut bench, &Generate { request: id, ..first.clone() });
        assert!(again.cached_tokens > 0, "request {id}");
        assert_eq!(again.pooled, bench.answer(first.request).pooled);
    }
}

#[test]
fn what_a_model_does_not_have_is_refused() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(1);
    bench.load(CLASSIFIER);
    let of = |tag: u8| Some([tag; 32]);
    let refused = [
        Generate { adapter: None, ..classes(1, prompt(1, 10)) },
        Generate { adapter: of(1), ..classes(2, prompt(1, 10)) },
        Generate { max_tokens: 1, ..classes(3, prompt(1, 10)) },
        Generate { adapter: of(CLASSIFIER), ..request(4, prompt(1, 10), 5) },
        Generate { adapter: of(CLASSIFIER), ..tokens(5, prompt(1, 10), &[1]) },
        tokens(6, prompt(1, 10), &[]),
        tokens(7, prompt(1, 10), &[64]),
        tokens(8, prompt(1, 10), &[1; 257]),
    ];
    for request in refused {
        assert_eq!(ask(&mut bench, &request).error, Some(ErrorCode::InvalidRequest), "{}", request.request);
    }
    assert_eq!(ask(&mut bench, &classes(9, prompt(1, 10))).pooled.len(), 3);
    assert_nothing_held(&bench);
}
