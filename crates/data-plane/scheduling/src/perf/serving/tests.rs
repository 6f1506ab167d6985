//! Planted planes are found again, also under noise, and each kernel by its own form (C-12).

use proptest::prelude::*;

use super::*;
use crate::random::Rng;

/// Approximate times of Llama2-7B on an A10, from CaraServe's Fig. 9.
const DECODE: [f64; 4] = [0.028, 1e-4, 4e-7, 3.5e-6];
const PREFILL: [f64; 3] = [0.012, 2.2e-4, 6e-7];

/// Returns a batch of 1 to 32 requests with ranks from 8 to 128.
fn batch(rng: Rng, number: u64) -> RequestLoad {
    let bits = |at| rng.bits(number * 100 + at);
    let each =
        (0..1 + bits(0) % 32).map(|at| RequestLoad::of(8 << (bits(at + 1) % 5), 1 + bits(at + 50) % 600));
    each.fold(RequestLoad::default(), RequestLoad::plus)
}

fn truth(form: LoraForm) -> ServingModel {
    const NONE: LinearFit = LinearFit { alpha: 0.0, beta: 0.0 };
    ServingModel {
        form,
        decode: LinearModel { seconds_each: DECODE },
        prefill: LinearModel { seconds_each: PREFILL },
        link: NONE,
        store: NONE,
        cold: ColdStart::Assisted,
    }
}

/// Fits timings of `truth` with relative noise up to `noise`; every tenth takes `outlier` times as long.
fn fitted(form: LoraForm, truth: &ServingModel, seed: u64, noise: f64, outlier: f64) -> ServingFit {
    let (rng, mut fit) = (Rng::seeded(seed), ServingFit::new(form, ColdStart::Assisted));
    for number in 0..600 {
        let load = batch(rng, number);
        let jitter = 1.0 + noise * (2.0 * rng.uniform(1 << 32 | number) - 1.0);
        let factor = if number % 10 == 3 { outlier } else { jitter };
        fit.observe_decode(load, Duration::from_secs_f64(truth.step_s(load) * factor));
        fit.observe_prefill(load, Duration::from_secs_f64(truth.prefill_s(load) * factor));
    }
    fit
}

#[test]
fn each_kernel_fits_its_own_form_and_explains_timings_it_has_not_seen() {
    for (kernel, other) in [(LoraForm::Padded, LoraForm::TrueRank), (LoraForm::TrueRank, LoraForm::Padded)] {
        let own = fitted(kernel, &truth(kernel), 1, 0.02, 1.0).r_squared().unwrap();
        let foreign = fitted(other, &truth(kernel), 1, 0.02, 1.0).r_squared().unwrap();
        for (own, foreign) in own.into_iter().zip(foreign) {
            assert!(own >= 0.95, "{kernel:?}: {own}");
            assert!(own > foreign, "{kernel:?}: {own} as itself, {foreign} as the other");
        }
    }
}

#[test]
fn what_an_executor_becomes_is_followed_and_a_busy_neighbour_is_not() {
    let before = truth(LoraForm::TrueRank);
    let mut fit = fitted(LoraForm::TrueRank, &before, 1, 0.01, 3.0);
    let rng = Rng::seeded(9);
    let error = |fit: &ServingFit, truth: &ServingModel| {
        let model = fit.model().unwrap();
        let each = (0..50).map(|number| batch(rng, number)).map(|load| {
            let decode = (model.step_s(load) / truth.step_s(load) - 1.0).abs();
            decode.max((model.prefill_s(load) / truth.prefill_s(load) - 1.0).abs())
        });
        each.fold(0.0, f64::max)
    };
    assert!(error(&fit, &before) < 0.03, "{}", error(&fit, &before));
    // The executor is half as fast from now on.
    let slow = ServingModel {
        decode: LinearModel { seconds_each: DECODE.map(|each| 2.0 * each) },
        prefill: LinearModel { seconds_each: PREFILL.map(|each| 2.0 * each) },
        ..before
    };
    for number in 0..6_000 {
        let load = batch(Rng::seeded(5), number);
        fit.observe_decode(load, Duration::from_secs_f64(slow.step_s(load)));
        fit.observe_prefill(load, Duration::from_secs_f64(slow.prefill_s(load)));
    }
    assert!(error(&fit, &slow) < 0.1, "{}", error(&fit, &slow));
}

