//! `adapters merge`, `convert`, `diff` and `stats` on adapter files: no gateway.

use std::{
    path::Path,
    process::{Command, Output},
};
use testkit::paths::{example_adapter as example, golden};

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
fn a_sum_is_cut_to_a_rank_by_its_singular_values_and_other_combinations_need_equal_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let output = |name: &str| text(&directory.path().join(name)).to_owned();
    let adapter = |name: &str| text(&golden("adapters/llama-tied").join(name)).to_owned();
    let (one, other, wide) = (adapter("rank8-f16"), adapter("rank8-bf16"), adapter("rank16-all-linear"));
    let cut =
        json(&["merge", &one, &other, "--output", &output("cut"), "--combination", "svd", "--rank", "5"]);
    assert_eq!(cut["rank"], 5);
    let ties = ["--combination", "dare_ties", "--density", "0.5", "--seed", "3"];
    let ties = |to: &str| json(&[&["merge", &one, &other, "--output", to], &ties[..]].concat());
    assert_eq!((&ties(&output("a"))["rank"], &ties(&output("b"))["rank"]), (&8.into(), &8.into()));
    let same = json(&["diff", &output("a"), &output("b")]);
    assert_eq!(same["relative_difference"], 0.0, "a seed gives one result");
    let refused = adapters(&["merge", &one, &wide, "--output", &output("c"), "--combination", "linear"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("equal"), "{refused:?}");
    let density = adapters(&["merge", &one, "--output", &output("d"), "--density", "0"]);
    assert_eq!(density.status.code(), Some(2));
}

#[test]
fn an_adapter_of_another_type_is_written_as_the_lora_that_it_is_served_as() {
    let directory = tempfile::tempdir().unwrap();
    let output = |name: &str| text(&directory.path().join(name)).to_owned();
    let adapter = |name: &str| text(&golden("adapters/peft/llama-tied").join(name)).to_owned();
    let model = text(&golden("models/llama-tied")).to_owned();
    let convert = |name: &str, to: &str, rank: &[&str]| {
        let from = adapter(name);
        adapters(&[&["convert", &from, "--output", to, "--model", &model, "--json"], rank].concat())
    };
    let answer = |ended: Output| -> Value {
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        serde_json::from_slice(&ended.stdout).unwrap()
    };
    let whole = answer(convert("loha-wide", &output("whole"), &[]));
    assert_eq!((&whole["rank"], &whole["largest_error"]), (&64.into(), &0.0.into()));
    let small = answer(convert("loha-wide", &output("small"), &["--rank", "4"]));
    let error = small["largest_error"].as_f64().unwrap();
    assert!(small["rank"] == 4 && error > 0.0 && error < 1.0, "{small}");
    let far = json(&["diff", &output("whole"), &output("small")])["relative_difference"].as_f64().unwrap();
    assert!(far > 0.0 && far < 1.1 * error, "{far} {error}");
    let refused = convert("prompt_tuning", &output("prompt"), &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("prompt tuning"), "{refused:?}");
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
