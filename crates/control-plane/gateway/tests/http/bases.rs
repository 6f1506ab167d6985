//! Several bases behind one gateway, and bases that sleep.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gateway::{
    config::{BaseConfig, BasesConfig, GatewayConfig},
    executor::Endpoint,
    executors::Address,
    served_base::{SleepPhase, SleepSettings, Supervisor, SupervisorRequest},
    server::Gateway,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Mutex, mpsc};

use crate::{
    client::{Response, TestClient},
    fake_executor::{FakeExecutor, FakeModelIdentity, Reply, hang_after, reply_with, say_slowly},
    harness::{config, eventually_async},
    text::bytes,
};

const TEXT: &str = "/v1/completions";

/// Bases `base` and `second`, whose executors answer "ab" and "cd".
struct BasePair {
    directory: TempDir,
    executors: Arc<Mutex<[Option<FakeExecutor>; 2]>>,
    /// Requests to the supervisor, in order.
    asked: Arc<Mutex<Vec<String>>>,
    gateway: Gateway,
    client: TestClient,
}

fn replies() -> [Reply; 2] {
    [reply_with("ab"), reply_with("cd")]
}

fn identity(index: usize) -> FakeModelIdentity {
    FakeModelIdentity { base_hash: [index as u8 + 1; 32], sessions: 0, ..FakeModelIdentity::default() }
}

fn address(directory: &Path, name: &str) -> Address {
    Address { name: name.to_owned(), endpoint: Endpoint::Socket(directory.join(name)) }
}

/// Starts and kills executors as the gateway asks, in order. `defunct` ignores requests for a wake.
fn supervisor(
    directory: PathBuf,
    executors: Arc<Mutex<[Option<FakeExecutor>; 2]>>,
    asked: Arc<Mutex<Vec<String>>>,
    is_defunct: bool,
) -> Supervisor {
    let (send, mut requests) = mpsc::unbounded_channel::<SupervisorRequest>();
    tokio::spawn(async move {
        while let Some(request) = requests.recv().await {
            asked.lock().await.push(request.to_string());
            let (SupervisorRequest::Sleep(base) | SupervisorRequest::Wake(base)) = &request;
            let index = usize::from(base == "second");
            let mut executors = executors.lock().await;
            match request {
                SupervisorRequest::Sleep(_) => {
                    if let Some(executor) = executors[index].take() {
                        executor.kill().await;
                    }
                }
                SupervisorRequest::Wake(_) if is_defunct => {}
                SupervisorRequest::Wake(_) => {
                    let (socket, reply) = (directory.join(["a", "b"][index]), replies()[index].clone());
                    executors[index] = Some(FakeExecutor::start_with(&socket, reply, identity(index)).await);
                }
            }
        }
    });
    Supervisor::new(move |request| drop(send.send(request)))
}

impl BasePair {
    async fn start() -> Self {
        Self::start_with(replies(), false, |_| {}).await
    }

    async fn start_with(
        replies: [Reply; 2],
        is_defunct: bool,
        change: impl FnOnce(&mut BasesConfig),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::create_dir(path.join("adapters")).unwrap();
        let (executors, asked) = (Arc::new(Mutex::new([None, None])), Arc::new(Mutex::new(Vec::new())));
        let mut config = config(&directory);
        config.executors = vec![address(path, "a")];
        let supervisor = supervisor(path.to_owned(), Arc::clone(&executors), Arc::clone(&asked), is_defunct);
        config.bases = BasesConfig {
            others: vec![second(&config, path)],
            supervisor: Some(supervisor),
            ..BasesConfig::default()
        };
        change(&mut config.bases);
        let phases = [config.bases.sleep.first, config.bases.others[0].sleep.first];
        for (index, reply) in
            replies.into_iter().enumerate().filter(|(index, _)| phases[*index] == SleepPhase::Awake)
        {
            let socket = path.join(["a", "b"][index]);
            executors.lock().await[index] =
                Some(FakeExecutor::start_with(&socket, reply, identity(index)).await);
        }
        let gateway = Gateway::start(config, bytes()).await.unwrap();
        let client = TestClient::new(gateway.address);
        let pair = Self { directory, executors, asked, gateway, client };
        let are_known = async || {
            let told = pair.bases().await;
            told.iter().all(|base| ["ready", "asleep"].contains(&base["state"].as_str().unwrap()))
        };
        eventually_async("both serve or sleep", are_known).await;
        pair
    }

