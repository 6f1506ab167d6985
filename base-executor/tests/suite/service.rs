//! The service over a real `ipc://` socket, with a DEALER as gateway.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use base_executor::{
    adapters::{AdapterLoadOutcome, AdapterRole, Budget},
    budget::MemoryBudget,
    config::ExecutorConfig,
    engine::event::{ConnectionId, EngineEvent},
    gateway_server::NO_REQUEST,
    loader::{self, LoadCall, LoadReply, Loader, PassReadyAdapter, PrepareError},
    model_loader::{ModelInfo, OpenedModel},
    placement::HostOnlyPlacement,
    serve,
};
use clap::Parser as _;
use kv_cache::ledger::MemoryAccount;
use model::{
    adapter::{Adapter, AnyAdapter, LoraModule, MethodWeights},
    shape::source::Target,
};
use shmproto::{
    codec::Wire as _,
    message::{
        AdapterPart, DeviceFacts, ErrorCode, Failed, Finish, Generate, Hello, LoadAdapter, PROTOCOL_VERSION,
        ToExecutor, ToGateway, UnloadAdapter,
    },
};
use tokio::{sync::mpsc, time::timeout};
use types::{AdapterId, AdapterVersion, TenantId};
use zeromq::SocketSend as _;

use crate::{
    common::{FakeAdapter, FakePass, VOCAB, prompt, request},
    gateway::{EVERYBODY, Gateway, WATCHDOG},
};

/// Reads `.../NUMBER`: an adapter of that version with that many elements.
struct FakeLoader;

fn id(owner: [u8; 32], number: u8) -> [u8; 32] {
    AdapterId::new(TenantId(owner), AdapterVersion([number; 32])).0
}

impl Loader for FakeLoader {
    type Adapter = FakeAdapter;

    fn read(&self, path: &Path) -> anyhow::Result<(AnyAdapter, Vec<String>)> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        assert_ne!(name, "panic", "a file that the reader cannot bear");
        let number: u8 = name.parse().map_err(|_| anyhow::anyhow!("it has no adapter_config.json"))?;
        let module = LoraModule {
            layer: 0,
            target: Target::Q,
            rank: 4,
            scale: 1.0,
            a: vec![0.0; number.into()],
            b: Vec::new(),
        };
        let adapter = Adapter {
            generation: AdapterVersion([number; 32]),
            method: MethodWeights::Lora(vec![module]),
            base_model: None,
            stored_in_16_bits: true,
        };
        Ok((adapter.into(), Vec::new()))
    }

    fn prepare(&self, adapter: AnyAdapter) -> Result<PassReadyAdapter<FakeAdapter>, PrepareError> {
        let bytes = self.least_bytes(&adapter);
        let adapter = Arc::new(FakeAdapter(adapter.adapter().generation.0[0].into()));
        Ok(PassReadyAdapter { adapter, bytes, role: AdapterRole::Answers })
    }
}

struct Executor {
    socket: PathBuf,
    shutdown: mpsc::Sender<Duration>,
    thread: JoinHandle<anyhow::Result<()>>,
    _directory: tempfile::TempDir,
}

impl Executor {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("private/executor.sock");
        let (shutdown, asked) = mpsc::channel(1);
        let (on_ready, ready) = tokio::sync::oneshot::channel();
        let place = socket.clone();
        let thread = std::thread::spawn(move || {
            let config = ExecutorConfig::parse_from([
                "base-executor",
                "--model=model.gguf",
                "--socket=executor.sock",
                "--cold-start=cached",
                "--max-running=8",
                "--max-waiting=8",
                "--chunk-tokens=64",
                "--draft=off",
            ]);
            let info = ModelInfo {
                model_path: "model.gguf".to_owned(),
                base_hash: [3; 32],
                text_hash: [4; 32],
                device: DeviceFacts::default(),
                numbers: String::new(),
                context_length: 512,
                kv_blocks: 256,
            };
            let resident = OpenedModel {
                pass: FakePass::slow(256),
                loader: FakeLoader,
                placement: Box::new(HostOnlyPlacement),
                layers: None,
                budget: MemoryBudget::new(u64::MAX, 100),
                draft_model: None,
                info,
            };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(serve(&place, config, |_, _| Ok(resident), asked, || on_ready.send(()).unwrap()))
        });
        timeout(WATCHDOG, ready).await.expect("it becomes ready").expect("it starts");
        Self { socket, shutdown, thread, _directory: directory }
    }

    async fn stop(self) {
        self.shutdown.send(WATCHDOG).await.unwrap();
        self.ended().await;
    }

    async fn ended(self) {
        let joined = tokio::task::spawn_blocking(|| self.thread.join());
        timeout(WATCHDOG, joined).await.expect("it ends").unwrap().unwrap().unwrap();
        assert!(!self.socket.exists(), "the socket file is removed");
    }
}

