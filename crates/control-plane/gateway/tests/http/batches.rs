//! Batches: answers as online, faults by name, limits, and every end of a batch.

use std::{fs, sync::Arc, time::Duration};

use gateway::keys::{Keys, line_of};
use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, Connection as _, sqlite::SqliteConnectOptions};

use crate::{
    client::{Response, TestClient},
    fake_executor::{Reply, ReplyScript, reply_with, spoken},
    harness::{Harness, eventually, eventually_async, key_file},
    text::tokens,
};

const BATCHES: &str = "/v1/batches";
const CHAT: &str = "/v1/chat/completions";
/// A line whose prompt has this word is answered without an end.
const HANG: &str = "forever";

fn line(custom_id: &str, url: &str, body: &Value) -> String {
    format!("{}\n", json!({ "custom_id": custom_id, "method": "POST", "url": url, "body": body }))
}

fn chat(content: &str) -> Value {
    json!({ "model": "base", "messages": [{ "role": "user", "content": content }], "max_tokens": 4 })
}

/// Answers every prompt, except those with [`HANG`].
fn patient() -> Reply {
    let (answer, hang) = (reply_with("fine"), tokens(HANG));
    Arc::new(move |generate| match generate.prompt.windows(hang.len()).any(|part| part == hang) {
        true => ReplyScript { outputs: spoken("f"), pause: Duration::ZERO },
        false => answer(generate),
    })
}

async fn upload(client: &TestClient, purpose: &str, text: &str) -> Value {
    let form = format!(
        "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n{purpose}\r\n--x\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\r\n{text}\r\n--x--\r\n"
    );
    let sent = client.send("POST", "/v1/files", "multipart/form-data; boundary=x", form).await;
    assert_eq!(sent.status, 200, "{}", sent.body);
    sent.json()["id"].clone()
}

async fn create(client: &TestClient, file: &Value, endpoint: &str) -> Response {
    let order = json!({ "input_file_id": file, "endpoint": endpoint, "completion_window": "24h" });
    client.post(BATCHES, &order).await
}

/// Creates a batch of `lines`; returns its path.
async fn begin(client: &TestClient, lines: &str, endpoint: &str) -> String {
    let file = upload(client, "batch", lines).await;
    let created = create(client, &file, endpoint).await;
    assert_eq!((created.status, &created.json()["status"]), (200, &json!("validating")), "{}", created.body);
    format!("{BATCHES}/{}", created.json()["id"].as_str().unwrap())
}

async fn ended(client: &TestClient, batch: &str) -> Value {
    let is_over = |batch: &Value| {
        ["completed", "failed", "expired", "cancelled"].map(Value::from).contains(&batch["status"])
    };
    eventually_async("the batch ends", async || is_over(&client.get(batch).await.json())).await;
    client.get(batch).await.json()
}

async fn finished(client: &TestClient, batch: &str, lines: u64) {
    let completed = async || client.get(batch).await.json()["request_counts"]["completed"] == lines;
    eventually_async("lines are completed", completed).await;
}

/// Results of a file by custom id, each of which must be there once.
async fn results(client: &TestClient, file: &Value) -> Vec<(String, Value)> {
    let Some(file) = file.as_str() else { return Vec::new() };
    let content = client.get(&format!("/v1/files/{file}/content")).await.body;
    let read = |line: &str| {
        let result: Value = serde_json::from_str(line).unwrap();
        (result["custom_id"].as_str().unwrap().to_owned(), result)
    };
    let mut results: Vec<_> = content.lines().map(read).collect();
    results.sort_by(|one, other| one.0.cmp(&other.0));
    assert!(results.windows(2).all(|pair| pair[0].0 != pair[1].0), "{content}");
    results
}

/// Removes the parts of an answer that differ between equal requests.
fn comparable(mut body: Value) -> Value {
    for field in ["id", "created", "created_at", "completed_at"] {
        body.as_object_mut().unwrap().remove(field);
    }
    if let Some(items) = body.get_mut("output").and_then(Value::as_array_mut) {
        items.iter_mut().for_each(|item| drop(item.as_object_mut().unwrap().remove("id")));
    }
    body
}

