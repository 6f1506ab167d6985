//! Request bodies, and key files.

use serde_json::{Value, json};

use super::{Maker, Seed};

const NUMBERS: &str = "vLLM's n = 16,384, and similar numbers";
const IDS: &str = "CVE-2026-93840 (ids beyond)";
const JSON: &str = "JSON bombs";
const SILENCE: &str = "silent ignorance";
const SALT: &str = "CVE-2026-105756 (cache_salt), CVE-2026-56340 (prompt_embeds)";

fn completion() -> Value {
    json!({"model": "base", "prompt": "Hello", "max_tokens": 4})
}

fn with(option: &str, value: Value) -> Vec<u8> {
    let mut body = completion();
    body[option] = value;
    body.to_string().into_bytes()
}

fn inside(text: &str) -> Vec<u8> {
    completion().to_string().replacen('{', &format!("{{{text},"), 1).into_bytes()
}

pub(super) fn completions() -> Vec<Seed> {
    let mut make = Maker::new("completion");
    make.valid("a completion", completion().to_string().into_bytes());
    make.valid("a prompt of token ids", with("prompt", json!([1, 2, 3])));
    for (name, class, option, value) in [
        ("n of 16,384", NUMBERS, "n", json!(16_384)),
        ("n of 0", NUMBERS, "n", json!(0)),
        ("max_tokens of 2^32", NUMBERS, "max_tokens", json!(1u64 << 32)),
        ("max_tokens of 2^64", NUMBERS, "max_tokens", json!(1.8446744073709552e19)),
        ("max_tokens of -1", NUMBERS, "max_tokens", json!(-1)),
        ("a temperature of 10^38", NUMBERS, "temperature", json!(1e38)),
        ("10,000 stops", NUMBERS, "stop", json!(vec!["stop"; 10_000])),
        ("a stop that is empty", NUMBERS, "stop", json!([""])),
        ("10,000 biases", NUMBERS, "logit_bias", biases(10_000)),
        ("a bias beyond the vocabulary", IDS, "logit_bias", json!({"32000": 1})),
        ("a bias of no token", IDS, "logit_bias", json!({"-1": 1})),
        ("a bias that is infinite", IDS, "logit_bias", json!({"1": 1e300})),
        ("a stop token beyond the vocabulary", IDS, "stop_token_ids", json!([32_000])),
        ("an unknown option", SILENCE, "unheard_of", json!(1)),
        ("a cache salt", SALT, "cache_salt", json!("victim")),
        ("embeddings for a prompt", SALT, "prompt_embeds", json!("AAAA")),
        ("an adapter by path", "CVE-2024-37032 (paths)", "lora_path", json!("/etc")),
    ] {
        make.refused(name, class, with(option, value), option);
    }
    // The context limit is checked later, when the prompt is known.
    make.valid("max_tokens of 2^31", with("max_tokens", json!(1u64 << 31)));
    let deep = inside(&format!("\"a\":{}", "[".repeat(100_000)));
    make.refused("a body 100,000 deep", JSON, deep, "not valid JSON");
    let names: Vec<String> = (0..1_000_000).map(|index| format!("\"{index:x}\":0")).collect();
    make.refused("a million names", JSON, inside(&names.join(",")), "not valid JSON");
    make.refused("a name that comes twice", JSON, inside("\"model\":\"other\""), "not valid JSON");
    make.refused("a lone surrogate", JSON, inside("\"user\":\"\\ud800\""), "not valid JSON");
    make.refused("bytes that are no text", JSON, vec![0xff; 64], "not valid JSON");
    make.refused("NaN", JSON, inside("\"temperature\":NaN"), "not valid JSON");
    make.refused("1e999", JSON, inside("\"temperature\":1e999"), "not valid JSON");
    make.refused("two bodies", JSON, completion().to_string().repeat(2).into_bytes(), "not valid JSON");
    make.refused("nothing", JSON, Vec::new(), "not valid JSON");
    make.bounded(
        "a million short lists",
        JSON,
        inside(&format!("\"prompt\":[{}[0]]", "[0],".repeat(1_000_000))),
    );
    make.bounded("a million token ids", JSON, inside(&format!("\"user\":[{}0]", "0,".repeat(1_000_000))));
    make.seeds
}

fn biases(count: u32) -> Value {
    Value::from((0..count).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>())
}

