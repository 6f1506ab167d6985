//! Spans as a collector receives them.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::{
    fake_executor::reply_with,
    harness::{Harness, WATCHDOG},
};

async fn receive(mut stream: TcpStream) -> (String, Value) {
    let mut bytes = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let count = stream.read(&mut chunk).await.unwrap();
        bytes.extend_from_slice(&chunk[..count]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        if body.len() == length.parse::<usize>().unwrap() {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
            return (head.to_owned(), serde_json::from_str(body).unwrap());
        }
    }
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let attributes = span["attributes"].as_array().unwrap();
    &attributes
        .iter()
        .find(|attribute| attribute["key"] == key)
        .unwrap_or_else(|| panic!("no {key} in {span}"))["value"]
}

async fn traced() -> (TcpListener, Harness) {
    let collector = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let harness =
        Harness::start_with(reply_with("abc"), |config| config.telemetry.otlp_endpoint = Some(endpoint))
            .await;
    (collector, harness)
}

async fn collect(collector: &TcpListener) -> (String, Value) {
    let (stream, _) = timeout(WATCHDOG, collector.accept()).await.expect("a message").unwrap();
    timeout(WATCHDOG, receive(stream)).await.expect("all of it")
}

#[tokio::test]
async fn a_request_is_a_span_that_follows_its_callers() {
    let (collector, harness) = traced().await;
    let client =
        harness.client.with_header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    client.post("/v1/completions", &json!({ "model": "base", "prompt": "ab" })).await;
    let (head, body) = collect(&collector).await;
    assert!(head.starts_with("POST /v1/traces HTTP/1.1"), "{head}");
    assert!(head.contains("content-type: application/json"), "{head}");
    let resource = &body["resourceSpans"][0]["resource"];
    assert_eq!(attribute(resource, "service.name")["stringValue"], "holobiont-gateway");
    assert_eq!(attribute(resource, "service.version")["stringValue"], env!("CARGO_PKG_VERSION"));
    let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(span["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(span["parentSpanId"], "00f067aa0ba902b7");
    assert_eq!((span["name"].as_str(), &span["kind"]), (Some("POST /v1/completions"), &json!(2)));
    assert_eq!(attribute(span, "gen_ai.request.model")["stringValue"], "base");
    assert_eq!(attribute(span, "gen_ai.usage.input_tokens")["intValue"], "3");
    assert_eq!(attribute(span, "gen_ai.usage.output_tokens")["intValue"], "4");
    assert_eq!(attribute(span, "http.response.status_code")["intValue"], "200");
    let reasons = &attribute(span, "gen_ai.response.finish_reasons")["arrayValue"]["values"];
    assert_eq!(reasons, &json!([{ "stringValue": "stop" }]));
    assert!(attribute(span, "gen_ai.server.time_to_first_token")["doubleValue"].is_f64());
    let nanoseconds = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
    assert!(nanoseconds("startTimeUnixNano") < nanoseconds("endTimeUnixNano"));
}

#[tokio::test]
async fn spans_that_wait_are_sent_before_the_gateway_ends() {
    let (collector, mut harness) = traced().await;
    harness.client.post("/v1/completions", &json!({ "model": "base", "prompt": "ab" })).await;
    let gateway = harness.gateway.take().unwrap();
    let (ended, (_, body)) = tokio::join!(gateway.shut_down(), collect(&collector));
    ended.unwrap();
    let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(span["name"], "POST /v1/completions");
    assert_eq!(span.get("parentSpanId").filter(|parent| *parent != ""), None, "nobody's child");
}

/// The system accepts the collector's messages, but no process reads them.
#[tokio::test]
async fn a_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end() {
    let (_collector, mut harness) = traced().await;
    let ask = json!({ "model": "base", "prompt": "ab" });
    for _ in 0..3 {
        let answer = harness.client.post("/v1/completions", &ask);
        timeout(WATCHDOG, answer).await.expect("an answer");
    }
    let gateway = harness.gateway.take().unwrap();
    timeout(WATCHDOG, gateway.shut_down()).await.expect("an end").unwrap();
}
