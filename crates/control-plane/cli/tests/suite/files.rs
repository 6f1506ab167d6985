//! `adapters merge`, `diff` and `stats` on the example adapters: no gateway, no model.

use std::{
    path::Path,
    process::{Command, Output},
};
use testkit::paths::example_adapter as example;

use serde_json::Value;

fn adapters(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holobiont"));
    command.arg("adapters").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let ended = adapters(&[arguments, &["--json"]].concat());
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    serde_json::from_slice(&ended.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn stats_say_what_is_in_an_adapters_files() {
    let (pirate, haiku) = (example("pirate"), example("haiku"));
    let stats = json(&["stats", text(&pirate)]);
    assert_eq!((&stats["kind"], &stats["rank"], &stats["modules"]), (&"LoRA".into(), &8.into(), &120.into()));
    assert_eq!(stats["dtypes"], serde_json::json!(["F16"]));
    let file = std::fs::metadata(pirate.join("adapter_model.safetensors")).unwrap().len();
    assert_eq!(stats["bytes"], file);
    let targets: Vec<&str> = stats["targets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|target| target["target"].as_str().unwrap())
        .collect();
    assert_eq!(targets, ["k_proj", "o_proj", "q_proj", "v_proj"]);
    assert!(stats["norm"].as_f64().unwrap() > 0.0);
    let shown = String::from_utf8(adapters(&["stats", text(&pirate), text(&haiku)]).stdout).unwrap();
    assert!(shown.contains("gate_proj") && shown.contains("o_proj"), "{shown}");
}

#[test]
fn what_is_merged_has_all_ranks_and_differs_from_each_part() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("merged");
    let (pirate, weighed) = (example("pirate"), format!("{}:0.3", text(&example("json"))));
    let merge = ["merge", text(&pirate), &weighed, "--output", text(&output)];
    let merged = json(&merge);
    assert_eq!((&merged["rank"], &merged["modules"]), (&12.into(), &120.into()));
    assert_eq!(json(&["stats", text(&output)])["rank"], 12);
    let again = adapters(&merge);
    assert_eq!(again.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists already"));

    let near = json(&["diff", text(&pirate), text(&output)])["relative_difference"].as_f64().unwrap();
    let far = json(&["diff", text(&pirate), text(&example("json"))])["relative_difference"].as_f64().unwrap();
    assert!(0.0 < near && near < far, "{near}, {far}");
    // The merged adapter has a third of one adapter beyond the other.
    let part = json(&["stats", text(&example("json"))])["norm"].as_f64().unwrap();
    let whole = json(&["stats", text(&output)])["norm"].as_f64().unwrap();
    let own = json(&["stats", text(&pirate)])["norm"].as_f64().unwrap();
    assert!((near * whole.max(own) / (0.3 * part) - 1.0).abs() < 1e-4, "{near}");
}

#[test]
fn a_diff_names_layers_and_options_that_differ() {
    let (pirate, haiku) = (example("pirate"), example("haiku"));
    let same = json(&["diff", text(&pirate), text(&pirate)]);
    assert_eq!((&same["relative_difference"], &same["options"]), (&0.0.into(), &serde_json::json!({})));
    let other = json(&["diff", text(&pirate), text(&haiku)]);
    let count = |field: &str| other[field].as_array().unwrap().len();
    assert_eq!((count("modules"), count("only_in_first"), count("only_in_second")), (0, 120, 90));
    assert_eq!(other["options"]["r"], serde_json::json!([8, 4]));
    let shown = String::from_utf8(adapters(&["diff", text(&pirate), text(&haiku)]).stdout).unwrap();
    assert!(shown.contains("only in the first") && shown.contains("target_modules"), "{shown}");
}

#[test]
fn what_is_no_lora_is_refused_in_words() {
    let missing = adapters(&["stats", "nowhere"]);
    assert_eq!(missing.status.code(), Some(3));
    let draft = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/drafts/smollm2-135m");
    let draft = adapters(&["stats", text(&draft)]);
    assert_eq!(draft.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&draft.stderr).contains("is a draft"));
    let weight = adapters(&["merge", "a:x", "--output", "b"]);
    assert_eq!(weight.status.code(), Some(2));
}
