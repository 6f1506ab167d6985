//! Every metric is triggered and observed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use gateway::{
    adapters::AllowList,
    config::MetricNames,
    metrics::{
        aliases::ALIASES,
        table::{MetricKind, TABLE},
    },
    served_base::Supervisor,
};
use serde_json::{Value, json};
use shmproto::message::ErrorCode;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixListener,
    sync::Notify,
};

use crate::{
    client::TestClient,
    fake_executor::{FakeModelIdentity, MAX_RESIDENT, Reply, fail_after, hang_after, reply_with},
    harness::{Harness, eventually, eventually_async},
    parser::{Family, parse},
};

pub(crate) const TEXT: &str = "/v1/completions";
/// Value of `max_tokens` that makes the fake executor hang.
const HANG: u32 = 33;
const REFUSE: u32 = 44;
const WAIT: u32 = 55;

pub(crate) fn as_told() -> Reply {
    Arc::new(|generate| match generate.max_tokens {
        HANG => hang_after("ab")(generate),
        WAIT => hang_after("")(generate),
        REFUSE => fail_after("", ErrorCode::QueueFull)(generate),
        _ => reply_with("abc")(generate),
    })
}

pub(crate) fn ask(model: &str, max_tokens: u32) -> Value {
    json!({ "model": model, "prompt": "ab", "max_tokens": max_tokens })
}

pub(crate) async fn scrape(client: &TestClient) -> BTreeMap<String, Family> {
    let text = client.get("/metrics").await.body;
    parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

pub(crate) fn value(families: &BTreeMap<String, Family>, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let family = families.values().find(|family| family.samples.iter().any(|sample| sample.name == name))?;
    let fits = |sample: &&crate::parser::MetricSample| {
        sample.name == name
            && labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|label| label == value))
    };
    family.samples.iter().find(fits).map(|sample| sample.value)
}