fn failure(answer: ToGateway) -> (u64, ErrorCode) {
    match answer {
        ToGateway::Failed(Failed { request, error }) => (request, error.code),
        other => panic!("a failure was expected: {other:?}"),
    }
}

#[tokio::test]
async fn a_gateway_says_hello_and_gets_tokens() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::connect(&executor.socket).await;
    let welcome = gateway.hello(1).await;
    assert_eq!((welcome.context_length, welcome.vocab_size, welcome.kv_blocks), (512, VOCAB as u32, 32));
    assert_eq!((welcome.base_hash, welcome.model_path.as_str()), ([3; 32], "model.gguf"));
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 100), 10))).await;
    gateway.send(ToExecutor::Generate(request(2, prompt(2, 10), 10))).await;
    assert_eq!(gateway.tokens(1).await.len(), 10);
    assert_eq!(gateway.outputs(2).await.last().unwrap().finish, Some(Finish::Length));
    executor.stop().await;
}

#[tokio::test]
async fn another_version_is_refused_with_both_versions() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::connect(&executor.socket).await;
    gateway.send(ToExecutor::Hello(Hello { version: 999, instance: 1 })).await;
    let Some(ToGateway::Refused(reason)) = gateway.try_receive().await else { panic!("it is refused") };
    assert!(reason.contains("999") && reason.contains(&format!("version {PROTOCOL_VERSION}")), "{reason}");
    executor.stop().await;
}

#[tokio::test]
async fn who_does_not_say_hello_first_is_refused() {
    let executor = Executor::start().await;
    for first in
        [ToExecutor::Generate(request(1, prompt(1, 10), 1)).to_bytes(), b"\xffnonsense".to_vec(), Vec::new()]
    {
        let mut gateway = Gateway::connect(&executor.socket).await;
        gateway.socket.send(first.into()).await.unwrap();
        assert!(matches!(gateway.try_receive().await, Some(ToGateway::Refused(_))));
    }
    executor.stop().await;
}

#[tokio::test]
async fn an_unreadable_message_is_one_error_and_the_other_requests_go_on() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 50))).await;

    let mut cut = ToExecutor::Generate(request(2, prompt(2, 10), 5)).to_bytes();
    cut.truncate(30);
    gateway.socket.send(cut.into()).await.unwrap();
    assert_eq!(gateway.error(2).await, Some(ErrorCode::InvalidRequest));

    let mut long = ToExecutor::GetStats(3).to_bytes();
    long.push(0);
    gateway.socket.send(long.into()).await.unwrap();
    assert_eq!(failure(gateway.answer().await), (3, ErrorCode::InvalidRequest));

    gateway.socket.send(b"\xff".to_vec().into()).await.unwrap();
    assert_eq!(failure(gateway.answer().await), (NO_REQUEST, ErrorCode::InvalidRequest));

    let mut two_frames = zeromq::ZmqMessage::from(ToExecutor::GetStats(4).to_bytes());
    two_frames.push_back(b"more".to_vec().into());
    gateway.socket.send(two_frames).await.unwrap();
    assert_eq!(failure(gateway.answer().await), (4, ErrorCode::InvalidRequest));

    assert_eq!(gateway.tokens(1).await.len(), 50);
    executor.stop().await;
}

