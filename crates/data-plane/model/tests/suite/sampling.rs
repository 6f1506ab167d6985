//! Sampling against transformers' logits processors and torch.

use model::sampling::{
    LOGPROB_FLOOR, Sampling, SamplingError, SamplingParams, TokenCounts, logprobs, sample,
};
use proptest::prelude::*;
use scheduling::random::Rng;
use serde_json::Value;

fn neutral() -> Sampling {
    Sampling::default()
}

fn params(request: Sampling, vocab_size: usize) -> SamplingParams {
    SamplingParams::new(request, vocab_size).unwrap()
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..neutral() }
}

/// Golden samples, made by `crates/shared/text/tests/golden/make_golden.py`.
fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/sampling.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn request(setting: &Value) -> Sampling {
    let float = |name: &str, default: f32| setting[name].as_f64().map_or(default, |value| value as f32);
    Sampling {
        temperature: float("temperature", 1.0),
        top_k: setting["top_k"].as_u64().unwrap_or(0) as u32,
        top_p: float("top_p", 1.0),
        min_p: float("min_p", 0.0),
        repetition_penalty: float("repetition_penalty", 1.0),
        ..neutral()
    }
}

#[test]
fn draws_follow_the_distribution_that_transformers_leaves() {
    const DRAWS: u64 = 40_000;
    let golden = golden();
    let history = TokenCounts::of_prompt(&ids(&golden["history"]));
    for (index, case) in (0u64..).zip(golden["cases"].as_array().unwrap()) {
        let row = floats(&golden["rows"][case["row"].as_u64().unwrap() as usize]);
        let params = params(Sampling { seed: index, ..request(&case["setting"]) }, row.len());
        let expected: Vec<f64> = serde_json::from_value(case["probabilities"].clone()).unwrap();
        let mut counts = vec![0u64; row.len()];
        for position in 0..DRAWS {
            counts[sample(&mut row.clone(), &params, &history, position, &[]) as usize] += 1;
        }
        for (token, (&count, &probability)) in counts.iter().zip(&expected).enumerate() {
            let (mean, deviation) =
                (DRAWS as f64 * probability, (DRAWS as f64 * probability * (1.0 - probability)).sqrt());
            let what = format!("{} row {} token {token}: {count} of {mean}", case["setting"], case["row"]);
            // Five deviations, and a few counts if the mean is too small for them; filtered tokens never
            // occur.
            let allowed = if probability == 0.0 { 0.0 } else { 5.0 * deviation + 4.0 };
            assert!((count as f64 - mean).abs() <= allowed, "{what}");
        }
    }
}

#[test]
fn log_probabilities_agree_with_torch() {
    let golden = golden();
    for (row, expected) in
        golden["rows"].as_array().unwrap().iter().zip(golden["logprobs"].as_array().unwrap())
    {
        let (row, expected) = (floats(row), floats(expected));
        for (token, &expected) in (0u32..).zip(&expected) {
            let (logprob, top) = logprobs(&row, token, row.len());
            assert!((logprob - expected).abs() < 2e-6, "{logprob} for {expected}");
            let listed = top.iter().find(|(id, _)| *id == token).unwrap();
            assert_eq!(listed.1.to_bits(), logprob.to_bits(), "one log-softmax");
            let ranked = |pair: &[(u32, f32)]| {
                let (a, b) = (pair[0], pair[1]);
                row[a.0 as usize] > row[b.0 as usize] || (row[a.0 as usize] == row[b.0 as usize] && a.0 < b.0)
            };
            assert!(top.windows(2).all(ranked), "best first, lower id first on ties");
        }
        assert_eq!(logprobs(&row, 0, 0).1, []);
        assert_eq!(logprobs(&row, 0, 5).1, logprobs(&row, 0, row.len()).1[..5]);
    }
}

#[test]
fn greedy_takes_the_largest_logit_and_the_lowest_id_on_ties() {
    let params = params(greedy(), 5);
    let none = TokenCounts::default();
    assert_eq!(sample(&mut [0.0, 3.0, -1.0, 3.0, 2.0], &params, &none, 0, &[]), 1);
    assert_eq!(sample(&mut [0.0, 3.0, -1.0, 3.0, 2.0], &params, &none, 0, &[1]), 3);
    assert_eq!(sample(&mut [0.0, 3.0, -1.0, 3.0, 2.0], &params, &none, 0, &[1, 3, 99]), 4);
}

