//! Losses, optimizer and schedules against torch, transformers and the documented formulas
//! (tests/golden/README.md).

use std::collections::BTreeMap;

use serde_json::Value;
use trainer::{
    loss::{self, AnswerLogprobs, Loss},
    optimizer::{Hyperparameters, OptimizerState},
    schedule::{Decay, Schedule},
};

const TOLERANCE: f64 = 1e-5;

pub(crate) fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

pub(crate) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

#[expect(clippy::cast_possible_truncation, reason = "they are numbers of 32 bits")]
pub(crate) fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|item| number(item) as f32).collect()
}

fn tensors(value: &Value) -> Vec<Vec<f32>> {
    value.as_array().unwrap().iter().map(floats).collect()
}

pub(crate) fn assert_near(found: f64, expected: f64, what: &str) {
    let distance = (found - expected).abs();
    assert!(
        distance <= TOLERANCE * expected.abs() + f64::from(f32::MIN_POSITIVE),
        "{what}: {found} is not {expected}"
    );
}

pub(crate) fn assert_all_near(found: &[f32], expected: &Value, what: &str) {
    let expected = expected.as_array().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_near(f64::from(*found), number(expected), &format!("{what} [{at}]"));
    }
}

#[test]
fn losses_and_their_gradients_are_those_of_the_formulas() {
    let cases = golden(include_str!("../../../../../tests/golden/training/losses.json"));
    for (at, case) in cases.as_array().unwrap().iter().enumerate() {
        let name = case["loss"].as_str().unwrap();
        let what = format!("case {at}, {name}");
        if name == "dpo" {
            assert_dpo(case, &what);
            continue;
        }
        let config: BTreeMap<String, f64> = serde_json::from_value(case["config"].clone()).unwrap();
        let logprobs = floats(&case["logprobs"]);
        let evaluated = match Loss::named(name, &config).unwrap() {
            Loss::CrossEntropy => loss::cross_entropy(&logprobs, &floats(&case["weights"])),
            Loss::Policy(policy) => {
                policy.of(&logprobs, &floats(&case["sampling_logprobs"]), &floats(&case["advantages"]))
            }
        };
        assert_near(evaluated.loss, number(&case["value"]), &what);
        assert_near(evaluated.metrics["loss:sum"], number(&case["value"]), &what);
        assert_all_near(&evaluated.gradients, &case["gradients"], &what);
    }
    assert!(cases.as_array().unwrap().len() > 30, "the cases were read");
}

/// The golden values are means over pairs.
fn assert_dpo(case: &Value, what: &str) {
    let pairs = case["pairs"].as_array().unwrap();
    let mut sum = 0.0;
    for pair in pairs {
        let rows = ["chosen", "rejected"]
            .map(|side| ["logprobs", "reference_logprobs", "weights"].map(|name| floats(&pair[side][name])));
        let [chosen, rejected] = rows.each_ref().map(|[logprobs, reference_logprobs, weights]| {
            AnswerLogprobs { logprobs, reference_logprobs, weights }
        });
        let compared = loss::dpo(number(&case["config"]["beta"]), chosen, rejected);
        sum += compared.loss;
        for (side, gradients) in
            [("chosen", compared.chosen_gradients), ("rejected", compared.rejected_gradients)]
        {
            let mean: Vec<f32> = gradients.iter().map(|gradient| gradient / pairs.len() as f32).collect();
            assert_all_near(&mean, &pair[side]["gradients"], &format!("{what}, {side}"));
        }
    }
    assert_near(sum / pairs.len() as f64, number(&case["value"]), what);
}

#[test]
fn a_hundred_steps_of_adamw_end_where_torchs_end() {
    let golden = golden(include_str!("../../../../../tests/golden/training/optimizer.json"));
    let gradients: Vec<_> = golden["gradients"].as_array().unwrap().iter().map(tensors).collect();
    for case in golden["cases"].as_array().unwrap() {
        let given = &case["hyperparameters"];
        let hyper = Hyperparameters {
            learning_rate: number(&given["lr"]),
            beta1: number(&given["betas"][0]),
            beta2: number(&given["betas"][1]),
            eps: number(&given["eps"]),
            weight_decay: number(&given["weight_decay"]),
        };
        let mut values = tensors(&golden["start"]);
        let mut state = OptimizerState::new(&values.iter().map(Vec::len).collect::<Vec<_>>());
        let after = case["after"].as_object().unwrap();
        for (step, gradients) in (1..).zip(&gradients) {
            // As after a save and a load.
            state = OptimizerState { step: state.step, moments: state.moments.clone() };
            state.step(&hyper, &mut values, gradients);
            let Some(expected) = after.get(&step.to_string()) else { continue };
            for (tensor, expected) in values.iter().zip(expected.as_array().unwrap()) {
                assert_all_near(tensor, expected, &format!("{given} after {step} steps"));
            }
        }
        assert!(after.contains_key("100") && gradients.len() == 100, "all steps were compared");
    }
}

#[test]
fn schedules_are_those_of_transformers() {
    let cases = golden(include_str!("../../../../../tests/golden/training/schedules.json"));
    for case in cases.as_array().unwrap() {
        let decay = match case["schedule"].as_str().unwrap() {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            other => panic!("{other}"),
        };
        let steps = |name: &str| case[name].as_u64().unwrap();
        let schedule =
            Schedule { decay, warmup_steps: steps("warmup_steps"), total_steps: steps("total_steps") };
        for (step, expected) in (0..).zip(case["multipliers"].as_array().unwrap()) {
            assert_near(schedule.multiplier(step), number(expected), &format!("{schedule:?} at {step}"));
        }
    }
}
