//! Requests for an embedding of their prompt.

use model::forward::LogitRows;
use shmproto::message::Pooling;

use super::{
    EngineHarness, EngineLimits, ErrorCode, Finish, Generate, ROOMY, RequestTranscript, assert_as_if_alone,
    assert_nothing_held, prompt, request, with_prefix,
};
use crate::common::{HIDDEN, HOPELESS};

fn embedding(id: u64, prompt: Vec<u32>, pooling: Pooling) -> Generate {
    Generate { pooling: Some(pooling), ..request(id, prompt, 0) }
}

fn ask(bench: &mut EngineHarness, request: &Generate) -> RequestTranscript {
    bench.send(request.clone());
    bench.finish();
    bench.answer(request.request).clone()
}

#[test]
fn an_embedding_is_the_mean_of_all_states_or_the_last_one() {
    let mut bench = EngineHarness::new(ROOMY);
    let prompt = prompt(1, 30);
    // The last state of a prompt depends on its tokens alone.
    let ends = (1..=30).map(|end| embedding(end, prompt[..end as usize].to_vec(), Pooling::Last));
    let states: Vec<_> = ends.map(|end| ask(&mut bench, &end).pooled).collect();
    assert!(states.iter().all(|state| state.len() == HIDDEN));
    let mean = ask(&mut bench, &embedding(31, prompt, Pooling::Mean));
    assert_eq!((mean.tokens.len(), mean.finish), (0, Some(Finish::Length)));
    for (column, value) in mean.pooled.iter().enumerate() {
        let sum: f64 = states.iter().map(|state| f64::from(state[column])).sum();
        assert_eq!(*value, (sum / 30.0) as f32);
    }
}

#[test]
fn a_prompt_in_chunks_and_among_others_has_the_same_embedding() {
    let mut bench = EngineHarness::new(EngineLimits { chunk_tokens: 24, kv_blocks: 40, ..ROOMY });
    bench.load(1);
    bench.load(super::PREFIX);
    let mut requests: Vec<_> = (1..=8)
        .map(|id| {
            let pooling = if id % 2 == 0 { Pooling::Mean } else { Pooling::Last };
            let adapter = (id % 3 == 0).then_some([1; 32]);
            Generate { adapter, ..embedding(id, prompt(id, 15 * id as usize), pooling) }
        })
        .collect();
    requests.push(with_prefix(embedding(9, prompt(9, 60), Pooling::Mean)));
    requests.push(request(10, prompt(10, 20), 30));
    requests.iter().for_each(|one| bench.send(one.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
    let log = bench.log.lock().unwrap();
    assert!(log.iter().any(|batch| batch.len() > 1), "some were computed together");
}

#[test]
fn what_is_cached_spares_the_last_state_its_prompt_and_is_of_no_use_to_a_mean() {
    let mut bench = EngineHarness::new(ROOMY);
    let prompt = prompt(1, 50);
    let first = ask(&mut bench, &embedding(1, prompt.clone(), Pooling::Last));
    let second = ask(&mut bench, &embedding(2, prompt.clone(), Pooling::Last));
    assert_eq!((first.cached_tokens, second.cached_tokens), (0, 48));
    assert_eq!(first.pooled, second.pooled);
    let mean = ask(&mut bench, &embedding(3, prompt.clone(), Pooling::Mean));
    assert_eq!(mean.cached_tokens, 0);
    // Other requests use the blocks of a mean.
    assert_eq!(ask(&mut bench, &request(4, prompt, 3)).cached_tokens, 48);
}

#[test]
fn virtual_tokens_are_no_part_of_a_mean() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.load(super::PREFIX);
    ask(&mut bench, &with_prefix(embedding(1, prompt(1, 30), Pooling::Mean)));
    let log = bench.log.lock().unwrap();
    assert_eq!(log.last().unwrap()[0].logits, LogitRows::States { from: 20 });
}

#[test]
fn an_embedding_is_asked_for_alone() {
    let mut bench = EngineHarness::new(ROOMY);
    let plain = embedding(1, prompt(1, 10), Pooling::Mean);
    let more = [
        Generate { max_tokens: 1, ..plain.clone() },
        Generate { prompt_logprobs: Some(0), ..plain.clone() },
        Generate { grammar: Some("{}".into()), ..plain.clone() },
    ];
    for (id, request) in (2..).zip(more) {
        assert_eq!(
            ask(&mut bench, &Generate { request: id, ..request }).error,
            Some(ErrorCode::InvalidRequest)
        );
    }
    assert_eq!(ask(&mut bench, &plain).pooled.len(), HIDDEN);
}

#[test]
fn one_that_finds_no_memory_fails_alone() {
    let mut bench = EngineHarness::new(ROOMY);
    let mut hopeless = prompt(1, 10);
    hopeless.push(HOPELESS);
    let good = embedding(2, prompt(2, 20), Pooling::Mean);
    bench.send(embedding(1, hopeless, Pooling::Mean));
    bench.send(good.clone());
    bench.finish();
    assert_eq!(bench.error(1), Some(ErrorCode::NoMemory));
    assert_as_if_alone(&bench, &[good]);
    assert_nothing_held(&bench);
}