#[tokio::test]
async fn each_line_has_the_answer_of_an_online_request_or_its_error() {
    let harness = Harness::start(reply_with("fine")).await;
    let client = &harness.client;
    let seeded = json!({ "seed": 7, "temperature": 0.5, "logprobs": true, "top_logprobs": 1 });
    let mut scored = chat("b");
    scored.as_object_mut().unwrap().extend(seeded.as_object().unwrap().clone());
    let mut hot = chat("c");
    hot["temperature"] = json!("hot");
    let mut unknown = chat("d");
    unknown["model"] = json!("nobody");
    let text = |more: Value| {
        let mut body = json!({ "model": "base", "prompt": "x", "max_tokens": 3, "logprobs": 1, "seed": 3 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let embeddings = json!({ "model": "base", "input": ["one", "two"] });
    let response = json!({ "model": "base", "input": "hello", "max_output_tokens": 4, "seed": 1 });
    let asked = [
        (CHAT, vec![chat("a"), scored, hot, unknown]),
        (
            "/v1/completions",
            vec![text(json!({})), text(json!({ "n": 2, "echo": true })), text(json!({ "x": 1 }))],
        ),
        ("/v1/embeddings", vec![embeddings, json!({ "model": "base" })]),
        ("/v1/responses", vec![response, json!({ "model": "base", "input": 7 })]),
    ];
    let mut batches = Vec::new();
    for (endpoint, bodies) in &asked {
        let lines = bodies.iter().enumerate().map(|(id, body)| line(&id.to_string(), endpoint, body));
        let batch = begin(client, &lines.collect::<String>(), endpoint).await;
        batches.push(ended(client, &batch).await);
    }
    // Lines wait for a while after online requests.
    for ((endpoint, bodies), batch) in asked.iter().zip(batches) {
        assert_eq!(batch["status"], "completed", "{batch}");
        let mut all = results(client, &batch["output_file_id"]).await;
        let failed = results(client, &batch["error_file_id"]).await;
        let counts = json!({ "total": bodies.len(), "completed": all.len(), "failed": failed.len() });
        assert_eq!(batch["request_counts"], counts);
        all.extend(failed);
        let mut tokens = 0;
        for (id, result) in all {
            let online = client.post(endpoint, &bodies[id.parse::<usize>().unwrap()]).await;
            assert_eq!(result["response"]["status_code"], online.status, "{result}");
            assert_eq!(result["response"]["request_id"], result["id"]);
            assert_eq!(result["error"], Value::Null);
            let (body, online) = (result["response"]["body"].clone(), online.json());
            tokens += body["usage"]["total_tokens"].as_u64().unwrap_or(0);
            assert_eq!(comparable(body), comparable(online));
        }
        assert_eq!(batch["usage"]["total_tokens"], tokens, "{batch}");
    }
}

#[tokio::test]
async fn a_line_that_asks_for_a_stream_fails_alone() {
    let harness = Harness::start(reply_with("fine")).await;
    let mut streamed = chat("a");
    streamed["stream"] = json!(true);
    let lines = line("a", CHAT, &streamed) + &line("b", CHAT, &chat("b"));
    let batch = begin(&harness.client, &lines, CHAT).await;
    let batch = ended(&harness.client, &batch).await;
    assert_eq!(batch["request_counts"], json!({ "total": 2, "completed": 1, "failed": 1 }));
    let failed = &results(&harness.client, &batch["error_file_id"]).await[0].1["response"];
    assert_eq!((&failed["status_code"], &failed["body"]["error"]["param"]), (&json!(400), &json!("stream")));
}

#[tokio::test]
async fn a_faulty_file_fails_its_batch_and_nothing_is_computed() {
    let harness = Harness::start(reply_with("fine")).await;
    let lines = [line("a", CHAT, &chat("a")), "no json\n".to_owned(), line("a", CHAT, &chat("b"))].concat();
    let batch = begin(&harness.client, &lines, CHAT).await;
    let batch = ended(&harness.client, &batch).await;
    assert_eq!(batch["status"], "failed");
    assert!(batch["failed_at"].is_u64() && batch["in_progress_at"].is_null(), "{batch}");
    let told = |fault: &Value| (fault["line"].as_u64(), fault["code"].as_str().unwrap().to_owned());
    let faults: Vec<_> = batch["errors"]["data"].as_array().unwrap().iter().map(told).collect();
    let expected = [(2, "invalid_json_line"), (3, "duplicate_custom_id")];
    assert_eq!(faults, expected.map(|(line, code)| (Some(line), code.to_owned())));
    assert!(harness.executor().generates().is_empty());
    let left = fs::read_dir(harness.directory.path().join("state/batches")).unwrap();
    assert_eq!(left.count(), 0, "an ended batch has no directory");
}

#[tokio::test]
async fn batches_are_their_tenants_own_and_limited() {
    let keys = key_file(&[("user", "alice", "hb-a"), ("user", "bob", "hb-b")]);
    let harness = Harness::start_with(patient(), |config| {
        config.keys = Keys::read(keys.path(), None).unwrap();
        config.batches.tenant_batches = 1;
    })
    .await;
    let [alice, bob] = ["hb-a", "hb-b"].map(|key| harness.client.with_key(key));
    let file = upload(&alice, "batch", &line("a", CHAT, &chat(HANG))).await;
    let refused = create(&bob, &file, CHAT).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (404, &json!("input_file_id")));
    let other = upload(&alice, "fine-tune", "{}").await;
    let refused = create(&alice, &other, CHAT).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("input_file_id")));
    let refused = create(&alice, &file, "/v1/moderations").await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("endpoint")));
    let created = create(&alice, &file, CHAT).await.json();
    let path = format!("{BATCHES}/{}", created["id"].as_str().unwrap());
    let refused = create(&alice, &file, CHAT).await;
    assert_eq!((refused.status, &*refused.code()), (429, "batch_quota_exceeded"));
    assert_eq!(bob.get(&path).await.status, 404);
    assert_eq!(bob.post(&format!("{path}/cancel"), &json!({})).await.status, 404);
    assert_eq!(bob.get(BATCHES).await.json()["data"], json!([]));
    assert_eq!(alice.get(BATCHES).await.json()["data"][0]["id"], created["id"]);
}