pub(super) fn chats() -> Vec<Seed> {
    let mut make = Maker::new("chat");
    let body = |messages: Value| json!({"model": "base", "messages": messages}).to_string().into_bytes();
    let hello = || json!([{"role": "user", "content": "Hello"}]);
    make.valid("a chat", body(hello()));
    make.refused("no messages", NUMBERS, body(json!([])), "messages");
    let many = json!(vec![json!({"role": "user", "content": "a"}); 10_000]);
    make.refused("10,000 messages", NUMBERS, body(many), "messages");
    make.refused("a message that is a number", NUMBERS, body(json!([1])), "messages");
    for (name, option) in [
        ("a template of the request", "chat_template"),
        ("variables for the template", "chat_template_kwargs"),
    ] {
        let mut own = json!({"model": "base", "messages": hello()});
        own[option] = json!({"chat_template": "{% for a in range(10**9) %}"});
        make.refused(
            name,
            "GHSA-69j4-grxj-j64p (templates of requests)",
            own.to_string().into_bytes(),
            option,
        );
    }
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]);
    make.refused("a picture to fetch", "CVE-2026-24779, -25960 (SSRF)", body(image), "content");
    make.seeds
}

/// Adds bodies that every route refuses: `option` is a field of the route that takes no list.
fn common(make: &mut Maker, valid: &Value) {
    let with = |option: &str, value: Value| {
        let mut body = valid.clone();
        body[option] = value;
        body.to_string().into_bytes()
    };
    make.valid("what is meant", valid.to_string().into_bytes());
    make.refused("an unknown option", SILENCE, with("unheard_of", json!(1)), "unheard_of");
    make.refused("a body 100,000 deep", JSON, "[".repeat(100_000).into_bytes(), "not valid JSON");
    make.refused("a list", JSON, b"[]".to_vec(), "");
    make.refused("nothing", JSON, Vec::new(), "not valid JSON");
    let twice = valid.to_string();
    let twice = twice.replacen('{', &format!("{},", twice.trim_end_matches('}')), 1);
    make.refused("every name twice", JSON, twice.into_bytes(), "not valid JSON");
    let names: Vec<String> = (0..300_000).map(|index| format!("\"{index:x}\":0")).collect();
    make.refused("300,000 names", JSON, format!("{{{}}}", names.join(",")).into_bytes(), "not valid JSON");
}

fn load_with(option: &str, value: Value) -> Vec<u8> {
    let mut body = json!({"lora_name": "mine", "lora_path": "/adapters/mine"});
    body[option] = value;
    body.to_string().into_bytes()
}

pub(super) fn loads() -> Vec<Seed> {
    let mut make = Maker::new("load_adapter");
    let whole = json!({
        "lora_name": "mine", "lora_path": "/adapters/mine", "load_inplace": true, "pinned": false,
        "expected_generation": "ab", "tenant": "me", "lora_int_id": 1, "base_model_name": "base",
    });
    common(&mut make, &whole);
    make.refused("no name", SILENCE, b"{\"lora_path\":\"/a\"}".to_vec(), "lora_name");
    make.refused("another base model", SILENCE, load_with("base_model_name", json!("b")), "base_model_name");
    make.refused("a path that is a list", NUMBERS, load_with("lora_path", json!(["/a"])), "lora_path");
    make.refused("a number below 0", NUMBERS, load_with("lora_int_id", json!(-1)), "lora_int_id");
    make.refused(
        "a number of 2^64",
        NUMBERS,
        load_with("lora_int_id", json!(1.8446744073709552e19)),
        "int_id",
    );
    // Names and paths are validated where they are used.
    make.bounded(
        "a path that leads out",
        "CVE-2024-37032 (paths)",
        load_with("lora_path", json!("../../etc")),
    );
    for (name, uri) in [
        ("a URI with an escape", "hf://org/..%2fname"),
        ("a URI that leads out", "s3://bucket/../other/x"),
        ("a URI with a user", "hf://key@org/name"),
        ("a URI of a port", "s3://bucket:22/x"),
        ("a URI of another scheme", "http://169.254.169.254/latest"),
    ] {
        make.refused(name, "CVE-2024-37032 (paths)", load_with("lora_path", json!(uri)), "lora_path");
    }
    make.refused("a digest of two digits", SILENCE, load_with("digest", json!("sha256:ab")), "digest");
    make.bounded("a path with a NUL", "CVE-2024-37032 (paths)", load_with("lora_path", json!("a\0b")));
    make.bounded("a name of a mebibyte", NUMBERS, load_with("lora_name", json!("m".repeat(1 << 20))));
    make.seeds
}

