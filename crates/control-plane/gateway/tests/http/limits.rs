//! Rate, number and speed limits of the gateway.

use std::{num::NonZeroU32, time::Duration};

use gateway::{config::RateLimits, keys::Keys, server::RunError, tenant_memory::MemoryLimits};
use scheduling::admission::DelayLimits;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{
    fake_executor::{hang_after, reply_with, say_slowly},
    harness::{Harness, WATCHDOG, eventually, eventually_async, key_file},
};

const TEXT: &str = "/v1/completions";

#[tokio::test]
async fn a_key_that_asks_too_often_is_told_when_to_come_back() {
    let file = key_file(&[("user", "alice", "hb-a"), ("user", "bob", "hb-b"), ("admin", "ops", "hb-ops")]);
    let limit = NonZeroU32::new(2);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), limit).unwrap())
            .await;
    let alice = harness.client.with_key("hb-a");
    let first = alice.get("/v1/models").await;
    assert_eq!((first.status, first.header("x-ratelimit-remaining-requests")), (200, Some("1")));
    assert_eq!(alice.get("/v1/models").await.header("x-ratelimit-limit-requests"), Some("2"));
    let refused = alice.get("/v1/models").await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "rate_limit_exceeded"));
    let wait_s: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((29..=30).contains(&wait_s), "two a minute is one each 30 s, not {wait_s}");
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("2 requests per minute"));
    assert_eq!(
        harness.client.with_key("hb-b").get("/v1/models").await.status,
        200,
        "others are not disturbed"
    );
    for _ in 0..5 {
        let status = harness.client.with_key("hb-ops").get("/v1/status").await.status;
        assert_eq!(status, 200, "the operator's own routes have no limit");
    }
}

#[tokio::test]
async fn an_adapter_that_is_asked_too_often_is_named_and_others_answer() {
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.rates = RateLimits { per_adapter: NonZeroU32::new(1), ..RateLimits::default() };
    })
    .await;
    for name in ["a", "b"] {
        let load = json!({ "lora_name": name, "lora_path": harness.adapter(name, name) });
        assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
    }
    let ask = async |model: &str| harness.client.post(TEXT, &json!({ "model": model, "prompt": "a" })).await;
    assert_eq!(ask("a").await.status, 200);
    let refused = ask("base:a").await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "rate_limit_exceeded"));
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("'base:a'"), "{}", refused.body);
    for model in ["b", "base", "base"] {
        assert_eq!(ask(model).await.status, 200);
    }
}

#[tokio::test]
async fn a_body_that_does_not_come_is_cut_off_with_a_typed_error() {
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.connections.body_timeout = Duration::from_millis(100);
    })
    .await;
    let mut stream = harness.client.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
        content-length: 1000\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(WATCHDOG, stream.read_to_string(&mut answer)).await.expect("it is closed").unwrap();
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body_timeout"), "{answer}");
}

#[tokio::test]
async fn who_says_nothing_or_half_a_header_is_cut_off() {
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.connections.header_timeout = Duration::from_millis(100);
    })
    .await;
    for said in ["", "GET /health HT", "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"] {
        let mut stream = harness.client.connect().await;
        stream.write_all(said.as_bytes()).await.unwrap();
        let mut answer = String::new();
        // A close may also appear as an error.
        let ended = timeout(WATCHDOG, stream.read_to_string(&mut answer)).await;
        assert!(ended.is_ok(), "{said:?} is still open");
    }
}

#[tokio::test]
async fn a_header_that_is_too_long_is_refused() {
    let harness = Harness::start(reply_with("x")).await;
    let long = harness.client.with_header("x-long", &"x".repeat(17 * 1024));
    let refused = long.get("/health").await;
    assert_eq!((refused.status, refused.code().as_str()), (431, "header_too_large"));
    let many = (0..65).fold(harness.client.clone(), |client, i| client.with_header(&format!("x-{i}"), "x"));
    assert_eq!(many.get("/health").await.status, 431);
}

#[tokio::test]
async fn a_queue_that_stands_is_refused_with_a_forecast_and_one_that_has_gone_is_forgotten() {
    let harness = Harness::start_with(hang_after(""), |config| {
        config.executor.max_sequences = 1000;
        config.admission.max_sequences = 1000;
        config.admission.delays =
            DelayLimits { target: Duration::from_millis(10), interval: Duration::from_millis(1200) };
    })
    .await;
    // All slots of the executor are taken, and more requests wait than it can run at once.
    let burst = json!({ "model": "base", "prompt": "a", "n": 120 });
    let running = harness.client.open_post(TEXT, &burst).await;
    eventually("the burst is let in", || harness.executor().generates().len() == 120).await;
    // Admitted requests hang, and their clients disconnect.
    let body = json!({ "model": "base", "prompt": "a" });
    let ask = async || timeout(Duration::from_millis(50), harness.client.post(TEXT, &body)).await.ok();
    let refused = timeout(WATCHDOG, async {
        loop {
            if let Some(refused) = ask().await {
                return refused;
            }
        }
    });
    let refused = refused.await.expect("the queue stands at last");
    assert_eq!((refused.status, refused.code().as_str()), (429, "queue_full"));
    let wait_s: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(wait_s >= 2, "nobody had a turn for 1.2 s, which the next has to wait for too, not {wait_s} s");
    assert!(refused.body.contains("--codel-target-ms"), "{}", refused.body);
    drop(running);
    eventually_async("it is let in", async || ask().await.is_none()).await;
}

