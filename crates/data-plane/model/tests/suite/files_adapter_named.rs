//! Adapters by the names of their layers: a merged file equals the sum in a request, bit by bit.

use testkit::paths::golden;

use crate::files_support::assert_says;
use kernels::TensorType;
use model::{
    adapter::{
        Adapter, AnyAdapter,
        by_name::{MergeError, NamedLora, NamedModule},
        merge::{AdapterMergeError, sum},
    },
    sources::open::open,
};

fn example(name: &str) -> NamedLora {
    NamedLora::read(&golden("../../examples/adapters").join(name)).unwrap()
}

/// The merged and re-read adapters `asked`, and their sum.
fn both_ways(asked: &[(&str, f32)]) -> [Adapter; 2] {
    let (adapters, model) = (golden("adapters/llama-tied"), golden("models/llama-tied"));
    let config = open(&model).unwrap().config().clone();
    let parts: Vec<_> = asked
        .iter()
        .map(|(name, weight)| (NamedLora::read(&adapters.join(name)).unwrap(), *weight))
        .collect();
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("merged");
    NamedLora::merge(&parts).unwrap().write(&output).unwrap();
    let read =
        |(name, weight): &(&str, f32)| (AnyAdapter::read(&adapters.join(name), &config).unwrap(), *weight);
    [Adapter::read(&output, &config).unwrap(), sum(asked.iter().map(read).collect()).unwrap()]
}

#[test]
fn what_is_merged_is_the_sum_to_the_last_bit() {
    for asked in [
        &[("rank4-attention", 0.7), ("rank16-rslora", 0.5)][..],
        &[("rank16-all-linear", 1.0), ("rank8-f16", -0.5), ("some-layers", 1.5)],
        &[("patterns", 0.3), ("patterns-regex", 0.3)],
        &[("rank64-all-linear", 0.25)],
    ] {
        let [merged, summed] = both_ways(asked);
        assert_eq!(merged.modules(), summed.modules(), "{asked:?}");
        let mut turned = asked.to_vec();
        turned.reverse();
        let [again, summed_again] = both_ways(&turned);
        assert_eq!((again.generation, &summed_again), (merged.generation, &summed), "{asked:?}, turned");
    }
}

#[test]
fn factors_of_16_bits_stay_as_they_are_where_all_scales_are_equal() {
    let kind = |weights: [f32; 2]| {
        let parts = [(example("pirate"), weights[0]), (example("pirate"), weights[1])];
        let merged = NamedLora::merge(&parts).unwrap();
        assert!(merged.modules.values().all(|module| module.rank == 16));
        merged.modules.values().next().unwrap().kind
    };
    assert_eq!(kind([0.5, 0.5]), TensorType::F16);
    assert_eq!(kind([0.5, 0.25]), TensorType::F32);
}

/// Product `s B A`, row-major.
fn product(module: &NamedModule) -> Vec<f64> {
    let element = |row: usize, column: usize| -> f64 {
        let ranks = 0..module.rank;
        let each = ranks.map(|r| {
            f64::from(module.b[row * module.rank + r]) * f64::from(module.a[r * module.inputs + column])
        });
        f64::from(module.scale) * each.sum::<f64>()
    };
    let rows = 0..module.outputs;
    rows.flat_map(|row| (0..module.inputs).map(move |column| (row, column)))
        .map(|(r, c)| element(r, c))
        .collect()
}

#[test]
fn norms_and_distances_are_those_of_the_products() {
    let (pirate, json) = (example("pirate"), example("json"));
    let name = "model.layers.3.self_attn.v_proj";
    let (one, other) = (&pirate.modules[name], &json.modules[name]);
    let (ones, others) = (product(one), product(other));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let near =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9, "{found}, {expected}");
    near(one.norm(), norm(&mut ones.iter().copied()));
    near(other.norm(), norm(&mut others.iter().copied()));
    near(one.distance(other), norm(&mut ones.iter().zip(&others).map(|(x, y)| x - y)));
    assert_eq!(one.distance(one), 0.0);
}

#[test]
fn what_cannot_be_merged_is_refused_by_name() {
    let dora = || NamedLora::read(&golden("adapters/dora/llama-tied/everything")).unwrap();
    assert!(dora().modules.values().all(|module| module.magnitude.is_some()));
    let lora = || NamedLora::read(&golden("adapters/llama-tied/rank16-all-linear")).unwrap();
    let error = NamedLora::merge(&[(dora(), 1.0), (lora(), 1.0)]).unwrap_err();
    assert!(matches!(error, MergeError::Sum(AdapterMergeError::Kind(_))), "{error}");
    let other = NamedLora::read(&golden("adapters/gemma3/rank16-all-linear")).unwrap();
    let error = NamedLora::merge(&[(lora(), 1.0), (other, 1.0)]).unwrap_err().to_string();
    assert!(error.contains("same base") && error.contains("layers.0.self_attn.k_proj"), "{error}");
    assert_says(NamedLora::read(&golden("adapters/llama-tied/ia3")), &["peft_type", "IA3"]);
    let draft = golden("../../examples/drafts/smollm2-135m");
    assert_says(NamedLora::read(&draft), &["draft"]);
    assert_says(NamedLora::read(&golden("adapters/llama-tied/nothing")), &["cannot read"]);
}
