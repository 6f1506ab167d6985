//! Loading, replacing and unloading adapters, and their state after restarts.

use std::time::Duration;

use gateway::{config::StartAdapter, keys::Keys};
use serde_json::{Value, json};
use types::{AdapterId, AdapterVersion, TenantId};

use crate::{
    client::Response,
    fake_executor::{MAX_RESIDENT, generation, hang_after, reply_with, say_slowly},
    harness::{Harness, eventually, eventually_async, key_file},
};

const TEXT: &str = "/v1/completions";

fn hex(weights: &str) -> String {
    AdapterVersion(generation(weights.as_bytes())).to_string()
}

/// Id of weights in the namespace of all tenants.
fn id(weights: &str) -> [u8; 32] {
    AdapterId::new(TenantId::EVERYBODY, AdapterVersion(generation(weights.as_bytes()))).0
}

async fn load(harness: &Harness, name: &str, weights: &str, extra: &Value) -> Response {
    let path = harness.adapter(name, weights);
    let mut body = json!({ "lora_name": name, "lora_path": path });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    harness.client.post("/v1/load_lora_adapter", &body).await
}

async fn ask(harness: &Harness, model: &str) -> Response {
    harness.client.post(TEXT, &json!({ "model": model, "prompt": "a" })).await
}

#[tokio::test]
async fn a_loaded_adapter_is_a_model_with_its_generation_in_every_answer() {
    let harness = Harness::start(reply_with("x")).await;
    let loaded = load(&harness, "pirate", "one", &json!({})).await;
    assert_eq!((loaded.status, &loaded.json()["generation"]), (200, &json!(hex("one"))));
    for model in ["pirate", "base:pirate"] {
        let answer = ask(&harness, model).await.json();
        assert_eq!((&answer["adapter_generation"], &answer["model"]), (&json!(hex("one")), &json!(model)));
    }
    assert_eq!(ask(&harness, "base").await.json()["adapter_generation"], Value::Null);
    let sent = harness.executor().generates();
    assert_eq!((sent[0].adapter, sent[2].adapter), (Some(id("one")), None));
    let models = harness.client.get("/v1/models").await.json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["parent"]), (&json!("base"), &Value::Null));
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&json!("pirate"), &json!("base")));
    assert_eq!(harness.client.get("/v1/models/pirate").await.json()["root"], "pirate");
    let listed = &harness.client.get("/v1/lora_adapters").await.json()["data"][0];
    assert_eq!(
        (&listed["rank"], &listed["bytes"], &listed["requests"]),
        (&json!(16), &json!(1000), &json!(0))
    );
}

#[tokio::test]
async fn a_name_that_nobody_has_is_replaced_by_nothing_and_the_digits_of_a_table_name_a_generation() {
    let harness = Harness::start(reply_with("x")).await;
    let expecting = |generation: &str| json!({ "load_inplace": true, "expected_generation": generation });
    for expected in ["*", &hex("one"), "nothing"] {
        let typo = load(&harness, "tpyo", "one", &expecting(expected)).await;
        assert_eq!((typo.status, typo.code().as_str()), (404, "model_not_found"), "{}", typo.body);
    }
    assert_eq!(harness.client.get("/v1/lora_adapters").await.json()["data"], json!([]));
    load(&harness, "a", "one", &json!({})).await;
    assert_eq!(load(&harness, "a", "two", &expecting(&hex("one")[..11])).await.status, 409);
    assert_eq!(load(&harness, "a", "two", &expecting(&hex("one")[..12])).await.status, 200);
    assert_eq!(load(&harness, "a", "three", &expecting("*")).await.status, 200);
}

