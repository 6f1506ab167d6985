//! A tenant that exhausts its limits on Tinker's routes, beside one that trains.

use std::collections::HashMap;

use gateway::{
    keys::Keys,
    tenant_memory::MemoryLimits,
    training_sessions::wire::{
        ChunkKind, DType, Datum, EncodedText, ForwardBackwardRequest, ModelInputChunk, TensorData, Values,
    },
};
use prost::Message as _;
use serde_json::{Value, json};

use crate::{
    client::{Response, TestClient},
    fake_executor::{Reply, hang_after, reply_with},
    fake_trainer::FakeTrainerService,
    harness::{Harness, eventually, eventually_async, key_file},
    jobs::{JOBS, upload},
};

const ALICE: &str = "tml-alice";
const MALLORY: &str = "tml-mallory";
const WATCHER: &str = "watcher";
const OPERATOR: &str = "operator";
const TENANT_BYTES: usize = 8 << 20;
const TOKENS: usize = 40_000;

struct TenantModel {
    client: TestClient,
    session: String,
    id: String,
}

impl TenantModel {
    /// Begins a session with a named model, which is not created yet.
    async fn of(client: TestClient) -> Self {
        let session = client.post("/api/v1/create_session", &json!({})).await.json();
        let session = session["session_id"].as_str().unwrap().to_owned();
        Self { client, id: format!("{session}:train:0"), session }
    }

    async fn create(&self) -> Response {
        let model = json!({
            "session_id": self.session, "model_seq_id": 0, "base_model": "base", "lora_config": { "rank": 4 },
        });
        self.client.post("/api/v1/create_model", &model).await
    }

    async fn evaluate(
        &self,
        seq: i32,
        tokens: usize,
        change: impl FnOnce(&mut ForwardBackwardRequest),
    ) -> Response {
        let mut request = batch(&self.id, seq, tokens);
        change(&mut request);
        self.send(request.encode_to_vec()).await
    }

    async fn send(&self, body: Vec<u8>) -> Response {
        self.client.send("POST", "/api/v1/forward_backward", "application/x-protobuf", body).await
    }

    async fn publish(&self, seq: u32, how: Value) -> Value {
        let mut request = how;
        request["model_id"] = self.id.as_str().into();
        request["seq_id"] = seq.into();
        let promised = self.client.post("/api/v1/save_weights_for_sampler", &request).await;
        self.result(&promised).await.json()
    }

    async fn result(&self, promised: &Response) -> Response {
        assert_eq!(promised.status, 200, "{}", promised.body);
        let request = json!({ "request_id": promised.json()["request_id"] });
        self.client.post("/api/v1/retrieve_future", &request).await
    }

    async fn end(&self) {
        self.client.post(&format!("/api/v1/sessions/{}/finish", self.session), &json!({})).await;
    }
}

fn batch(model: &str, seq: i32, tokens: usize) -> ForwardBackwardRequest {
    let tensor = |dtype: DType, bytes: usize| TensorData {
        values: Some(Values::Dense(vec![0; tokens * bytes])),
        dtype: dtype.into(),
        shape: Vec::new(),
    };
    let inputs = HashMap::from([
        ("target_tokens".to_owned(), tensor(DType::Int64, 8)),
        ("weights".to_owned(), tensor(DType::Float32, 4)),
    ]);
    let text = EncodedText { tokens: vec![0; tokens * 4] };
    ForwardBackwardRequest {
        model_id: model.to_owned(),
        seq_id: seq,
        loss_fn: "cross_entropy".to_owned(),
        data: vec![Datum {
            model_input: vec![ModelInputChunk { kind: Some(ChunkKind::EncodedText(text)) }],
            loss_fn_inputs: inputs,
        }],
        ..ForwardBackwardRequest::default()
    }
}

async fn served(harness: &Harness, tenant: &str) -> Vec<String> {
    let operator = harness.client.with_key(OPERATOR);
    let listed = operator.get("/v1/lora_adapters?runs=true").await.json();
    let is_served = |adapter: &&Value| adapter["tenant"] == tenant && adapter["state"] != "draining";
    let listed = listed["data"].as_array().unwrap().iter().filter(is_served);
    listed.map(|adapter| adapter["name"].as_str().unwrap().to_owned()).collect()
}

