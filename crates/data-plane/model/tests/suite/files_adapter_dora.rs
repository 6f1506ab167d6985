//! A DoRA is read exactly as PEFT defines it, and changes direction and length of the base's weights (values
//! by PEFT: `golden.rs`).

use crate::files_support::{assert_says, f16_bytes, f32_bytes, hf_name, numbers, safetensors, tiny};
use model::{
    adapter::{
        AdapterError, AdapterKind, AnyAdapter, DoraAdapter, ScaledSide,
        dora::{BaseLayer, DoraError},
        merge::{AdapterMergeError, sum},
    },
    shape::source::Target,
};
use serde_json::{Value, json};

type DoraTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "use_dora": true,
        "target_modules": ["q_proj"],
    });
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn entries(magnitude: f32) -> DoraTensors {
    let of = |layer| {
        let name = format!("base_model.model.{}", hf_name(layer, Target::Q));
        [
            (format!("{name}.lora_A.weight"), "F32", vec![2, 32], f32_bytes(&numbers(64, layer))),
            (format!("{name}.lora_B.weight"), "F32", vec![32, 2], f32_bytes(&numbers(64, layer + 5))),
            (format!("{name}.lora_magnitude_vector"), "F32", vec![32], f32_bytes(&[magnitude; 32])),
        ]
    };
    (0..2).flat_map(of).collect()
}

fn read(config: &Value, entries: &DoraTensors) -> Result<DoraAdapter, AdapterError> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    let adapter = AnyAdapter::read(directory.path(), &tiny());
    assert_eq!(AnyAdapter::problems(directory.path(), &tiny()).is_empty(), adapter.is_ok());
    adapter.map(|adapter| {
        assert_eq!(adapter.kind(), AdapterKind::Dora);
        let AnyAdapter::Decomposed(dora) = adapter else { panic!("{adapter:?}") };
        dora
    })
}

#[test]
fn a_dora_is_a_lora_with_a_magnitude_for_each_output_and_another_generation_for_each_of_them() {
    let dora = read(&config(&json!({})), &entries(1.5)).unwrap();
    assert_eq!((dora.adapter.modules().len(), dora.adapter.method.rank()), (2, 2));
    assert_eq!(dora.magnitudes, [[1.5; 32], [1.5; 32]]);
    let other = read(&config(&json!({})), &entries(1.25)).unwrap();
    assert_ne!(dora.adapter.generation, other.adapter.generation);
    let mut halves = entries(1.5);
    halves[2] = (halves[2].0.clone(), "F16", vec![32], f16_bytes(&[1.5; 32]));
    assert_eq!(read(&config(&json!({})), &halves).unwrap().magnitudes, dora.magnitudes);
}

#[test]
fn a_dora_by_halves_is_refused_by_name() {
    let changed = |change: &dyn Fn(&mut DoraTensors)| {
        let mut entries = entries(1.5);
        change(&mut entries);
        read(&config(&json!({})), &entries)
    };
    let magnitude = "layers.1.self_attn.q_proj.lora_magnitude_vector";
    assert_says(changed(&|entries| drop(entries.remove(5))), &[magnitude, "is missing"]);
    assert_says(changed(&|entries| entries[5].2 = vec![32, 1]), &[magnitude, "[32, 1]"]);
    let not_finite = changed(&|entries| entries[5].3[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    assert_says(not_finite, &[magnitude, "NaN"]);
    assert_says(read(&config(&json!({"use_dora": false})), &entries(1.5)), &["lora_magnitude_vector"]);
    let draft = json!({"holobiont_draft": {"layers": 1}});
    assert_says(read(&config(&draft), &entries(1.5)), &["use_dora", "draft"]);
}

/// A base whose rows are all `[3, 4, 0, ...]`, with this bias.
fn base(bias: Option<&[f32]>) -> BaseLayer<'_> {
    let read_row = |_: usize, row: &mut [f32]| {
        row.fill(0.0);
        row[..2].copy_from_slice(&[3.0, 4.0]);
    };
    BaseLayer { read_row: Box::new(read_row), bias }
}

#[test]
fn over_the_bases_weights_outputs_are_stretched_and_biases_stay() {
    let mut plain = entries(10.0);
    for entry in [1, 4] {
        plain[entry].3.fill(0);
    }
    let dora = read(&config(&json!({})), &plain).unwrap();
    let bias = [0.5; 32];
    let (adapter, scales) = dora.over(&tiny(), |_, _| Some(base(Some(&bias)))).unwrap();
    // With a zero delta, rows have the norm 5, and the magnitude is 10.
    assert_eq!(scales.get(1, Target::Q, ScaledSide::Output), Some(&[2.0; 32][..]));
    assert_eq!(scales.offset(1, Target::Q), Some(&[-0.5; 32][..]), "2 (W x + b) - b");
    assert_eq!(scales.offset(1, Target::K), None);
    assert!(adapter.modules().iter().all(|module| module.b.iter().all(|number| *number == 0.0)));
    assert_eq!(adapter.generation, dora.adapter.generation);

    let dora = read(&config(&json!({})), &entries(10.0)).unwrap();
    let (adapter, scales) = dora.over(&tiny(), |_, _| Some(base(None))).unwrap();
    assert!(!scales.have_offsets());
    for (module, plain) in adapter.modules().iter().zip(dora.adapter.modules()) {
        let gains = scales.get(module.layer, Target::Q, ScaledSide::Output).unwrap();
        for (row, gain) in gains.iter().enumerate() {
            let whole = (0..32).map(|column| {
                let weight = [3.0, 4.0].get(column).copied().unwrap_or(0.0);
                let delta: f32 = (0..2).map(|r| plain.b[row * 2 + r] * plain.a[r * 32 + column]).sum();
                f64::from(weight + 2.0 * delta).powi(2)
            });
            let expected = 10.0 / whole.sum::<f64>().sqrt();
            assert!((f64::from(*gain) / expected - 1.0).abs() < 1e-5, "{gain} is not {expected}");
            let b = plain.b[row * 2..][..2].iter().map(|number| number * gain);
            assert_eq!(module.b[row * 2..][..2], b.collect::<Vec<_>>());
        }
    }
}

#[test]
fn what_has_no_direction_and_what_is_not_at_hand_is_refused_and_nothing_adds_up_with_it() {
    let mut nothing = entries(1.0);
    nothing[1].3.fill(0);
    let dora = read(&config(&json!({})), &nothing).unwrap();
    let empty = || BaseLayer { read_row: Box::new(|_, row: &mut [f32]| row.fill(0.0)), bias: None };
    let module = || hf_name(0, Target::Q);
    assert_eq!(
        dora.over(&tiny(), |_, _| Some(empty())),
        Err(DoraError::NoDirection { module: module(), row: 0 })
    );
    assert_eq!(dora.over(&tiny(), |_, _| None), Err(DoraError::NoWeights { module: module() }));
    let twice = [(AnyAdapter::Decomposed(dora.clone()), 1.0), (AnyAdapter::Decomposed(dora), 1.0)];
    assert_eq!(sum(twice.into()), Err(AdapterMergeError::Kind(AdapterKind::Dora)));
}
