//! `base-executor check` as users and programs see it.

use std::{path::Path, process::Command};

use serde_json::Value;

use crate::tiny;

fn check(directory: &Path, adapter: &str, flags: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_base-executor"))
        .args(["check", "--model"])
        .arg(directory.join("model"))
        .arg("--adapter")
        .arg(directory.join(adapter))
        .args(flags)
        .output()
        .unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn check_json(directory: &Path, adapter: &str, flags: &[&str]) -> (i32, Value) {
    let (status, text) = check(directory, adapter, &[&["--json"], flags].concat());
    assert_eq!(text.lines().count(), 1, "{text}");
    (status, serde_json::from_str(&text).unwrap())
}

#[test]
fn a_usable_adapter_is_described() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    tiny::write_adapter(&directory.path().join("adapter"), &[]);
    let (status, report) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, &report["usable"]), (0, &true.into()), "{report}");
    assert_eq!((report["modules"].as_u64(), report["rank"].as_u64()), (Some(2), Some(2)));
    assert_eq!(report["kind"], "lora");
    assert_eq!(report["generation"].as_str().map(str::len), Some(64));
    assert!(report["bytes"].as_u64().unwrap() >= 2 * 2 * 2 * 64 * 2 && report["probe"].is_null());
    let (_, text) = check(directory.path(), "adapter", &[]);
    assert!(text.starts_with("usable\n") && text.contains(report["generation"].as_str().unwrap()), "{text}");
}

#[test]
fn a_chat_template_and_a_tokenizer_beside_an_adapter_are_told() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let adapter = directory.path().join("adapter");
    tiny::write_adapter(&adapter, &[]);
    let (_, plain) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((&plain["own_chat_template"], &plain["notes"]), (&false.into(), &Value::Array(Vec::new())));
    std::fs::write(adapter.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let (status, own) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, &own["own_chat_template"]), (0, &true.into()));
    assert_ne!(own["generation"], plain["generation"], "the template is part of what is served");
    assert!(check(directory.path(), "adapter", &[]).1.contains("template    the adapter's own"));
    std::fs::write(adapter.join("added_tokens.json"), r#"{"<new>": 100000}"#).unwrap();
    let tokenizer = r#"{"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    std::fs::write(directory.path().join("model/tokenizer.json"), tokenizer).unwrap();
    let (status, differs) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, differs["notes"].as_array().map(Vec::len)), (0, Some(1)), "{differs}");
    assert!(differs["notes"][0].as_str().unwrap().contains("<new>"), "{differs}");
    std::fs::write(adapter.join("chat_template.jinja"), "{% if %}").unwrap();
    let (status, broken) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, &broken["usable"]), (1, &false.into()));
    assert!(broken["problems"][0]["message"].as_str().unwrap().contains("chat_template.jinja"), "{broken}");
}

#[test]
fn a_key_of_a_pattern_that_matches_nothing_is_a_note() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let adapter = directory.path().join("adapter");
    tiny::write_adapter(&adapter, &[]);
    let config = adapter.join("adapter_config.json");
    let mut options: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    options["rank_pattern"] = serde_json::json!({ "^q_proj": 7 });
    std::fs::write(&config, options.to_string()).unwrap();
    let (status, report) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, report["notes"].as_array().map(Vec::len)), (0, Some(1)), "{report}");
    assert!(report["notes"][0].as_str().unwrap().contains("`^q_proj`"), "{report}");
}

#[test]
fn a_probe_tells_an_adapter_that_changes_logits_from_one_that_does_nothing() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    tiny::write_adapter(&directory.path().join("adapter"), &[]);
    let (status, report) = check_json(directory.path(), "adapter", &["--probe"]);
    assert_eq!((status, &report["probe"]["changes"]), (0, &true.into()), "{report}");
    assert!(report["probe"]["largest_change"].as_f64() >= report["probe"]["rms_change"].as_f64());

    let weights = directory.path().join("adapter/adapter_model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data..].fill(0);
    std::fs::write(&weights, bytes).unwrap();
    let (status, report) = check_json(directory.path(), "adapter", &["--probe"]);
    assert_eq!((status, &report["probe"]["changes"]), (0, &false.into()), "{report}");
}