/// The greedy choice from four logits with `change` made to the parameters.
fn choose(change: impl FnOnce(&mut Sampling), prompt: &[u32], completion: &[u32]) -> u32 {
    let mut counts = TokenCounts::of_prompt(prompt);
    completion.iter().for_each(|&token| counts.push_completion(token));
    let mut request = greedy();
    change(&mut request);
    sample(&mut [1.0, 2.0, 3.0, -1.0], &params(request, 4), &counts, 0, &[])
}

#[test]
fn presence_and_frequency_penalties_look_at_the_completion() {
    let presence = |r: &mut Sampling| r.presence_penalty = 1.5;
    assert_eq!(choose(presence, &[2], &[]), 2);
    assert_eq!(choose(presence, &[], &[2, 2]), 1);
    let frequency = |r: &mut Sampling| r.frequency_penalty = 0.6;
    assert_eq!(choose(frequency, &[2, 2], &[2]), 2);
    assert_eq!(choose(frequency, &[], &[2, 2]), 1);
}

#[test]
fn the_repetition_penalty_looks_at_prompt_and_completion() {
    let repetition = |r: &mut Sampling| r.repetition_penalty = 2.0;
    assert_eq!(choose(repetition, &[2], &[]), 1);
    assert_eq!(choose(repetition, &[1], &[2]), 2);
}

#[test]
fn the_bias_comes_before_the_penalties() {
    assert_eq!(choose(|r| r.logit_bias = vec![(3, 6.0)], &[], &[]), 3);
    // (-1 + 6) / 2 = 2.5, less than 3: the sum is penalized. In the other order it would be -2 + 6 = 4.
    let both = |r: &mut Sampling| {
        r.logit_bias = vec![(3, 6.0)];
        r.repetition_penalty = 2.0;
    };
    assert_eq!(choose(both, &[3], &[]), 2);
    assert_eq!(choose(both, &[2], &[]), 3);
}

type Spoil = fn(&mut Sampling);

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let cases: [(&str, Spoil); 11] = [
        ("temperature", |r| r.temperature = -0.1),
        ("temperature", |r| r.temperature = f32::NAN),
        ("temperature", |r| r.temperature = f32::INFINITY),
        ("top_p", |r| r.top_p = 0.0),
        ("top_p", |r| r.top_p = 1.1),
        ("min_p", |r| r.min_p = -0.5),
        ("presence_penalty", |r| r.presence_penalty = 2.5),
        ("frequency_penalty", |r| r.frequency_penalty = f32::NAN),
        ("repetition_penalty", |r| r.repetition_penalty = 0.0),
        ("logit_bias", |r| r.logit_bias = vec![(1, 101.0)]),
        ("unknown token", |r| r.logit_bias = vec![(10, 1.0)]),
    ];
    for (expected, spoil) in cases {
        let mut request = neutral();
        spoil(&mut request);
        let refused = match SamplingParams::new(request, 10).unwrap_err() {
            SamplingError::OutOfRange { field, .. } => field,
            SamplingError::UnknownToken { .. } => "unknown token",
        };
        assert_eq!(refused, expected);
    }
}

#[test]
fn the_generator_is_uniform_over_positions_and_over_seeds() {
    const DRAWS: u64 = 100_000;
    for fixed in [0, 1, u64::MAX] {
        for over_seeds in [false, true] {
            let draw = |n: u64| {
                if over_seeds { Rng::seeded(n).uniform(fixed) } else { Rng::seeded(fixed).uniform(n) }
            };
            let mut counts = [0u64; 100];
            let (mut mean, mut correlation) = (0.0, 0.0);
            for n in 0..DRAWS {
                let value = draw(n);
                assert!((0.0..1.0).contains(&value));
                counts[(value * 100.0) as usize] += 1;
                mean += value / DRAWS as f64;
                correlation += (value - 0.5) * (draw(n + 1) - 0.5) / DRAWS as f64;
            }
            let expected = DRAWS as f64 / 100.0;
            let chi_squared: f64 =
                counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
            // 99 degrees of freedom: beyond 166 once in 100,000.
            assert!(chi_squared < 166.0, "{chi_squared} with {fixed}");
            assert!((mean - 0.5).abs() < 0.005 && correlation.abs() < 0.0015, "{mean} {correlation}");
        }
    }
}

