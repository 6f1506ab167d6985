//! Saved objects of Tinker's runs: listed apart from users' adapters, with an optional expiry, and deleted by
//! their owner.

use gateway::keys::Keys;
use serde_json::{Value, json};

use crate::{
    client::TestClient,
    fake_executor::reply_with,
    fake_trainer::{FakeTrainerService, weights},
    harness::{Harness, key_file},
};

const ALICE: &str = "tml-alice";
const BOB: &str = "tml-bob";
const OPS: &str = "tml-ops";

pub(crate) struct TinkerRun<'a> {
    client: &'a TestClient,
    session: String,
    model: Value,
    seq: u64,
}

impl<'a> TinkerRun<'a> {
    pub(crate) async fn begin(client: &'a TestClient) -> Self {
        let session = client.post("/api/v1/create_session", &json!({ "sdk_version": "0.38.0" })).await;
        let session = session.json()["session_id"].as_str().unwrap().to_owned();
        let body = json!({
            "session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": { "rank": 4 },
        });
        let begun = promised(client, "create_model", &body).await;
        Self { client, session, model: begun["model_id"].clone(), seq: 0 }
    }

    pub(crate) fn name(&self) -> String {
        format!("{}-0", self.session)
    }

    pub(crate) async fn ask(&mut self, route: &str, mut body: Value) -> Value {
        self.seq += 1;
        (body["model_id"], body["seq_id"]) = (self.model.clone(), self.seq.into());
        promised(self.client, route, &body).await
    }
}

async fn promised(client: &TestClient, route: &str, body: &Value) -> Value {
    let promise = client.post(&format!("/api/v1/{route}"), body).await;
    assert_eq!(promise.status, 200, "{route}: {}", promise.body);
    let asked = json!({ "request_id": promise.json()["request_id"] });
    loop {
        let answer = client.post("/api/v1/retrieve_future", &asked).await.json();
        if answer["type"] != "try_again" {
            return answer;
        }
    }
}

async fn gateway(trainers: &FakeTrainerService) -> (Harness, [TestClient; 3]) {
    let keys = key_file(&[("user", "alice", ALICE), ("user", "bob", BOB), ("admin", "ops", OPS)]);
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.keys = Keys::read(keys.path(), None).unwrap();
        config.training.trainer_socket = Some(trainers.socket());
    })
    .await;
    let clients = [ALICE, BOB, OPS].map(|key| harness.client.with_key(key));
    (harness, clients)
}

