//! Adapters that requests and loads name by URI.

use std::{path::PathBuf, time::Duration};

use gateway::{
    adapters::{AllowList, BucketAccess, RemoteOptions},
    config::GatewayConfig,
    keys::Keys,
};
use model_files::hub_access::HubAccess;
use serde_json::{Value, json};
use testkit::servers::{
    hub::{COMMIT, FakeHub},
    s3::Bucket,
};

use crate::{
    client::{Response, TestClient},
    fake_executor::{hang_after, reply_with},
    harness::{Harness, eventually, key_file},
};

const TEXT: &str = "/v1/completions";
const LOAD: &str = "/v1/load_lora_adapter";
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// SHA-256 of the text `one`, by `sha256sum`.
const DIGEST_OF_ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
/// Time for which failures are remembered in tests that do not wait for its end.
const LONG: Duration = Duration::from_secs(600);

fn remote(prefixes: &[&str], hub: &FakeHub) -> RemoteOptions {
    let prefixes: Vec<String> = prefixes.iter().map(|&prefix| prefix.to_owned()).collect();
    RemoteOptions {
        allowed: AllowList::parse(&prefixes).unwrap(),
        failure_time: LONG,
        hub: HubAccess { endpoint: hub.url.clone(), token: Some("hf_secret".to_owned()), is_offline: false },
        ..RemoteOptions::default()
    }
}

fn hub() -> FakeHub {
    FakeHub::start(&[
        (CONFIG, b"{}"),
        (WEIGHTS, b"one"),
        ("README.md", b"not needed"),
        ("optimizer.pt", b"not needed"),
    ])
}

/// Starts a gateway that may fetch adapters below `prefixes` from `hub`.
async fn start(prefixes: &[&str], hub: &FakeHub, change: impl FnOnce(&mut GatewayConfig)) -> Harness {
    let options = remote(prefixes, hub);
    Harness::start_with(reply_with("x"), |config| {
        config.remote = options;
        change(config);
    })
    .await
}

/// Allows all directories inside the adapter root.
fn allow_root(config: &mut GatewayConfig) {
    config.remote.allowed = AllowList::parse(&[format!("file://{}", config.adapter_root.display())]).unwrap();
}

fn file_uri(path: &std::path::Path) -> String {
    format!("file://{}", path.canonicalize().unwrap().display())
}

async fn ask(client: &TestClient, model: &str) -> Response {
    client.post(TEXT, &json!({ "model": model, "prompt": "a" })).await
}

async fn listed(client: &TestClient) -> Vec<Value> {
    let models = client.get("/v1/models").await.json();
    models["data"].as_array().unwrap().iter().skip(1).cloned().collect()
}

/// Returns the unfinished copies in the store.
fn unfinished(harness: &Harness) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(harness.directory.path().join("state/adapters")).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".incoming-"))
        .collect()
}

#[tokio::test]
async fn a_directory_is_loaded_by_its_uri_once_and_survives_a_restart() {
    let mut harness = start(&[], &hub(), allow_root).await;
    let path = harness.adapter("sql", "one");
    let uri = file_uri(&path);
    for asked in [&uri, &format!("{uri}/"), &uri] {
        let answer = ask(&harness.client, asked).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["model"], **asked);
    }
    let models = listed(&harness.client).await;
    assert_eq!(models.len(), 1, "{models:?}");
    assert_eq!(
        (&models[0]["id"], &models[0]["root"]),
        (&json!(uri), &json!(format!("{uri}#sha256={DIGEST_OF_ONE}")))
    );
    let status = harness.client.get("/v1/lora_adapters").await.json();
    assert_eq!(status["data"][0]["uri"], models[0]["root"]);
    assert_eq!(status["data"][0]["tenant"], Value::Null, "an administrator loads it for all");

    std::fs::remove_dir_all(path).unwrap();
    harness.restart_gateway().await;
    assert_eq!(ask(&harness.client, &uri).await.status, 200, "the registry has it");
}