#[tokio::test]
async fn a_name_that_is_taken_is_replaced_only_when_that_is_said() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    let again = load(&harness, "a", "two", &json!({})).await;
    assert_eq!((again.status, again.code().as_str()), (400, "adapter_already_loaded"));
    let wrong = load(&harness, "a", "two", &json!({ "expected_generation": hex("three") })).await;
    assert_eq!((wrong.status, wrong.code().as_str()), (409, "generation_mismatch"));
    assert_eq!(wrong.header("x-should-retry"), Some("false"));
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
    let right = load(&harness, "a", "two", &json!({ "expected_generation": hex("one") })).await;
    assert_eq!((right.status, &right.json()["generation"]), (200, &json!(hex("two"))));
    assert_eq!(load(&harness, "a", "three", &json!({ "load_inplace": true })).await.status, 200);
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("three")));
    let freed = [id("one"), id("two")];
    eventually("what was replaced is freed", || harness.executor().unloads() == freed).await;
}

#[tokio::test]
async fn a_request_keeps_the_generation_it_started_with() {
    let harness = Harness::start(say_slowly("abcdefgh", Duration::from_millis(30))).await;
    load(&harness, "a", "one", &json!({})).await;
    let client = harness.client.clone();
    let body = json!({ "model": "a", "prompt": "a" });
    let request = tokio::spawn(async move { client.post(TEXT, &body).await.json() });
    eventually("it began", || harness.executor().generates().len() == 1).await;
    load(&harness, "a", "two", &json!({ "load_inplace": true })).await;
    assert!(harness.executor().unloads().is_empty(), "a request still uses it");
    let answer = request.await.unwrap();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["adapter_generation"]),
        (&json!("abcdefgh"), &json!(hex("one")))
    );
    eventually("now it is freed", || harness.executor().unloads() == [id("one")]).await;
}

#[tokio::test]
async fn the_base_cannot_be_unloaded_or_pinned_and_that_is_said() {
    let harness = Harness::start(reply_with("x")).await;
    for route in ["/v1/unload_lora_adapter", "/v1/pin_lora_adapter"] {
        let refused = harness.client.post(route, &json!({ "lora_name": "base" })).await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_value"));
        assert!(refused.body.contains("is the base model"), "{}", refused.body);
    }
}

#[tokio::test]
async fn unloading_refuses_new_requests_and_waits_for_those_that_run() {
    let harness = Harness::start(hang_after("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    let exchange =
        harness.client.open_post(TEXT, &json!({ "model": "a", "prompt": "a", "stream": true })).await;
    eventually("it began", || harness.executor().generates().len() == 1).await;
    let client = harness.client.clone();
    let unload = json!({ "lora_name": "a", "lora_int_id": 1 });
    let unloading = tokio::spawn(async move { client.post("/v1/unload_lora_adapter", &unload).await });
    let client = harness.client.clone();
    let refused = async {
        while client.get("/v1/models/a").await.status != 404 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(crate::harness::WATCHDOG, refused).await.expect("new requests are refused");
    assert_eq!(ask(&harness, "a").await.code(), "model_not_found");
    assert!(!unloading.is_finished() && harness.executor().unloads().is_empty());
    drop(exchange);
    let unloaded = unloading.await.unwrap();
    assert_eq!((unloaded.status, &unloaded.json()["freed_bytes"]), (200, &json!(1000)));
    assert_eq!(harness.executor().unloads(), [id("one")]);
}

#[tokio::test]
async fn unloading_what_is_not_there_is_an_error_that_names_it() {
    let harness = Harness::start(reply_with("x")).await;
    let error = harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "nobody" })).await;
    assert_eq!((error.status, error.code().as_str()), (404, "model_not_found"));
    assert!(error.body.contains("nobody"));
}

#[tokio::test]
async fn two_names_of_one_generation_are_freed_with_the_second() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "same", &json!({})).await;
    load(&harness, "b", "same", &json!({})).await;
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "a" })).await;
    assert!(harness.executor().unloads().is_empty());
    assert_eq!(ask(&harness, "b").await.status, 200);
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "b" })).await;
    assert_eq!(harness.executor().unloads(), [id("same")]);
}