async fn names(client: &TestClient, route: &str, field: &str) -> Vec<String> {
    let listed = client.get(route).await.json();
    let listed = listed["data"].as_array().or_else(|| listed["models"].as_array()).unwrap().clone();
    listed.iter().map(|one| one[field].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn adapters_of_runs_are_listed_apart_and_answer_by_their_names() {
    let trainers = FakeTrainerService::start(4);
    let (harness, [alice, _, ops]) = gateway(&trainers).await;
    let load =
        json!({ "lora_name": "pirate", "lora_path": harness.adapter("pirate", "yarr"), "tenant": "alice" });
    assert_eq!(ops.post("/v1/load_lora_adapter", &load).await.status, 200);
    let mut run = TinkerRun::begin(&alice).await;
    run.ask("save_weights_for_sampler", json!({ "path": "kept" })).await;
    run.ask("save_weights_for_sampler", json!({ "sampling_session_seq_id": 1 })).await;
    run.ask("save_weights_external", json!({ "path": "out" })).await;
    let of_run = ["-kept", "@out", "~2"].map(|end| format!("tinker-{}{end}", run.name()));
    assert_eq!(names(&alice, "/v1/models", "id").await, ["base", "pirate"]);
    assert_eq!(names(&alice, "/api/tags", "model").await.len(), 2);
    assert_eq!(names(&ops, "/v1/lora_adapters", "name").await, ["pirate"]);
    let mut listed = names(&ops, "/v1/lora_adapters?runs=true", "name").await;
    listed.sort();
    assert_eq!(listed, of_run);
    for name in &of_run {
        assert_eq!(alice.get(&format!("/v1/models/{name}")).await.status, 200, "{name}");
        let completion = json!({ "model": name, "prompt": "x", "max_tokens": 1 });
        assert_eq!(alice.post("/v1/completions", &completion).await.status, 200, "{name}");
    }
}

#[tokio::test]
async fn what_is_kept_ends_when_it_is_said_and_nothing_is_published() {
    let trainers = FakeTrainerService::start(4);
    let (_harness, [alice, bob, _]) = gateway(&trainers).await;
    let mut run = TinkerRun::begin(&alice).await;
    run.ask("save_weights_for_sampler", json!({ "path": "a", "ttl_seconds": 3600 })).await;
    run.ask("save_weights", json!({ "path": "a", "ttl_seconds": 3600 })).await;
    run.ask("save_weights", json!({ "path": "b" })).await;
    for route in ["save_weights", "save_weights_for_sampler", "save_weights_external"] {
        let refused = run.ask(route, json!({ "path": "c", "ttl_seconds": 60 })).await;
        assert!(refused["error"].as_str().unwrap().contains("1 hour"), "{route}: {refused}");
    }
    let route = format!("/api/v1/training_runs/{}/checkpoints", run.name());
    let ends = async || -> Vec<(String, bool)> {
        let listed = alice.get(&route).await.json();
        let mut ends: Vec<_> = listed["checkpoints"].as_array().unwrap().clone();
        ends.sort_by_key(|one| one["checkpoint_id"].to_string());
        let end =
            |one: &Value| (one["checkpoint_id"].as_str().unwrap().to_owned(), one["expires_at"].is_u64());
        ends.iter().map(end).collect()
    };
    let of = |ends: [(&str, bool); 3]| ends.map(|(id, ends)| (id.to_owned(), ends));
    assert_eq!(ends().await, of([("sampler_weights/a", true), ("weights/a", true), ("weights/b", false)]));
    let set = async |client: &TestClient, id: &str, ttl: &str| {
        let body = format!(r#"{{"ttl_seconds": {ttl}}}"#);
        client.send("PUT", &format!("{route}/{id}/ttl"), "application/json", &body).await.status
    };
    for (id, ttl) in [("sampler_weights/a", "null"), ("weights/a", "null"), ("weights/b", "7200")] {
        assert_eq!(set(&bob, id, ttl).await, 404, "{id} is another's");
        assert_eq!(set(&alice, id, "1").await, 400, "{id}");
        assert_eq!(set(&alice, id, ttl).await, 200, "{id}");
    }
    assert_eq!(set(&alice, "weights/nothing", "null").await, 404);
    assert_eq!(ends().await, of([("sampler_weights/a", false), ("weights/a", false), ("weights/b", true)]));
    for method in ["POST", "DELETE"] {
        let publish = format!("{route}/weights/a/publish");
        let refused = alice.send(method, &publish, "application/json", "").await;
        assert_eq!(refused.status, 501, "{}", refused.body);
        assert!(refused.body.contains("holobiont adapters pull"), "{}", refused.body);
    }
}

#[tokio::test]
async fn an_adapter_is_taken_away_by_its_tenant_and_by_whoever_has_a_signed_address() {
    let trainers = FakeTrainerService::start(4);
    let (harness, [alice, bob, ops]) = gateway(&trainers).await;
    let mut run = TinkerRun::begin(&alice).await;
    let kept = run.ask("save_weights_external", json!({ "path": "out" })).await;
    assert_eq!(kept["path"], format!("tinker://{}/external_weights/out", run.name()));
    let encrypted = json!({ "path": "sealed", "age_encryption_recipients": ["age1x"] });
    let refused = run.ask("save_weights_external", encrypted).await;
    assert!(refused["error"].as_str().unwrap().contains("age_encryption_recipients"), "{refused}");
    let urls = format!(
        "/api/v1/training_runs/{}/checkpoints/external_weights/out/external_weights_urls",
        run.name()
    );
    assert_eq!(bob.get(&urls).await.status, 404, "another's");
    let signed = alice.get(&urls).await.json();
    let signed = signed["urls"].as_object().unwrap();
    let texts = [("adapter_config.json", "{}".to_owned()), ("adapter_model.safetensors", weights(0))];
    assert_eq!(signed.keys().collect::<Vec<_>>(), texts.iter().map(|(name, _)| name).collect::<Vec<_>>());
    let server = format!("http://{}", harness.client.address());
    for (name, text) in &texts {
        let path = signed[*name].as_str().unwrap().strip_prefix(&server).unwrap();
        let file = harness.client.get(path).await;
        assert_eq!((file.status, &file.body), (200, text), "without a key");
        assert_eq!(file.header("content-length"), Some(text.len().to_string().as_str()));
        let other = path.replace(name, if *name == texts[0].0 { texts[1].0 } else { texts[0].0 });
        for forged in
            [other, path.replace("expires=", "expires=9"), path.replace("signature=", "signature=0")]
        {
            assert_eq!(harness.client.get(&forged).await.status, 403, "{forged}");
        }
    }
    let load = json!({ "lora_name": "all/of us", "lora_path": harness.adapter("all", "yarr") });
    assert_eq!(ops.post("/v1/load_lora_adapter", &load).await.status, 200);
    let own = format!("?lora_name=tinker-{}@out", run.name());
    let everybodys = "?lora_name=all/of%20us".to_owned();
    for (client, adapter, status) in [
        (&alice, &own, 200),
        (&bob, &own, 404),
        (&ops, &own, 200),
        (&alice, &everybodys, 403),
        (&ops, &everybodys, 200),
    ] {
        for file in ["", "/adapter_model.safetensors"] {
            let answer = client.get(&format!("/v1/lora_adapter_files{file}{adapter}")).await;
            assert_eq!(answer.status, status, "{file} {adapter}: {}", answer.body);
        }
    }
    let listed = alice.get(&format!("/v1/lora_adapter_files{own}")).await.json();
    assert_eq!(listed["data"][1], json!({ "name": texts[1].0, "bytes": texts[1].1.len() }));
    let generation = listed["generation"].as_str().unwrap();
    let asked = format!("/v1/lora_adapter_files/{}{own}&expected_generation=", texts[1].0);
    assert_eq!(alice.get(&format!("{asked}{generation}")).await.body, texts[1].1);
    assert_eq!(alice.get(&format!("{asked}{}", "0".repeat(64))).await.status, 409);
    assert_eq!(alice.get(&format!("/v1/lora_adapter_files/..%2Fsecret{own}")).await.status, 404);
}
