//! The next token of each row, against the definition of the parameters in 64 bits with a sorted vocabulary.

use kernels::{
    cuda::{ChoiceReport, ChosenToken, ChosenTokens, CudaStream, Graph, Replay, TokenChoice, sample::choose},
    lora::ElementKind,
};

use crate::support::{SeededNumbers, matrix, stream};

/// Vocabulary sizes: SmolLM2's, Qwen's, ragged ones, and a single token.
const SMOL: usize = 49_152;
const QWEN: usize = 151_936;

const NEUTRAL: TokenChoice = TokenChoice {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    draw: 0.5,
    report: ChoiceReport::Token,
};

/// Normalizes a logit; both zeros are equal.
fn clean(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) + 0.0 }
}

/// Candidate tokens with weights in sampling order, after the filters.
fn candidates(logits: &[f32], choice: &TokenChoice) -> Vec<(u32, f64)> {
    let largest = logits.iter().map(|&logit| clean(logit)).fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from((clean(logit) - largest) / choice.temperature).exp();
    let mut all: Vec<(u32, f64)> = (0..).zip(logits).map(|(token, &logit)| (token, weight(logit))).collect();
    let top_k = choice.top_k as usize;
    if !(1..all.len()).contains(&top_k) && choice.top_p >= 1.0 && choice.min_p == 0.0 {
        return all;
    }
    let logit = |token: u32| clean(logits[token as usize]);
    all.sort_by(|one, other| logit(other.0).total_cmp(&logit(one.0)).then(one.0.cmp(&other.0)));
    if top_k > 0 {
        all.truncate(top_k);
    }
    let enough = if choice.top_p < 1.0 { f64::from(choice.top_p) } else { f64::INFINITY };
    let enough = enough * all.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut before = 0.0;
    let keeps = |&(_, weight): &(u32, f64)| {
        let keep = before == 0.0 || (before < enough && weight >= f64::from(choice.min_p));
        before += weight;
        keep
    };
    all.into_iter().take_while(keeps).collect()
}

/// Expected token, and the distance of the draw from the next one, relative to the total weight.
fn wanted(logits: &[f32], choice: &TokenChoice) -> (Option<u32>, f64) {
    let Some(best) = most_likely(logits) else { return (None, 1.0) };
    if choice.temperature == 0.0 {
        return (Some(best), 1.0);
    }
    let candidates = candidates(logits, choice);
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    let (mut sum, mut chosen, mut margin) = (0.0, best, 1.0f64);
    for &(token, weight) in candidates.iter().filter(|(_, weight)| *weight > 0.0) {
        chosen = token;
        margin = (choice.draw - sum / total).abs();
        sum += weight;
        margin = margin.min((choice.draw - sum / total).abs());
        if sum > choice.draw * total {
            break;
        }
    }
    (Some(chosen), margin)
}

/// Lowest token id of the largest logit, if any is finite.
fn most_likely(logits: &[f32]) -> Option<u32> {
    let largest = logits.iter().map(|&logit| clean(logit)).fold(f32::NEG_INFINITY, f32::max);
    let at = logits.iter().position(|&logit| clean(logit) == largest)?;
    (largest > f32::NEG_INFINITY).then_some(at as u32)
}

fn chosen(stream: &CudaStream, logits: &[f32], choices: &[TokenChoice]) -> Vec<Option<ChosenToken>> {
    let logits = matrix(stream, ElementKind::F32, logits.len() / choices.len(), logits);
    let mut chosen = ChosenTokens::new(stream.cuda(), 0).unwrap();
    chosen.ask(stream, choices).unwrap();
    choose(stream, &logits, &mut chosen).unwrap();
    let told = chosen.read(stream).unwrap();
    let token = |told: &Option<ChosenToken>| told.map_or(u32::MAX, |told| told.token);
    let kept = chosen.tokens().to_vec(stream).unwrap();
    assert_eq!(
        kept[..choices.len()],
        told.iter().map(token).collect::<Vec<_>>(),
        "host and device are told the same"
    );
    told
}

fn tokens(stream: &CudaStream, logits: &[f32], choices: &[TokenChoice]) -> Vec<Option<u32>> {
    chosen(stream, logits, choices).into_iter().map(|told| told.map(|told| told.token)).collect()
}

/// Checks that every token is the expected one, unless the draw is within rounding of the next.
fn check(stream: &CudaStream, what: &str, vocabulary: usize, logits: &[f32], choices: &[TokenChoice]) {
    let got = tokens(stream, logits, choices);
    for ((row, choice), got) in logits.chunks(vocabulary).zip(choices).zip(got) {
        let (want, margin) = wanted(row, choice);
        assert!(
            got == want || margin < 1e-5,
            "{what}: {got:?} instead of {want:?} for {choice:?}, {margin:e} away"
        );
    }
}

fn choices(random: &mut SeededNumbers) -> Vec<TokenChoice> {
    let mut draw = || random.below(1 << 20) as f64 / f64::from(1 << 20);
    let filters = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (50, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (40, 0.95, 0.02),
        (3000, 0.7, 1e-4),
    ];
    let choice = |(top_k, top_p, min_p), temperature, draw| TokenChoice {
        temperature,
        top_k,
        top_p,
        min_p,
        draw,
        ..NEUTRAL
    };
    let greedy = TokenChoice { temperature: 0.0, ..NEUTRAL };
    let drawn = [0.7, 1.0, 3.0].into_iter().flat_map(|t| filters.map(|filter| choice(filter, t, draw())));
    std::iter::once(greedy).chain(drawn).collect()
}