    async fn bases(&self) -> Vec<Value> {
        self.client.get("/v1/bases").await.json()["data"].as_array().unwrap().clone()
    }

    async fn states(&self) -> Vec<String> {
        self.bases().await.iter().map(|base| base["state"].as_str().unwrap().to_owned()).collect()
    }

    async fn text(&self, model: &str) -> String {
        let answer = self.ask(model).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    async fn ask(&self, model: &str) -> Response {
        self.client.post(TEXT, &json!({ "model": model, "prompt": "x", "seed": 5 })).await
    }

    async fn load(&self, name: &str, base: Option<&str>) -> Response {
        let path = self.directory.path().join("adapters").join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(path.join("adapter_model.safetensors"), name).unwrap();
        let mut body = json!({ "lora_name": name, "lora_path": path });
        if let Some(base) = base {
            body["base_model_name"] = base.into();
        }
        self.client.post("/v1/load_lora_adapter", &body).await
    }

    async fn models(&self) -> Vec<String> {
        let list = self.client.get("/v1/models").await.json();
        list["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect()
    }

    async fn sleep(&self, base: &str) -> Response {
        self.client.post(&format!("/v1/bases/{base}/sleep?mode=refuse"), &json!({})).await
    }

    async fn kill(&self, index: usize) {
        self.executors.lock().await[index].take().unwrap().kill().await;
    }
}

fn second(first: &GatewayConfig, directory: &Path) -> BaseConfig {
    BaseConfig {
        name: "second".to_owned(),
        is_first: false,
        executors: vec![address(directory, "b")],
        expected_workers: vec![0],
        model: None,
        served_model_name: Some("org/second".to_owned()),
        parsers: first.parsers,
        scoring: first.scoring.clone(),
        adapters: Vec::new(),
        sleep: SleepSettings::default(),
    }
}

#[tokio::test]
async fn each_base_answers_under_its_name_and_one_list_names_all() {
    let pair = BasePair::start().await;
    assert_eq!((pair.text("base").await, pair.text("org/second").await), ("ab".to_owned(), "cd".to_owned()));
    assert_eq!(pair.models().await, ["base", "org/second"]);
    let card = pair.client.get("/v1/models/org/second").await.json();
    assert_eq!((&card["id"], &card["state"]), (&json!("org/second"), &json!("awake")));
    let unknown = pair.ask("nobody").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("base") && unknown.body.contains("org/second"), "{}", unknown.body);
    let told = pair.client.get("/v1/status").await.json();
    let executors: Vec<_> = told["executors"].as_array().unwrap().iter().map(|one| &one["base"]).collect();
    assert_eq!(executors, [&json!("base"), &json!("second")]);
    let metrics = pair.client.get("/metrics").await.body;
    for part in ["executor=\"a\"", "executor=\"b\"", "holobiont_base_asleep{base=\"second\"} 0"] {
        assert!(metrics.contains(part), "{part} is not in {metrics}");
    }
}

#[tokio::test]
async fn every_api_finds_the_base_of_a_model() {
    let pair = BasePair::start().await;
    let messages = json!([{ "role": "user", "content": "x" }]);
    for (path, at) in [
        ("/v1/chat/completions", "/choices/0/message/content"),
        ("/v1/responses", "/output/0/content/0/text"),
        ("/v1/messages", "/content/0/text"),
        ("/api/chat", "/message/content"),
    ] {
        let mut body =
            json!({ "model": "org/second", "messages": messages, "max_tokens": 9, "stream": false });
        if path == "/v1/responses" {
            body = json!({ "model": "org/second", "input": "x" });
        } else if path == "/api/chat" {
            body = json!({ "model": "org/second:latest", "messages": messages, "stream": false });
        }
        let answer = pair.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert_eq!(answer.json().pointer(at), Some(&json!("cd")), "{path}: {}", answer.body);
    }
    let tags = pair.client.get("/api/tags").await.json();
    assert_eq!(tags["models"].as_array().unwrap().len(), 2);
    let tokens = pair.client.post("/tokenize", &json!({ "model": "org/second", "prompt": "x" })).await;
    assert_eq!(tokens.status, 200, "{}", tokens.body);
}

#[tokio::test]
async fn an_adapter_belongs_to_one_base_and_is_refused_for_another_by_name() {
    let pair = BasePair::start().await;
    assert_eq!(pair.load("first-tuned", None).await.status, 200);
    assert_eq!(pair.load("second-tuned", Some("org/second")).await.status, 200);
    for (model, text) in [
        ("first-tuned", "ab"),
        ("second-tuned", "cd"),
        ("base:first-tuned", "ab"),
        ("org/second:second-tuned", "cd"),
        ("second-tuned:0.5", "cd"),
    ] {
        assert_eq!(pair.text(model).await, text, "{model}");
    }
    assert_eq!(pair.models().await, ["base", "first-tuned", "org/second", "second-tuned"]);
    let refused = pair.ask("base:second-tuned").await;
    assert_eq!((refused.status, refused.code()), (400, "adapter_of_other_base".to_owned()));
    assert!(refused.body.contains("'org/second:second-tuned'"), "{}", refused.body);
    let taken = pair.load("first-tuned", Some("org/second")).await;
    assert_eq!((taken.status, taken.code()), (409, "adapter_of_other_base".to_owned()));
    let unknown = pair.load("other", Some("third")).await;
    assert_eq!((unknown.status, unknown.code()), (400, "invalid_value".to_owned()), "{}", unknown.body);
    let listed = pair.client.get("/v1/lora_adapters").await.json();
    let bases: Vec<_> = listed["data"].as_array().unwrap().iter().map(|adapter| &adapter["base"]).collect();
    assert_eq!(bases, [&json!("base"), &json!("org/second")]);
    let unload = json!({ "lora_name": "second-tuned" });
    assert_eq!(pair.client.post("/v1/unload_lora_adapter", &unload).await.status, 200);
    assert_eq!(pair.ask("second-tuned").await.status, 404);
}

#[tokio::test]
async fn training_of_another_base_than_the_first_is_refused_by_name() {
    let pair = BasePair::start().await;
    let job = json!({ "model": "org/second", "training_file": "file-1" });
    let refused = pair.client.post("/v1/fine_tuning/jobs", &job).await;
    assert_eq!((refused.status, refused.code()), (501, "first_base_only".to_owned()));
    assert!(refused.body.contains("'org/second'") && refused.body.contains("'base'"), "{}", refused.body);
    let other = json!({ "model": "base", "training_file": "file-1" });
    assert_ne!(pair.client.post("/v1/fine_tuning/jobs", &other).await.code(), "first_base_only");
}

#[tokio::test]
async fn the_death_of_one_base_leaves_the_answers_of_another_alone() {
    let pair = BasePair::start().await;
    pair.kill(1).await;
    eventually_async("it is missed", async || pair.states().await[1] == "lost").await;
    assert_eq!(pair.text("base").await, "ab");
    assert_eq!(pair.client.get("/ready").await.status, 200);
    assert_eq!(pair.models().await, ["base"]);
    let lost = pair.ask("org/second").await;
    assert_eq!(lost.status, 503, "{}", lost.body);
    assert!(lost.header("retry-after").is_some());
}

#[tokio::test]
async fn a_sleeping_base_is_woken_by_a_request_and_keeps_its_adapters() {
    let pair = BasePair::start().await;
    assert_eq!(pair.load("second-tuned", Some("org/second")).await.status, 200);
    let before = pair.text("second-tuned").await;
    assert_eq!(pair.sleep("second").await.json()["state"], "asleep");
    eventually_async("its executor is gone", async || pair.executors.lock().await[1].is_none()).await;
    assert_eq!(pair.states().await, ["ready", "asleep"]);
    let card = pair.client.get("/v1/models/second-tuned").await.json();
    assert_eq!(card["parent"], "org/second", "lists do not wake a base");
    assert_eq!(pair.states().await, ["ready", "asleep"]);
    let (one, other) = tokio::join!(pair.text("second-tuned"), pair.text("org/second"));
    assert_eq!((one, other), (before, "cd".to_owned()));
    assert_eq!(*pair.asked.lock().await, ["sleep second", "wake second"]);
    let told = &pair.bases().await[1];
    assert_eq!((&told["state"], &told["sleeps"], &told["wakes"]), (&json!("ready"), &json!(1), &json!(1)));
}

#[tokio::test]
async fn a_base_falls_asleep_when_nobody_has_used_it_for_its_time() {
    let after = Some(Duration::from_millis(1));
    let sleep = move |bases: &mut BasesConfig| bases.others[0].sleep.after = after;
    let pair = BasePair::start_with(replies(), false, sleep).await;
    eventually_async("it sleeps", async || pair.states().await == ["ready", "asleep"]).await;
    assert_eq!(pair.text("org/second").await, "cd");
    assert_eq!(pair.text("base").await, "ab");
}

#[tokio::test]
async fn a_base_in_use_stays_awake() {
    let replies = [reply_with("ab"), hang_after("cd")];
    let pair = BasePair::start_with(replies, false, |_| {}).await;
    let body = json!({ "model": "org/second", "prompt": "x", "stream": true });
    let mut exchange = pair.client.open_post(TEXT, &body).await;
    exchange.read_until("\"text\":\"d\"").await;
    let refused = pair.sleep("second").await;
    assert_eq!((refused.status, refused.code()), (409, "base_in_use".to_owned()));
    drop(exchange);
    eventually_async("it sleeps", async || pair.sleep("second").await.status == 200).await;
}

#[tokio::test]
async fn a_wake_lets_the_idle_base_sleep_if_the_memory_suffices_for_one() {
    let tight = |bases: &mut BasesConfig| {
        bases.host_bytes = Some(10);
        let after = Some(Duration::from_secs(3600));
        bases.sleep = SleepSettings { host_bytes: 7, after, ..SleepSettings::default() };
        bases.others[0].sleep = SleepSettings { first: SleepPhase::Asleep, host_bytes: 6, after };
    };
    let pair = BasePair::start_with(replies(), false, tight).await;
    assert_eq!(pair.states().await, ["ready", "asleep"]);
    assert_eq!(pair.models().await, ["base", "org/second"]);
    for _ in 0..2 {
        assert_eq!(pair.text("org/second").await, "cd");
        assert_eq!(pair.states().await, ["asleep", "ready"]);
        assert_eq!(pair.text("base").await, "ab");
        assert_eq!(pair.states().await, ["ready", "asleep"]);
    }
}

#[tokio::test]
async fn a_request_waits_for_memory_until_the_other_base_is_idle() {
    let tight = |bases: &mut BasesConfig| {
        bases.host_bytes = Some(10);
        let after = Some(Duration::from_secs(3600));
        bases.sleep = SleepSettings { host_bytes: 7, after, ..SleepSettings::default() };
        bases.others[0].sleep = SleepSettings { first: SleepPhase::Asleep, host_bytes: 6, after };
    };
    let slow = [say_slowly("ab", Duration::from_millis(100)), reply_with("cd")];
    let pair = BasePair::start_with(slow, false, tight).await;
    let (first, second) = tokio::join!(pair.text("base"), pair.text("org/second"));
    assert_eq!((first, second), ("ab".to_owned(), "cd".to_owned()));
}

#[tokio::test]
async fn a_base_that_does_not_wake_in_time_is_refused_with_a_time_to_try_again() {
    let hurried = |bases: &mut BasesConfig| bases.wake_timeout = Duration::from_millis(100);
    let pair = BasePair::start_with(replies(), true, hurried).await;
    assert_eq!(pair.sleep("second").await.status, 200);
    let late = pair.ask("org/second").await;
    assert_eq!((late.status, late.code()), (503, "base_still_waking".to_owned()), "{}", late.body);
    assert!(late.header("retry-after").is_some());
    assert_eq!(pair.text("base").await, "ab");
}

#[tokio::test]
async fn a_killed_executor_of_a_waking_base_is_waited_for() {
    let pair = BasePair::start_with(replies(), true, |_| {}).await;
    assert_eq!(pair.sleep("second").await.status, 200);
    let request = {
        let client = pair.client.address();
        tokio::spawn(async move {
            TestClient::new(client).post(TEXT, &json!({ "model": "org/second", "prompt": "x" })).await
        })
    };
    eventually_async("it wakes", async || pair.states().await[1] == "waking").await;
    let socket = pair.directory.path().join("b");
    for _ in 0..2 {
        let started = FakeExecutor::start_with(&socket, hang_after(""), identity(1)).await;
        started.kill().await;
    }
    let _serving = FakeExecutor::start_with(&socket, reply_with("cd"), identity(1)).await;
    assert_eq!(request.await.unwrap().status, 200);
}

#[tokio::test]
async fn without_a_supervisor_a_sleep_is_refused() {
    let alone = |bases: &mut BasesConfig| bases.supervisor = None;
    let pair = BasePair::start_with(replies(), false, alone).await;
    let refused = pair.sleep("second").await;
    assert_eq!((refused.status, refused.code()), (501, "sleep_unsupported".to_owned()));
    assert_eq!(pair.sleep("third").await.status, 404);
    assert_eq!(pair.client.get("/v1/models/base").await.json()["state"], Value::Null);
}

#[tokio::test]
async fn adapters_do_not_serve_with_another_model_in_the_place_of_their_base() {
    let pair = BasePair::start().await;
    assert_eq!(pair.load("second-tuned", Some("org/second")).await.status, 200);
    pair.kill(1).await;
    let socket = pair.directory.path().join("b");
    let replaced = FakeExecutor::start_with(&socket, reply_with("cd"), identity(8)).await;
    let told = async || pair.client.get("/v1/status").await.json()["executors"][1].clone();
    eventually_async("it is refused", async || told().await["state"] == "refused").await;
    assert!(told().await["detail"].to_string().contains("belong to another base model"));
    replaced.kill().await;
    let _restored = FakeExecutor::start_with(&socket, reply_with("cd"), identity(1)).await;
    eventually_async("it serves", async || pair.ask("second-tuned").await.status == 200).await;
}

#[tokio::test]
async fn a_restarted_gateway_finds_each_base_with_its_adapters() {
    let pair = BasePair::start().await;
    assert_eq!(pair.load("second-tuned", Some("org/second")).await.status, 200);
    let BasePair { directory, executors, gateway, .. } = pair;
    gateway.shut_down().await.unwrap();
    let mut config = config(&directory);
    config.executors = vec![address(directory.path(), "a")];
    config.bases.others = vec![second(&config, directory.path())];
    let gateway = Gateway::start(config, bytes()).await.unwrap();
    let client = TestClient::new(gateway.address);
    let ask = json!({ "model": "second-tuned", "prompt": "x" });
    eventually_async("it answers", async || client.post(TEXT, &ask).await.status == 200).await;
    assert!(directory.path().join("state/bases/second").is_dir());
    drop(executors);
}