#[tokio::test]
async fn a_repository_is_pinned_to_its_commit_and_only_needed_files_are_fetched() {
    let hub = hub();
    let harness = start(&["hf://org"], &hub, |_| {}).await;
    let answer = ask(&harness.client, "hf://org/name").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(ask(&harness.client, "hf://org/name@main").await.status, 200);
    let models = listed(&harness.client).await;
    assert_eq!(models.len(), 1);
    assert_eq!(models[0]["id"], "hf://org/name@main");
    assert_eq!(models[0]["root"], format!("hf://org/name@{COMMIT}#sha256={DIGEST_OF_ONE}"));
    assert!(
        hub.requests().iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret"))
    );
    assert_eq!(hub.take_downloads(), [CONFIG, WEIGHTS]);
    let encoded = "hf%3A%2F%2Forg%2Fname%40main";
    assert_eq!(harness.client.get(&format!("/v1/models/{encoded}")).await.json()["id"], "hf://org/name@main");
    let deleted =
        harness.client.send("DELETE", &format!("/v1/models/{encoded}"), "application/json", "").await;
    assert_eq!(deleted.status, 200, "{}", deleted.body);
    assert!(listed(&harness.client).await.is_empty());
}

#[tokio::test]
async fn every_route_that_takes_a_model_takes_a_uri() {
    let harness = start(&[], &hub(), allow_root).await;
    for (index, (route, body)) in [
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "a" }] })),
        (
            "/v1/completions",
            json!({ "prompt": "a", "model": "base", "adapter_switches": [{ "after_tokens": 1 }] }),
        ),
        ("/v1/responses", json!({ "input": "a" })),
        ("/v1/messages", json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 1 })),
        ("/api/generate", json!({ "prompt": "a", "stream": false })),
        ("/tokenize", json!({ "prompt": "a" })),
    ]
    .into_iter()
    .enumerate()
    {
        let uri = file_uri(&harness.adapter(&format!("a{index}"), "one"));
        let mut body = body;
        match body.get("adapter_switches").is_some() {
            true => body["adapter_switches"][0]["model"] = json!(uri),
            false => body["model"] = json!(uri),
        }
        let answer = harness.client.post(route, &body).await;
        assert_eq!(answer.status, 200, "{route}: {}", answer.body);
        assert_eq!(listed(&harness.client).await.len(), index + 1, "{route}");
    }
}

#[tokio::test]
async fn all_who_ask_meanwhile_share_one_fetch_and_other_requests_go_on() {
    let hub = hub();
    let harness = start(&["hf://org"], &hub, |_| {}).await;
    hub.hold();
    let body = json!({ "model": "hf://org/name", "prompt": "a" });
    let first = harness.client.open_post(TEXT, &body).await;
    eventually("the fetch begins", || hub.requests().iter().any(|request| request.file.is_some())).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(harness.client.open_post(TEXT, &body).await);
    }
    for name in ["a", "b", "c"] {
        let load = json!({ "lora_name": name, "lora_path": "hf://org/name" });
        waiting.push(harness.client.open_post(LOAD, &load).await);
    }
    drop(first);
    assert_eq!(ask(&harness.client, "base").await.status, 200, "others go on");
    assert!(listed(&harness.client).await.is_empty());
    hub.release();
    for answer in waiting {
        let answer = answer.rest().await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    assert_eq!(hub.take_downloads(), [CONFIG, WEIGHTS], "although the first caller left");
    assert!(unfinished(&harness).is_empty());
}