#[tokio::test]
async fn adapters_outside_of_the_root_are_refused_also_through_links() {
    let harness = Harness::start(reply_with("x")).await;
    let outside = harness.directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("adapter_config.json"), "{}").unwrap();
    let link = harness.directory.path().join("adapters/link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let dotted = harness.directory.path().join("adapters/../outside");
    for path in [outside, link, dotted] {
        let body = json!({ "lora_name": "a", "lora_path": path });
        let error = harness.client.post("/v1/load_lora_adapter", &body).await;
        assert_eq!(
            (error.status, error.code().as_str()),
            (400, "adapter_path_forbidden"),
            "{}",
            path.display()
        );
    }
    let body = json!({ "lora_name": "a", "lora_path": "nowhere" });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.code(), "invalid_adapter");
    assert!(harness.executor().loads().is_empty());
}

#[tokio::test]
async fn an_adapter_that_cannot_be_used_leaves_no_name_behind() {
    let harness = Harness::start(reply_with("x")).await;
    let path = harness.adapter("a", "one");
    std::fs::remove_file(path.join("adapter_model.safetensors")).unwrap();
    let body = json!({ "lora_name": "a", "lora_path": path });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.code(), "invalid_adapter");
    assert_eq!(load(&harness, "a", "empty", &json!({})).await.code(), "invalid_adapter");
    assert_eq!(harness.executor().unloads(), [id("empty")], "one that changes nothing is freed again");
    for name in ["base", "a:b", ""] {
        let body = json!({ "lora_name": name, "lora_path": harness.adapter("b", "one") });
        assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.status, 400, "{name}");
    }
    assert_eq!(harness.client.get("/v1/lora_adapters").await.json()["data"], json!([]));
}

#[tokio::test]
async fn what_is_wrong_with_an_adapter_is_told_by_the_path_that_was_asked_for() {
    let harness = Harness::start(reply_with("x")).await;
    let refused = load(&harness, "a", "misfit", &json!({})).await;
    let path = harness.adapter("a", "misfit").display().to_string();
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with(&format!("{path}/adapter_config.json: `r`")), "{message}");
    assert!(!message.contains("state"), "where the store lies is nobody's business: {message}");
}

#[tokio::test]
async fn a_draft_is_kept_in_the_executor_and_answers_nobody() {
    let mut harness = Harness::start(reply_with("x")).await;
    let loaded = load(&harness, "guesses", "draft", &json!({})).await;
    assert_eq!((loaded.status, &loaded.json()["pinned"]), (200, &json!(true)), "{}", loaded.body);
    harness.restart_gateway().await;
    for model in ["guesses", "base:guesses"] {
        let refused = ask(&harness, model).await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_value"));
        assert!(
            refused.body.contains("'guesses' is a draft adapter and answers no requests"),
            "{}",
            refused.body
        );
    }
    assert!(harness.executor().generates().is_empty());
    let models = harness.client.get("/v1/models").await.json();
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
    assert_eq!(harness.client.get("/v1/models/guesses").await.status, 404);
    let listed = &harness.client.get("/v1/lora_adapters").await.json()["data"][0];
    assert_eq!((&listed["draft_layers"], &listed["pinned"]), (&json!(2), &json!(true)));
    load(&harness, "guesses", "one", &json!({ "load_inplace": true })).await;
    assert_eq!(ask(&harness, "guesses").await.status, 200, "what has the name now is none");
    let status = harness.client.get("/v1/status").await.json();
    assert_eq!(
        (&status["speculation"]["by"], &status["speculation"]["model_accepted_tokens"]),
        (&json!("self"), &json!(6))
    );
}

#[tokio::test]
async fn the_registry_survives_a_restart_of_the_gateway() {
    let mut harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    load(&harness, "b", "two", &json!({})).await;
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "b" })).await;
    harness.restart_gateway().await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
    assert_eq!(ask(&harness, "b").await.code(), "model_not_found");
}

#[tokio::test]
async fn a_restarted_executor_gets_its_adapters_back() {
    let mut harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    harness.restart_executor(reply_with("x")).await;
    eventually("it is loaded again", || harness.executor().loads().len() == 1).await;
    harness.wait_ready().await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
}

