//! Tests with planted lines, the paper's own example and arbitrary input.

use proptest::prelude::*;

use super::*;
use crate::perf::linear_fit::TimingSample;

const CORE: LinearFit = LinearFit { alpha: 5e-11, beta: 4e-6 };
const BASE: LinearFit = LinearFit { alpha: 3e-4, beta: 4e-3 };
const LINK: LinearFit = LinearFit { alpha: 5e-10, beta: 2e-5 };

/// Rank 32 in all seven matrices of a small Llama: 30 layers of width 576.
const COLD: ColdPrefill = ColdPrefill {
    tokens: 64,
    work: LayerWork { multiply_adds: 32 * 10_000, slices: 4 },
    layers: 30,
    missing_bytes: 20 << 20,
    queued_bytes: 0,
    uptake: ArrivalPolicy::ByLayer,
    hands: HostCompute::Workers(NonZeroUsize::MIN),
    interference: 1.0,
};

/// Returns a model with exactly these lines.
fn exact(core: LinearFit, base: LinearFit, link: LinearFit) -> PerfModel {
    let mut model = PerfModel::new();
    let pairs = [(&mut model.core, core), (&mut model.base, base), (&mut model.link, link)];
    for (fit, line) in pairs {
        for power in 0..44 {
            let work = 2_f64.powi(power);
            fit.observe(work, line.at(work));
        }
    }
    model
}

fn near(found: f64, truth: f64, tolerance: f64) -> bool {
    (found - truth).abs() <= tolerance * truth
}

/// Returns timings of `line` with relative noise up to `noise`; every fifth takes `outlier` times as long.
fn timings(line: LinearFit, noises: &[f64], noise: f64, outlier: f64) -> Vec<TimingSample> {
    let timing = |(number, &random): (usize, &f64)| {
        let work = 1.5_f64.powi(number as i32 % 24);
        let factor = if number % 5 == 4 { outlier } else { 1.0 + noise * random };
        TimingSample::new(work, line.at(work) * factor)
    };
    noises.iter().enumerate().map(timing).collect()
}

fn fit_to(samples: &[TimingSample]) -> Fit {
    let mut fit = Fit::default();
    samples.iter().for_each(|sample| fit.observe(sample.work, sample.seconds));
    fit
}

#[test]
fn least_squares_gives_the_textbook_line_and_is_nowhere_negative() {
    let sample = |work, seconds| TimingSample { work, seconds };
    // By hand: means 2 and 4, covariance 4, variance 2.
    let line = LinearFit::least_squares(&[sample(1.0, 2.0), sample(2.0, 4.0), sample(3.0, 6.0)]).unwrap();
    assert!(near(line.alpha, 2.0, 1e-12) && line.beta < 1e-12);
    let line = LinearFit::least_squares(&[sample(1.0, 3.0), sample(2.0, 4.0), sample(3.0, 8.0)]).unwrap();
    // Unbounded it would be 2.5 x + 0.
    assert!(near(line.at(2.0), 5.0, 1e-12));
    let below_zero = LinearFit::least_squares(&[sample(1.0, 1.0), sample(2.0, 4.0)]).unwrap();
    // Through zero: (1 + 8) / (1 + 4).
    assert_eq!((below_zero.alpha, below_zero.beta), (1.8, 0.0));
    let falling = LinearFit::least_squares(&[sample(1.0, 4.0), sample(2.0, 2.0)]).unwrap();
    assert_eq!((falling.alpha, falling.beta), (0.0, 3.0));
    let one_size = LinearFit::least_squares(&[sample(4.0, 2.0), sample(4.0, 6.0)]).unwrap();
    assert_eq!((one_size.alpha, one_size.beta), (1.0, 0.0));
    assert_eq!(LinearFit::least_squares(&[]), None);
}

#[test]
fn a_flood_of_small_passes_does_not_drive_out_what_is_known_of_large_ones() {
    let mut fit = fit_to(&timings(BASE, &[0.0; 48], 0.0, 1.0));
    let before = fit.line().unwrap().at(10_000.0);
    for _ in 0..100_000 {
        fit.observe(1.0, BASE.at(1.0) * 1.05);
    }
    assert!(near(fit.line().unwrap().at(10_000.0), before, 0.05));
    assert!(fit.samples() <= 24 * 9);
}