#[test]
fn a_dora_is_described_and_probed_over_the_models_weights() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let layers = [0, 1]
        .map(|layer| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector"));
    tiny::write_dora(&directory.path().join("dora"), &layers);
    let (status, report) = check_json(directory.path(), "dora", &["--probe"]);
    assert_eq!((status, &report["kind"], &report["probe"]["changes"]), (0, &"dora".into(), &true.into()));
    tiny::write_dora(&directory.path().join("half"), &layers[..1]);
    let (status, report) = check_json(directory.path(), "half", &[]);
    assert_eq!(status, 1);
    assert!(report.to_string().contains(&layers[1]["base_model.model.".len()..]), "{report}");
}

#[test]
fn saved_modules_are_named_and_probed() {
    let directory = tempfile::tempdir().unwrap();
    let golden = testkit::paths::golden("");
    std::os::unix::fs::symlink(golden.join("models/llama-tied"), directory.path().join("model")).unwrap();
    for (name, saved) in [("two", &["lm_head"][..]), ("tied", &["embed_tokens", "lm_head"])] {
        let adapter = golden.join("adapters/saved/llama-tied").join(name);
        let adapter = adapter.to_str().unwrap();
        let (status, report) = check_json(directory.path(), adapter, &["--probe"]);
        assert_eq!(
            (status, &report["kind"], &report["probe"]["changes"]),
            (0, &"saved".into(), &true.into())
        );
        assert_eq!(report["saved"], serde_json::json!(saved));
        assert!(report["bytes"].as_u64().unwrap() >= 2 * 320 * 64, "{report}");
        let (_, text) = check(directory.path(), adapter, &[]);
        let expected = format!("saved       {}\n", saved.join(", "));
        assert!(text.contains("LoRA with saved modules\n") && text.contains(&expected), "{text}");
    }
}

#[test]
fn every_tensor_that_is_not_supported_is_named() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let also = [
        ("base_model.model.model.layers.0.self_attn.v_proj.lora_magnitude_vector", [1, 64]),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", [2, 64]),
    ];
    tiny::write_adapter(&directory.path().join("adapter"), &also);
    let (status, report) = check_json(directory.path(), "adapter", &[]);
    assert_eq!(status, 1, "{report}");
    let tensors: Vec<_> = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["tensor"].as_str().unwrap())
        .collect();
    assert_eq!(tensors, also.map(|(name, _)| name));
    let (status, text) = check(directory.path(), "adapter", &[]);
    assert!(status == 1 && text.starts_with("not usable: 2 problems\n"), "{text}");
}

#[test]
fn every_tensor_of_a_wrong_shape_is_named_with_both_shapes() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let adapter = directory.path().join("adapter");
    tiny::write_adapter(&adapter, &[]);
    let config = std::fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    std::fs::write(adapter.join("adapter_config.json"), config.replace("\"r\": 2", "\"r\": 3")).unwrap();
    let (status, report) = check_json(directory.path(), "adapter", &[]);
    assert_eq!((status, report["problems"].as_array().map(Vec::len)), (1, Some(2)), "one a layer: {report}");
    assert_eq!(report["problems"][1]["expected"], serde_json::json!([3, 64]));
    assert_eq!(report["problems"][1]["found"], serde_json::json!([2, 64]));
}

#[test]
fn what_is_not_there_is_another_exit_status_than_what_is_unusable() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    let (status, report) = check_json(directory.path(), "nothing", &[]);
    assert_eq!((status, &report["found"]), (3, &false.into()), "{report}");
}

#[test]
fn adapters_without_matrices_are_described_by_their_kind() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(&directory.path().join("model"));
    tiny::write_ia3(&directory.path().join("ia3"));
    tiny::write_prefix(&directory.path().join("prefix"), 20);
    for (name, modules, virtual_tokens, bytes) in
        [("ia3", 4, 0, 2 * (32 + 128) * 4), ("prefix", 4, 20, 20 * 128 * 4)]
    {
        let (status, report) = check_json(directory.path(), name, &["--probe"]);
        assert_eq!((status, report["kind"].as_str()), (0, Some(name)), "{report}");
        assert_eq!((report["modules"].as_u64(), report["rank"].as_u64()), (Some(modules), Some(0)));
        assert_eq!(
            (report["virtual_tokens"].as_u64(), report["bytes"].as_u64()),
            (Some(virtual_tokens), Some(bytes))
        );
        assert_eq!(report["probe"]["changes"], true, "{report}");
    }
    let (_, text) = check(directory.path(), "prefix", &[]);
    assert!(text.contains("kind        prefix tuning") && text.contains("20 virtual tokens"), "{text}");
    assert!(!text.contains("rank"), "{text}");
}
