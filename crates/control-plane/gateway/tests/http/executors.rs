//! Two executors behind one gateway: routing of requests, and their continuation on the other one.

use gateway::{executor::Endpoint, executors::Address, lifecycle::GatewayReadiness, server::Gateway};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    client::{Response, TestClient},
    fake_executor::{FakeExecutor, FakeModelIdentity, Reply, hang_after, reply_with},
    harness::{WATCHDOG, config, eventually, eventually_async},
    text::{bytes, tokens},
};

const TEXT: &str = "/v1/completions";

struct ExecutorPair {
    directory: TempDir,
    executors: [Option<FakeExecutor>; 2],
    gateway: Gateway,
    client: TestClient,
}

impl ExecutorPair {
    async fn start(replies: [Reply; 2]) -> Self {
        let pair = Self::start_with(replies, FakeModelIdentity::default()).await;
        let ready = async |status: Value| {
            status["executors"].as_array().unwrap().iter().all(|one| one["state"] == "ready")
        };
        eventually_async("both are ready", async || ready(pair.status().await).await).await;
        pair
    }

    async fn start_with([a, b]: [Reply; 2], model: FakeModelIdentity) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("adapters")).unwrap();
        let a = FakeExecutor::start(&directory.path().join("a"), a).await;
        let mut config = config(&directory);
        let address = |name: &str| Address {
            name: name.to_owned(),
            endpoint: Endpoint::Socket(directory.path().join(name)),
        };
        config.executors = ["a", "b"].map(address).into();
        config.telemetry.expected_workers = vec![2, 5];
        let gateway = Gateway::start(config, bytes()).await.unwrap();
        let mut status = gateway.status.clone();
        let ready = status.wait_for(|status| matches!(status, GatewayReadiness::Ready(_)));
        tokio::time::timeout(WATCHDOG, ready).await.expect("one is ready").unwrap();
        let b = FakeExecutor::start_with(&directory.path().join("b"), b, model).await;
        let client = TestClient::new(gateway.address);
        Self { directory, executors: [Some(a), Some(b)], gateway, client }
    }

    fn executor(&self, index: usize) -> &FakeExecutor {
        self.executors[index].as_ref().unwrap()
    }

    async fn kill(&mut self, index: usize) {
        self.executors[index].take().unwrap().kill().await;
    }

    async fn status(&self) -> Value {
        self.client.get("/v1/status").await.json()
    }

    async fn order(&self, order: &str) -> Response {
        self.client.post(&format!("/v1/executors/{order}"), &json!({})).await
    }

    async fn load(&self, name: &str) {
        let path = self.directory.path().join("adapters").join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(path.join("adapter_model.safetensors"), name).unwrap();
        let body = json!({ "lora_name": name, "lora_path": path });
        assert_eq!(self.client.post("/v1/load_lora_adapter", &body).await.status, 200);
    }

    fn sent(&self) -> [usize; 2] {
        [0, 1].map(|index| self.executor(index).generates().len())
    }

    /// A request of which the client has read "ab".
    async fn under_way(&self, body: &Value) -> tokio::task::JoinHandle<Response> {
        let mut exchange = self.client.open_post(TEXT, body).await;
        exchange.read_until_any(&["\"text\":\"b\"", "\"text\":\"ab\""]).await;
        tokio::spawn(exchange.rest())
    }
}

fn ask(model: &str, prompt: &str) -> Value {
    json!({ "model": model, "prompt": prompt, "stream": true, "max_tokens": 10, "seed": 5 })
}

fn spoken(response: &Response) -> String {
    let text = |chunk: Value| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    response.chunks().into_iter().map(text).collect()
}

#[tokio::test]
async fn requests_at_once_go_to_different_executors() {
    let pair = ExecutorPair::start([hang_after("ab"), hang_after("ab")]).await;
    let first = pair.under_way(&ask("base", "one")).await;
    let second = pair.under_way(&ask("base", "two")).await;
    assert_eq!(pair.sent(), [1, 1]);
    first.abort();
    second.abort();
}

#[tokio::test]
async fn what_a_dead_executor_had_goes_on_on_the_other_with_what_was_emitted() {
    let mut pair = ExecutorPair::start([hang_after("ab"), reply_with("cd")]).await;
    let request = pair.under_way(&ask("base", "xy")).await;
    assert_eq!(pair.sent(), [1, 0]);
    pair.kill(0).await;
    assert_eq!(spoken(&request.await.unwrap()), "abcd");
    let again = &pair.executor(1).generates()[0];
    assert_eq!(again.prompt, [&[257][..], &tokens("xyab")].concat());
    assert_eq!((again.generated, again.max_tokens, again.sampling.seed), (2, 8, 5));
    let told = pair.status().await;
    assert_eq!(told["executors"][1]["sequences"]["taken_over"], 1);
    assert_eq!((&told["executors"][0]["state"], &told["ready"]), (&json!("lost"), &json!(true)));
}

#[tokio::test]
async fn an_adapter_goes_along_with_what_is_gone_on_with() {
    let mut pair = ExecutorPair::start([hang_after("ab"), reply_with("cd")]).await;
    pair.load("tuned").await;
    assert_eq!(
        (pair.executor(0).loads().len(), pair.executor(1).loads().len()),
        (1, 0),
        "where it was asked for"
    );
    let request = pair.under_way(&ask("tuned", "xy")).await;
    pair.kill(0).await;
    assert_eq!(spoken(&request.await.unwrap()), "abcd");
    assert_eq!(pair.executor(1).loads().len(), 1);
    assert!(pair.executor(1).generates()[0].adapter.is_some());
}