/// Gateway with two tenants and trainers for both; the executor answers with `reply`.
async fn start(reply: Reply) -> (Harness, FakeTrainerService, TenantModel, TenantModel) {
    start_with(reply, 4).await
}

async fn start_with(
    reply: Reply,
    trainers: usize,
) -> (Harness, FakeTrainerService, TenantModel, TenantModel) {
    let keys = [
        ("user", "alice", ALICE),
        ("user", "mallory", MALLORY),
        ("metrics", "watcher", WATCHER),
        ("admin", "operator", OPERATOR),
    ];
    let file = key_file(&keys);
    let service = FakeTrainerService::start(trainers);
    let harness = Harness::start_with(reply, |config| {
        config.keys = Keys::read(file.path(), None).unwrap();
        config.connections.memory =
            MemoryLimits { tenant_bytes: TENANT_BYTES, total_bytes: 4 * TENANT_BYTES };
        config.training.trainer_socket = Some(service.socket());
    })
    .await;
    let alice = TenantModel::of(harness.client.with_key(ALICE)).await;
    let mallory = TenantModel::of(harness.client.with_key(MALLORY)).await;
    (harness, service, alice, mallory)
}

#[tokio::test]
async fn a_tenant_whose_work_waits_for_ever_keeps_what_a_tenant_may_and_others_train() {
    let (harness, _service, alice, mallory) = start(reply_with("x")).await;
    let used = || harness.gateway.as_ref().unwrap().memory().used_by("mallory");
    assert_eq!(mallory.create().await.status, 200);
    // The first operation never comes, so all others wait.
    let (mut promised, mut refused) = (Vec::new(), Vec::new());
    for seq in 2..40 {
        let answer = mallory.evaluate(seq, TOKENS, |_| {}).await;
        if answer.status == 200 { &mut promised } else { &mut refused }.push(answer);
        assert!(used() <= TENANT_BYTES / 4 * 3, "{} bytes", used());
    }
    assert!(promised.len() > 5 && refused.len() > 5, "{} taken", promised.len());
    assert!(refused.iter().all(|answer| (answer.status, answer.code().as_str()) == (429, "memory_full")));
    // Another tenant is not affected.
    let created = alice.create().await;
    assert_eq!(alice.result(&created).await.json()["type"], "create_model");
    let evaluated = alice.evaluate(1, TOKENS, |_| {}).await;
    let evaluated = alice.result(&evaluated).await;
    assert_eq!(evaluated.header("content-type"), Some("application/x-protobuf"), "{}", evaluated.body);
    // The next operation in order is always accepted, and then all others run.
    let first = mallory.evaluate(1, TOKENS, |_| {}).await;
    for promised in std::iter::once(&first).chain(&promised) {
        let evaluated = mallory.result(promised).await;
        assert_eq!(evaluated.header("content-type"), Some("application/x-protobuf"), "{}", evaluated.body);
    }
    let results = (promised.len() + 1) * TOKENS * size_of::<f32>();
    assert!((results..results + (1 << 20)).contains(&used()), "{} bytes of {results}", used());
}