#[tokio::test]
async fn the_lines_of_a_tenant_without_a_key_wait_for_one() {
    let keys = key_file(&[("user", "alice", "hb-a")]);
    let lines = fs::read_to_string(keys.path()).unwrap();
    let mut harness =
        Harness::start_with(patient(), |config| config.keys = Keys::read(keys.path(), None).unwrap()).await;
    let alice = harness.client.with_key("hb-a");
    // Without an executor, no line runs before the key is removed.
    harness.kill_executor().await;
    let batch = begin(&alice, &line("a", CHAT, &chat("a")), CHAT).await;
    fs::write(keys.path(), line_of("user", "bob", "hb-b")).unwrap();
    let bob = harness.client.with_key("hb-b");
    eventually_async("the keys are read", async || bob.get(BATCHES).await.status == 200).await;
    harness.restart_executor(patient()).await;
    harness.wait_ready().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(harness.executor().generates().is_empty());
    fs::write(keys.path(), lines).unwrap();
    eventually_async("the keys are read", async || alice.get(BATCHES).await.status == 200).await;
    assert_eq!(ended(&alice, &batch).await["status"], "completed");
}

#[tokio::test]
async fn a_cancelled_batch_keeps_what_is_complete() {
    let harness = Harness::start(patient()).await;
    let client = &harness.client;
    let lines = line("a", CHAT, &chat("a")) + &line("b", CHAT, &chat(HANG));
    let batch = begin(client, &lines, CHAT).await;
    finished(client, &batch, 1).await;
    let cancel = format!("{batch}/cancel");
    let cancelling = client.post(&cancel, &json!({})).await;
    assert_eq!((cancelling.status, &cancelling.json()["status"]), (200, &json!("cancelling")));
    let batch = ended(client, &batch).await;
    assert_eq!(batch["status"], "cancelled");
    assert!(batch["cancelled_at"].as_u64() >= batch["cancelling_at"].as_u64());
    let kept = results(client, &batch["output_file_id"]).await;
    assert_eq!(kept.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(batch["error_file_id"], Value::Null);
    eventually("the running line is cancelled", || harness.executor().cancels().len() == 1).await;
    let refused = client.post(&cancel, &json!({})).await;
    assert_eq!((refused.status, &*refused.code()), (400, "invalid_batch_state"));
}

#[tokio::test]
async fn the_rest_of_a_batch_expires_at_the_end_of_its_window() {
    let window = Duration::from_secs(3);
    let harness = Harness::start_with(patient(), |config| config.batches.window = window).await;
    let client = &harness.client;
    let lines = line("a", CHAT, &chat("a")) + &line("b", CHAT, &chat(HANG)) + &line("c", CHAT, &chat(HANG));
    let batch = begin(client, &lines, CHAT).await;
    let batch = ended(client, &batch).await;
    assert_eq!(batch["status"], "expired", "{batch}");
    assert_eq!(batch["request_counts"], json!({ "total": 3, "completed": 1, "failed": 2 }));
    for (_, result) in results(client, &batch["error_file_id"]).await {
        assert_eq!((&result["response"], &result["error"]["code"]), (&Value::Null, &json!("batch_expired")));
    }
    assert_eq!(results(client, &batch["output_file_id"]).await.len(), 1);
}

#[tokio::test]
async fn online_requests_stop_all_lines() {
    let harness = Harness::start(patient()).await;
    let client = &harness.client;
    let lines: String = (0..10).map(|id| line(&id.to_string(), CHAT, &chat(HANG))).collect();
    let batch = begin(client, &lines, CHAT).await;
    eventually("the lines run", || harness.executor().generates().len() == 10).await;
    assert_eq!(client.post(CHAT, &chat("online")).await.status, 200);
    eventually("lines stop", || harness.executor().cancels().len() == 10).await;
    let metrics = client.get("/metrics").await.body;
    for expected in [
        "holobiont_batch_lines_preempted_total 10",
        "holobiont_batch_lines_running 0",
        "holobiont_batches{state=\"in_progress\"} 1",
        "holobiont_time_to_first_token_seconds_count 1",
    ] {
        assert!(metrics.contains(expected), "{expected}: {metrics}");
    }
    client.post(&format!("{batch}/cancel"), &json!({})).await;
    assert_eq!(ended(client, &batch).await["status"], "cancelled");
}

#[tokio::test]
async fn a_batch_outlives_its_gateway_and_its_executor_and_repeats_no_finished_line() {
    let mut harness = Harness::start(patient()).await;
    let lines = line("a", CHAT, &chat("first")) + &line("b", CHAT, &chat(HANG));
    let batch = begin(&harness.client, &lines, CHAT).await;
    finished(&harness.client, &batch, 1).await;
    harness.restart_executor(reply_with("late")).await;
    harness.restart_gateway().await;
    let batch = ended(&harness.client, &batch).await;
    assert_eq!((&batch["status"], &batch["request_counts"]["completed"]), (&json!("completed"), &json!(2)));
    let all = results(&harness.client, &batch["output_file_id"]).await;
    let said = |index: usize| {
        all[index].1["response"]["body"]["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    assert_eq!((said(0), said(1)), ("fine".to_owned(), "late".to_owned()));
    assert_eq!(harness.executor().generates().len(), 1, "the first line is not computed again");
}

#[tokio::test]
async fn result_files_are_deleted_at_their_time() {
    let mut harness = Harness::start(patient()).await;
    let file = upload(&harness.client, "batch", &line("a", CHAT, &chat("a"))).await;
    let order = json!({
        "input_file_id": file, "endpoint": CHAT, "completion_window": "24h",
        "output_expires_after": { "anchor": "created_at", "seconds": 3600 },
    });
    let created = harness.client.post(BATCHES, &order).await.json();
    let batch = ended(&harness.client, &format!("{BATCHES}/{}", created["id"].as_str().unwrap())).await;
    let path = format!("/v1/files/{}", batch["output_file_id"].as_str().unwrap());
    let output = harness.client.get(&path).await.json();
    let lifetime = output["expires_at"].as_u64().unwrap() - output["created_at"].as_u64().unwrap();
    assert!((3599..=3600).contains(&lifetime), "{output}");
    let database = harness.directory.path().join("state/registry.sqlite3");
    let mut connection = SqliteConnectOptions::new().filename(database).connect().await.unwrap();
    let hour_later = sqlx::query("UPDATE batches SET outputs_expire_at = outputs_expire_at - 3600");
    assert_eq!(hour_later.execute(&mut connection).await.unwrap().rows_affected(), 1);
    connection.close().await.unwrap();
    harness.restart_gateway().await;
    let is_gone = async || harness.client.get(&path).await.status == 404;
    eventually_async("the results are deleted", is_gone).await;
    assert_eq!(
        harness.client.get(&format!("{BATCHES}/{}", created["id"].as_str().unwrap())).await.status,
        200
    );
}
