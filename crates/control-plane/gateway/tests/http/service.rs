//! Health, metrics, and the tokenizer's routes.

use std::sync::Arc;

use gateway::{
    config::StartAdapter,
    lifecycle::StartError,
    server::{Gateway, RunError},
};
use serde_json::json;
use shmproto::{
    codec::Wire as _,
    message::{Loading, ToGateway},
};
use tokio::time::{Duration, timeout};
use zeromq::{RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use crate::{
    client::TestClient,
    fake_executor::{FakeExecutor, reply_with},
    harness::{Harness, WATCHDOG, config, eventually, eventually_async},
    text::bytes,
};

#[tokio::test]
async fn before_the_executor_is_there_health_says_loading_and_requests_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let gateway = Gateway::start(config(&directory), bytes()).await.unwrap();
    let client = TestClient::new(gateway.address);
    let health = client.get("/health").await;
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("loading")));
    let refused = client.post("/v1/completions", &json!({ "model": "base", "prompt": "a" })).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "executor_unavailable"));
    let _executor = FakeExecutor::start(&directory.path().join("socket"), reply_with("x")).await;
    let healthy = async {
        while client.get("/health").await.status != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WATCHDOG, healthy).await.expect("health becomes ok");
}

#[tokio::test]
async fn a_lost_executor_shows_in_health() {
    let mut harness = Harness::start(reply_with("x")).await;
    assert_eq!(harness.client.get("/health").await.json(), json!({ "status": "ok" }));
    harness.executor.take().unwrap().kill().await;
    let client = harness.client.clone();
    let lost = async {
        while client.get("/health").await.json()["status"] != "lost" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WATCHDOG, lost).await.expect("health says so");
    let refused = client.post("/v1/completions", &json!({ "model": "base", "prompt": "a" })).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "executor_unavailable"));
}

#[tokio::test]
async fn an_adapter_that_cannot_be_loaded_at_start_ends_the_gateway_with_its_name() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let _executor = FakeExecutor::start(&directory.path().join("socket"), reply_with("x")).await;
    let mut config = config(&directory);
    config.adapters = vec![StartAdapter { name: "ghost".to_owned(), path: "nowhere".into() }];
    let gateway = Gateway::start(config, bytes()).await.unwrap();
    let ended = timeout(WATCHDOG, gateway.until(std::future::pending(), std::future::pending()))
        .await
        .expect("it ends");
    assert!(matches!(ended, Err(RunError::Start(StartError::Adapter { name, .. })) if name == "ghost"));
}

#[tokio::test]
async fn figures_name_what_the_executor_reports_and_what_was_answered() {
    let harness = Harness::start(reply_with("x")).await;
    harness.client.post("/v1/completions", &json!({ "model": "base", "prompt": "a" })).await;
    let reported = async {
        loop {
            let text = harness.client.get("/metrics").await.body;
            if text.contains("holobiont_requests_waiting 3") {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = timeout(WATCHDOG, reported).await.expect("the executor is asked");
    for line in [
        "holobiont_executor_up 1",
        "holobiont_kv_blocks{state=\"total\"} 64",
        "holobiont_executor_generated_tokens_total 11",
        "holobiont_requests_in_flight 0",
        "holobiont_time_to_first_token_seconds_count 1",
        "holobiont_http_requests_total{route=\"/v1/completions\",status=\"200\"} 1",
        "vllm:lora_requests_info{max_lora=\"64\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"} ",
    ] {
        assert!(text.contains(line), "no '{line}' in\n{text}");
    }
}

#[tokio::test]
async fn the_tokenizer_can_be_asked() {
    let harness = Harness::start(reply_with("x")).await;
    let client = &harness.client;
    let tokens = client.post("/tokenize", &json!({ "model": "base", "prompt": "ab" })).await.json();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([257, 97, 98]), &json!(3)));
    let tokens =
        client.post("/tokenize", &json!({ "prompt": "ab", "add_special_tokens": false })).await.json();
    assert_eq!(tokens["tokens"], json!([97, 98]));
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }] });
    assert_eq!(client.post("/tokenize", &chat).await.json()["count"], "user:a;assistant:".len());
    assert_eq!(
        client.post("/detokenize", &json!({ "tokens": [97, 256] })).await.json(),
        json!({ "prompt": "a<end>" })
    );
    assert_eq!(client.post("/detokenize", &json!({ "tokens": [258] })).await.code(), "invalid_value");
    let with_strings = json!({ "prompt": "ab", "return_token_strs": true });
    let strings = client.post("/tokenize", &with_strings).await.json();
    assert_eq!(strings["token_strs"], json!(["<begin>", "a", "b"]));
    assert_eq!(client.get("/tokenizer_info").await.json()["eos_token"], "<end>");
}