#[tokio::test]
async fn an_executor_of_another_base_is_refused_by_name_and_gets_nothing() {
    let other = FakeModelIdentity { base_hash: [9; 32], ..FakeModelIdentity::default() };
    let mut pair = ExecutorPair::start_with([reply_with("ab"), reply_with("cd")], other).await;
    let told = async || pair.status().await["executors"][1].clone();
    eventually_async("it is refused", async || told().await["state"] == "refused").await;
    let why = told().await["detail"].to_string();
    assert!(why.contains("another base model than the executor 'a'"), "{why}");
    for _ in 0..3 {
        assert_eq!(spoken(&pair.client.post(TEXT, &ask("base", "x")).await), "ab");
    }
    assert_eq!(pair.sent(), [3, 0]);
    pair.kill(0).await;
    // After the first executor's end, the base of the second one is used.
    let next = async || pair.client.post(TEXT, &ask("base", "x")).await.status == 200;
    eventually_async("it is used once the other is gone", next).await;
}

#[tokio::test]
async fn a_drained_executor_gets_nothing_new_and_the_last_one_cannot_be_drained() {
    let pair = ExecutorPair::start([hang_after("ab"), reply_with("cd")]).await;
    let request = pair.under_way(&ask("base", "xy")).await;
    let drained = pair.order("a/drain").await.json();
    assert_eq!((&drained["drained"], &drained["sequences_under_way"]), (&json!(true), &json!(1)));
    for _ in 0..3 {
        assert_eq!(spoken(&pair.client.post(TEXT, &ask("base", "xy")).await), "cd");
    }
    assert_eq!(pair.sent(), [1, 3]);
    let refused = pair.order("b/drain").await;
    assert_eq!((refused.status, refused.code().as_str()), (409, "last_executor"));
    assert_eq!(pair.order("c/drain").await.status, 404);
    assert_eq!(pair.order("a/undrain").await.json()["drained"], false);
    assert_eq!(pair.order("b/drain").await.status, 200);
    request.abort();
}

#[tokio::test]
async fn what_a_drained_executor_still_has_moves_when_it_stops() {
    let mut pair = ExecutorPair::start([hang_after("ab"), reply_with("cd")]).await;
    let request = pair.under_way(&ask("base", "xy")).await;
    pair.order("a/drain").await;
    pair.kill(0).await;
    assert_eq!(spoken(&request.await.unwrap()), "abcd");
    // A new process stays drained until an undrain.
    let socket = pair.directory.path().join("a");
    pair.executors[0] = Some(FakeExecutor::start(&socket, reply_with("ef")).await);
    let state = async || pair.status().await["executors"][0]["state"].clone();
    eventually_async("it is back", async || state().await == "drained").await;
    assert_eq!(spoken(&pair.client.post(TEXT, &ask("base", "other")).await), "cd");
    pair.order("a/undrain").await;
    assert_eq!(state().await, "ready");
}

#[tokio::test]
async fn a_prompt_goes_where_its_beginning_was_computed() {
    let pair = ExecutorPair::start([reply_with("x"), reply_with("x")]).await;
    let prompt = "a beginning that fills more than one block of sixteen tokens";
    pair.order("a/drain").await;
    pair.client.post(TEXT, &ask("base", prompt)).await;
    pair.order("a/undrain").await;
    pair.client.post(TEXT, &ask("base", &format!("{prompt}, and goes on"))).await;
    assert_eq!(pair.sent(), [0, 2]);
    pair.client.post(TEXT, &ask("base", "something that nobody has computed so far, at any time")).await;
    assert_eq!(pair.sent(), [1, 2]);
}

#[tokio::test]
async fn an_adapter_is_unloaded_everywhere_and_pinned_everywhere() {
    let pair = ExecutorPair::start([reply_with("x"), reply_with("x")]).await;
    pair.load("tuned").await;
    let name = json!({ "lora_name": "tuned" });
    let pin = json!({ "lora_name": "tuned", "pinned": true });
    assert_eq!(pair.client.post("/v1/pin_lora_adapter", &pin).await.status, 200);
    assert_eq!([0, 1].map(|index| pair.executor(index).loads().len()), [1, 1]);
    assert_eq!(pair.client.post("/v1/unload_lora_adapter", &name).await.status, 200);
    eventually("both have freed it", || {
        [0, 1].iter().all(|index| pair.executor(*index).unloads().len() == 1)
    })
    .await;
}

#[tokio::test]
async fn figures_of_several_executors_say_whose_they_are() {
    let pair = ExecutorPair::start([reply_with("x"), reply_with("x")]).await;
    let seen = async || pair.client.get("/metrics").await.body;
    let running = |name: &str| format!("holobiont_executor_up{{executor=\"{name}\"}} 1\n");
    eventually_async("both report", async || {
        let text = seen().await;
        ["a", "b"].iter().all(|name| text.contains(&running(name)))
    })
    .await;
    let text = seen().await;
    for (name, workers) in [("a", 2), ("b", 5)] {
        let expected = format!("holobiont_workers_expected{{executor=\"{name}\"}} {workers}\n");
        assert!(text.contains(&expected), "{text}");
    }
    assert!(
        !text.contains("\nholobiont_executor_up 1") && !text.contains("\nholobiont_engine_steps_total 0"),
        "{text}"
    );
    let told = pair.status().await;
    assert_eq!(told["requests"], json!({ "running": 4, "waiting": 6 }));
    assert_eq!(told["executors"][1]["requests"], json!({ "running": 2, "waiting": 3 }));
    let expected = [0, 1].map(|index| told["executors"][index]["workers"]["expected"].clone());
    assert_eq!(expected, [2, 5]);
    assert!(told.get("device").is_none() && told["executors"][0]["device"]["kind"] == "cuda");
    drop(pair.gateway);
}
