//! The log: one line per finished request, found by its id, without texts or keys.

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use gateway::keys::Keys;
use serde_json::{Value, json};
use shmproto::message::ErrorCode;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

use crate::{
    fake_executor::{fail_after, hang_after, reply_with},
    harness::{Harness, eventually, key_file},
};

const TEXT: &str = "/v1/completions";

/// Log of this thread, which runs the whole gateway of a test.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Log {
    fn start() -> (Self, DefaultGuard) {
        let log = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(log.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Lines of finished requests on generation routes.
    fn finished(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .filter(|line| {
                line["fields"]["message"] == "request finished" && line["fields"]["method"] == "POST"
            })
            .collect()
    }

    async fn one(&self) -> Value {
        eventually("a line", || self.finished().len() == 1).await;
        self.finished().remove(0)
    }
}

#[tokio::test]
async fn a_finished_request_is_one_line_with_its_figures() {
    let (log, _guard) = Log::start();
    let harness = Harness::start(reply_with("abc")).await;
    let client = harness.client.with_header("x-request-id", "my-request");
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let client = client.with_header("traceparent", traceparent);
    client.post(TEXT, &json!({ "model": "base", "prompt": "ab", "stream": true })).await;
    let line = log.one().await;
    let fields = &line["fields"];
    for (field, expected) in [
        ("route", json!(TEXT)),
        ("status", json!(200)),
        ("model", json!("base")),
        ("prompt_tokens", json!(3)),
        ("completion_tokens", json!(4)),
        ("cached_tokens", json!(4)),
        ("finish", json!("stop")),
    ] {
        assert_eq!(fields[field], expected, "{field} of {line}");
    }
    assert!(
        fields["ttft_ms"].as_f64() <= fields["total_ms"].as_f64() && fields["ttft_ms"].is_f64(),
        "{line}"
    );
    let waits = ["queue_ms", "adapter_wait_ms", "kv_wait_ms"].map(|part| fields[part].as_f64());
    assert!(waits.iter().all(Option::is_some), "{line}");
    assert_eq!(
        (line["level"].as_str(), line["span"]["request_id"].as_str()),
        (Some("INFO"), Some("my-request"))
    );
    assert!(line["span"]["traceparent"].as_str().unwrap().starts_with(&traceparent[..36]), "{line}");
}

#[tokio::test]
async fn a_fault_of_the_server_is_an_error_line_under_the_id_its_caller_sees() {
    let (log, _guard) = Log::start();
    let harness = Harness::start(fail_after("ab", ErrorCode::Internal)).await;
    let client = harness.client.with_header("x-request-id", "find-me");
    let response = client.post(TEXT, &json!({ "model": "base", "prompt": "ab", "stream": true })).await;
    assert!(response.body.contains("(request find-me)"), "{}", response.body);
    let line = log.one().await;
    assert_eq!(
        (line["level"].as_str(), line["span"]["request_id"].as_str()),
        (Some("ERROR"), Some("find-me"))
    );
    assert_eq!(
        (line["fields"]["error"].as_str(), line["fields"]["finish"].as_str()),
        (Some("internal_error"), Some("error"))
    );
}

#[tokio::test]
async fn a_caller_who_goes_away_is_a_line_that_says_so() {
    let (log, _guard) = Log::start();
    let harness = Harness::start(hang_after("ab")).await;
    let mut exchange =
        harness.client.open_post(TEXT, &json!({ "model": "base", "prompt": "ab", "stream": true })).await;
    exchange.read_until("\"text\":\"b\"").await;
    drop(exchange);
    let line = log.one().await;
    assert_eq!(
        (line["fields"]["finish"].as_str(), &line["fields"]["completion_tokens"]),
        (Some("cancelled"), &json!(2))
    );
}

#[tokio::test]
async fn neither_prompts_nor_answers_nor_keys_are_logged_at_any_level() {
    let (log, _guard) = Log::start();
    let file = key_file(&[("user", "alice", "hb-secret-key"), ("admin", "ops", "hb-secret-admin")]);
    let harness = Harness::start_with(reply_with("zebra-answer"), |config| {
        config.keys = Keys::read(file.path(), None).unwrap()
    })
    .await;
    let client = harness.client.with_key("hb-secret-key");
    for stream in [true, false] {
        let body =
            json!({ "model": "base", "prompt": "walrus-prompt", "stop": "yak-stop", "stream": stream });
        assert_eq!(client.post(TEXT, &body).await.status, 200);
    }
    client.post(TEXT, &json!({ "model": "base", "prompt": "walrus-prompt", "max_tokens": 100_000 })).await;
    harness.client.with_key("hb-wrong-secret").post(TEXT, &json!({})).await;
    eventually("four lines", || log.finished().len() == 4).await;
    let text = log.text();
    for secret in ["walrus", "zebra", "yak-stop", "secret"] {
        let line = text.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "'{secret}' is in the log");
    }
}