#[tokio::test]
async fn a_large_body_is_answered_like_a_small_one() {
    let harness = Harness::start(reply_with("x")).await;
    let text = "a".repeat(100_000);
    let tokens = harness.client.post("/tokenize", &json!({ "prompt": text })).await.json();
    assert_eq!(tokens["count"], 100_001);
}

#[tokio::test]
async fn every_answer_has_a_request_id() {
    let harness = Harness::start(reply_with("x")).await;
    let ids = [harness.client.get("/health").await, harness.client.get("/nowhere").await];
    let ids: Vec<&str> = ids.iter().map(|answer| answer.header("x-request-id").unwrap()).collect();
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test]
async fn a_callers_own_request_id_and_trace_come_back() {
    let harness = Harness::start(reply_with("x")).await;
    let client = harness.client.with_header("x-request-id", "order/7");
    assert_eq!(client.get("/health").await.header("x-request-id"), Some("order/7"));
    let bad = harness.client.with_header("x-request-id", &"x".repeat(200)).get("/health").await;
    assert_eq!(bad.header("x-request-id").map(str::len), Some(16));
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let traced = harness.client.with_header("traceparent", trace).get("/health").await;
    assert_eq!(traced.header("traceparent"), Some(trace));
}

#[tokio::test]
async fn ready_says_loading_then_ready_then_lost() {
    let mut harness = Harness::start(reply_with("x")).await;
    let ready = harness.client.get("/ready").await;
    assert_eq!((ready.status, ready.json()), (200, json!({ "status": "ready" })));
    harness.executor.take().unwrap().kill().await;
    eventually_async("it says lost", async || harness.client.get("/ready").await.json()["status"] == "lost")
        .await;
    let lost = harness.client.get("/ready").await;
    assert!(lost.status == 503 && lost.json()["detail"].is_string(), "{}", lost.body);
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let gateway = Gateway::start(config(&directory), bytes()).await.unwrap();
    let loading = TestClient::new(gateway.address).get("/ready").await;
    assert_eq!((loading.status, &loading.json()["status"]), (503, &json!("loading")));
    assert!(loading.json()["stage"].is_string() && loading.json()["percent"].is_null(), "{}", loading.body);
}

#[tokio::test]
async fn the_service_manager_is_told_that_it_is_ready_and_how() {
    let harness = Harness::start(reply_with("x")).await;
    let told = Arc::new(std::sync::Mutex::new(String::new()));
    let (status, heard) = (harness.gateway.as_ref().unwrap().status.clone(), Arc::clone(&told));
    let follow = gateway::systemd::follow(
        status,
        || 12,
        move |states| {
            states.iter().for_each(|state| *heard.lock().unwrap() += &format!("{state}\n"));
        },
    );
    let follow = tokio::spawn(follow);
    eventually("it is told", || told.lock().unwrap().contains("READY=1\nSTATUS=ready, 12 adapters")).await;
    follow.abort();
}

#[tokio::test]
async fn the_status_names_the_model_and_what_is_done() {
    let harness = Harness::start(reply_with("x")).await;
    eventually_async("the executor was asked", async || {
        harness.client.get("/v1/status").await.json()["requests"]["waiting"] == 3
    })
    .await;
    let status = harness.client.get("/v1/status").await.json();
    assert_eq!((&status["model"], &status["ready"]), (&json!("base"), &json!(true)));
    assert_eq!((&status["kv_blocks"]["total"], &status["adapters"]["registered"]), (&json!(64), &json!(0)));
    for field in ["version", "uptime_s", "tokens_per_s"] {
        assert!(!status[field].is_null(), "{status}");
    }
}

