//! An adapter with a classification head (PEFT's task `SEQ_CLS`) is read as PEFT saves it (values by PEFT:
//! `golden.rs`), and rejected by name where it is not supported.

use crate::files_support::{assert_says, f32_bytes, hf_name, numbers, safetensors, tiny};
use model::{
    adapter::{
        Adapter, AdapterError, AdapterKind, AnyAdapter, ClassificationAdapter,
        by_name::NamedLora,
        merge::{AdapterMergeError, sum},
    },
    shape::source::Target,
};
use serde_json::{Value, json};

type HeadTensor = (String, &'static str, Vec<usize>, Vec<u8>);

const SCORE: &str = "base_model.model.score";

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "modules_to_save": ["classifier", "score"],
    });
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn floats(name: &str, shape: &[usize], seed: usize) -> HeadTensor {
    (name.to_owned(), "F32", shape.to_vec(), f32_bytes(&numbers(shape.iter().product(), seed)))
}

fn layers() -> Vec<HeadTensor> {
    let layer = |layer| {
        let name = format!("base_model.model.{}", hf_name(layer, Target::Q));
        [
            floats(&format!("{name}.lora_A.weight"), &[2, 32], 3),
            floats(&format!("{name}.lora_B.weight"), &[32, 2], 4),
        ]
    };
    (0..2).flat_map(layer).collect()
}

fn with_head(labels: usize) -> Vec<HeadTensor> {
    let mut all = layers();
    all.push(floats(&format!("{SCORE}.weight"), &[labels, tiny().hidden_size], 5));
    all
}

fn in_directory<T>(config: &Value, entries: &[HeadTensor], use_it: impl FnOnce(&std::path::Path) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    use_it(directory.path())
}

fn read(changes: &Value, entries: &[HeadTensor]) -> Result<ClassificationAdapter, AdapterError> {
    in_directory(&config(changes), entries, |path| {
        let adapter = AnyAdapter::read(path, &tiny());
        assert_eq!(AnyAdapter::problems(path, &tiny()).is_empty(), adapter.is_ok());
        adapter.map(|adapter| {
            assert_eq!(adapter.kind(), AdapterKind::Classification);
            let AnyAdapter::Classifies(classifier) = adapter else { panic!("{adapter:?}") };
            classifier
        })
    })
}

#[test]
fn a_head_is_that_of_the_file_with_the_names_of_the_configuration() {
    let hidden = tiny().hidden_size;
    let plain = read(&json!({}), &with_head(3)).unwrap();
    assert_eq!(plain.head.labels(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
    assert_eq!(plain.adapter.modules().len(), 2);
    let state = numbers(hidden, 9);
    let weight = numbers(3 * hidden, 5);
    for (label, logit) in plain.head.logits(&state).into_iter().enumerate() {
        let row = &weight[label * hidden..][..hidden];
        let expected: f64 = row.iter().zip(&state).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        assert_eq!(logit, expected as f32);
    }
    let named = read(&json!({ "id2label": { "2": "bad", "0": "good" } }), &with_head(3)).unwrap();
    assert_eq!(named.head.labels(), ["good", "LABEL_1", "bad"]);
    assert_ne!(named.adapter.generation, plain.adapter.generation, "answers show the names");
}

#[test]
fn a_bias_and_the_other_name_of_the_head_are_accepted() {
    let hidden = tiny().hidden_size;
    let mut all = layers();
    all.push(floats("base_model.model.classifier.weight", &[2, hidden], 5));
    let without = read(&json!({}), &all).unwrap();
    all.push(floats("base_model.model.classifier.bias", &[2], 6));
    let with = read(&json!({}), &all).unwrap();
    let zeros = vec![0.0; hidden];
    assert_eq!(without.head.logits(&zeros), [0.0; 2]);
    assert_eq!(with.head.logits(&zeros), numbers(2, 6)[..]);
    assert_ne!(with.adapter.generation, without.adapter.generation);
}

#[test]
fn a_head_that_is_not_supported_is_refused_by_name() {
    let hidden = tiny().hidden_size;
    let says = |changes: &Value, entries: &[HeadTensor], parts: &[&str]| {
        assert_says(read(changes, entries), parts);
    };
    says(&json!({}), &layers(), &["score.weight", "missing"]);
    says(&json!({}), &with_head(257), &["257 labels", "256"]);
    says(&json!({ "modules_to_save": ["score", "embed_tokens"] }), &with_head(2), &["embed_tokens", "score"]);
    says(&json!({ "id2label": { "2": "x" } }), &with_head(2), &["2 labels", "label 2"]);
    says(&json!({ "id2label": { "one": "x" } }), &with_head(2), &["`id2label`", "numbers"]);
    says(&json!({ "id2label": ["x"] }), &with_head(2), &["`id2label`", "object"]);
    says(&json!({ "use_dora": true }), &with_head(2), &["`task_type` is SEQ_CLS", "plain LoRA"]);
    let mut narrow = layers();
    narrow.push(floats(&format!("{SCORE}.weight"), &[2, hidden - 1], 5));
    says(&json!({}), &narrow, &["score.weight", "shape"]);
    let mut broken = layers();
    let values = vec![f32::NAN; 2 * hidden];
    broken.push((format!("{SCORE}.weight"), "F32", vec![2, hidden], f32_bytes(&values)));
    assert!(read(&json!({}), &broken).unwrap_err().to_string().contains("NaN"));
    says(&json!({ "task_type": "CAUSAL_LM", "modules_to_save": null }), &with_head(2), &["score.weight"]);
}

#[test]
fn a_classifier_is_neither_merged_nor_read_where_only_languages_are() {
    in_directory(&config(&json!({})), &with_head(2), |path| {
        for refused in
            [Adapter::read(path, &tiny()).map(drop), NamedLora::read(path).map(drop)].map(Result::unwrap_err)
        {
            assert!(matches!(refused, AdapterError::Classification { .. }), "{refused}");
        }
        let adapter = AnyAdapter::read(path, &tiny()).unwrap();
        let kind = AdapterMergeError::Kind(AdapterKind::Classification);
        assert_eq!(sum(vec![(adapter.clone(), 1.0), (adapter, 1.0)]), Err(kind));
    });
}
