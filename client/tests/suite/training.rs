//! Gradients of an adapter that trains over the executor's layers.

use std::path::PathBuf;

use crate::support::{
    OFF, bits, example_adapter, executor, golden, real_model, tiny, tokens,
    training::{learn, remote_trainer, resident_trainer},
};
use client::masking::{Masking, NoiseSettings};
use shmproto::layer::SitePath;

const CASES: [(&str, &str); 4] = [
    ("llama-tied", "lora-all"),
    ("qwen2-bias", "ia3"),
    ("mistral-window", "prefix"),
    ("llama-rope3", "lm-head"),
];

fn start(model: &str, method: &str) -> PathBuf {
    golden("training").join(model).join(method).join("start")
}

#[test]
fn gradients_over_rented_layers_have_the_resident_bits() {
    for (model, method) in CASES {
        let (path, adapter) = (tiny(model), start(model, method));
        let mut resident = resident_trainer(&path);
        let mut remote = remote_trainer(Box::new(executor(&path)), &path, OFF);
        let text = tokens(40, resident.model().config.vocab_size);
        let (expected, found) = (learn(&mut resident, &adapter, &text), learn(&mut remote, &adapter, &text));
        assert_eq!(bits(&found.0), bits(&expected.0), "{model}, {method}: log-probabilities");
        assert_eq!(bits(&found.1.concat()), bits(&expected.1.concat()), "{model}, {method}: gradients");
        assert!(expected.1.concat().iter().any(|&gradient| gradient != 0.0), "{model}, {method}");
    }
}

/// Largest difference, relative to the largest expected value.
fn off(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    if largest == 0.0 { off } else { off / largest }
}

#[test]
fn obfuscated_gradients_are_those_of_the_linear_path_up_to_rounding() {
    let settings = NoiseSettings { noises: 3, rotate_rows: 60, ..NoiseSettings::default() };
    let tiny = CASES.map(|(model, method)| (tiny(model), start(model, method), 1e-4));
    // A 16-bit KV cache amplifies rounding, and random tokens that this adapter finds improbable do more; the
    // noise of some runs causes 1.3e-2.
    let real = (real_model(), example_adapter("pirate"), 5e-2);
    for (path, adapter, most) in tiny.into_iter().chain([real]) {
        let trainer = |masking| remote_trainer(Box::new(executor(&path)), &path, masking);
        let mut plain = trainer(Masking::Off { path: SitePath::Linear });
        let mut masked = trainer(Masking::Paper(settings));
        let text = tokens(40, plain.model().config.vocab_size);
        let (_, expected) = learn(&mut plain, &adapter, &text);
        // The second round draws new noises.
        for _ in 0..2 {
            let (_, found) = learn(&mut masked, &adapter, &text);
            let far = found.iter().zip(&expected).map(|(a, b)| off(a, b)).fold(0.0, f32::max);
            println!("{}: {far:.1e} of a tensor's largest gradient", adapter.display());
            assert!(far < most, "{}: {far}", adapter.display());
            assert_ne!(bits(&found.concat()), bits(&expected.concat()), "something was added and taken away");
        }
    }
}