#[tokio::test]
async fn a_gateway_that_disappears_has_its_requests_cancelled() {
    let executor = Executor::start().await;
    let mut lost = Gateway::greet(&executor.socket, 1).await;
    lost.send(ToExecutor::Generate(request(1, prompt(1, 10), 500))).await;
    let mut stays = Gateway::greet(&executor.socket, 2).await;
    stays.send(ToExecutor::Generate(request(1, prompt(2, 10), 300))).await;
    stays.stats_when(|stats| stats.running == 2).await;
    drop(lost);
    let stats = stays.stats_when(|stats| stats.running == 1).await;
    assert_eq!(stats.cancelled, 1);
    assert_eq!(stays.tokens(1).await.len(), 300);
    executor.stop().await;
}

#[tokio::test]
async fn another_instance_on_the_same_connection_begins_anew_and_the_same_one_does_not() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 500))).await;
    gateway.stats_when(|stats| stats.running == 1).await;
    gateway.hello(1).await;
    assert_eq!(gateway.stats().await.running, 1, "the same gateway has merely asked again");
    gateway.hello(2).await;
    let stats = gateway.stats_when(|stats| stats.running == 0).await;
    assert_eq!((stats.cancelled, stats.kv_blocks_used), (1, 0));
    gateway.send(ToExecutor::Generate(request(1, prompt(2, 10), 5))).await;
    gateway.answers.clear();
    assert_eq!(gateway.tokens(1).await.len(), 5);
    executor.stop().await;
}

#[tokio::test]
async fn a_gateway_that_comes_back_on_another_connection_ends_its_former_one() {
    let executor = Executor::start().await;
    let mut former = Gateway::greet(&executor.socket, 1).await;
    former.send(ToExecutor::Generate(request(1, prompt(1, 10), 500))).await;
    former.stats_when(|stats| stats.running == 1).await;
    // Gateway and executor may disagree about a connection for a while after one of them was stopped.
    let mut again = Gateway::greet(&executor.socket, 1).await;
    again.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    let stats = again.stats().await;
    assert_eq!((stats.running + stats.waiting, stats.cancelled), (1, 1), "only what is asked for now");
    assert_eq!(again.tokens(1).await.len(), 5);
    executor.stop().await;
}

#[tokio::test]
async fn a_gateway_that_stops_reading_disturbs_no_other_and_finds_its_tokens_when_it_goes_on() {
    let executor = Executor::start().await;
    let mut stopped = Gateway::greet(&executor.socket, 1).await;
    let chatty = Generate { logprobs: Some(20), ..request(1, prompt(1, 10), 400) };
    stopped.send(ToExecutor::Generate(chatty)).await;
    let mut other = Gateway::greet(&executor.socket, 2).await;
    for id in 1..=5 {
        other.send(ToExecutor::Generate(request(id, prompt(id, 10), 100))).await;
        assert_eq!(other.tokens(id).await.len(), 100);
    }
    assert_eq!(stopped.tokens(1).await.len(), 400);
    executor.stop().await;
}

#[tokio::test]
async fn a_cancelled_request_is_not_answered_any_more() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 500))).await;
    gateway.stats_when(|stats| stats.running == 1).await;
    gateway.send(ToExecutor::Cancel(1)).await;
    let stats = gateway.stats_when(|stats| stats.cancelled == 1).await;
    assert_eq!((stats.running, stats.kv_blocks_used), (0, 0));
    executor.stop().await;
}

