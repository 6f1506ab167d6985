//! Another model replaces the served one at any moment: text of one model never meets weights of the other.

use std::sync::{Arc, Mutex};

use gateway::{config::GatewayConfig, lifecycle::LoadText, server::Gateway, text::LoadedText};
use model_files::text_hash::TextHash;
use serde_json::json;
use shmproto::message::DeviceKind;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    client::TestClient,
    fake_executor::{FakeExecutor, FakeModelIdentity, reply_with},
    harness::{Harness, WATCHDOG, config, eventually, eventually_async},
    text::{ByteText, TEXT_HASH},
};

const OTHER: FakeModelIdentity =
    FakeModelIdentity { base_hash: [7; 32], text_hash: [8; 32], sessions: 3, device: DeviceKind::Cuda };

/// File at the model's path: its tokenizer, and the number of reads.
#[derive(Default)]
struct ModelFile {
    hash: Mutex<[u8; 32]>,
    reads: Mutex<Vec<[u8; 32]>>,
}

impl ModelFile {
    fn with(hash: [u8; 32]) -> Arc<Self> {
        let shelf = Self::default();
        shelf.put(hash);
        Arc::new(shelf)
    }

    fn put(&self, hash: [u8; 32]) {
        *self.hash.lock().unwrap() = hash;
    }

    fn reads(&self) -> Vec<[u8; 32]> {
        self.reads.lock().unwrap().clone()
    }

    /// Loader of the gateway; the end token identifies the tokenizer.
    fn loader(self: &Arc<Self>) -> LoadText {
        let shelf = Arc::clone(self);
        Arc::new(move |_| {
            let hash = *shelf.hash.lock().unwrap();
            shelf.reads.lock().unwrap().push(hash);
            let text = Arc::new(ByteText::ending_in(&format!("<end {}>", hash[0])));
            Ok(LoadedText { text, hash: TextHash(hash) })
        })
    }
}

async fn end_token(client: &TestClient) -> serde_json::Value {
    client.get("/tokenizer_info").await.json()["eos_token"].take()
}

#[tokio::test]
async fn a_model_renamed_over_the_old_one_is_served_with_its_own_text_once_the_executor_has_read_it() {
    let shelf = ModelFile::with(TEXT_HASH);
    let mut harness = Harness::start_with_text(reply_with("x"), shelf.loader(), |_| {}).await;
    assert_eq!(end_token(&harness.client).await, "<end 2>");
    shelf.put(OTHER.text_hash);
    // The executor still has the old weights, and the gateway the old tokenizer.
    assert_eq!(end_token(&harness.client).await, "<end 2>");
    harness.replace_executor(reply_with("x"), OTHER).await;
    assert_eq!(end_token(&harness.client).await, "<end 8>");
    assert_eq!(shelf.reads(), [TEXT_HASH, OTHER.text_hash]);
    harness.replace_executor(reply_with("x"), OTHER).await;
    assert_eq!(shelf.reads().len(), 2, "what is known to be the same is not read again");
}

#[tokio::test]
async fn the_text_of_a_model_that_the_executor_has_not_read_is_not_served() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let shelf = ModelFile::with(OTHER.text_hash);
    let _executor = FakeExecutor::start(&directory.path().join("socket"), reply_with("x")).await;
    let gateway = Gateway::start(config(&directory), shelf.loader()).await.unwrap();
    let client = TestClient::new(gateway.address);
    let says = |body: &str| body.contains("restart the base-executor, or restore the files");
    eventually_async("it says why it does not serve", async || says(&client.get("/ready").await.body)).await;
    let refused = client.post("/v1/completions", &json!({ "model": "base", "prompt": "a" })).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "executor_unavailable"));
    shelf.put(TEXT_HASH);
    eventually_async("it serves what was put back", async || client.get("/ready").await.status == 200).await;
    assert_eq!(end_token(&client).await, "<end 2>");
}

#[tokio::test]
async fn the_text_of_the_expected_model_is_read_before_an_executor_has_loaded_it() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("adapters")).unwrap();
    let shelf = ModelFile::with(TEXT_HASH);
    let model = Some(directory.path().to_str().unwrap().to_owned());
    let gateway =
        Gateway::start(GatewayConfig { model, ..config(&directory) }, shelf.loader()).await.unwrap();
    eventually("it is read while nobody serves", || shelf.reads() == [TEXT_HASH]).await;
    let _executor = FakeExecutor::start(&directory.path().join("socket"), reply_with("x")).await;
    let client = TestClient::new(gateway.address);
    eventually_async("it serves", async || client.get("/ready").await.status == 200).await;
    assert_eq!(end_token(&client).await, "<end 2>");
    assert_eq!(shelf.reads().len(), 1, "what is known to be the same is not read again");
}

/// Sends the second half of a request's body only after `between`.
async fn ask_slowly(client: &TestClient, between: impl Future<Output = ()>) -> String {
    let mut stream = client.connect().await;
    let body = json!({ "model": "base", "prompt": "a", "max_tokens": 1 }).to_string();
    let (begin, end) = body.split_at(body.len() / 2);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{begin}",
        client.address(),
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    between.await;
    stream.write_all(end.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(WATCHDOG, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
    answer
}

#[tokio::test]
async fn a_request_whose_body_comes_after_another_model_took_its_place_is_not_answered_by_it() {
    for (model, expected) in [(OTHER, "another base model"), (FakeModelIdentity::default(), "\"text\":\"x\"")]
    {
        let shelf = ModelFile::with(TEXT_HASH);
        let mut harness = Harness::start_with_text(reply_with("x"), shelf.loader(), |_| {}).await;
        let client = harness.client.clone();
        let answer = ask_slowly(&client, async {
            // Time for the first half to arrive.
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            shelf.put(model.text_hash);
            harness.replace_executor(reply_with("x"), model).await;
        })
        .await;
        assert!(answer.contains(expected), "{answer}");
        let status = if model.base_hash == OTHER.base_hash { "HTTP/1.1 503" } else { "HTTP/1.1 200" };
        assert!(answer.starts_with(status), "{answer}");
    }
}