#[test]
fn a_redo_draws_the_same_token_and_other_positions_draw_others() {
    let row: Vec<f32> = (0..1000).map(|token| (token % 17) as f32 * 0.1).collect();
    let params = params(Sampling { seed: 7, ..neutral() }, row.len());
    let draw = |position| sample(&mut row.clone(), &params, &TokenCounts::default(), position, &[]);
    let first: Vec<u32> = (0..50).map(draw).collect();
    assert_eq!(first, (0..50).map(draw).collect::<Vec<_>>());
    assert!(first.iter().collect::<std::collections::HashSet<_>>().len() > 40);
}

#[test]
fn impossible_rows_yield_a_token_and_the_floor() {
    for row in [vec![f32::NAN; 8], vec![f32::NEG_INFINITY; 8], vec![f32::INFINITY; 8]] {
        for request in [greedy(), neutral(), Sampling { top_k: 3, top_p: 0.5, ..neutral() }] {
            assert!(sample(&mut row.clone(), &params(request, 8), &TokenCounts::default(), 3, &[]) < 8);
        }
        assert!(logprobs(&row, 0, 3).0 >= LOGPROB_FLOOR);
    }
    let (logprob, top) = logprobs(&[0.0, f32::NAN, f32::NEG_INFINITY], 2, 3);
    assert_eq!(logprob, LOGPROB_FLOOR);
    assert_eq!(top, [(0, 0.0), (1, LOGPROB_FLOOR), (2, LOGPROB_FLOOR)]);
}

/// Tokens that the three filters keep, by their definition with a sorted row.
fn kept_by_sorting(row: &[f32], request: &Sampling) -> Vec<u32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut ranked: Vec<(u32, f64)> = (0..)
        .zip(row)
        .map(|(token, &logit)| (token, f64::from((logit - max) / request.temperature).exp()))
        .collect();
    ranked.sort_by(|a, b| row[b.0 as usize].total_cmp(&row[a.0 as usize]).then(a.0.cmp(&b.0)));
    if request.top_k > 0 {
        ranked.truncate(request.top_k as usize);
    }
    let total: f64 = ranked.iter().map(|(_, weight)| weight).sum();
    let mut before = 0.0;
    // Weights at the border are left to rounding.
    let kept = ranked.into_iter().take_while(|&(_, weight)| {
        let keep = before < f64::from(request.top_p) * total * 1.000_01
            && weight >= f64::from(request.min_p) * 0.999;
        before += weight;
        keep
    });
    kept.map(|(token, _)| token).collect()
}

proptest! {
    #[test]
    fn chosen_tokens_are_among_those_the_filters_leave(
        row in proptest::collection::vec(-30.0f32..30.0, 1..3000),
        temperature in 0.05f32..3.0,
        top_k in 0u32..60,
        top_p in 0.01f32..=1.0,
        min_p in 0.0f32..0.5,
        seed: u64,
    ) {
        let request = Sampling { temperature, top_k, top_p, min_p, seed, ..neutral() };
        let kept = kept_by_sorting(&row, &request);
        let params = params(request, row.len());
        for position in 0..20 {
            let token = sample(&mut row.clone(), &params, &TokenCounts::default(), position, &[]);
            prop_assert!(kept.contains(&token), "{token} is not in {kept:?}");
        }
    }

    #[test]
    fn no_row_of_any_bits_panics(
        bits in proptest::collection::vec(any::<u32>(), 1..200),
        temperature in prop_oneof![Just(0.0f32), Just(f32::MIN_POSITIVE), Just(1.0), Just(f32::MAX)],
        top_k in 0u32..5,
        top_p in prop_oneof![Just(1.0f32), Just(0.5), Just(f32::MIN_POSITIVE)],
        repetition_penalty in prop_oneof![Just(1.0f32), Just(f32::MAX), Just(f32::MIN_POSITIVE)],
    ) {
        let mut row: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let count = row.len();
        let request = Sampling { temperature, top_k, top_p, repetition_penalty, ..neutral() };
        let params = params(request, count);
        let (logprob, top) = logprobs(&row, 0, 4);
        prop_assert!(!logprob.is_nan() && top.iter().all(|(_, logprob)| !logprob.is_nan()));
        let token = sample(&mut row, &params, &TokenCounts::of_prompt(&[0, 1]), 5, &[0]);
        prop_assert!((token as usize) < count);
    }
}