#[tokio::test]
async fn adapters_are_loaded_used_and_unloaded() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    let ToGateway::AdapterLoaded(loaded) = gateway.load(1, "20").await else { panic!("it is loaded") };
    assert_eq!((loaded.generation, loaded.rank, loaded.bytes, loaded.modules), ([20; 32], 4, 40, 1));
    let ToGateway::AdapterLoaded(again) = gateway.load(2, "20").await else { panic!("it is there already") };
    assert_eq!((again.request, again.generation, again.adapter), (2, [20; 32], loaded.adapter));
    assert_eq!(loaded.adapter, id(EVERYBODY, 20));
    assert_eq!(gateway.stats().await.adapter_bytes, 40);
    assert_eq!(Gateway::connect(&executor.socket).await.hello(2).await.adapters, [loaded.adapter]);

    let adapted = Generate { adapter: Some(loaded.adapter), ..request(1, prompt(1, 10), 60) };
    gateway.send(ToExecutor::Generate(adapted)).await;
    gateway.send(ToExecutor::Generate(request(2, prompt(1, 10), 60))).await;
    gateway.send(ToExecutor::UnloadAdapter(UnloadAdapter { request: 3, adapter: loaded.adapter })).await;
    let ToGateway::AdapterUnloaded(unloaded) = gateway.answer().await else { panic!("it is unloaded") };
    assert_eq!((unloaded.request, unloaded.freed_bytes), (3, 40));
    let outputs = gateway.answers[&1].iter().filter(|one| one.finish.is_some()).count();
    assert_eq!(outputs, 1, "the request on the adapter ended before");
    assert_ne!(gateway.tokens(1).await, gateway.tokens(2).await);
    assert_eq!(gateway.stats().await.adapter_bytes, 0);
    executor.stop().await;
}

#[tokio::test]
async fn several_adapters_are_loaded_as_one_and_nothing_is_not() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    let part = |name: &str, weight| AdapterPart { path: format!("/adapters/{name}"), weight };
    let mut ask = async |request, parts| {
        let call = LoadAdapter { request, parts, owner: EVERYBODY };
        gateway.send(ToExecutor::LoadAdapter(call)).await;
        gateway.answer().await
    };
    let ToGateway::AdapterLoaded(sum) = ask(1, vec![part("20", 0.5), part("30", 1.0)]).await else {
        panic!("it is loaded")
    };
    let of = |number: u8, weight: f32| (AdapterVersion([number; 32]), weight.to_bits());
    let generation = AdapterVersion::of_sum(vec![of(30, 1.0), of(20, 0.5)]);
    assert_eq!((sum.generation, sum.rank, sum.bytes), (generation.0, 8, 100));
    assert_eq!(sum.adapter, AdapterId::new(TenantId(EVERYBODY), generation).0);
    for (request, parts, says) in [
        (2, vec![], "no adapter is named"),
        (3, vec![part("20", 1.0), part("nothing", 1.0)], "/adapters/nothing"),
        (4, vec![part("20", f32::MAX), part("20", f32::INFINITY)], "too large"),
    ] {
        let ToGateway::Failed(failed) = ask(request, parts).await else { panic!("it is refused") };
        assert_eq!((failed.request, failed.error.code), (request, ErrorCode::InvalidAdapter));
        assert!(failed.error.message.contains(says), "{}", failed.error.message);
    }
    executor.stop().await;
}

#[tokio::test]
async fn the_same_bytes_under_two_owners_are_two_adapters() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    let (one, other) = ([1; 32], [2; 32]);
    let ToGateway::AdapterLoaded(ours) = gateway.load_for(one, 1, "20").await else { panic!("it is loaded") };
    let ToGateway::AdapterLoaded(theirs) = gateway.load_for(other, 2, "20").await else {
        panic!("and again")
    };
    assert_eq!((ours.generation, theirs.generation), ([20; 32], [20; 32]));
    assert_eq!((ours.adapter, theirs.adapter), (id(one, 20), id(other, 20)));
    assert_eq!(gateway.stats().await.adapter_bytes, 80, "each has its own copy");

    gateway.send(ToExecutor::UnloadAdapter(UnloadAdapter { request: 3, adapter: ours.adapter })).await;
    assert!(matches!(gateway.answer().await, ToGateway::AdapterUnloaded(_)));
    gateway
        .send(ToExecutor::Generate(Generate { adapter: Some(ours.adapter), ..request(1, prompt(1, 10), 5) }))
        .await;
    assert_eq!(gateway.error(1).await, Some(ErrorCode::AdapterNotFound));
    gateway
        .send(ToExecutor::Generate(Generate {
            adapter: Some(theirs.adapter),
            ..request(2, prompt(1, 10), 5)
        }))
        .await;
    assert_eq!(gateway.tokens(2).await.len(), 5, "one owner's unloading does not touch the other's");
    executor.stop().await;
}