#[test]
fn a_few_timings_give_a_model_and_none_gives_none() {
    let mut fit = ServingFit::new(LoraForm::TrueRank, ColdStart::Waits);
    assert!(fit.model().is_none() && fit.r_squared().is_none());
    fit.observe_decode(RequestLoad::of(16, 100), Duration::from_millis(30));
    assert!(fit.model().is_none());
    fit.observe_prefill(RequestLoad::of(16, 100), Duration::from_millis(50));
    let model = fit.model().unwrap();
    assert!((model.step_s(RequestLoad::of(16, 100)) - 0.03).abs() < 1e-3);
    assert!((model.prefill_s(RequestLoad::of(16, 100)) - 0.05).abs() < 1e-3);
    assert_eq!(model.prefill_s(RequestLoad::default()), 0.0);
}

#[test]
fn what_is_added_is_the_difference() {
    let model = truth(LoraForm::Padded);
    let (load, more) = (RequestLoad::of(16, 300).plus(RequestLoad::of(8, 20)), RequestLoad::of(64, 100));
    let step_s = model.step_s(load.plus(more)) - model.step_s(load);
    assert!((model.added_step_s(load, more) / step_s - 1.0).abs() < 1e-9);
    let prefill_s = model.prefill_s(load.plus(more)) - model.prefill_s(load);
    assert!((model.added_prefill_s(load, more) / prefill_s - 1.0).abs() < 1e-9);
    let alone_s = model.added_prefill_s(RequestLoad::default(), more);
    assert!((alone_s / model.prefill_s(more) - 1.0).abs() < 1e-9, "a pass that nobody else asks for");
}

proptest! {
    // A case is 1,200 timings.
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn planted_planes_are_found_under_noise_and_outliers(seed in any::<u64>(), pads in prop::bool::ANY) {
        let form = if pads { LoraForm::Padded } else { LoraForm::TrueRank };
        let truth = truth(form);
        let model = fitted(form, &truth, seed, 0.03, 3.0).model().unwrap();
        for number in 1000..1050 {
            let load = batch(Rng::seeded(seed), number);
            let near = |found: f64, truth: f64| (found / truth - 1.0).abs() < 0.1;
            prop_assert!(near(model.step_s(load), truth.step_s(load)), "{:?}", model.decode);
            prop_assert!(near(model.prefill_s(load), truth.prefill_s(load)), "{:?}", model.prefill);
        }
    }

    #[test]
    fn no_timings_give_nonsense(
        seen in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 1..60),
        load in (any::<u32>(), any::<u64>(), any::<u64>()),
    ) {
        let mut fit = ServingFit::new(LoraForm::Padded, ColdStart::Assisted);
        for (requests, ranks, max_rank, tokens, nanos) in seen {
            let load = RequestLoad { requests: requests.into(), ranks, max_rank, tokens, token_ranks: ranks };
            fit.observe_decode(load, Duration::from_nanos(nanos));
            fit.observe_prefill(load, Duration::from_nanos(nanos));
        }
        let model = fit.model().unwrap();
        let load = RequestLoad { requests: load.0.into(), ranks: load.1, max_rank: load.2, tokens: load.1, token_ranks: load.2 };
        for seconds in [model.step_s(load), model.prefill_s(load), model.added_step_s(load, load)] {
            prop_assert!(seconds.is_finite() && seconds >= 0.0, "{seconds}");
        }
    }
}