#[tokio::test]
async fn a_failure_answers_all_who_wait_and_is_remembered_for_a_while() {
    let hub = hub();
    let harness =
        start(&["hf://org"], &hub, |config| config.remote.failure_time = Duration::from_secs(3)).await;
    hub.set_broken(Some(WEIGHTS));
    hub.hold();
    let body = json!({ "model": "hf://org/name", "prompt": "a" });
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(harness.client.open_post(TEXT, &body).await);
    }
    eventually("the fetch begins", || hub.requests().iter().any(|request| request.file.is_some())).await;
    hub.release();
    let mut messages = Vec::new();
    for answer in waiting {
        let answer = answer.rest().await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "adapter_fetch_failed"), "{}", answer.body);
        assert_eq!(answer.header("retry-after"), Some("3"));
        messages.push(answer.json()["error"]["message"].clone());
    }
    messages.dedup_by_key(|message| message.as_str().unwrap().split(" (request").next().unwrap().to_owned());
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert_eq!(hub.take_downloads(), [CONFIG, WEIGHTS]);

    let again = ask(&harness.client, "hf://org/name").await;
    assert_eq!((again.status, again.code().as_str()), (503, "adapter_fetch_failed"));
    assert!(again.header("retry-after").is_some());
    assert!(hub.take_downloads().is_empty(), "the failure is remembered");
    assert!(unfinished(&harness).is_empty(), "nothing half is left");

    hub.set_broken(None);
    let mut answer = ask(&harness.client, "hf://org/name").await;
    while answer.status == 503 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        answer = ask(&harness.client, "hf://org/name").await;
    }
    assert_eq!(answer.status, 200, "the fetch is tried again later: {}", answer.body);
}

#[tokio::test]
async fn what_is_not_allowed_is_refused_without_a_request_to_anybody() {
    let hub = hub();
    let harness =
        start(&["hf://org/name", "s3://bucket/adapters/", "s3://bucket/{tenant}/"], &hub, |_| {}).await;
    let uris = [
        ("hf://org-evil/name", 403, "adapter_uri_forbidden"),
        ("hf://org/name2", 403, "adapter_uri_forbidden"),
        ("s3://bucket/adapters-private/x", 403, "adapter_uri_forbidden"),
        ("s3://bucket/public/x", 403, "adapter_uri_forbidden"),
        ("file:///etc", 403, "adapter_uri_forbidden"),
        ("hf://org/name/../../other", 400, "adapter_uri_invalid"),
        ("hf://org/name@../../other/name", 400, "adapter_uri_invalid"),
        ("hf://org/..%2fother", 400, "adapter_uri_invalid"),
        ("s3://bucket/adapters/../private/x", 400, "adapter_uri_invalid"),
        ("s3://bucket/adapters/%2e%2e/private", 400, "adapter_uri_invalid"),
        ("s3://key@bucket/adapters/x", 400, "adapter_uri_invalid"),
        ("hf://user@org/name", 400, "adapter_uri_invalid"),
        ("hf://org/name#sha256=00", 400, "adapter_uri_invalid"),
        ("file://host/etc", 400, "adapter_uri_invalid"),
    ];
    for (uri, status, code) in uris {
        let asked = ask(&harness.client, uri).await;
        assert_eq!((asked.status, asked.code().as_str()), (status, code), "{uri}: {}", asked.body);
        assert_eq!(asked.json()["error"]["param"], "model", "{uri}");
        let loaded = harness.client.post(LOAD, &json!({ "lora_name": "x", "lora_path": uri })).await;
        assert_eq!((loaded.status, loaded.code().as_str()), (status, code), "{uri}: {}", loaded.body);
        assert_eq!(loaded.json()["error"]["param"], "lora_path", "{uri}");
    }
    for uri in ["hf://org:80/name", "s3://bucket:9000/adapters/x"] {
        assert_eq!(ask(&harness.client, uri).await.status, 404, "{uri}");
        let loaded = harness.client.post(LOAD, &json!({ "lora_name": "x", "lora_path": uri })).await;
        assert_eq!(loaded.code(), "adapter_uri_invalid", "{uri}");
    }
    assert_eq!(hub.requests(), []);
    assert!(listed(&harness.client).await.is_empty());
}

#[tokio::test]
async fn without_an_allow_list_a_uri_is_refused_with_what_to_do() {
    let harness = start(&[], &hub(), |_| {}).await;
    for answer in [
        ask(&harness.client, "hf://org/name").await,
        harness.client.post(LOAD, &json!({ "lora_name": "x", "lora_path": "hf://org/name" })).await,
    ] {
        assert_eq!((answer.status, answer.code().as_str()), (403, "adapter_uri_forbidden"));
        assert!(answer.body.contains("--allowed-adapter-uris"), "{}", answer.body);
    }
}

