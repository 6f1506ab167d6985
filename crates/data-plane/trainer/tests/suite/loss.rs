//! Losses: names, gradients by finite differences, and edge values.

use std::collections::BTreeMap;

use proptest::prelude::*;
use trainer::loss::{self, AnswerLogprobs, Clip, Loss, LossError, PolicyLoss};

fn config(options: &[(&str, f64)]) -> BTreeMap<String, f64> {
    options.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

#[test]
fn losses_are_named_as_tinker_names_them() {
    let named = |name: &str, options: &[(&str, f64)]| Loss::named(name, &config(options));
    assert_eq!(named("cross_entropy", &[]), Ok(Loss::CrossEntropy));
    assert_eq!(named("ppo", &[]), Ok(Loss::Policy(PolicyLoss::Ppo(Clip { low: 0.8, high: 1.2 }))));
    let bounds = [("clip_low_threshold", 0.0), ("clip_high_threshold", 4.0)];
    assert_eq!(named("cispo", &bounds), Ok(Loss::Policy(PolicyLoss::Cispo(Clip { low: 0.0, high: 4.0 }))));
    assert_eq!(named("dro", &[("beta", 0.05)]), Ok(Loss::Policy(PolicyLoss::Dro { beta: 0.05 })));
    assert!(matches!(named("gspo", &[]), Err(LossError::UnknownLoss(_))));
    assert!(matches!(named("dro", &[]), Err(LossError::MissingOption { option: "beta", .. })));
    assert!(matches!(named("importance_sampling", &[("beta", 1.0)]), Err(LossError::UnknownOption { .. })));
    for wrong in [
        ("clip_low_threshold", 1.3),
        ("clip_low_threshold", f64::NAN),
        ("clip_high_threshold", f64::INFINITY),
    ] {
        assert!(matches!(named("ppo", &[wrong]), Err(LossError::Invalid { .. })), "{wrong:?}");
    }
}

#[test]
fn tokens_without_advantage_or_weight_count_nothing_however_unlikely() {
    let unlikely = [f32::NEG_INFINITY, -1.0];
    for policy in
        [PolicyLoss::ImportanceSampling, PolicyLoss::Ppo(Clip::default()), PolicyLoss::Cispo(Clip::default())]
    {
        let evaluated = policy.of(&unlikely, &[0.0, -1.0], &[0.0, 2.0]);
        assert!(
            evaluated.loss.is_finite() && evaluated.gradients == [0.0, -2.0],
            "{policy:?}: {evaluated:?}"
        );
        assert_eq!(evaluated.metrics["sampled:sum"], 1.0);
        let overflow = policy.of(&[0.0, -1.0], &[-1e4, -1.0], &[0.0, 2.0]);
        assert!(overflow.loss.is_finite() && overflow.gradients == [0.0, -2.0], "{policy:?}: {overflow:?}");
    }
    assert_eq!(loss::cross_entropy(&unlikely, &[0.0, 1.0]).loss, 1.0);
}

#[test]
fn dpo_of_a_margin_beyond_any_exponent_is_a_line() {
    let answer = |logprobs| AnswerLogprobs { logprobs, reference_logprobs: &[0.0], weights: &[1.0] };
    let lost = loss::dpo(1.0, answer(&[-5000.0]), answer(&[0.0]));
    assert!(
        (lost.loss - 5000.0).abs() < 1e-9
            && lost.chosen_gradients == [-1.0]
            && lost.rejected_gradients == [1.0]
    );
    let won = loss::dpo(1.0, answer(&[0.0]), answer(&[-5000.0]));
    assert!(won.loss == 0.0 && won.chosen_gradients == [0.0], "{won:?}");
    assert_eq!((won.metrics["accuracy:sum"], lost.metrics["accuracy:sum"]), (1.0, 0.0));
}

#[test]
fn metrics_of_parts_add_up() {
    let mut whole = loss::LossMetrics::new();
    for logprob in [-1.0, -2.0] {
        loss::add(&mut whole, &loss::cross_entropy(&[logprob], &[0.5]).metrics);
    }
    assert_eq!(whole, loss::LossMetrics::from([("loss:sum", 1.5), ("weight:sum", 1.0)]));
}

proptest! {
    #[test]
    fn gradients_are_what_the_loss_changes_by(logprob in -4.0f32..0.0, sampling in -4.0f32..0.0, advantage in -2.0f32..2.0) {
        let bounds = Clip { low: 0.5, high: 2.0 };
        for policy in [PolicyLoss::ImportanceSampling, PolicyLoss::Ppo(bounds), PolicyLoss::Dro { beta: 0.3 }] {
            let at = |logprob: f32| policy.of(&[logprob], &[sampling], &[advantage]);
            let (before, behind) = (logprob - 1.0 / 1024.0, logprob + 1.0 / 1024.0);
            let slope = (at(behind).loss - at(before).loss) / (f64::from(behind) - f64::from(before));
            // The slope is undefined if a bound lies between the two points.
            let ends = [before, behind].map(|logprob| f64::from(at(logprob).gradients[0]));
            let (least, most) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
            let slack = 1e-4 * (1.0 + slope.abs());
            prop_assert!(slope >= least - slack && slope <= most + slack, "{policy:?}: {slope} and {ends:?}");
        }
    }
}