#[tokio::test]
async fn an_adapter_that_cannot_be_loaded_is_a_typed_error_and_the_next_one_is_loaded() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    assert_eq!(failure(gateway.load(1, "nothing").await), (1, ErrorCode::InvalidAdapter));
    assert_eq!(failure(gateway.load(2, "panic").await), (2, ErrorCode::Internal));
    assert_eq!(
        failure(gateway.load(3, "51").await),
        (3, ErrorCode::AdapterBudgetExceeded),
        "102 bytes of 100"
    );
    assert!(matches!(gateway.load(4, "50").await, ToGateway::AdapterLoaded(_)));
    assert_eq!(failure(gateway.load(5, "1").await), (5, ErrorCode::AdapterBudgetExceeded));
    gateway.send(ToExecutor::UnloadAdapter(UnloadAdapter { request: 6, adapter: id(EVERYBODY, 50) })).await;
    assert!(matches!(gateway.answer().await, ToGateway::AdapterUnloaded(_)));
    assert!(matches!(gateway.load(7, "1").await, ToGateway::AdapterLoaded(_)));
    executor.stop().await;
}

#[tokio::test]
async fn a_shutdown_finishes_what_runs_and_refuses_what_is_new() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 300))).await;
    gateway.stats_when(|stats| stats.running == 1).await;
    executor.shutdown.send(WATCHDOG).await.unwrap();
    let mut id = 2;
    // The signal and the message are not ordered, so the first requests may still be accepted.
    loop {
        gateway.send(ToExecutor::Generate(request(id, prompt(id, 4), 1))).await;
        if gateway.error(id).await == Some(ErrorCode::ShuttingDown) {
            break;
        }
        id += 1;
    }
    assert_eq!(gateway.tokens(1).await.len(), 300);
    executor.ended().await;
}

#[tokio::test]
async fn a_shutdown_without_grace_ends_every_request_with_an_error() {
    let executor = Executor::start().await;
    let mut gateway = Gateway::greet(&executor.socket, 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 500))).await;
    gateway.stats_when(|stats| stats.running == 1).await;
    executor.shutdown.send(Duration::ZERO).await.unwrap();
    assert_eq!(gateway.error(1).await, Some(ErrorCode::ShuttingDown));
    executor.ended().await;
}

#[test]
fn a_load_is_answered_while_the_engine_computes_unless_it_must_find_a_place_first() {
    let load = |reply: LoadReply| {
        let (engine, mut events) = mpsc::channel(4);
        let (calls, queue) = mpsc::channel(4);
        let (outbox, mut replies) = mpsc::channel(4);
        for request in [1, 2] {
            let parts = vec![AdapterPart { path: "/7".to_owned(), weight: 1.0 }];
            let call = LoadAdapter { request, parts, owner: EVERYBODY };
            let outbox = outbox.downgrade();
            calls.try_send(LoadCall { connection: ConnectionId(1), call, outbox }).unwrap();
        }
        drop(calls);
        let budget = Budget::new(MemoryAccount::new("adapters", 1000));
        loader::run(&FakeLoader, &budget, queue, &engine, reply);
        let EngineEvent::AdapterLoaded { caller, loaded } = events.try_recv().unwrap() else {
            panic!("the engine gets the adapter")
        };
        assert!(matches!(loaded, AdapterLoadOutcome::New(_)));
        let EngineEvent::AdapterLoaded { caller: Some(again), loaded } = events.try_recv().unwrap() else {
            panic!("the engine answers the second call")
        };
        assert!(matches!(loaded, AdapterLoadOutcome::Known(_)), "the adapter was loaded before");
        assert_eq!(again.request, 2);
        (caller.map(|caller| caller.request), replies.try_recv().ok())
    };
    let (caller, reply) = load(LoadReply::ByLoader);
    let Some(ToGateway::AdapterLoaded(loaded)) = reply else { panic!("the loader answers: {reply:?}") };
    assert_eq!((caller, loaded.request, loaded.adapter), (None, 1, id(EVERYBODY, 7)));
    let (caller, reply) = load(LoadReply::ByEngine);
    assert_eq!((caller, reply), (Some(1), None));
}
