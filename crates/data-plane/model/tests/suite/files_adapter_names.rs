//! Tensor names of PEFT, its wrappers, multimodal models and Tinker: the same adapter where the meaning is
//! certain, otherwise an error that quotes a tensor of the file.

use crate::files_support::{assert_says, f32_bytes, numbers, safetensors, tiny};
use model::{
    adapter::{AdapterError, AdapterWarning, AnyAdapter, by_name::NamedLora},
    shape::config::ModelConfig,
};
use serde_json::{Value, json};
use tempfile::TempDir;

type NamedTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

const Q: &str = "base_model.model.model.layers.{}.self_attn.q_proj";
const HEAD: &str = "base_model.model.lm_head";
const EMBEDDING: &str = "base_model.model.model.embed_tokens";

fn config(changes: &Value) -> Value {
    let mut config = json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"] });
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn matrix(name: &str, [rows, cols]: [usize; 2], seed: usize) -> (String, &'static str, Vec<usize>, Vec<u8>) {
    (name.to_owned(), "F32", vec![rows, cols], f32_bytes(&numbers(rows * cols, seed)))
}

fn factors(module: &str, [rows, cols]: [usize; 2], seed: usize) -> NamedTensors {
    let [a, b] = ["A", "B"].map(|part| format!("{module}.lora_{part}.weight"));
    vec![matrix(&a, [2, cols], seed), matrix(&b, [rows, 2], seed + 1)]
}

fn queries() -> NamedTensors {
    (0..2).flat_map(|layer| factors(&Q.replace("{}", &layer.to_string()), [32, 32], 10 * layer)).collect()
}

fn with_head() -> NamedTensors {
    [queries(), factors(HEAD, [tiny().vocab_size, tiny().hidden_size], 7)].concat()
}

fn renamed(mut entries: NamedTensors, rename: impl Fn(&str) -> String) -> NamedTensors {
    entries.iter_mut().for_each(|entry| entry.0 = rename(&entry.0));
    entries
}

fn write(config: &Value, entries: &NamedTensors) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    directory
}

type ReadAdapter = Result<(AnyAdapter, Vec<AdapterWarning>), AdapterError>;

fn read_for(model: &ModelConfig, changes: &Value, entries: &NamedTensors) -> ReadAdapter {
    AnyAdapter::read_with_notes(write(&config(changes), entries).path(), model)
}

fn read(changes: &Value, entries: &NamedTensors) -> ReadAdapter {
    read_for(&tiny(), changes, entries)
}

/// Renames a tensor as a wrapper does.
type TensorRename = fn(&str) -> String;

#[test]
fn wrapped_names_are_the_same_adapter_of_the_same_generation() {
    let (expected, _) = read(&json!({}), &queries()).unwrap();
    let renames: [(&str, TensorRename); 8] = [
        ("an adapter's name", |name| name.replace(".weight", ".default.weight")),
        ("PEFT twice", |name| format!("base_model.model.{name}")),
        ("a compiled model", |name| format!("_orig_mod.{name}")),
        ("a compiled base", |name| name.replacen("base_model.model.", "base_model.model._orig_mod.", 1)),
        ("data parallelism", |name| format!("module.{name}")),
        ("a new model of text and images", |name| {
            name.replace("model.layers", "model.language_model.layers")
        }),
        ("an old model of text and images", |name| {
            name.replace("model.layers", "language_model.model.layers")
        }),
        ("a model without a head", |name| name.replace("model.layers", "layers")),
    ];
    for (what, rename) in renames {
        let entries = renamed(queries(), rename);
        let (adapter, notes) = read(&json!({}), &entries).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(adapter, expected, "{what}: {}", entries[0].0);
        assert_eq!(notes, [], "{what}");
        let named = NamedLora::read(write(&config(&json!({})), &entries).path()).unwrap();
        assert!(named.modules.contains_key("model.layers.1.self_attn.q_proj"), "{what}");
    }
}

#[test]
fn patterns_mean_the_names_of_the_model_that_was_trained() {
    let nested = renamed(queries(), |name| name.replace("model.layers", "model.language_model.layers"));
    let expression = json!({ "target_modules": r"model\.language_model\..*\.q_proj" });
    let (adapter, _) = read(&expression, &nested).unwrap();
    assert_eq!(adapter.adapter().generation, read(&json!({}), &queries()).unwrap().0.adapter().generation);
    assert_says(read(&expression, &queries()), &["model.layers.0.self_attn.q_proj", "target_modules"]);
    let alphas = json!({ "alpha_pattern": { "model.language_model.layers.1.self_attn.q_proj": 8 } });
    let scales = |entries: &NamedTensors| {
        let (adapter, notes) = read(&alphas, entries).unwrap();
        let scales: Vec<_> = adapter.adapter().modules().iter().map(|module| module.scale).collect();
        (scales, notes.len())
    };
    assert_eq!(scales(&nested), (vec![2.0, 4.0], 0));
    assert_eq!(scales(&queries()), (vec![2.0, 2.0], 1), "and a note that nothing matches");
}

#[test]
fn an_adapter_of_embeddings_or_with_ranks_as_fractions_is_a_plain_lora() {
    let (expected, _) = read(&json!({}), &queries()).unwrap();
    let changes = json!({ "task_type": "FEATURE_EXTRACTION", "r": 2.0, "rank_pattern": { "q_proj": 2.0 } });
    assert_eq!(read(&changes, &queries()).unwrap().0, expected);
    assert_says(read(&json!({ "task_type": "TOKEN_CLS" }), &queries()), &["TOKEN_CLS", "FEATURE_EXTRACTION"]);
}

