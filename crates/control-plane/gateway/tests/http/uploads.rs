//! Adapters whose files are uploaded with the request.

use serde_json::{Value, json};
use types::AdapterVersion;

use crate::{
    client::Response,
    fake_executor::{generation, reply_with},
    harness::Harness,
};

const CONFIG: UploadPart = ("file", Some("adapter_config.json"), "{}");
const NAME: UploadPart = ("lora_name", None, "pirate");

/// Part of a form: name, file name if it is a file, and content.
type UploadPart<'a> = (&'a str, Option<&'a str>, &'a str);

fn weights(text: &str) -> UploadPart<'_> {
    ("file", Some("adapter_model.safetensors"), text)
}

async fn upload(harness: &Harness, parts: &[UploadPart<'_>]) -> Response {
    let mut form = String::new();
    for (name, file, content) in parts {
        let file = file.map(|file| format!("; filename=\"{file}\"")).unwrap_or_default();
        form += &format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{content}\r\n");
    }
    form += "--x--\r\n";
    let kind = "multipart/form-data; boundary=x";
    harness.client.send("POST", "/v1/upload_lora_adapter", kind, &form).await
}

fn hex(weights: &str) -> String {
    AdapterVersion(generation(weights.as_bytes())).to_string()
}

fn left_behind(harness: &Harness) -> Vec<String> {
    let store = std::fs::read_dir(harness.directory.path().join("state/adapters")).unwrap();
    let names = store.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

async fn names(harness: &Harness) -> Vec<Value> {
    let models = harness.client.get("/v1/models").await.json();
    models["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect()
}

#[tokio::test]
async fn files_that_are_sent_along_become_what_the_same_files_at_a_path_are() {
    let harness = Harness::start(reply_with("x")).await;
    let sent = upload(&harness, &[NAME, ("pinned", None, "true"), CONFIG, weights("one")]).await;
    assert_eq!((sent.status, &sent.json()["status"]), (200, &json!("loaded")), "{}", sent.body);
    assert_eq!((&sent.json()["generation"], &sent.json()["pinned"]), (&json!(hex("one")), &json!(true)));
    let body = json!({ "lora_name": "again", "lora_path": harness.adapter("again", "one") });
    let loaded = harness.client.post("/v1/load_lora_adapter", &body).await.json();
    assert_eq!(loaded["generation"], sent.json()["generation"]);
    let [first, .., last] = &*harness.executor().loads() else { panic!("both were loaded") };
    assert_eq!(first, last, "the same files are kept once");
    let answer = harness.client.post("/v1/completions", &json!({ "model": "pirate", "prompt": "a" })).await;
    assert_eq!(answer.json()["adapter_generation"], json!(hex("one")));
    assert_eq!(left_behind(&harness), Vec::<String>::new());
}

#[tokio::test]
async fn a_chat_template_and_a_tokenizer_are_sent_along_too() {
    let harness = Harness::start(reply_with("x")).await;
    let template = ("file", Some("chat_template.jinja"), "{{ messages }}");
    let added = ("file", Some("added_tokens.json"), r#"{"<new>": 300}"#);
    let sent = upload(&harness, &[NAME, template, added, CONFIG, weights("one")]).await;
    let expected = AdapterVersion(generation(b"one")).with_chat_template("{{ messages }}").to_string();
    assert_eq!((sent.status, &sent.json()["generation"]), (200, &json!(expected)), "{}", sent.body);
    assert_eq!(sent.json()["own_chat_template"], true);
    assert!(sent.json()["warnings"][0].as_str().unwrap().contains("<new>"), "{}", sent.body);
    let long = "x".repeat((128 << 10) + 1);
    let long = ("file", Some("chat_template.jinja"), &*long);
    let refused = upload(&harness, &[("lora_name", None, "long"), long, CONFIG, weights("one")]).await;
    assert_eq!((refused.status, &*refused.code()), (400, "invalid_adapter"), "{}", refused.body);
    assert!(refused.body.contains("chat_template.jinja"), "{}", refused.body);
    assert_eq!(left_behind(&harness), Vec::<String>::new());
}

#[tokio::test]
async fn one_gguf_file_is_an_adapter_whatever_it_is_called() {
    let harness = Harness::start(reply_with("x")).await;
    let sent = upload(&harness, &[NAME, ("file", Some("my pirate.gguf"), "GGUF")]).await;
    assert_eq!(sent.status, 200, "{}", sent.body);
    assert!(harness.executor().loads()[0].ends_with("/adapter.gguf"));
}

#[tokio::test]
async fn a_name_that_is_taken_is_replaced_only_if_that_is_asked_for() {
    let harness = Harness::start(reply_with("x")).await;
    assert_eq!(upload(&harness, &[NAME, CONFIG, weights("one")]).await.status, 200);
    let taken = upload(&harness, &[NAME, CONFIG, weights("two")]).await;
    assert_eq!((taken.status, taken.code().as_str()), (400, "adapter_already_loaded"));
    let other = ("expected_generation", None, "0123456789ab");
    assert_eq!(upload(&harness, &[NAME, other, CONFIG, weights("two")]).await.code(), "generation_mismatch");
    let replaced = upload(&harness, &[NAME, ("load_inplace", None, "true"), CONFIG, weights("two")]).await;
    assert_eq!(replaced.json()["generation"], json!(hex("two")));
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused_by_name_and_leaves_nothing_behind() {
    let harness = Harness::start_with(reply_with("x"), |config| config.max_adapter_file_bytes = 100).await;
    let large = "x".repeat(101);
    let large_config = format!("\"{}\"", "x".repeat(1 << 20));
    let cases: &[(&[UploadPart<'_>], &str, &str)] = &[
        (&[CONFIG, weights("one")], "missing_required_parameter", "lora_name"),
        (&[NAME], "missing_required_parameter", "file"),
        (&[NAME, CONFIG], "invalid_adapter", "adapter_model.safetensors is missing"),
        (&[NAME, weights("one")], "invalid_adapter", "adapter_config.json"),
        (&[NAME, CONFIG, CONFIG], "invalid_adapter", "appears twice"),
        (&[NAME, ("file", Some("adapter_model.bin"), "x")], "invalid_adapter", "not a file of an adapter"),
        (&[NAME, ("file", Some("../adapter_config.json"), "x")], "invalid_adapter", "../adapter_config.json"),
        (&[NAME, ("file", None, "x")], "invalid_adapter", "not a file of an adapter"),
        (&[NAME, CONFIG, weights(&large)], "invalid_adapter", "100 bytes"),
        (&[NAME, ("file", Some("adapter_config.json"), &large_config)], "invalid_adapter", "1048576 bytes"),
        (&[CONFIG, NAME], "missing_required_parameter", "lora_name"),
        (&[NAME, CONFIG, ("pinned", None, "true")], "invalid_value", "before the files"),
        (&[NAME, ("pinned", None, "yes"), CONFIG], "invalid_value", "'true' or 'false'"),
        (&[NAME, ("lora_path", None, "/etc"), CONFIG], "unsupported_parameter", "lora_path"),
        (&[("lora_name", None, "base"), CONFIG], "invalid_value", "base"),
        (&[("lora_name", None, "a\u{7}"), CONFIG], "invalid_value", "lora_name"),
    ];
    for (parts, code, said) in cases {
        let refused = upload(&harness, parts).await;
        assert_eq!((refused.status, &*refused.code()), (400, *code), "{parts:?}: {}", refused.body);
        assert!(refused.body.contains(said), "{parts:?}: {}", refused.body);
    }
    let broken = "--x\r\nContent-Disposition: form-data; name=\"lora_name\"\r\n\r\npir";
    let kind = "multipart/form-data; boundary=x";
    let refused = harness.client.send("POST", "/v1/upload_lora_adapter", kind, broken).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert_eq!(left_behind(&harness), Vec::<String>::new());
    assert_eq!(names(&harness).await, ["base"]);
    assert_eq!(harness.executor().loads(), Vec::<String>::new());
}