#[tokio::test]
async fn what_is_made_to_take_room_is_refused_by_name_in_its_turn_and_takes_none() {
    let (harness, service, _, mallory) = start(reply_with("x")).await;
    let used = || harness.gateway.as_ref().unwrap().memory().used_by("mallory");
    assert_eq!(mallory.create().await.status, 200);
    let (before, long) = (used(), "a".repeat(900 << 10));
    let short = "a".repeat(200 << 10);
    // Two bytes per sequence; operation 5.
    let parts = [batch(&mallory.id, 5, 0).encode_to_vec(), b"\x1a\x00".repeat(450_000)].concat();
    let load = json!({ "model_id": mallory.id, "seq_id": 6, "path": short, "optimizer": true });
    let save = json!({ "model_id": mallory.id, "seq_id": 7, "path": short });
    let step = json!({ "model_id": mallory.id, "seq_id": 8, "adam_params": { &short: 1 } });
    let promised = [
        (mallory.evaluate(2, 1, |request| request.loss_fn.clone_from(&long)).await, "'loss_fn'"),
        (
            mallory
                .evaluate(3, 1, |request| {
                    request.loss_fn_config.insert(long.clone(), 1.0);
                })
                .await,
            "'loss_fn_config'",
        ),
        (
            mallory
                .evaluate(4, 1, |request| {
                    let inputs = &mut request.data[0].loss_fn_inputs;
                    let weights = inputs.remove("weights").unwrap();
                    inputs.insert(long.clone(), weights);
                })
                .await,
            "'loss_fn_inputs'",
        ),
        (mallory.send(parts).await, "65536 parts"),
        (mallory.client.post("/api/v1/load_weights", &load).await, "is not a path"),
        (mallory.client.post("/api/v1/save_weights", &save).await, "is not a valid name"),
        (mallory.client.post("/api/v1/optim_step", &step).await, "adam_params"),
    ];
    assert!(used() - before < promised.len() * 4096, "{} bytes", used() - before);
    let first = mallory.evaluate(1, 1, |_| {}).await;
    assert_eq!(mallory.result(&first).await.status, 200);
    for (promised, named) in &promised {
        let refused: Value = mallory.result(promised).await.json();
        assert_eq!(refused["category"], "user", "{refused}");
        assert!(refused["error"].as_str().unwrap().contains(named), "{named}: {refused}");
    }
    let larger = json!({ "model_id": mallory.id, "seq_id": 9, "path": long });
    let larger = mallory.client.post("/api/v1/save_weights", &larger).await;
    assert_eq!((larger.status, larger.code().as_str()), (400, "body_too_large"));
    // The trainer's state is unchanged.
    let last = mallory.evaluate(9, 1, |_| {}).await;
    let last = mallory.result(&last).await;
    assert_eq!(last.header("content-type"), Some("application/x-protobuf"), "{}", last.body);
    assert_eq!(service.taken(), 1);
    mallory.end().await;
}

#[tokio::test]
async fn a_tenant_whose_idle_models_have_all_trainers_gives_one_to_another_tenant_and_goes_on_with_the_next()
{
    let (_harness, service, alice, mallory) = start_with(reply_with("x"), 1).await;
    let created = mallory.create().await;
    assert_eq!(mallory.result(&created).await.json()["type"], "create_model");
    let asked = alice.create().await;
    let waits = alice.result(&asked).await.json();
    assert_eq!(
        (&waits["type"], &waits["queue_state"]),
        (&json!("try_again"), &json!("paused_capacity")),
        "{waits}"
    );
    assert_eq!(alice.result(&asked).await.json()["type"], "create_model");
    assert_eq!(service.taken(), 1);
    // The suspended model resumes with its next request, once the other has ended.
    let evaluated = mallory.evaluate(1, 1, |_| {}).await;
    alice.end().await;
    let evaluated = mallory.result(&evaluated).await;
    assert_eq!(evaluated.header("content-type"), Some("application/x-protobuf"), "{}", evaluated.body);
}

#[tokio::test]
async fn an_idle_model_gives_its_trainer_to_a_job_of_another_tenant_that_waits_and_goes_on_after_it() {
    let (_harness, service, alice, mallory) = start_with(reply_with("x"), 1).await;
    let created = mallory.create().await;
    assert_eq!(mallory.result(&created).await.json()["type"], "create_model");
    let order = json!({ "model": "base", "training_file": upload(&alice.client).await });
    let job = alice.client.post(JOBS, &order).await;
    assert_eq!(job.status, 200, "{}", job.body);
    let route = format!("{JOBS}/{}", job.json()["id"].as_str().unwrap());
    let status = async || alice.client.get(&route).await.json()["status"].clone();
    assert_eq!((status().await, service.taken()), (json!("queued"), 1), "the model has the only trainer");
    eventually_async("the job gets the trainer and ends", async || status().await == "succeeded").await;
    let evaluated = mallory.evaluate(1, 1, |_| {}).await;
    let evaluated = mallory.result(&evaluated).await;
    assert_eq!(evaluated.header("content-type"), Some("application/x-protobuf"), "{}", evaluated.body);
    assert_eq!(service.taken(), 1, "the model has another trainer");
}