pub(crate) async fn load(harness: &Harness, name: &str) {
    let path = harness.adapter(name, name);
    let body = json!({ "lora_name": name, "lora_path": path });
    let answer = harness.client.post("/v1/load_lora_adapter", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

async fn unload(harness: &Harness, name: &str) {
    let answer = harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": name })).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

/// Collects the metrics with a series above zero.
fn note(families: &BTreeMap<String, Family>, seen: &mut BTreeSet<&'static str>) {
    for metric in TABLE {
        let Some(family) = families.get(metric.name) else { continue };
        let counts =
            |name: &str| !matches!(metric.kind, MetricKind::Histogram(_)) || name.ends_with("_count");
        if family.samples.iter().any(|sample| counts(&sample.name) && sample.value > 0.0) {
            seen.insert(metric.name);
        }
    }
}

/// Service whose first trainer makes a step and ends on request, and whose second one fails.
fn start_trainers(socket: &Path) -> Arc<Notify> {
    let (listener, death) = (UnixListener::bind(socket).unwrap(), Arc::new(Notify::new()));
    let told = Arc::clone(&death);
    tokio::spawn(async move {
        for is_first in [true, false] {
            let (connection, _) = listener.accept().await.unwrap();
            let mut connection = BufReader::new(connection);
            connection.read_line(&mut String::new()).await.unwrap();
            let lines: &[Value] = match is_first {
                true => &[
                    json!({ "event": "plan", "examples": 1, "steps": 2, "kind": "text" }),
                    json!({ "event": "step", "step": 1, "steps": 2, "loss": 0.5, "tokens": 9 }),
                ],
                false => &[json!({ "event": "failed", "message": "as a test wants it", "exit": "failed" })],
            };
            for line in lines {
                connection.write_all(format!("{line}\n").as_bytes()).await.unwrap();
            }
            if is_first {
                told.notified().await;
            }
        }
    });
    death
}

async fn train(harness: &Harness, death: &Notify, seen: &mut BTreeSet<&'static str>) {
    let form = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n--x\r\n\
                Content-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n--x--\r\n";
    let answer = harness.client.send("POST", "/v1/files", "multipart/form-data; boundary=x", form).await;
    let file: Value = serde_json::from_str(&answer.body).unwrap();
    let order = json!({ "model": "base", "training_file": file["id"] });
    assert_eq!(harness.client.post("/v1/fine_tuning/jobs", &order).await.status, 200);
    let at = async |name: &str, labels: &[(&str, &str)]| value(&scrape(&harness.client).await, name, labels);
    eventually_async("it makes a step", async || {
        at("holobiont_trained_tokens_total", &[]).await == Some(9.0)
    })
    .await;
    note(&scrape(&harness.client).await, seen);
    death.notify_one();
    eventually_async("it fails", async || {
        at("holobiont_training_jobs_ended_total", &[("outcome", "failed")]).await == Some(1.0)
    })
    .await;
}

/// A batch that ends, and one whose line stops for an online request.
async fn batches(seen: &mut BTreeSet<&'static str>) {
    let harness = Harness::start(as_told()).await;
    let client = &harness.client;
    let create = async |max_tokens| {
        let line =
            json!({ "custom_id": "a", "method": "POST", "url": TEXT, "body": ask("base", max_tokens) });
        let form = format!(
            "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\n\
             Content-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\r\n{line}\r\n--x--\r\n"
        );
        let answer = client.send("POST", "/v1/files", "multipart/form-data; boundary=x", form).await;
        let file: Value = serde_json::from_str(&answer.body).unwrap();
        let order = json!({ "input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h" });
        assert_eq!(client.post("/v1/batches", &order).await.status, 200);
    };
    let has = async |name: &str| {
        eventually_async(name, async || value(&scrape(client).await, name, &[]) > Some(0.0)).await;
    };
    create(8).await;
    eventually_async("it ends", async || {
        let outcome = [("outcome", "completed")];
        value(&scrape(client).await, "holobiont_batches_ended_total", &outcome) == Some(1.0)
    })
    .await;
    create(HANG).await;
    has("holobiont_batch_lines_running").await;
    note(&scrape(client).await, seen);
    assert_eq!(client.post(TEXT, &ask("base", 8)).await.status, 200);
    has("holobiont_batch_lines_preempted_total").await;
    note(&scrape(client).await, seen);
}

/// Fetches by URI with each outcome.
async fn fetches(seen: &mut BTreeSet<&'static str>) {
    let harness = Harness::start_with(as_told(), |config| {
        let prefix = format!("file://{}", config.adapter_root.display());
        config.remote.allowed = AllowList::parse(&[prefix]).unwrap();
    })
    .await;
    let path = harness.adapter("a", "weights").canonicalize().unwrap();
    let missing = path.with_file_name("missing");
    for (path, status) in [(&*path, 200), (&*missing, 404), (&*missing, 404), (Path::new("/etc/x"), 403)] {
        let answer = harness.client.post(TEXT, &ask(&format!("file://{}", path.display()), 8)).await;
        assert_eq!(answer.status, status, "{}", answer.body);
    }
    let families = scrape(&harness.client).await;
    for (outcome, count) in [("fetched", 1.0), ("failed", 1.0), ("remembered", 1.0), ("refused", 1.0)] {
        let labels = [("scheme", "file"), ("outcome", outcome)];
        assert_eq!(value(&families, "holobiont_uri_fetches_total", &labels), Some(count), "{outcome}");
    }
    let bytes = value(&families, "holobiont_uri_fetched_bytes_total", &[("scheme", "file")]);
    assert_eq!(bytes, Some(9.0), "the configuration and the weights");
    note(&families, seen);
}

/// A base that sleeps until a request wakes it.
async fn sleeps(seen: &mut BTreeSet<&'static str>) {
    let mut harness = Harness::start_with(as_told(), |config| {
        config.bases.supervisor = Some(Supervisor::new(drop));
    })
    .await;
    // Split clients keep a base awake.
    let alone = FakeModelIdentity { sessions: 0, ..FakeModelIdentity::default() };
    harness.replace_executor(as_told(), alone).await;
    let client = harness.client.clone();
    assert_eq!(client.post("/v1/bases/base/sleep", &json!({})).await.status, 200);
    harness.kill_executor().await;
    note(&scrape(&client).await, seen);
    let request = tokio::spawn(async move { client.post(TEXT, &ask("base", 8)).await.status });
    harness.restart_executor(as_told()).await;
    assert_eq!(request.await.unwrap(), 200);
    note(&scrape(&harness.client).await, seen);
}

#[tokio::test]
async fn every_metric_is_written_when_what_it_counts_happens() {
    let place = tempfile::tempdir().unwrap();
    let death = start_trainers(&place.path().join("trainers"));
    let mut harness = Harness::start_with(as_told(), |config| {
        config.telemetry.expected_workers = vec![2];
        config.training.trainer_socket = Some(place.path().join("trainers"));
        let few = format!(r#"{{name="few",adapters=["a{MAX_RESIDENT}"],requests_per_min=1}}"#);
        config.classes =
            [r#"{name="default",ttft_ms=60000}"#, &few].map(|class| class.parse().unwrap()).into();
    })
    .await;
    let mut seen = BTreeSet::new();
    batches(&mut seen).await;
    fetches(&mut seen).await;
    sleeps(&mut seen).await;
    train(&harness, &death, &mut seen).await;
    for number in 0..=MAX_RESIDENT {
        load(&harness, &format!("a{number}")).await;
    }
    let pin = json!({ "lora_name": format!("a{MAX_RESIDENT}"), "pinned": true });
    assert_eq!(harness.client.post("/v1/pin_lora_adapter", &pin).await.status, 200);
    let adapter = format!("a{MAX_RESIDENT}");
    for model in ["base", adapter.as_str()] {
        assert_eq!(harness.client.post(TEXT, &ask(model, 8)).await.status, 200);
    }
    assert_eq!(harness.client.post(TEXT, &ask("base", REFUSE)).await.status, 429);
    assert_eq!(harness.client.post(TEXT, &ask(&adapter, 8)).await.status, 429, "one a minute");
    let hang = |max_tokens| {
        let client = harness.client.clone();
        tokio::spawn(async move { client.post(TEXT, &ask("base", max_tokens)).await })
    };
    let (hanging, waiting) = (hang(HANG), hang(WAIT));
    eventually("they run", || harness.executor().generates().len() == 5).await;
    eventually_async("the executor was asked", async || {
        value(&scrape(&harness.client).await, "holobiont_adapter_bytes", &[]) > Some(0.0)
    })
    .await;
    note(&scrape(&harness.client).await, &mut seen);
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!([hanging.await.unwrap().status, waiting.await.unwrap().status], [200, 200]);
    eventually_async("the restart was seen", async || {
        value(&scrape(&harness.client).await, "holobiont_executor_restarts_total", &[]) == Some(1.0)
    })
    .await;
    note(&scrape(&harness.client).await, &mut seen);
    // Metrics of shared servers are observed in tests/tests/suite/shared_registry.rs.
    let is_shared =
        |name: &str| name.starts_with("holobiont_store_") || name.starts_with("holobiont_registry_");
    let names = TABLE.iter().map(|metric| metric.name);
    let missing: Vec<&str> = names.filter(|name| !seen.contains(name) && !is_shared(name)).collect();
    assert!(missing.is_empty(), "never written: {missing:?}");
}

#[tokio::test]
async fn the_tokens_that_are_counted_are_those_that_callers_are_told() {
    let harness = Harness::start(as_told()).await;
    let mut told = [0, 0, 0];
    let mut add = |usage: &Value| {
        told[0] += usage["prompt_tokens"].as_u64().unwrap();
        told[1] += usage["completion_tokens"].as_u64().unwrap();
        told[2] += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    };
    for choices in [1, 3] {
        let mut body = ask("base", 8);
        body["n"] = json!(choices);
        add(&harness.client.post(TEXT, &body).await.json()["usage"]);
    }
    let mut body = ask("base", HANG);
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": true });
    let mut exchange = harness.client.open_post(TEXT, &body).await;
    // The client reads two tokens of this request and disconnects.
    exchange.read_until("\"completion_tokens\":2").await;
    drop(exchange);
    add(&json!({
        "prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": { "cached_tokens": 0 },
    }));
    eventually_async("the caller is gone", async || {
        let families = scrape(&harness.client).await;
        value(&families, "holobiont_choices_finished_total", &[("reason", "cancelled")]) == Some(1.0)
    })
    .await;
    let families = scrape(&harness.client).await;
    for (name, told) in ["prompt", "generated", "cached"].iter().zip(told) {
        #[expect(clippy::cast_precision_loss, reason = "a handful of tokens")]
        let told = Some(told as f64);
        assert_eq!(value(&families, &format!("holobiont_{name}_tokens_total"), &[]), told, "{name}");
        let by_adapter = format!("holobiont_adapter_{name}_tokens_total");
        assert_eq!(value(&families, &by_adapter, &[("adapter", "base")]), told, "{name}");
    }
}

#[tokio::test]
async fn every_choice_is_counted_once_by_how_it_ended() {
    let harness = Harness::start(as_told()).await;
    let mut body = ask("base", 8);
    body["n"] = json!(3);
    harness.client.post(TEXT, &body).await;
    harness.client.post(TEXT, &ask("base", 2)).await;
    harness.client.post(TEXT, &ask("base", REFUSE)).await;
    let families = scrape(&harness.client).await;
    let count = |reason| value(&families, "holobiont_choices_finished_total", &[("reason", reason)]);
    assert_eq!(
        ["stop", "length", "error", "cancelled"].map(count),
        [Some(3.0), Some(1.0), Some(1.0), Some(0.0)]
    );
    assert_eq!(value(&families, "holobiont_errors_total", &[("code", "queue_full")]), Some(1.0));
    assert_eq!(value(&families, "holobiont_refusals_total", &[("reason", "queue_full")]), Some(1.0));
}

#[tokio::test]
async fn answers_are_counted_by_route_and_status_also_where_there_is_no_route_and_no_caller() {
    let harness = Harness::start(as_told()).await;
    harness.client.get("/nowhere").await;
    harness.client.get("/v1/models/nobody").await;
    // This client disconnects before the first token.
    let mut body = ask("base", HANG);
    body["min_tokens"] = json!(8);
    let exchange = harness.client.open_post(TEXT, &body).await;
    eventually("it runs", || harness.executor().generates().len() == 1).await;
    drop(exchange);
    eventually_async("the caller is gone", async || {
        let families = scrape(&harness.client).await;
        let count = |route, status| {
            value(&families, "holobiont_http_requests_total", &[("route", route), ("status", status)])
        };
        [count("none", "404"), count("/v1/models/{*id}", "404"), count(TEXT, "499")] == [Some(1.0); 3]
    })
    .await;
    let families = scrape(&harness.client).await;
    assert_eq!(value(&families, "holobiont_refusals_total", &[]), None, "nobody was turned away");
}

#[tokio::test]
async fn adapters_beyond_the_cap_share_a_label_and_labels_of_unloaded_ones_go_away() {
    let harness = Harness::start_with(as_told(), |config| config.telemetry.max_adapter_labels = 2).await;
    for name in ["a", "b", "c"] {
        load(&harness, name).await;
        harness.client.post(TEXT, &ask(name, 8)).await;
    }
    let labels = async || -> Vec<String> {
        let families = scrape(&harness.client).await;
        let samples = &families["holobiont_adapter_generated_tokens_total"].samples;
        samples.iter().map(|sample| sample.labels["adapter"].clone()).collect()
    };
    assert_eq!(labels().await, ["a", "b", "base", "other"]);
    assert_eq!(scrape(&harness.client).await["holobiont_adapter_info"].samples.len(), 2);
    // The third adapter's stats are known: it must not take the freed label.
    eventually_async("all is reported", async || {
        let families = scrape(&harness.client).await;
        let of_device = |adapter| [("adapter", adapter), ("place", "device")];
        let rows = |adapter| value(&families, "holobiont_adapter_rank_rows_total", &of_device(adapter));
        ["a", "b", "other"].map(rows) == [Some(50.0); 3]
    })
    .await;
    unload(&harness, "a").await;
    eventually_async("its label is gone", async || labels().await == ["b", "base", "other"]).await;
    let families = scrape(&harness.client).await;
    let shown: Vec<&str> = families["holobiont_adapter_info"]
        .samples
        .iter()
        .map(|sample| sample.labels["adapter"].as_str())
        .collect();
    assert_eq!(shown, ["b", "c"]);
}

#[tokio::test]
async fn vllms_names_show_the_same_values_and_only_when_asked_for() {
    let plain = Harness::start(as_told()).await;
    let families = scrape(&plain.client).await;
    let foreign: Vec<&String> = families.keys().filter(|name| name.starts_with("vllm:")).collect();
    assert_eq!(foreign, ["vllm:lora_requests_info"]);
    let harness =
        Harness::start_with(as_told(), |config| config.telemetry.names = MetricNames::WithVllm).await;
    harness.client.post(TEXT, &ask("base", 8)).await;
    let families = scrape(&harness.client).await;
    for alias in ALIASES {
        let (own, other) = (&families[alias.of.metric().name], &families[alias.name]);
        assert_eq!(own.kind, other.kind, "{}", alias.name);
        let values = |family: &Family| family.samples.iter().map(|sample| sample.value).collect::<Vec<_>>();
        assert_eq!(values(own), values(other), "{}", alias.name);
        assert!(other.samples.iter().all(|sample| sample.labels["model_name"] == "base"), "{}", alias.name);
    }
}

#[tokio::test]
async fn lora_requests_info_names_adapters_in_use_and_its_value_is_now() {
    let harness = Harness::start(as_told()).await;
    load(&harness, "pirate").await;
    let info = async || scrape(&harness.client).await.remove("vllm:lora_requests_info").unwrap();
    eventually_async("the executor was asked", async || {
        info().await.samples[0].labels["running_lora_adapters"] == "pirate"
    })
    .await;
    let info = info().await;
    let [sample] = &info.samples[..] else { panic!("one series, not {info:?}") };
    assert_eq!(
        (sample.labels["max_lora"].as_str(), sample.labels["waiting_lora_adapters"].as_str()),
        ("64", "")
    );
    assert_eq!((info.kind.as_str(), sample.labels.len()), ("gauge", 3));
    #[expect(clippy::cast_precision_loss, reason = "seconds")]
    let age = gateway::seconds_since_1970() as f64 - sample.value;
    assert!((0.0..60.0).contains(&age), "{age}");
}

#[tokio::test]
async fn a_lost_executor_is_down_and_runs_nothing() {
    let mut harness = Harness::start(as_told()).await;
    harness.executor.take().unwrap().kill().await;
    eventually_async("it shows", async || {
        let families = scrape(&harness.client).await;
        ["holobiont_executor_up", "holobiont_requests_running", "holobiont_kv_usage_ratio"]
            .iter()
            .all(|name| value(&families, name, &[]) == Some(0.0))
    })
    .await;
}