#[test]
fn a_machine_that_became_slower_is_believed_soon() {
    let mut fit = fit_to(&timings(BASE, &[0.0; 240], 0.0, 1.0));
    let slower = LinearFit { alpha: BASE.alpha * 3.0, beta: BASE.beta * 3.0 };
    for sample in timings(slower, &[0.0; 240], 0.0, 3.0) {
        fit.observe(sample.work, sample.seconds);
    }
    assert!(near(fit.line().unwrap().at(1_000.0), slower.at(1_000.0), 0.01));
}

#[test]
fn c_is_the_most_tokens_for_which_a_core_keeps_up_with_the_base() {
    // A layer of the base takes 1.6 ms for this pass; a core needs 0.1 ms for a token: 16 tokens, as in the paper.
    let core = LinearFit { alpha: 1e-9, beta: 0.0 };
    let base = LinearFit { alpha: 1e-4, beta: 128e-4 };
    let model = exact(core, base, LINK);
    let work = LayerWork { multiply_adds: 100_000, slices: 4 };
    assert_eq!(model.tokens_per_core(work, 16, 128), Some(16));
    assert_eq!(cores_for(128, 16), 8);
    // The slices' own cost leaves time for 12 tokens: 1.6 ms - 4 · 0.1 ms.
    let model = exact(LinearFit { beta: 1e-4, ..core }, base, LINK);
    assert_eq!(model.tokens_per_core(work, 16, 128), Some(12));
    assert_eq!(cores_for(128, 12), 11);
    // No token fits where the slices cost more than the layer.
    assert_eq!(model.tokens_per_core(LayerWork { slices: 17, ..work }, 16, 128), Some(1));
    assert_eq!(PerfModel::new().tokens_per_core(work, 16, 128), None);
}

#[test]
fn cores_are_rounded_up() {
    let golden =
        [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (128, 16, 8), (5, 0, 5), (9, usize::MAX, 1)];
    for (tokens, c, cores) in golden {
        assert_eq!(cores_for(tokens, c), cores, "{tokens} tokens at {c} a core");
    }
}

#[test]
fn a_model_that_knows_nothing_assists() {
    assert_eq!(PerfModel::new().decide(&COLD), Decision::Assist);
    assert_eq!(PerfModel::new().forecast(&COLD), None);
    assert_eq!(PerfModel::new().crossover_tokens(&COLD, 4_096), None);
}

#[test]
fn both_ways_are_forecast_as_by_hand() {
    // There are 10 layers; base 1 ms per layer, worker 4 ms, load 10 ms: 2.5 layers, and half a one.
    let model = exact(
        LinearFit { alpha: 1e-9, beta: 0.0 },
        LinearFit { alpha: 1e-5, beta: 9e-3 },
        LinearFit { alpha: 1e-9, beta: 0.0 },
    );
    let cold = ColdPrefill {
        tokens: 100,
        work: LayerWork { multiply_adds: 40_000, slices: 1 },
        layers: 10,
        missing_bytes: 4_000_000,
        queued_bytes: 6_000_000,
        ..COLD
    };
    let forecast = model.forecast(&cold).unwrap();
    assert!(near(forecast.assist_s, 3.0 * 4e-3 + 7.0 * 1e-3, 1e-6), "{forecast:?}");
    assert!(near(forecast.wait_s, 10e-3 + 10.0 * 1e-3, 1e-6), "{forecast:?}");
    // In a pass that is taken whole, the worker computes all ten layers, however far the load is.
    let whole = model.forecast(&ColdPrefill { uptake: ArrivalPolicy::ByPass, ..cold }).unwrap();
    assert!(near(whole.assist_s, 10.0 * 4e-3, 1e-6), "{whole:?}");
    assert_eq!((whole.wait_s, whole.decision()), (forecast.wait_s, Decision::Wait));
    // The executor's own threads add to the base's time: 5 ms per layer, two layers and a half.
    let alone = ColdPrefill { hands: HostCompute::of(0, 1), ..cold };
    let forecast = model.forecast(&alone).unwrap();
    assert!(near(forecast.assist_s, 2.5 * 5e-3 + 7.5 * 1e-3, 1e-6), "{forecast:?}");
    // Two workers on the base's cores take 2 ms, against 3 ms of a base that they slow down.
    let shared = ColdPrefill { hands: HostCompute::of(2, 1), interference: 3.0, ..cold };
    let (load, both) = (10e-3, 3e-3);
    let layers = load / both + 0.5;
    let forecast = model.forecast(&shared).unwrap();
    assert!(near(forecast.assist_s, layers * both + (10.0 - layers) * 1e-3, 1e-6), "{forecast:?}");
}