#[tokio::test]
async fn an_adapter_whose_files_changed_is_served_as_it_was_loaded() {
    let mut harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    harness.adapter("a", "other");
    harness.restart_executor(reply_with("x")).await;
    eventually("it is loaded again", || harness.executor().loads().len() == 1).await;
    harness.wait_ready().await;
    let answer = ask(&harness, "a").await;
    assert_eq!(answer.json()["adapter_generation"], json!(hex("one")), "{}", answer.body);
    let stored = std::fs::read_dir(harness.directory.path().join("state/adapters")).unwrap();
    let stored = stored.map(|entry| entry.unwrap().path()).next().unwrap();
    std::fs::write(stored.join("adapter_model.safetensors"), "rotten").unwrap();
    harness.restart_executor(reply_with("x")).await;
    harness.wait_ready().await;
    let listed = async || harness.client.get("/v1/lora_adapters").await.json()["data"][0]["state"].clone();
    eventually_async("what rotted is noticed", async || listed().await == "failed").await;
    let error = ask(&harness, "a").await;
    assert_eq!((error.status, error.code().as_str()), (503, "adapter_unavailable"));
    assert_eq!(load(&harness, "a", "one", &json!({ "load_inplace": true })).await.status, 200);
    let answer = ask(&harness, "a").await;
    assert_eq!(answer.json()["adapter_generation"], json!(hex("one")), "{}", answer.body);
}

#[tokio::test]
async fn adapters_given_at_start_are_there_when_it_is_ready() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("adapter_config.json"), "{}").unwrap();
    std::fs::write(outside.path().join("adapter_model.safetensors"), "one").unwrap();
    let adapter = StartAdapter { name: "a".to_owned(), path: outside.path().to_owned() };
    let harness = Harness::start_with(reply_with("x"), |config| config.adapters = vec![adapter]).await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
}

#[tokio::test]
async fn more_adapters_than_fit_are_all_served_and_the_list_says_where_they_are() {
    let harness = Harness::start(reply_with("x")).await;
    for index in 0..=MAX_RESIDENT {
        let (name, weights) = (format!("a{index}"), format!("w{index}"));
        assert_eq!(load(&harness, &name, &weights, &json!({})).await.status, 200);
    }
    let list = harness.client.get("/v1/lora_adapters").await.json();
    let tier = |index: usize| list["data"][index]["tier"].clone();
    assert_eq!((tier(0), tier(MAX_RESIDENT)), (json!("disk"), json!("host")));
    assert_eq!((&list["max_adapters"], &list["resident_bytes"]), (&json!(100), &json!(1000 * MAX_RESIDENT)));
    assert_eq!(list["budget_bytes"], json!(1 << 20));
    assert_eq!(ask(&harness, "a0").await.json()["adapter_generation"], json!(hex("w0")));
    let all: Vec<_> = (0..=MAX_RESIDENT).map(|index| ask_owned(&harness, index)).collect();
    for answer in futures::future::join_all(all).await {
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}

async fn ask_owned(harness: &Harness, index: usize) -> Response {
    ask(harness, &format!("a{index}")).await
}

#[tokio::test]
async fn an_adapter_is_pinned_and_listed_with_all_that_is_known_of_it() {
    let harness = Harness::start(reply_with("x")).await;
    let extra =
        json!({ "lora_int_id": 3, "is_3d_lora_weight": true, "base_model_name": "base", "pinned": true });
    assert_eq!(load(&harness, "a", "one", &extra).await.json()["pinned"], json!(true));
    let unpin = json!({ "lora_name": "a", "pinned": false });
    assert_eq!(harness.client.post("/v1/pin_lora_adapter", &unpin).await.json()["pinned"], json!(false));
    assert_eq!(ask(&harness, "a").await.status, 200);
    let listed = &harness.client.get("/v1/lora_adapters").await.json()["data"][0];
    for (field, value) in [
        ("name", json!("a")),
        ("generation", json!(hex("one"))),
        ("tenant", Value::Null),
        ("tier", json!("host")),
        ("state", json!("ready")),
        ("error", Value::Null),
        ("pinned", json!(false)),
        ("requests", json!(0)),
    ] {
        assert_eq!(listed[field], value, "{field}");
    }
    assert!(listed["tokens_per_s"].as_f64().unwrap() > 0.0, "{listed}");
    assert!(listed["last_used_at"].as_u64() >= listed["loaded_at"].as_u64(), "{listed}");
    let missing = harness.client.post("/v1/pin_lora_adapter", &json!({ "lora_name": "nobody" })).await;
    assert_eq!((missing.status, missing.code().as_str()), (404, "model_not_found"));
    for (field, value) in [("is_3d_lora_weight", json!("yes")), ("base_model_name", json!("another"))] {
        let refused = load(&harness, "b", "two", &json!({ field: value })).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(field)));
    }
}