pub(super) fn unloads() -> Vec<Seed> {
    let mut make = Maker::new("unload_adapter");
    common(&mut make, &json!({"lora_name": "mine", "expected_generation": "ab", "lora_int_id": 1}));
    make.refused("a name that is null", SILENCE, b"{\"lora_name\":null}".to_vec(), "lora_name");
    make.seeds
}

pub(super) fn pins() -> Vec<Seed> {
    let mut make = Maker::new("pin_adapter");
    common(&mut make, &json!({"lora_name": "mine", "pinned": false}));
    make.refused("a pin of 1", NUMBERS, b"{\"lora_name\":\"mine\",\"pinned\":1}".to_vec(), "pinned");
    make.seeds
}

pub(super) fn jobs() -> Vec<Seed> {
    let mut make = Maker::new("fine_tuning_job");
    let method = json!({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": "auto", "beta": 0.1}}});
    let lora = json!({"rank": 8, "target_modules": ["q_proj"]});
    common(
        &mut make,
        &json!({"model": "base", "training_file": "file-1", "suffix": "a", "seed": 5, "method": method, "lora": lora}),
    );
    let with = |name: &str, value: Value| {
        let mut order = json!({"model": "base", "training_file": "file-1"});
        order[name] = value;
        order.to_string().into_bytes()
    };
    make.refused(
        "a suffix that leads out",
        "CVE-2024-37032 (paths)",
        with("suffix", json!("../x")),
        "suffix",
    );
    make.refused(
        "an option as a module",
        SILENCE,
        with("lora", json!({"target_modules": ["--from"]})),
        "target_modules",
    );
    make.refused("a rank of 2^40", NUMBERS, with("lora", json!({"rank": 1_u64 << 40})), "rank");
    make.refused("many words", NUMBERS, with("metadata", json!({"a": "b".repeat(1 << 16)})), "metadata");
    make.seeds
}

pub(super) fn tokenizations() -> Vec<Seed> {
    let mut make = Maker::new("tokenize");
    common(&mut make, &json!({"model": "base", "prompt": "Hello", "add_special_tokens": false}));
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "return_token_strs": true});
    make.valid("a chat", chat.to_string().into_bytes());
    let both = json!({"prompt": "a", "messages": []}).to_string().into_bytes();
    make.refused("a prompt and messages", SILENCE, both, "prompt");
    let many = json!({"messages": vec![json!({"role": "user", "content": "a"}); 10_000]});
    make.refused("10,000 messages", NUMBERS, many.to_string().into_bytes(), "messages");
    make.seeds
}

pub(super) fn detokenizations() -> Vec<Seed> {
    let mut make = Maker::new("detokenize");
    common(&mut make, &json!({"model": "base", "tokens": [1, 2, 3]}));
    for (name, tokens) in [
        ("a token beyond the vocabulary", json!([32_000])),
        ("a token of 2^32", json!([1u64 << 32])),
        ("a token of -1", json!([-1])),
        ("a token and a half", json!([1.5])),
        ("a token that is a text", json!(["1"])),
    ] {
        make.refused(name, IDS, json!({"tokens": tokens}).to_string().into_bytes(), "tokens");
    }
    let many = format!("{{\"tokens\":[{}0]}}", "0,".repeat(1_000_000));
    make.bounded("a million tokens", JSON, many.into_bytes());
    make.seeds
}

pub(super) fn key_files() -> Vec<Seed> {
    const KEYS: &str = "keys at rest";
    let mut make = Maker::new("key_file");
    let hash = "ab".repeat(32);
    make.valid("a key", format!("# ours\nadmin me blake3:{hash}\n").into_bytes());
    make.refused("a key in plain text", KEYS, b"admin me hb-secret\n".to_vec(), "line 1");
    make.refused("an unknown role", KEYS, format!("root me blake3:{hash}\n").into_bytes(), "line 1");
    make.refused("a name that leads out", KEYS, format!("user ../me blake3:{hash}\n").into_bytes(), "line 1");
    make.refused("a hash that is short", KEYS, b"user me blake3:ab\n".to_vec(), "line 1");
    make.refused("bytes that are no text", KEYS, vec![0xff; 64], "");
    make.refused("nothing", KEYS, Vec::new(), "no key");
    let many: String = (0..8_000).map(|id| format!("user me{id} blake3:{id:064x}\n")).collect();
    make.refused("8,000 keys", KEYS, many.into_bytes(), "more than");
    make.refused("two mebibytes", KEYS, vec![b'#'; 2 << 20], "more than");
    make.seeds
}