#[test]
fn tokens_are_those_of_the_sorted_vocabulary() {
    let Some(stream) = stream() else { return };
    for (seed, vocabulary, spread) in
        [(1, SMOL, 3.0), (2, QWEN, 2.0), (3, 1000, 1.0), (4, 257, 8.0), (5, 1, 1.0)]
    {
        let mut random = SeededNumbers::new(seed);
        let choices = choices(&mut random);
        let logits: Vec<f32> =
            random.normals(vocabulary * choices.len()).iter().map(|x| spread * x).collect();
        check(&stream, &format!("{vocabulary} tokens"), vocabulary, &logits, &choices);
    }
}

#[test]
fn a_sure_model_and_one_that_knows_nothing_are_drawn_from_alike() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(6);
    let choices = choices(&mut random);
    let mut sure: Vec<f32> = random.normals(SMOL * choices.len());
    for row in sure.chunks_mut(SMOL) {
        for peak in 0..40 {
            row[random.below(SMOL)] = 20.0 - peak as f32 / 4.0;
        }
    }
    check(&stream, "sure", SMOL, &sure, &choices);
    // Equal tokens differ only by id.
    check(&stream, "equal", SMOL, &vec![-2.5; SMOL * choices.len()], &choices);
    let two: Vec<f32> =
        (0..SMOL * choices.len()).map(|_| if random.below(2) == 0 { 0.0 } else { -0.0 }).collect();
    check(&stream, "zeroes of both signs", SMOL, &two, &choices);
}

#[test]
fn the_lowest_of_equal_tokens_is_the_most_likely() {
    let Some(stream) = stream() else { return };
    let mut logits = vec![0.0; 3 * 5000];
    for at in [4999, 1024, 77] {
        logits[at] = 9.0;
    }
    logits[5000 + 4999] = 1.0;
    let greedy = TokenChoice { temperature: 0.0, ..NEUTRAL };
    assert_eq!(tokens(&stream, &logits, &[greedy; 3]), [Some(77), Some(4999), Some(0)]);
}

#[test]
fn what_is_not_a_number_is_never_chosen_and_a_row_of_it_yields_no_token() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(7);
    let choices = choices(&mut random);
    let broken = [f32::NAN, f32::NEG_INFINITY, -f32::NAN, f32::MIN];
    let logits: Vec<f32> = (0..3000 * choices.len())
        .map(|at| if at % 7 == 0 { (at % 13) as f32 } else { broken[at % 4] })
        .collect();
    check(&stream, "broken", 3000, &logits, &choices);
    check(&stream, "nothing", 500, &vec![f32::NAN; 500 * choices.len()], &choices);
    check(&stream, "infinite", 2, &[f32::INFINITY, 1.0, 2.0, f32::INFINITY], &choices[..2]);
}

#[test]
fn a_draw_at_the_very_end_takes_the_last_token_that_has_any_weight() {
    let Some(stream) = stream() else { return };
    let mut logits = vec![-500.0; 4000];
    (logits[3], logits[2000]) = (0.0, 0.0);
    let end = TokenChoice { draw: 1.0 - f64::EPSILON / 2.0, ..NEUTRAL };
    let filtered = TokenChoice { top_k: 3000, ..end };
    let logits = [&logits[..], &logits[..]].concat();
    assert_eq!(tokens(&stream, &logits, &[end, filtered]), [Some(2000); 2]);
}

#[test]
fn equal_weights_are_drawn_by_halves_exactly() {
    let Some(stream) = stream() else { return };
    let at = |draw, top_k| TokenChoice { draw, top_k, ..NEUTRAL };
    let choices =
        [at(0.0, 0), at(0.25, 0), at(0.5, 0), at(0.75, 0), at(0.0, 3), at(0.5, 2), at(0.49, 2), at(0.99, 3)];
    let want = [0, 1, 2, 3, 0, 1, 0, 2];
    assert_eq!(tokens(&stream, &[1.0; 4 * 8], &choices), want.map(Some));
}

#[test]
fn the_log_probability_is_the_models_own() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(8);
    let mut choices = choices(&mut random);
    choices.iter_mut().for_each(|choice| choice.report = ChoiceReport::LogProbability);
    let vocabulary = 5001;
    let logits: Vec<f32> = random.normals(vocabulary * choices.len()).iter().map(|x| 4.0 * x).collect();
    for (row, told) in logits.chunks(vocabulary).zip(chosen(&stream, &logits, &choices)) {
        let told = told.unwrap();
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        let want = f64::from(row[told.token as usize]) - sum.ln();
        assert!((f64::from(told.log_probability) - want).abs() < 1e-5, "{told:?} instead of {want}");
    }
    assert_eq!(chosen(&stream, &logits[..vocabulary], &[NEUTRAL])[0].unwrap().log_probability, -9999.0);
}

#[test]
fn a_recorded_choice_is_made_anew_of_what_is_then_asked() {
    let Some(stream) = stream() else { return };
    let logits = matrix(&stream, ElementKind::F32, 4, &[1.0; 8]);
    let mut chosen = ChosenTokens::new(stream.cuda(), 2).unwrap();
    let at = |draw| TokenChoice { draw, ..NEUTRAL };
    // Concurrent tests free memory, which invalidates a graph.
    let mut replay = Replay::Stale;
    while replay == Replay::Stale {
        chosen.ask(&stream, &[at(0.1), at(0.1)]).unwrap();
        let mut graph = Graph::capture(&stream, || choose(&stream, &logits, &mut chosen)).unwrap();
        chosen.ask(&stream, &[at(0.9), at(0.3)]).unwrap();
        replay = graph.launch(&stream).unwrap();
        stream.synchronize().unwrap();
    }
    let told = chosen.read(&stream).unwrap();
    assert_eq!(told.iter().map(|told| told.unwrap().token).collect::<Vec<_>>(), [3, 1]);
}
