//! Training files: valid and invalid forms, and slow senders.

use std::time::Duration;

use gateway::keys::Keys;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::timeout,
};

use crate::{
    client::{Response, TestClient},
    fake_executor::reply_with,
    harness::{Harness, WATCHDOG, key_file},
};

const FILES: &str = "/v1/files";
const FORM: &str = "multipart/form-data; boundary=x";
const PURPOSE: &str = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n";
const FILE: &str = "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"data.jsonl\"\r\n\r\n{\"text\":\"a\"}\r\n";
const END: &str = "--x--\r\n";

async fn send(client: &TestClient, form: &[&str]) -> Response {
    client.send("POST", FILES, FORM, &form.concat()).await
}

/// Sends only `begin` of a form that announces more.
async fn hang(client: &TestClient, key: &str, path: &str, begin: &str) -> BufReader<TcpStream> {
    let mut stream = client.connect().await;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: {FORM}\r\n\
         content-length: 100000000\r\n\r\n{begin}"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

async fn answer(stream: &mut BufReader<TcpStream>) -> String {
    let mut answer = Vec::new();
    // Data in flight at the close may turn the end into an error.
    let _ = timeout(WATCHDOG, stream.read_to_end(&mut answer)).await.expect("it is closed");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_file_is_taken_in_with_its_purpose_before_or_behind_it() {
    let harness = Harness::start(reply_with("x")).await;
    for form in [[PURPOSE, FILE, END], [FILE, PURPOSE, END]] {
        let sent = send(&harness.client, &form).await;
        assert_eq!((sent.status, &sent.json()["bytes"]), (200, &json!(12)), "{}", sent.body);
        let id = sent.json()["id"].as_str().unwrap().to_owned();
        assert_eq!(harness.client.get(&format!("{FILES}/{id}/content")).await.body, "{\"text\":\"a\"}");
    }
}

#[tokio::test]
async fn a_form_that_says_something_twice_or_is_none_is_refused_by_name() {
    let harness = Harness::start(reply_with("x")).await;
    for (form, named) in
        [(&[FILE, FILE, PURPOSE, END][..], "file"), (&[PURPOSE, PURPOSE, FILE, END], "purpose")]
    {
        let refused = send(&harness.client, form).await;
        assert_eq!((refused.status, &*refused.code()), (400, "invalid_value"), "{}", refused.body);
        assert_eq!(refused.json()["error"]["param"], named);
    }
    let refused = harness.client.send("POST", FILES, "text/plain", "a").await;
    assert_eq!((refused.status, &*refused.code()), (415, "unsupported_media_type"));
    let files = harness.client.get(FILES).await.json();
    assert_eq!(files["data"], json!([]), "nothing is kept");
}

#[tokio::test]
async fn a_body_without_the_head_of_a_part_is_refused_while_it_still_comes() {
    let harness = Harness::start(reply_with("x")).await;
    for path in [FILES, "/v1/upload_lora_adapter"] {
        let mut stream = hang(&harness.client, "", path, &"a".repeat(1 << 20)).await;
        let answer = answer(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("invalid_body"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_file_that_drips_is_cut_off_although_no_pause_is_too_long() {
    let limit = Duration::from_millis(400);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.connections.body_timeout = limit).await;
    let adapter = "--x\r\nContent-Disposition: form-data; name=\"lora_name\"\r\n\r\na\r\n--x\r\n\
        Content-Disposition: form-data; name=\"file\"; filename=\"adapter_model.safetensors\"\r\n\r\n";
    for (path, begin) in [(FILES, FILE.trim_end()), ("/v1/upload_lora_adapter", adapter)] {
        let stream = hang(&harness.client, "", path, begin).await;
        let (mut read, mut write) = tokio::io::split(stream.into_inner());
        let drip = async {
            while write.write_all(b"a").await.is_ok() {
                tokio::time::sleep(limit / 8).await;
            }
            std::future::pending::<()>().await;
        };
        let mut answer = String::new();
        let read = timeout(WATCHDOG, read.read_to_string(&mut answer));
        tokio::select! {
            () = drip => {}
            read = read => assert!(read.is_ok(), "{path}: it is still open"),
        }
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body_timeout"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_tenant_whose_uploads_hang_keeps_nobody_else_from_sending_files() {
    let file = key_file(&[("user", "alice", "hb-a"), ("user", "bob", "hb-b")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let mut hanging = Vec::new();
    for _ in 0..40 {
        hanging.push(hang(&harness.client, "hb-a", FILES, FILE).await);
    }
    let sent = send(&harness.client.with_key("hb-b"), &[PURPOSE, FILE, END]).await;
    assert_eq!(sent.status, 200, "{}", sent.body);
}