#[tokio::test]
async fn a_directory_outside_of_the_root_and_a_link_out_of_it_are_refused() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join(CONFIG), "{}").unwrap();
    std::fs::write(outside.path().join(WEIGHTS), "secret").unwrap();
    let harness = start(&["file:///tmp", "file:///etc"], &hub(), |config| {
        let everything = std::env::temp_dir().canonicalize().unwrap();
        config.remote.allowed = AllowList::parse(&[format!("file://{}", everything.display())]).unwrap();
    })
    .await;
    let link = harness.directory.path().join("adapters/link");
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    let inner = harness.adapter("inner", "one");
    std::fs::remove_file(inner.join(WEIGHTS)).unwrap();
    std::os::unix::fs::symlink(outside.path().join(WEIGHTS), inner.join(WEIGHTS)).unwrap();
    for path in [outside.path().to_owned(), link, inner] {
        let uri = format!("file://{}", path.display());
        let answer = ask(&harness.client, &uri).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "adapter_path_forbidden"),
            "{}",
            answer.body
        );
    }
    assert!(listed(&harness.client).await.is_empty());
}

#[tokio::test]
async fn a_redirect_to_another_host_does_not_carry_the_token() {
    let (hub, other) = (hub(), FakeHub::start(&[(CONFIG, b"{}"), (WEIGHTS, b"one")]));
    let harness = start(&["hf://org"], &hub, |_| {}).await;
    hub.redirect_to(&format!("{}/moved", other.url));
    let answer = ask(&harness.client, "hf://org/name").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let moved = other.requests();
    assert_eq!(moved.len(), 2);
    assert!(moved.iter().all(|request| request.authorization.is_none()), "{moved:?}");
    let own = hub.requests();
    assert!(own.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")));

    let looping = self::hub();
    looping.redirect_to("/moved");
    let harness = start(&["hf://org"], &looping, |_| {}).await;
    let answer = ask(&harness.client, "hf://org/name").await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "adapter_fetch_failed"));
    assert!(answer.body.contains("too often") && !answer.body.contains("hf_secret"), "{}", answer.body);
}

#[tokio::test]
async fn a_digest_pins_the_weights_in_the_uri_and_in_a_load() {
    let hub = hub();
    let harness = start(&["hf://org"], &hub, |_| {}).await;
    let pinned = format!("hf://org/name@{COMMIT}#sha256={DIGEST_OF_ONE}");
    assert_eq!(ask(&harness.client, &pinned).await.status, 200);
    let wrong = format!("hf://org/name#sha256={}", "0".repeat(64));
    let answer = ask(&harness.client, &wrong).await;
    assert_eq!((answer.status, answer.code().as_str()), (409, "adapter_digest_mismatch"), "{}", answer.body);
    assert!(answer.body.contains(DIGEST_OF_ONE), "{}", answer.body);

    let load = async |name: &str, digest: &str| {
        let digest = format!("sha256:{digest}");
        let body = json!({ "lora_name": name, "lora_path": "hf://org/name", "digest": digest });
        harness.client.post(LOAD, &body).await
    };
    let loaded = load("sql", DIGEST_OF_ONE).await;
    assert_eq!(loaded.status, 200, "{}", loaded.body);
    assert_eq!((&loaded.json()["name"], &loaded.json()["uri"]), (&json!("sql"), &json!(pinned)));
    assert_eq!(ask(&harness.client, "sql").await.status, 200);
    assert_eq!(load("other", &"0".repeat(64)).await.code(), "adapter_digest_mismatch");
    assert_eq!(load("other", "12").await.json()["error"]["param"], "digest");
    assert!(unfinished(&harness).is_empty());
}