#[tokio::test]
async fn samples_that_never_end_hold_up_neither_the_sweep_nor_the_end_of_any_snapshot() {
    let (harness, _service, alice, mallory) = start(hang_after("x")).await;
    assert_eq!(mallory.create().await.status, 200);
    for number in 1..=2 {
        let sampler = mallory.publish(number, json!({ "sampling_session_seq_id": number })).await;
        let sample = json!({
            "sampling_session_id": sampler["sampling_session_id"], "seq_id": 1, "sampling_params": { "max_tokens": 9 },
            "prompt": { "chunks": [{ "type": "encoded_text", "tokens": [1] }] },
        });
        assert_eq!(mallory.client.post("/api/v1/asample", &sample).await.status, 200, "{sampler}");
    }
    eventually("both are sampled from", || harness.executor().generates().len() == 2).await;
    assert_eq!(served(&harness, "mallory").await.len(), 2);
    let passing = harness.directory.path().join("state/tinker/passing");
    let is_empty = || std::fs::read_dir(&passing).map_or(true, |mut entries| entries.next().is_none());
    eventually("no adapter is left on its way", is_empty).await;
    std::fs::create_dir_all(passing.join("killed-0-0")).unwrap();
    mallory.end().await;
    eventually_async("no snapshot is served", async || served(&harness, "mallory").await.is_empty()).await;
    eventually("what a kill left behind is swept", is_empty).await;
    assert!(harness.executor().unloads().is_empty(), "both are still sampled from");
    assert_eq!(alice.create().await.status, 200);
}

#[tokio::test]
async fn a_snapshot_is_in_memory_alone_and_a_named_checkpoint_is_on_disk() {
    let (harness, _service, alice, _) = start(hang_after("x")).await;
    assert_eq!(alice.create().await.status, 200);
    let stored = || std::fs::read_dir(harness.directory.path().join("state/adapters")).unwrap().count();
    alice.publish(1, json!({ "sampling_session_seq_id": 1 })).await;
    assert_eq!((served(&harness, "alice").await.len(), stored()), (1, 0));
    alice.publish(2, json!({ "path": "kept" })).await;
    assert_eq!((served(&harness, "alice").await.len(), stored()), (2, 1));
}

#[tokio::test]
async fn a_checkpoint_whose_deletion_nobody_waits_for_any_more_is_freed_all_the_same() {
    const COMPLETIONS: &str = "/v1/completions";
    let (harness, _service, alice, _) = start(hang_after("x")).await;
    assert_eq!(alice.create().await.status, 200);
    let path = alice.publish(1, json!({ "path": "kept" })).await["path"].as_str().unwrap().to_owned();
    let run = path.split('/').nth(2).unwrap().to_owned();
    let ask = json!({ "model": served(&harness, "alice").await[0], "prompt": "a", "stream": true });
    let reader = alice.client.open_post(COMPLETIONS, &ask).await;
    eventually("it is used", || harness.executor().generates().len() == 1).await;
    let route = format!("/api/v1/training_runs/{run}/checkpoints/sampler_weights/kept");
    let deletion = alice.client.open("DELETE", &route, "application/json", "").await;
    eventually_async("it has no name any more", async || served(&harness, "alice").await.is_empty()).await;
    drop(deletion);
    let watcher = harness.client.with_key(WATCHER);
    let has_left = async || {
        let metrics = watcher.get("/metrics").await.body;
        metrics
            .lines()
            .any(|line| line.contains("/checkpoints/{kind}/{name}") && line.contains("status=\"499\""))
    };
    eventually_async("the caller has left", has_left).await;
    assert!(harness.executor().unloads().is_empty());
    drop(reader);
    eventually("its bytes are freed", || harness.executor().unloads().len() == 1).await;
}

#[tokio::test]
async fn what_the_sdk_tells_of_itself_is_taken_and_not_kept() {
    let (harness, _service, alice, _) = start(reply_with("x")).await;
    let used = || harness.gateway.as_ref().unwrap().memory().used_by("alice");
    let before = used();
    let batch = json!({ "events": [{ "event": "SESSION_START" }], "platform": "x", "sdk_version": "0.38.0", "session_id": "s" });
    let taken = alice.client.post("/api/v1/telemetry", &batch).await;
    assert_eq!((taken.status, taken.json()), (200, json!({ "status": "accepted" })));
    eventually("nothing is kept", || used() == before).await;
    let long = alice.client.post("/api/v1/telemetry", &json!({ "events": "a".repeat(2 << 20) })).await;
    assert_eq!(long.status, 413, "{}", long.body);
}