#[tokio::test]
async fn when_all_connections_are_taken_health_still_answers_and_others_are_told() {
    let harness = Harness::start_with(reply_with("x"), |config| config.connections.max_connections = 2).await;
    let held = [harness.client.connect().await, harness.client.connect().await];
    eventually_async("both are taken", async || harness.client.get("/v1/models").await.status == 503).await;
    assert_eq!(harness.client.get("/health").await.status, 200);
    let refused = harness.client.get("/v1/models").await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "too_many_connections"));
    assert_eq!((refused.header("retry-after"), refused.header("connection")), (Some("1"), Some("close")));
    drop(held);
    eventually_async("there is room again", async || harness.client.get("/v1/models").await.status == 200)
        .await;
}

#[tokio::test]
async fn a_reader_who_takes_nothing_is_cut_off_and_its_request_cancelled() {
    // More than all buffers between gateway and client hold.
    let endless = hang_after(String::leak("a".repeat(490)));
    let harness = Harness::start_with(endless, |config| {
        config.connections.stall_timeout = Duration::from_millis(300);
    })
    .await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true, "n": 32, "max_tokens": 500,
        "logprobs": 20 });
    let exchange = harness.client.open_post(TEXT, &body).await;
    eventually("the executor is told", || !harness.executor().cancels().is_empty()).await;
    drop(exchange);
}

#[tokio::test]
async fn what_a_reader_has_not_read_is_bounded_by_its_tenants_memory() {
    let endless = hang_after(String::leak("a".repeat(490)));
    let limits = MemoryLimits { tenant_bytes: 256 << 10, total_bytes: 1 << 30 };
    let harness = Harness::start_with(endless, |config| config.connections.memory = limits).await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true, "n": 32, "max_tokens": 500,
        "logprobs": 20 });
    let mut exchange = harness.client.open_post(TEXT, &body).await;
    // Long before the timeout of the reader.
    eventually("the executor is told", || !harness.executor().cancels().is_empty()).await;
    exchange.read_until("memory_full").await;
    let others = json!({ "model": "base", "prompt": "a", "stream": true });
    let mut next = harness.client.open_post(TEXT, &others).await;
    next.read_until("data: ").await;
}

#[tokio::test]
async fn nothing_is_taken_after_draining_began_and_what_runs_ends() {
    let mut harness = Harness::start_with(say_slowly("ababababab", Duration::from_millis(50)), |config| {
        config.grace = WATCHDOG;
    })
    .await;
    let mut old = harness.client.connect().await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true, "max_tokens": 100 });
    let mut running = harness.client.open_post(TEXT, &body).await;
    running.read_until("data: ").await;
    // A request that is half sent when draining begins.
    old.write_all(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n").await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let gateway = harness.gateway.take().unwrap();
    let stopping = tokio::spawn(gateway.shut_down());
    eventually_async("nobody is accepted", async || {
        let refused = tokio::net::TcpStream::connect(old.get_ref().peer_addr().unwrap()).await;
        refused.is_err()
    })
    .await;
    let mut answer = String::new();
    // A close is allowed too, but not an answer.
    let _ = old.write_all(b"\r\n").await;
    let _ = timeout(WATCHDOG, old.read_to_string(&mut answer)).await.expect("it ends");
    assert!(answer.is_empty() || answer.contains("shutting_down"), "{answer}");
    running.read_until("[DONE]").await;
    stopping.await.unwrap().expect("nothing was cut off");
}

#[tokio::test]
async fn a_host_that_stops_says_so_to_whoever_chooses_among_hosts() {
    let mut harness = Harness::start_with(hang_after("a"), |config| config.grace = WATCHDOG).await;
    let mut picker = harness.client.connect().await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true, "max_tokens": 100 });
    let mut running = harness.client.open_post(TEXT, &body).await;
    running.read_until("data: ").await;
    // A request that is half sent when draining begins.
    picker.write_all(b"GET /v1/load HTTP/1.1\r\nhost: 127.0.0.1\r\n").await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let address = harness.client.address();
    let stopping = tokio::spawn(harness.gateway.take().unwrap().shut_down());
    eventually_async("nobody is accepted", async || tokio::net::TcpStream::connect(address).await.is_err())
        .await;
    picker.write_all(b"\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(WATCHDOG, picker.read_to_string(&mut answer)).await.expect("it ends").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"stopping\""), "{answer}");
    drop(running);
    stopping.await.unwrap().expect("nothing was cut off");
}

#[tokio::test]
async fn what_cannot_end_within_the_grace_is_cut_off_and_that_is_said() {
    let mut harness = Harness::start_with(hang_after("a"), |config| {
        config.grace = Duration::from_millis(50);
    })
    .await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true, "max_tokens": 500 });
    let mut running = harness.client.open_post(TEXT, &body).await;
    running.read_until("data: ").await;
    let stopped = harness.gateway.take().unwrap().shut_down().await;
    assert!(matches!(stopped, Err(RunError::Cut { grace_ms: 50, .. })), "{stopped:?}");
    running.read_until("\"error\"").await;
}

#[tokio::test]
async fn told_a_second_time_to_stop_it_waits_for_nothing() {
    let mut harness = Harness::start_with(hang_after("a"), |config| config.grace = WATCHDOG * 100).await;
    let body = json!({ "model": "base", "prompt": "a", "stream": true });
    let mut running = harness.client.open_post(TEXT, &body).await;
    running.read_until("data: ").await;
    let gateway = harness.gateway.take().unwrap();
    let stopped = timeout(WATCHDOG, gateway.until(async {}, async {})).await.expect("it ends at once");
    assert!(matches!(stopped, Err(RunError::Hurried)), "{stopped:?}");
}