#[tokio::test]
async fn an_adapter_belongs_to_the_tenant_that_asked_and_an_administrators_to_all() {
    let hub = hub();
    let keys = key_file(&[("user", "alice", "hb-a"), ("user", "bob", "hb-b"), ("admin", "ops", "hb-o")]);
    let harness = start(&["hf://org"], &hub, |config| {
        config.keys = Keys::read(keys.path(), None).unwrap();
    })
    .await;
    let [alice, bob, admin] = ["hb-a", "hb-b", "hb-o"].map(|key| harness.client.with_key(key));
    let uri = "hf://org/name@main";
    assert_eq!(ask(&alice, uri).await.status, 200);
    let own = "hf://org/name@main?tenant=alice";
    assert_eq!(listed(&alice).await[0]["id"], own);
    assert!(listed(&bob).await.is_empty());
    assert_eq!(ask(&alice, own).await.status, 200);
    assert_eq!(ask(&bob, own).await.status, 404, "another tenant's name");
    assert_eq!(ask(&bob, uri).await.status, 200);
    assert_eq!(hub.take_downloads().len(), 4, "each tenant has its own files");
    assert_eq!(listed(&bob).await[0]["id"], "hf://org/name@main?tenant=bob");

    let shared = format!("hf://org/name@{COMMIT}");
    assert_eq!(ask(&admin, &shared).await.status, 200);
    assert_eq!(hub.take_downloads().len(), 2);
    assert_eq!(ask(&bob, &shared).await.status, 200);
    assert!(hub.take_downloads().is_empty(), "all tenants use it");
    let deleted = bob.send("DELETE", "/v1/models/hf%3A%2F%2Forg%2Fname", "application/json", "").await;
    assert_eq!(deleted.status, 200, "{}", deleted.body);
    assert_eq!(listed(&alice).await.len(), 2, "the other tenant's stays");
}

#[tokio::test]
async fn a_tenant_reaches_only_its_own_part_of_a_prefix_with_the_placeholder() {
    let keys = key_file(&[("user", "alice", "hb-a"), ("admin", "ops", "hb-o")]);
    let harness = start(&[], &hub(), |config| {
        config.keys = Keys::read(keys.path(), None).unwrap();
        let prefix = format!("file://{}/{{tenant}}", config.adapter_root.display());
        config.remote.allowed = AllowList::parse(&[prefix]).unwrap();
    })
    .await;
    let alice = harness.client.with_key("hb-a");
    let [own, others] = ["alice/sql", "bob/sql"].map(|name| file_uri(&harness.adapter(name, "one")));
    assert_eq!(ask(&alice, &own).await.status, 200);
    assert_eq!(ask(&alice, &others).await.code(), "adapter_uri_forbidden");
    let admin = harness.client.with_key("hb-o");
    let load = |tenant: Value| json!({ "lora_name": "sql", "lora_path": others, "tenant": tenant });
    assert_eq!(admin.post(LOAD, &load(json!("alice"))).await.code(), "adapter_uri_forbidden");
    assert_eq!(admin.post(LOAD, &load(json!("bob"))).await.status, 200);
    let key = admin.post(LOAD, &json!({ "lora_name": "x", "lora_path": others })).await;
    assert_eq!(key.code(), "adapter_uri_forbidden", "an adapter of all tenants is not one tenant's");
}

#[tokio::test]
async fn adapters_that_were_not_used_for_longest_make_room_and_those_in_use_stay() {
    // The executor says that each adapter has 1000 bytes.
    let harness = Harness::start_with(hang_after("x"), |config| {
        allow_root(config);
        config.remote.tenant_bytes = 2000;
        config.remote.failure_time = Duration::from_millis(1);
    })
    .await;
    let uri = |name: &str| file_uri(&harness.adapter(name, name));
    let body = |name: &str| json!({ "model": uri(name), "prompt": "a", "stream": true });
    let names = async || {
        let names = listed(&harness.client).await;
        let name = |model: &Value| model["id"].as_str().unwrap().rsplit_once('/').unwrap().1.to_owned();
        names.iter().map(name).collect::<Vec<_>>()
    };
    let mut running = harness.client.open_post(TEXT, &body("a")).await;
    running.read_until("data:").await;
    for name in ["b", "c"] {
        let mut other = harness.client.open_post(TEXT, &body(name)).await;
        other.read_until("data:").await;
        drop(other);
        let idle = async || {
            let listed = harness.client.get("/v1/lora_adapters").await.json();
            let data = listed["data"].as_array().unwrap().clone();
            data.iter().filter(|entry| entry["requests"] != 0).count() == 1
        };
        crate::harness::eventually_async("the request ends", idle).await;
    }
    assert_eq!(names().await, ["a", "c"], "b was idle, and a is in use although it is older");
    let mut second = harness.client.open_post(TEXT, &body("c")).await;
    second.read_until("data:").await;
    let full = harness.client.post(TEXT, &body("d")).await;
    assert_eq!((full.status, full.code().as_str()), (507, "adapter_quota_exceeded"), "{}", full.body);
    assert_eq!(names().await, ["a", "c"]);
    assert!(unfinished(&harness).is_empty());
}