#[test]
fn what_is_there_already_is_not_waited_for() {
    let model = exact(CORE, BASE, LINK);
    let forecast = model.forecast(&ColdPrefill { missing_bytes: 0, queued_bytes: 1 << 40, ..COLD }).unwrap();
    assert_eq!(forecast.assist_s, forecast.wait_s);
    assert_eq!(forecast.decision(), Decision::Assist);
}

#[test]
fn a_short_prompt_is_assisted_and_a_long_one_waits_from_the_crossover_on() {
    let model = exact(CORE, BASE, LINK);
    // The core is slow enough to fall behind the base.
    let slow = ColdPrefill { work: LayerWork { multiply_adds: 32_000_000, slices: 4 }, ..COLD };
    let crossover = model.crossover_tokens(&slow, 100_000).unwrap();
    assert!(crossover > 1);
    let at = |tokens| model.decide(&ColdPrefill { tokens, ..slow });
    assert_eq!((at(crossover - 1), at(crossover)), (Decision::Assist, Decision::Wait));
    let more_workers = ColdPrefill { hands: HostCompute::of(8, 1), ..slow };
    assert!(model.crossover_tokens(&more_workers, 100_000).is_none_or(|later| later > crossover));
    assert_eq!(model.crossover_tokens(&slow, crossover - 1), None);
}

fn planted() -> impl Strategy<Value = LinearFit> {
    (-12.0..-3.0_f64, -7.0..-2.0_f64)
        .prop_map(|(a, b)| LinearFit { alpha: 10_f64.powf(a), beta: 10_f64.powf(b) })
}

/// Generates arbitrary input of a caller.
fn anything() -> impl Strategy<Value = ColdPrefill> {
    let sizes = (any::<usize>(), any::<u64>(), any::<usize>(), any::<usize>());
    (sizes, any::<u64>(), any::<u64>(), any::<usize>(), any::<f64>()).prop_map(
        |((tokens, multiply_adds, slices, layers), missing_bytes, queued_bytes, hands, interference)| {
            ColdPrefill {
                tokens,
                work: LayerWork { multiply_adds, slices },
                layers,
                missing_bytes,
                queued_bytes,
                uptake: if hands & 4 == 0 { ArrivalPolicy::ByLayer } else { ArrivalPolicy::ByPass },
                hands: HostCompute::of(hands & 3, hands >> 3),
                interference,
            }
        },
    )
}

