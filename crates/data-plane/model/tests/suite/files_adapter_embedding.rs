//! A LoRA of the token embedding is read exactly as PEFT defines it (values by PEFT: `golden.rs`), and
//! rejected by name where it is not supported.

use crate::files_support::{assert_says, f32_bytes, hf_name, numbers, safetensors, tiny};
use model::{
    adapter::{
        Adapter, AdapterError, AdapterKind, AnyAdapter, EmbeddingChange, EmbeddingFactors, VocabularyAdapter,
        by_name::NamedLora,
        merge::{AdapterMergeError, sum},
    },
    shape::source::Target,
};
use serde_json::{Value, json};

type EmbeddingTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

const EMBEDDING: &str = "base_model.model.model.embed_tokens";

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens"],
    });
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn floats(name: &str, shape: [usize; 2], seed: usize) -> (String, &'static str, Vec<usize>, Vec<u8>) {
    (name.to_owned(), "F32", shape.to_vec(), f32_bytes(&numbers(shape[0] * shape[1], seed)))
}

fn entries() -> EmbeddingTensors {
    let (vocab, hidden) = (tiny().vocab_size, tiny().hidden_size);
    vec![
        floats(&format!("{EMBEDDING}.lora_embedding_A"), [2, vocab], 1),
        floats(&format!("{EMBEDDING}.lora_embedding_B"), [hidden, 2], 2),
    ]
}

fn with_queries() -> (Value, EmbeddingTensors) {
    let mut all = entries();
    for layer in 0..2 {
        let name = format!("base_model.model.{}", hf_name(layer, Target::Q));
        all.push(floats(&format!("{name}.lora_A.weight"), [2, 32], 3));
        all.push(floats(&format!("{name}.lora_B.weight"), [32, 2], 4));
    }
    (config(&json!({ "target_modules": ["embed_tokens", "q_proj"] })), all)
}

fn in_directory<T>(
    config: &Value,
    entries: &EmbeddingTensors,
    use_it: impl FnOnce(&std::path::Path) -> T,
) -> T {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    use_it(directory.path())
}

fn read(config: &Value, entries: &EmbeddingTensors) -> Result<VocabularyAdapter, AdapterError> {
    in_directory(config, entries, |path| {
        let adapter = AnyAdapter::read(path, &tiny());
        assert_eq!(AnyAdapter::problems(path, &tiny()).is_empty(), adapter.is_ok());
        adapter.map(|adapter| {
            assert_eq!(adapter.kind(), AdapterKind::Embedding);
            let AnyAdapter::Vocabulary(vocabulary) = adapter else { panic!("{adapter:?}") };
            vocabulary
        })
    })
}

fn factors(adapter: &VocabularyAdapter) -> &EmbeddingFactors {
    let Some(EmbeddingChange::Factors(factors)) = &adapter.changes.embedding else { panic!("{adapter:?}") };
    factors
}

#[test]
fn each_token_has_a_column_of_a_and_all_of_b() {
    let (vocab, hidden) = (tiny().vocab_size, tiny().hidden_size);
    let adapter = read(&config(&json!({})), &entries()).unwrap();
    assert!(adapter.adapter.modules().is_empty(), "there need be no linear layer");
    let (a, b) = (numbers(2 * vocab, 1), numbers(hidden * 2, 2));
    for token in [0, 1, vocab - 1] {
        let delta = |out: usize| 2.0 * (a[token] * b[out * 2] + a[vocab + token] * b[out * 2 + 1]);
        let found = factors(&adapter).delta(u32::try_from(token).unwrap());
        let expected: Vec<f32> = (0..hidden).map(delta).collect();
        assert!(
            found.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 1e-5),
            "{found:?} is not {expected:?}"
        );
    }
    assert_eq!(adapter.changes.bytes(), 4 * 2 * (vocab + hidden));
}

#[test]
fn what_it_does_is_its_generation_and_a_copy_of_the_bases_embedding_is_not() {
    let (vocab, hidden) = (tiny().vocab_size, tiny().hidden_size);
    let generation =
        |config: &Value, entries: &EmbeddingTensors| read(config, entries).unwrap().adapter.generation;
    let usual = generation(&config(&json!({})), &entries());
    let mut copied = entries();
    copied.push(floats(&format!("{EMBEDDING}.base_layer.weight"), [vocab, hidden], 5));
    assert_eq!(generation(&config(&json!({})), &copied), usual);
    let mut other = entries();
    other[1] = floats(&format!("{EMBEDDING}.lora_embedding_B"), [hidden, 2], 6);
    let (both, queries) = with_queries();
    let generations = [
        usual,
        generation(&config(&json!({ "lora_alpha": 5 })), &entries()),
        generation(&config(&json!({})), &other),
        generation(&both, &queries),
    ];
    assert!((0..4).all(|one| (0..one).all(|two| generations[one] != generations[two])), "{generations:?}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (vocab, hidden) = (tiny().vocab_size, tiny().hidden_size);
    let refused = |changes: Value, entries: &EmbeddingTensors, said: &[&str]| {
        assert_says(read(&config(&changes), entries), said);
    };
    let mut broken = entries();
    broken[0] = floats(&format!("{EMBEDDING}.lora_embedding_A"), [2, vocab - 1], 1);
    refused(json!({}), &broken, &["lora_embedding_A"]);
    refused(json!({}), &entries()[..1].to_vec(), &["lora_embedding_B"]);
    refused(json!({ "target_modules": ["tokens"] }), &entries(), &["embed_tokens"]);
    refused(json!({ "target_modules": "all-linear" }), &entries(), &["embed_tokens", "target_modules"]);
    let mut infinite = entries();
    infinite[1].3[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    refused(json!({}), &infinite, &["lora_embedding_B"]);
    let mut copied = entries();
    copied.push(floats(&format!("{EMBEDDING}.base_layer.weight"), [vocab + 8, hidden], 5));
    refused(json!({}), &copied, &["base_layer", &(vocab + 8).to_string(), "resized"]);
    refused(json!({ "alora_invocation_tokens": [1] }), &entries(), &["lora_embedding_A", "plain LoRA"]);
}

#[test]
fn nothing_adds_up_with_it_and_nobody_trains_or_merges_it() {
    let (both, queries) = with_queries();
    let adapter = AnyAdapter::Vocabulary(read(&both, &queries).unwrap());
    let kind = Err(AdapterMergeError::Kind(AdapterKind::Embedding));
    assert_eq!(sum(vec![(adapter.clone(), 1.0), (adapter, 1.0)]), kind);
    let named = in_directory(&both, &queries, NamedLora::read);
    assert_says(named, &["embedding", "merged"]);
    let read = in_directory(&both, &queries, |path| Adapter::read(path, &tiny()));
    assert_says(read, &["embedding", "an executor"]);
}
