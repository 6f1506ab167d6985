//! Models with GPTQ or AWQ layers: conversion of their parts, and rejected files.

use crate::files_support::{assert_says, f16_bytes, numbers, tiny_entries, tiny_json, write_model};
use kernels::TensorType;
use model::{
    shape::source::{Target, TensorId, WeightSource},
    sources::safetensors::{SafetensorsSource, SafetensorsSourceError},
};
use serde_json::json;

type QuantizedTensor = (String, &'static str, Vec<usize>, Vec<u8>);

const LAYER: &str = "model.layers.0.self_attn.q_proj";

/// Parts of a 32 x 32 layer in two groups, each with its type, shape and bytes.
fn parts() -> [(&'static str, &'static str, Vec<usize>, Vec<u8>); 4] {
    let words = |count: usize| (0..4 * count).map(|at| (at * 37 % 251) as u8).collect();
    let groups = (0..32u32).flat_map(|input| (input / 16).to_le_bytes()).collect();
    [
        ("qweight", "I32", vec![4, 32], words(128)),
        ("qzeros", "I32", vec![2, 4], words(8)),
        ("scales", "F16", vec![2, 32], f16_bytes(&numbers(64, 3))),
        ("g_idx", "I32", vec![32], groups),
    ]
}

fn open_with(
    parts: impl IntoIterator<Item = (&'static str, &'static str, Vec<usize>, Vec<u8>)>,
) -> Result<SafetensorsSource, SafetensorsSourceError> {
    let mut entries: Vec<QuantizedTensor> = tiny_entries(&[]);
    entries.retain(|entry| entry.0 != format!("{LAYER}.weight"));
    entries.extend(
        parts.into_iter().map(|(part, kind, shape, data)| (format!("{LAYER}.{part}"), kind, shape, data)),
    );
    let mut config = tiny_json();
    config["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4, "group_size": 16 });
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &config, &entries);
    SafetensorsSource::open(directory.path())
}

#[test]
fn layers_become_blocks_where_their_groups_are_runs_of_them() {
    let golden = testkit::paths::golden("models");
    for (name, expected) in [
        ("llama-gptq", TensorType::Q4_0),
        ("llama-gptq-rows", TensorType::Q4_1),
        ("llama-gptq8", TensorType::Q8_0),
        ("llama-awq", TensorType::Q4_1),
        ("qwen2-gptq-order", TensorType::F16),
    ] {
        let source = SafetensorsSource::open(&golden.join(name)).unwrap();
        let layer = TensorId::Weight(1, Target::Down);
        let tensor = source.tensor(layer).unwrap();
        assert_eq!((source.kind(layer), tensor.kind), (Some(expected), expected), "{name}");
        assert_eq!((tensor.rows, tensor.cols), (64, 96));
        assert_eq!(tensor.data.len(), 64 * expected.row_bytes(96).unwrap());
        assert_eq!(source.kind(TensorId::TokenEmbedding), Some(TensorType::F32), "not quantized");
    }
}

#[test]
fn layers_that_are_stored_as_matrices_and_biases_stand_beside_quantized_ones() {
    let bias = ("bias", "F16", vec![32], f16_bytes(&numbers(32, 1)));
    let source = open_with(parts().into_iter().chain([bias])).unwrap();
    // Groups of sixteen do not form blocks.
    assert_eq!(source.kind(TensorId::Weight(0, Target::Q)), Some(TensorType::F16));
    assert_eq!(source.kind(TensorId::Weight(0, Target::K)), Some(TensorType::F32));
    assert_eq!(source.kind(TensorId::Bias(0, Target::Q)), Some(TensorType::F16));
    source.release(TensorId::Weight(0, Target::Q));
    assert!(source.tensor(TensorId::Weight(0, Target::Q)).is_some());
}

#[test]
fn parts_that_are_missing_or_do_not_fit_are_refused_by_name() {
    for missing in ["qzeros", "scales"] {
        let rest = parts().into_iter().filter(|part| part.0 != missing);
        assert_says(open_with(rest), &[&format!("{LAYER}.{missing}"), "missing"]);
    }
    assert_says(open_with(parts().into_iter().skip(1)), &["q_proj", "missing"]);
    let with = |part: &str, shape: Vec<usize>, data: Vec<u8>| {
        let change = |(name, kind, old, bytes)| {
            if name == part { (name, kind, shape.clone(), data.clone()) } else { (name, kind, old, bytes) }
        };
        open_with(parts().map(change))
    };
    assert_says(with("qweight", vec![32, 4], vec![0; 512]), &["qweight", "[32, 4]", "[4, 32]"]);
    assert_says(with("qzeros", vec![1, 8], vec![0; 32]), &["qzeros", "[1, 8]"]);
    assert_says(with("scales", vec![1, 64], vec![0; 128]), &["scales", "[1, 64]"]);
    assert_says(with("g_idx", vec![16], vec![0; 64]), &["g_idx", "[16"]);
    assert_says(with("g_idx", vec![32], vec![255; 128]), &["g_idx", "group 4294967295", "2"]);
    let strange = ("strange", "I32", vec![1], vec![0; 4]);
    assert_says(open_with(parts().into_iter().chain([strange])), &["strange", "not supported"]);
    let long = parts()
        .map(|part| if part.0 == "qweight" { ("qweight", "I64", vec![2, 32], vec![0; 512]) } else { part });
    assert_says(open_with(long), &["q_proj"]);
}