#[test]
fn an_initialization_that_changes_the_base_is_refused_with_how_to_save_it() {
    for name in ["pissa", "pissa_niter_4", "olora", "corda"] {
        let refused = read(&json!({ "init_lora_weights": name }), &queries());
        assert_says(refused, &[name, "path_initial_model_for_weight_conversion"]);
    }
}

#[test]
fn what_tinker_exports_adapts_the_head() {
    let bare = json!({ "target_modules": "all-linear" });
    let (expected, _) = read(&json!({ "target_modules": ["q_proj", "lm_head"] }), &with_head()).unwrap();
    let exported = renamed(with_head(), |name| name.replace("lm_head", "model.unembed_tokens"));
    assert_eq!(read(&bare, &exported).unwrap().0, expected);
    assert_eq!(read(&bare, &with_head()).unwrap().0, expected, "and as whoever renames it has it");
    let listed = json!({ "target_modules": ["q_proj", "unembed_tokens"] });
    assert_eq!(read(&listed, &exported).unwrap().0, expected);
}

#[test]
fn factors_of_a_tied_head_may_be_called_like_the_embedding() {
    let tied = ModelConfig { tied_head: true, ..tiny() };
    let expected =
        read_for(&tied, &json!({ "target_modules": ["q_proj", "lm_head"] }), &with_head()).unwrap();
    let converted = renamed(with_head(), |name| name.replace("lm_head", "model.embed_tokens"));
    for targets in [json!("all-linear"), json!(["q_proj", "embed_tokens"])] {
        let found = read_for(&tied, &json!({ "target_modules": targets }), &converted).unwrap();
        assert_eq!(found, expected, "{targets}");
    }
    let refused = read(&json!({ "target_modules": ["q_proj", "embed_tokens"] }), &converted);
    assert_says(refused, &["embed_tokens.lora_"]);
}

#[test]
fn a_copy_of_the_bases_embedding_or_head_is_not_used_and_told() {
    let (vocab, hidden) = (tiny().vocab_size, tiny().hidden_size);
    let targets = json!({ "target_modules": ["q_proj", "lm_head"] });
    let (expected, _) = read(&targets, &with_head()).unwrap();
    let copies = [
        format!("{HEAD}.base_layer.weight"),
        format!("{HEAD}.weight"),
        format!("{EMBEDDING}.weight"),
        format!("{EMBEDDING}.base_layer.weight"),
    ];
    for copy in copies {
        let mut entries = with_head();
        entries.push(matrix(&copy, [vocab, hidden], 3));
        let (adapter, notes) = read(&targets, &entries).unwrap();
        assert_eq!(adapter, expected, "{copy}");
        assert_eq!(notes, [AdapterWarning::BaseCopy { tensor: copy.clone() }]);
        assert!(notes[0].to_string().contains(&copy), "{}", notes[0]);
        *entries.last_mut().unwrap() = matrix(&copy, [vocab + 8, hidden], 3);
        let rows = [vocab, vocab + 8].map(|rows| rows.to_string());
        assert_says(read(&targets, &entries), &[&copy, "resized", &rows[0], &rows[1]]);
    }
}

#[test]
fn keys_of_patterns_that_match_nothing_are_told() {
    let changes = json!({ "rank_pattern": { "^q_proj": 4, "q_proj": 2 }, "alpha_pattern": { "k_proj": 4 } });
    let (adapter, notes) = read(&changes, &queries()).unwrap();
    assert_eq!(adapter, read(&json!({}), &queries()).unwrap().0);
    // `^` follows an optional prefix, so only a layer with the whole name `q_proj` would match.
    let expected = [("rank_pattern", "^q_proj"), ("alpha_pattern", "k_proj")];
    let unused =
        expected.map(|(option, pattern)| AdapterWarning::UnusedPattern { option, pattern: pattern.into() });
    assert_eq!(notes, unused);
}

#[test]
fn names_that_nothing_is_known_of_are_quoted() {
    let foreign = renamed(queries(), |name| name.replace("model.layers", "policy.layers"));
    assert_says(
        read(&json!({}), &foreign),
        &["base_model.model.policy.layers.0.self_attn.q_proj.lora_A.weight", "model.model.layers.0"],
    );
    let mut partly = queries();
    partly[0].0 = partly[0].0.replace("lora_A", "lora_C");
    partly[2].0 = "base_model.model.vision.blocks.0.attn.lora_A.weight".to_owned();
    assert_says(
        read(&json!({}), &partly),
        &["lora_A.weight", "missing", "vision.blocks.0.attn.lora_A.weight"],
    );
    let mut vision = queries();
    vision.extend(factors("base_model.model.model.visual.blocks.0.attn.qkv", [96, 32], 5));
    assert_says(read(&json!({}), &vision), &["model.visual.blocks.0.attn.qkv.lora_A.weight"]);
    let mut mixed = queries();
    mixed[0].0 = mixed[0].0.replace("model.layers", "language_model.model.layers");
    assert_says(read(&json!({}), &mixed), &["begins differently", "self_attn.q_proj"]);
}
