//! Two gateways on one PostgreSQL and one bucket, each with an executor and trainers of its own: objects
//! saved through one are available through the other.

use gateway::adapters::{BucketAddress, FleetStorage as Shared, PostgresAddress};
use serde_json::{Value, json};

use crate::{
    client::TestClient,
    fake_executor::reply_with,
    fake_trainer::{FakeTrainerService, weights},
    harness::{Harness, eventually_async},
    jobs::{JOBS, upload},
    servers::{self, postgres::Postgres, s3::Bucket},
    tinker_kept::TinkerRun,
};

pub(crate) struct GatewayFleet {
    pub(crate) gateways: [Harness; 2],
    _trainers: FakeTrainerService,
    _servers: (Postgres, Bucket),
}

impl GatewayFleet {
    /// Starts both gateways; `None` if the servers are not installed.
    pub(crate) async fn start() -> Option<Self> {
        let servers = servers::both()?;
        let trainers = FakeTrainerService::start(4);
        let gateway = || {
            let variables = servers.1.variables().into_iter().map(|(name, value)| (name.to_owned(), value));
            let shared = Shared {
                registry: PostgresAddress::parse(&servers.0.url()).unwrap(),
                store: BucketAddress::parse(&servers.1.url(), variables).unwrap(),
                cache_bytes: 1 << 30,
                key_file: None,
            };
            Harness::start_with(reply_with("x"), |config| {
                config.fleet = Some(shared);
                config.training.trainer_socket = Some(trainers.socket());
            })
        };
        let gateways = [gateway().await, gateway().await];
        Some(Self { gateways, _trainers: trainers, _servers: servers })
    }

    fn clients(&self) -> [&TestClient; 2] {
        self.gateways.each_ref().map(|gateway| &gateway.client)
    }
}

async fn knows(client: &TestClient, name: &str) {
    let knows = async || client.get(&format!("/v1/models/{name}")).await.status == 200;
    eventually_async("the other gateway hears of it", knows).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sampler_that_is_kept_through_one_gateway_is_sampled_through_the_other() {
    let Some(fleet) = GatewayFleet::start().await else { return };
    let [one, other] = fleet.clients();
    let mut run = TinkerRun::begin(one).await;
    let path = run.ask("save_weights_for_sampler", json!({ "path": "pirate" })).await["path"].clone();
    run.ask("save_weights_for_sampler", json!({ "sampling_session_seq_id": 1 })).await;
    let name = format!("tinker-{}-pirate", run.name());
    knows(other, &name).await;
    let session = other.post("/api/v1/create_session", &json!({ "sdk_version": "0.38.0" })).await;
    let sampler = json!({
        "session_id": session.json()["session_id"], "sampling_session_seq_id": 0, "model_path": path,
    });
    let sampler = other.post("/api/v1/create_sampling_session", &sampler).await;
    assert_eq!(sampler.status, 200, "{}", sampler.body);
    let sample = json!({
        "sampling_session_id": sampler.json()["sampling_session_id"], "seq_id": 1,
        "sampling_params": { "max_tokens": 1 },
        "prompt": { "chunks": [{ "type": "encoded_text", "tokens": [1] }] },
    });
    let promised = other.post("/api/v1/asample", &sample).await.json();
    let asked = json!({ "request_id": promised["request_id"] });
    let answer = other.post("/api/v1/retrieve_future", &asked).await;
    assert_eq!(answer.header("content-type"), Some("application/x-protobuf"), "{}", answer.body);
    // The sampler of the snapshot belongs to its session; the adapter is available by name.
    let snapshot = format!("tinker-{}~2", run.name());
    knows(other, &snapshot).await;
    let completion = json!({ "model": snapshot, "prompt": "x", "max_tokens": 1 });
    assert_eq!(other.post("/v1/completions", &completion).await.status, 200);
    let listed = other.get("/api/v1/checkpoints").await.json();
    assert_eq!(listed["checkpoints"][0]["tinker_path"], path, "{listed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_gateway_keeps_is_downloaded_and_given_an_end_through_the_other() {
    let Some(fleet) = GatewayFleet::start().await else { return };
    let [one, other] = fleet.clients();
    let mut run = TinkerRun::begin(one).await;
    run.ask("save_weights_external", json!({ "path": "out" })).await;
    let name = format!("tinker-{}@out", run.name());
    knows(other, &name).await;
    let kept = format!("/api/v1/training_runs/{}/checkpoints/external_weights/out", run.name());
    // An address signed by one gateway is valid at the other.
    let signed = one.get(&format!("{kept}/external_weights_urls")).await.json();
    let address = signed["urls"]["adapter_model.safetensors"].as_str().unwrap();
    let path = address.strip_prefix(&format!("http://{}", one.address())).unwrap();
    let file = other.get(path).await;
    assert_eq!((file.status, file.body.as_str()), (200, weights(0).as_str()));
    let set = other.send("PUT", &format!("{kept}/ttl"), "application/json", r#"{"ttl_seconds": 7200}"#).await;
    assert_eq!(set.status, 200, "{}", set.body);
    let ends = async || {
        let listed: Value = one.get("/api/v1/checkpoints").await.json();
        listed["checkpoints"][0]["expires_at"].is_u64()
    };
    eventually_async("the first gateway hears of it", ends).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_through_one_gateway_learns_from_a_file_of_the_other_and_both_serve_its_adapter() {
    let Some(fleet) = GatewayFleet::start().await else { return };
    let [one, other] = fleet.clients();
    let file = upload(one).await;
    let file = file.as_str().unwrap();
    assert_eq!(other.get(&format!("/v1/files/{file}/content")).await.body, "{}");
    let order = json!({ "model": "base", "training_file": file, "suffix": "made" });
    let job = other.post(JOBS, &order).await;
    assert_eq!(job.status, 200, "{}", job.body);
    let route = format!("{JOBS}/{}", job.json()["id"].as_str().unwrap());
    let is_done = async |client: &TestClient| client.get(&route).await.json()["status"] == "succeeded";
    eventually_async("the job ends", async || is_done(one).await && is_done(other).await).await;
    let done = one.get(&route).await.json();
    let name = done["fine_tuned_model"].as_str().unwrap();
    assert!(name.ends_with("/made"), "{done}");
    let results = done["result_files"].as_array().unwrap();
    assert_eq!(results.len(), 1);
    let content = format!("/v1/files/{}/content", results[0].as_str().unwrap());
    let measured = one.get(&content).await;
    assert!(measured.body.starts_with("step,"), "{}", measured.body);
    assert_eq!(other.get(&content).await.body, measured.body);
    for client in [one, other] {
        knows(client, name).await;
        let completion = json!({ "model": name, "prompt": "x", "max_tokens": 1 });
        assert_eq!(client.post("/v1/completions", &completion).await.status, 200);
    }
    let cancelled = other.post(&format!("{route}/cancel"), &json!({})).await;
    assert_eq!(cancelled.status, 400, "it has ended: {}", cancelled.body);
    assert_eq!(one.send("DELETE", &format!("/v1/files/{file}"), "application/json", "").await.status, 200);
    assert_eq!(other.get(&format!("/v1/files/{file}")).await.status, 404);
}