#[tokio::test]
async fn files_that_are_too_long_or_no_adapter_are_refused() {
    let harness = start(&[], &hub(), |config| {
        allow_root(config);
        config.max_adapter_file_bytes = 100;
    })
    .await;
    let long = harness.adapter("long", &"x".repeat(101));
    let pickled = harness.adapter("pickled", "one");
    std::fs::rename(pickled.join(WEIGHTS), pickled.join("adapter_model.bin")).unwrap();
    let missing = harness.directory.path().join("adapters/nothing");
    for (path, status, code, says) in [
        (long, 400, "invalid_adapter", "--max-adapter-file-bytes"),
        (pickled, 400, "invalid_adapter", "pickle"),
        (missing, 404, "adapter_not_found", CONFIG),
    ] {
        let answer = ask(&harness.client, &format!("file://{}", path.display())).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{}", answer.body);
        assert!(answer.body.contains(says), "{}", answer.body);
        assert_eq!(answer.header("retry-after"), Some("600"));
    }
    assert!(unfinished(&harness).is_empty());
}

#[tokio::test]
async fn a_repository_that_is_missing_silent_or_offline_is_a_typed_error() {
    let hub = hub();
    let harness =
        start(&["hf://org"], &hub, |config| config.remote.timeout = Duration::from_millis(500)).await;
    let missing = ask(&harness.client, "hf://org/other").await;
    assert_eq!((missing.status, missing.code().as_str()), (404, "adapter_not_found"), "{}", missing.body);
    hub.hold();
    let silent = ask(&harness.client, "hf://org/name").await;
    assert_eq!((silent.status, silent.code().as_str()), (503, "adapter_fetch_failed"));
    assert!(silent.body.contains("--fetch-timeout-ms"), "{}", silent.body);
    assert!(unfinished(&harness).is_empty());
    hub.release();
    let offline = start(&["hf://org"], &hub, |config| config.remote.hub.is_offline = true).await;
    let refused = ask(&offline.client, "hf://org/name").await;
    assert!(refused.body.contains("HF_HUB_OFFLINE"), "{}", refused.body);
}

#[tokio::test]
async fn a_prefix_of_a_bucket_is_an_adapter() {
    let Ok(bucket) = Bucket::start().inspect_err(|missing| eprintln!("skipped: {missing}")) else { return };
    bucket.replace(&format!("adapters/sql/{CONFIG}"), b"{}");
    bucket.replace(&format!("adapters/sql/{WEIGHTS}"), b"one");
    let variables = bucket.variables().into_iter().map(|(name, value)| (name.to_owned(), value));
    let harness = start(&["s3://fleet/adapters/"], &hub(), |config| {
        config.remote.bucket = BucketAccess::of(variables);
    })
    .await;
    let answer = ask(&harness.client, "s3://fleet/adapters/sql").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let models = listed(&harness.client).await;
    assert_eq!(models[0]["root"], format!("s3://fleet/adapters/sql#sha256={DIGEST_OF_ONE}"));
    let missing = ask(&harness.client, "s3://fleet/adapters/other").await;
    assert_eq!((missing.status, missing.code().as_str()), (404, "adapter_not_found"), "{}", missing.body);
}
