//! Replays: the tokens of an answer are confirmed many at once, and the first other token ends the replay.

use super::*;

/// Returns the request that replays `answer`, under a new number.
fn replay(request: &Generate, answer: &[u32]) -> Generate {
    let max_tokens = u32::try_from(answer.len()).unwrap();
    let expected = answer.to_vec();
    Generate {
        request: request.request + 1000,
        max_tokens,
        expected,
        logprobs: None,
        prompt_logprobs: None,
        ..request.clone()
    }
}

fn tokens_of(answer: &RequestTranscript) -> Vec<u32> {
    answer.tokens.iter().map(|token| token.token).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_an_answer_was_its_replay_samples_the_same_tokens_beside_others(
        moments in prop::collection::vec((any_request(), 0..6usize), 1..12),
        limits in any_limits(),
    ) {
        let requests: Vec<_> = (1..)
            .zip(moments.iter())
            .map(|(id, (request, _))| Generate { request: id, ..request.clone() })
            .collect();
        let answers: Vec<_> = requests.iter().map(alone).collect();
        let mut bench = EngineHarness::new(limits);
        [1, 2, PREFIX, ACTIVATED].into_iter().for_each(|tag| bench.load(tag));
        let mut replays = Vec::new();
        for ((request, answer), (_, steps)) in requests.iter().zip(&answers).zip(&moments) {
            bench.send(request.clone());
            (0..*steps).for_each(|_| bench.step());
            // Requests without a completion have nothing to replay.
            if !answer.tokens.is_empty() && request.pooling.is_none() {
                let replay = replay(request, &tokens_of(answer));
                bench.send(replay.clone());
                replays.push((replay.request, answer));
            }
        }
        bench.finish();
        for (id, answer) in replays {
            prop_assert_eq!(tokens_of(bench.answer(id)), tokens_of(answer));
            prop_assert_eq!(bench.answer(id).finish, answer.finish);
            prop_assert_eq!(bench.answer(id).cached_tokens, 0, "a replay reads no cached block");
        }
        assert_nothing_held(&bench);
    }

    #[test]
    fn a_replay_ends_with_the_first_token_that_differs(length in 2..100_usize, at in any::<prop::sample::Index>()) {
        let asked = request(1, prompt(5, 40), u32::try_from(length).unwrap());
        let answer = tokens_of(&alone(&asked));
        let (mut forged, at) = (answer.clone(), at.index(length));
        forged[at] = (forged[at] + 1) % 50;
        prop_assume!(forged[at] != answer[at]);
        let mut bench = EngineHarness::new(ROOMY);
        bench.send(replay(&asked, &forged));
        bench.finish();
        let replayed = bench.answer(1001);
        prop_assert_eq!(tokens_of(replayed), &answer[..=at]);
        prop_assert_eq!(replayed.finish, Some(Finish::Length));
        assert_nothing_held(&bench);
    }
}

#[test]
fn a_replay_takes_few_steps_and_leaves_neither_cached_blocks_nor_figures_of_drafts() {
    let asked = request(1, prompt(5, 100), 200);
    let answer = tokens_of(&alone(&asked));
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(replay(&asked, &answer));
    bench.finish();
    assert_eq!(tokens_of(bench.answer(1001)), answer);
    let stats = bench.stats();
    assert!(stats.steps <= 6, "200 tokens in {} steps", stats.steps);
    assert_eq!((stats.kv_blocks_cached, stats.speculation.verifications), (0, 0));
}

#[test]
fn an_expected_token_beyond_the_vocabulary_is_refused() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(replay(&request(1, prompt(5, 10), 4), &[1, 2, VOCAB as u32]));
    bench.finish();
    assert_eq!(bench.error(1001), Some(ErrorCode::InvalidRequest));
}