proptest! {
    #[test]
    fn a_planted_line_is_found_again_under_noise_and_outliers(
        line in planted(),
        noises in prop::collection::vec(-1.0..1.0_f64, 240),
        outlier in prop_oneof![3.0..100.0_f64, 0.01..0.3_f64],
    ) {
        let samples = timings(line, &noises, 0.05, outlier);
        let fit = fit_to(&samples);
        let found = fit.line().unwrap();
        for sample in &samples {
            let (found, truth) = (found.at(sample.work), line.at(sample.work));
            prop_assert!(near(found, truth, 0.06), "{found} instead of {truth} for {}", sample.work);
        }
        prop_assert!(fit.outliers() > 0);
        prop_assert!((0.0..=1.0).contains(&fit.r_squared()));
    }

    #[test]
    fn clean_timings_give_both_coefficients_and_explain_everything(line in planted()) {
        let fit = fit_to(&timings(line, &[0.0; 120], 0.0, 1.0));
        let found = fit.line().unwrap();
        prop_assert!(near(found.alpha, line.alpha, 1e-2 + 1e-9 * line.beta / line.alpha), "{found:?} {line:?}");
        prop_assert!(near(found.beta, line.beta, 1e-2 + 1e-9 * line.alpha / line.beta), "{found:?} {line:?}");
        prop_assert!(near(found.at(50.0), line.at(50.0), 1e-6));
    }

    #[test]
    fn a_longer_prompt_never_goes_back_to_assistance(
        core in planted(),
        base in planted(),
        link in planted(),
        slowness in 1.0..1e6_f64,
        bytes in 0..1_u64 << 34,
        layers in 1..100_usize,
        workers in 1..9_usize,
        interference in 1.0..4.0_f64,
    ) {
        // The cost per slice, relative to its tokens, is at most the base's fixed cost relative to its own.
        let multiply_adds = (1e3 * slowness) as u64;
        let relative = base.beta / base.alpha * core.alpha * multiply_adds as f64 / workers as f64;
        let core = LinearFit { beta: core.beta.min(relative), ..core };
        let model = exact(core, base, link);
        let cold = ColdPrefill {
            work: LayerWork { multiply_adds, slices: 1 },
            layers,
            missing_bytes: bytes,
            hands: HostCompute::of(workers, 1),
            interference,
            ..COLD
        };
        let mut waited = false;
        for tokens in (0..200).chain((2..60).map(|step| step * 100)) {
            let forecast = model.forecast(&ColdPrefill { tokens, ..cold }).unwrap();
            // A tie up to rounding is no change of the decision.
            let wins = forecast.assist_s - forecast.wait_s;
            prop_assert!(!waited || wins > -1e-6 * forecast.wait_s, "{tokens} tokens are assisted again");
            waited |= wins > 1e-6 * forecast.wait_s;
        }
    }

    #[test]
    fn the_half_layer_is_at_most_half_a_layer_from_rounding_up(
        core in planted(),
        base in planted(),
        link in planted(),
        tokens in 1..4_096_usize,
        bytes in 1..1_u64 << 30,
    ) {
        let model = exact(core, base, link);
        let (core, base, link) = (model.core.line().unwrap(), model.base.line().unwrap(), model.link.line().unwrap());
        let cold = ColdPrefill { tokens, missing_bytes: bytes, ..COLD };
        let (layers, base_s) = (30.0, base_layer_s(base, tokens, 30));
        let both_s = both_layer_s(hands_layer_s(core, &cold), base_s, &cold);
        let rounded = (load_s(link, &cold) / both_s).ceil().min(layers);
        let by_the_paper = rounded * both_s + (layers - rounded) * base_s;
        let forecast = model.forecast(&cold).unwrap();
        prop_assert!((forecast.assist_s - by_the_paper).abs() <= (both_s - base_s) * 0.5 + 1e-9 * by_the_paper);
    }

    #[test]
    fn nothing_that_can_come_in_gives_nonsense(
        samples in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u32>()), 0..60),
        strange in prop::collection::vec((any::<f64>(), any::<f64>()), 0..20),
        cold in anything(),
    ) {
        let mut model = PerfModel::new();
        for (number, &(work, seconds, nanos)) in samples.iter().enumerate() {
            let took = Duration::new(seconds >> (number % 64), nanos % 1_000_000_000);
            model.observe_core(work, took);
            model.observe_base(work as usize, took);
            model.observe_link(work >> (number % 64), took);
        }
        strange.iter().for_each(|&(work, seconds)| model.core.observe(work, seconds));
        for fit in [model.core(), model.base(), model.link()] {
            if let Some(LinearFit { alpha, beta }) = fit.line() {
                prop_assert!(alpha.is_finite() && alpha >= 0.0 && beta.is_finite() && beta >= 0.0);
            }
            prop_assert!((0.0..=1.0).contains(&fit.r_squared()));
        }
        if let Some(Forecast { assist_s, wait_s }) = model.forecast(&cold) {
            prop_assert!(assist_s.is_finite() && assist_s >= 0.0 && wait_s.is_finite() && wait_s >= 0.0);
        }
        let _ = model.decide(&cold);
        let c = model.tokens_per_core(cold.work, cold.layers, cold.tokens);
        prop_assert!(c.is_none_or(|c| c >= 1 && cores_for(cold.tokens, c) <= cold.tokens));
        let _ = model.crossover_tokens(&cold, cold.tokens % 100);
        let written = format!("{model:?}");
        prop_assert!(!written.contains("NaN"), "{written}");
    }
}