#[tokio::test]
async fn the_list_says_of_each_adapter_where_it_was_computed_and_what_waiting_cost() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    let listed = async || harness.client.get("/v1/lora_adapters").await.json()["data"][0].clone();
    eventually_async("the executor was asked", async || listed().await["cold_starts"] == 2).await;
    let listed = listed().await;
    assert_eq!((&listed["device_bytes"], &listed["load_wait_ms"]), (&json!(250), &json!(3.0)));
    assert_eq!(listed["rank_rows"], json!({ "device": 50, "workers": 40, "executor": 10 }));
}

#[tokio::test]
async fn another_tenants_adapter_is_answered_byte_for_byte_like_one_that_does_not_exist() {
    const ADMIN: &str = "admin-key-0123456789";
    const ALICE: &str = "alice-key-0123456789";
    const BOB: &str = "bob-key-0123456789ab";
    let file = key_file(&[("admin", "root", ADMIN), ("user", "alice", ALICE), ("user", "bob", BOB)]);
    let mut harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let open = harness.client.clone();
    harness.client = open.with_key(ADMIN);
    assert_eq!(load(&harness, "hers", "one", &json!({ "tenant": "alice" })).await.json()["tenant"], "alice");
    let (alice, bob) = (open.with_key(ALICE), open.with_key(BOB));
    assert_eq!(alice.get("/v1/models/hers").await.status, 200);
    assert_eq!(alice.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 2);
    assert_eq!(bob.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 1);
    assert_eq!(
        bob.get("/v1/models/hers").await.body,
        bob.get("/v1/models/none").await.body.replace("none", "hers")
    );
    for route in [TEXT, "/v1/chat/completions", "/tokenize", "/detokenize"] {
        let ask = |model: &str| {
            let message = json!([{ "role": "user", "content": "a" }]);
            let mut body = json!({ "model": model });
            match route {
                "/v1/chat/completions" => body["messages"] = message,
                "/detokenize" => body["tokens"] = json!([65]),
                _ => body["prompt"] = json!("a"),
            }
            body
        };
        assert_eq!(alice.post(route, &ask("hers")).await.status, 200, "{route}");
        let (hers, none) = (bob.post(route, &ask("hers")).await, bob.post(route, &ask("none")).await);
        assert_eq!((hers.status, &hers.body), (404, &none.body.replace("none", "hers")), "{route}");
        let headers = |response: &Response| -> Vec<String> {
            let names = response.headers.iter().map(|(name, _)| name.clone());
            names.collect()
        };
        assert_eq!(headers(&hers), headers(&none), "{route}");
    }
    assert_eq!(bob.get("/v1/lora_adapters").await.status, 403);
}

#[tokio::test]
async fn a_registry_that_is_full_says_so() {
    let harness = Harness::start_with(reply_with("x"), |config| config.max_adapters = 1).await;
    load(&harness, "a", "one", &json!({})).await;
    let refused = load(&harness, "b", "two", &json!({})).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "adapter_limit_exceeded"));
    assert_eq!(load(&harness, "a", "two", &json!({ "load_inplace": true })).await.status, 200);
}