#[tokio::test]
async fn the_status_says_what_the_device_holds_what_waiting_cost_and_who_works() {
    let harness =
        Harness::start_with(reply_with("x"), |config| config.telemetry.expected_workers = vec![3]).await;
    eventually_async("the executor was asked", async || {
        harness.client.get("/v1/status").await.json()["cold_starts"]["count"] == 4
    })
    .await;
    let status = harness.client.get("/v1/status").await.json();
    let device = json!({
        "kind": "cuda", "name": "A GPU", "memory_bytes": 1 << 30, "memory_free_bytes": 1 << 29, "group_weight_bytes": [5, 7], "numbers": "activations mixed",
        "bytes": 0, "budget_bytes": 1 << 19, "cold_start": "cpu-assist",
        "emulated_link_bytes_per_s": 125_000_000, "copied_bytes": 8000, "copy_ms": 9.0,
    });
    assert_eq!(status["device"], device);
    let waited = json!({ "count": 4, "load_wait_ms": 6.0, "mean_load_wait_ms": 1.5 });
    assert_eq!(status["cold_starts"], waited);
    let worker = |core: u32| json!({ "core": core, "pid": 100 + core, "slices": 6, "rank_rows": 20, "share": 0.5, "taken_back": 1 });
    let workers = json!({ "expected": 3, "lost": 1, "wait_ms": 7.0, "seated": [worker(2), worker(3)] });
    assert_eq!(status["workers"], workers);
}

#[tokio::test]
async fn the_status_lists_the_split_clients_and_what_each_has_used() {
    let harness = Harness::start(reply_with("x")).await;
    eventually_async("the executor was asked", async || {
        harness.client.get("/v1/status").await.json()["layers"]["open"] == 3
    })
    .await;
    let layers = &harness.client.get("/v1/status").await.json()["layers"];
    let used = json!({
        "calls": 10, "refused": 1, "bytes_in": 100, "bytes_out": 300, "wait_ms": 2.0, "compute_ms": 4.0,
        "rows": { "decode": 7, "verify": 0, "prefill": 3, "training": 0, "noise": 0 }, "mean_batch_rows": 2.5,
    });
    let first = json!({
        "session": 1, "tenant": "acme", "name": "client 1", "masking": "off", "route": "tls", "waiting_rows": 2,
        "slab_bytes": 4096, "used": used,
    });
    assert_eq!(layers["sessions"][0], first);
    assert_eq!(layers["sessions"][2]["route"], "shared memory");
    assert_eq!(layers["tenants"][1], json!({ "tenant": "zeta", "waiting_rows": 2, "used": used }));
    assert_eq!((&layers["broken"], &layers["used"]), (&json!(5), &used));
}

#[tokio::test]
async fn ready_says_how_far_the_executor_is_with_its_weights() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let mut socket = RouterSocket::new();
    let path = directory.path().join("socket");
    socket.bind(&format!("ipc://{}", path.display())).await.unwrap();
    let gateway = Gateway::start(config(&directory), bytes()).await.unwrap();
    let client = TestClient::new(gateway.address);
    let hello = timeout(WATCHDOG, socket.recv()).await.expect("it says hello").unwrap();
    let loading = ToGateway::Loading(Loading { stage: "reading weights".to_owned(), percent: 43 });
    let mut frames = ZmqMessage::from(hello.get(0).unwrap().to_vec());
    frames.push_back(loading.to_bytes().into());
    socket.send(frames).await.unwrap();
    let expected = json!({ "status": "loading", "detail": "loading 43 %", "stage": "reading weights",
        "percent": 43 });
    eventually_async("it says how far", async || client.get("/ready").await.json() == expected).await;
    let refused = client.post("/v1/completions", &json!({ "model": "base", "prompt": "a" })).await;
    assert!(refused.status == 503 && refused.body.contains("43 %"), "{}", refused.body);
}
