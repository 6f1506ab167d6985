//! Tinker's routes: ownership, errors without a trainer, and sampling.

use gateway::keys::Keys;
use serde_json::json;

use crate::{
    client::TestClient,
    fake_executor::reply_with,
    harness::{Harness, key_file},
};

const ALICE: &str = "tml-alice";
const BOB: &str = "tml-bob";

async fn begin(client: &TestClient) -> String {
    let body = json!({ "tags": [], "user_metadata": null, "sdk_version": "0.38.0" });
    let session = client.post("/api/v1/create_session", &body).await;
    assert_eq!(session.status, 200, "{}", session.body);
    session.json()["session_id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn sessions_models_samplers_and_answers_are_their_tenants_alone() {
    let file = key_file(&[("user", "alice", ALICE), ("user", "bob", BOB)]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let (alice, bob) = (harness.client.with_key(ALICE), harness.client.with_key(BOB));
    let session = begin(&alice).await;
    let base = alice.get("/api/v1/get_server_capabilities").await.json();
    let base = base["supported_models"][0]["model_name"].clone();
    let sampler = json!({ "session_id": session, "sampling_session_seq_id": 0, "base_model": base });
    let made = alice.post("/api/v1/create_sampling_session", &sampler).await;
    let sampler_id = made.json()["sampling_session_id"].as_str().unwrap().to_owned();
    let sample = json!({
        "sampling_session_id": sampler_id, "seq_id": 1, "sampling_params": { "max_tokens": 1 },
        "prompt": { "chunks": [{ "type": "encoded_text", "tokens": [1] }] },
    });
    let promised = alice.post("/api/v1/asample", &sample).await;
    assert_eq!(promised.status, 200, "{}", promised.body);
    let request = json!({ "request_id": promised.json()["request_id"] });
    // A repeated request returns the same future.
    assert_eq!(alice.post("/api/v1/asample", &sample).await.json(), promised.json());
    let answer = alice.post("/api/v1/retrieve_future", &request).await;
    assert_eq!(answer.header("content-type"), Some("application/x-protobuf"), "{}", answer.body);
    assert_eq!(bob.post("/api/v1/retrieve_future", &request).await.status, 410);
    assert_eq!(bob.post("/api/v1/asample", &sample).await.status, 404);
    assert_eq!(bob.get(&format!("/api/v1/samplers/{sampler_id}")).await.status, 404);
    assert_eq!(alice.get(&format!("/api/v1/samplers/{sampler_id}")).await.status, 200);
    let heartbeat = json!({ "session_id": session });
    assert_eq!(bob.post("/api/v1/session_heartbeat", &heartbeat).await.status, 404);
    assert_eq!(alice.post("/api/v1/session_heartbeat", &heartbeat).await.status, 200);
    bob.post(&format!("/api/v1/sessions/{session}/finish"), &json!({})).await;
    assert_eq!(alice.post("/api/v1/session_heartbeat", &heartbeat).await.status, 200);
    alice.post(&format!("/api/v1/sessions/{session}/finish"), &json!({})).await;
    assert_eq!(alice.post("/api/v1/session_heartbeat", &heartbeat).await.status, 404);
}

#[tokio::test]
async fn where_nothing_is_trained_a_model_fails_with_what_to_do_and_samplers_work() {
    let harness = Harness::start(reply_with("x")).await;
    let session = begin(&harness.client).await;
    let base = harness.client.get("/api/v1/get_server_capabilities").await.json();
    let base = &base["supported_models"][0];
    assert_eq!(base["trainable"], false);
    let model = json!({
        "session_id": session, "model_seq_id": 0, "base_model": base["model_name"], "lora_config": { "rank": 4 },
    });
    let promised = harness.client.post("/api/v1/create_model", &model).await;
    let request = json!({ "request_id": promised.json()["request_id"] });
    let answer = harness.client.post("/api/v1/retrieve_future", &request).await.json();
    assert!(answer["error"].as_str().unwrap().contains("--trainer-socket"), "{answer}");
    let other = json!({
        "session_id": session, "model_seq_id": 1, "base_model": "another", "lora_config": { "rank": 4 },
    });
    assert_eq!(harness.client.post("/api/v1/create_model", &other).await.status, 400);
}
