//! Tests of the connection with a ROUTER that loads, falls silent and returns as each test needs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use shmproto::message::{
    ColdStart, DeviceFacts, Finish, Hello, Loading, Output, PROTOCOL_VERSION, Precision, ProvisionalMode,
    Sampling, ToGateway, Welcome,
};
use testkit::WATCHDOG;
use tokio::{task::JoinHandle, time::timeout};
use zeromq::{RouterSendHalf, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::{link_messages::SequenceEvent, *};
use crate::tenant_memory::{MemoryLimits, TenantMemory};

/// Long enough for an answer of a busy machine, and short enough for a test to wait for.
const SILENCE: Duration = Duration::from_secs(5);

/// Returns the backlog of a tenant with enough memory.
fn backlog() -> Arc<Backlog> {
    let memory = TenantMemory::new(MemoryLimits::default());
    Backlog::new(memory.reserve(&"alice".into(), 0).unwrap())
}

/// Starts `count` sequences that release their slots when they end.
fn start(executor: &Executor, epoch: u64, count: usize) -> Result<SequenceBatch, CallError> {
    let sequences = vec![sequence(); count];
    executor.generate(epoch, sequences, EndedSlots::Release, &mut Vec::new(), backlog())
}

/// An executor that accepts three sequences and generates only on a test's request.
struct Router {
    state: Arc<FakeRouterState>,
    task: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

#[derive(Default)]
struct FakeRouterState {
    /// If true, the router reads but does not answer, like a stopped process.
    is_mute: AtomicBool,
    /// Answers to a hello before the welcome.
    loading: Mutex<Vec<Loading>>,
    hellos: Mutex<Vec<Hello>>,
    generates: Mutex<Vec<Generate>>,
    /// The connection that last sent a message.
    peer: Mutex<Option<(RouterSendHalf, Vec<u8>)>>,
}

impl Router {
    async fn start(state: FakeRouterState) -> (Self, Executor) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("executor.sock");
        let mut socket = RouterSocket::new();
        socket.bind(&format!("ipc://{}", path.display())).await.unwrap();
        let state = Arc::new(state);
        let task = tokio::spawn(Arc::clone(&state).serve(socket));
        let limits = LinkSettings { max_sequences: 64, silence: SILENCE };
        (
            Self { state, task, _directory: directory },
            Executor::connect(Endpoint::Socket(path), limits, SharedConnections::default()),
        )
    }

    fn mute(&self, is_mute: bool) {
        self.state.is_mute.store(is_mute, Ordering::SeqCst);
    }

    fn generates(&self) -> Vec<Generate> {
        self.state.generates.lock().unwrap().clone()
    }

    async fn eventually_generates(&self, count: usize) {
        let so = async {
            while self.generates().len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(WATCHDOG, so).await.expect("the sequences arrive");
    }

    async fn end(&self, request: RequestId) {
        let output = Output { request, finish: Some(Finish::Length), ..Output::default() };
        let peer = self.state.peer.lock().unwrap().clone();
        send_message(&peer.unwrap(), &ToGateway::Outputs(vec![output])).await;
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeRouterState {
    async fn serve(self: Arc<Self>, socket: RouterSocket) {
        let (send, mut receive) = socket.split();
        while let Ok(message) = receive.recv().await {
            let peer = (send.clone(), message.get(0).unwrap().to_vec());
            self.peer.lock().unwrap().replace(peer.clone());
            if self.is_mute.load(Ordering::SeqCst) {
                continue;
            }
            match ToExecutor::from_bytes(message.get(1).unwrap()).unwrap() {
                ToExecutor::Hello(hello) => {
                    self.hellos.lock().unwrap().push(hello);
                    let loading = std::mem::take(&mut *self.loading.lock().unwrap());
                    for step in loading {
                        send_message(&peer, &ToGateway::Loading(step)).await;
                        tokio::time::sleep(SILENCE * 3 / 4).await;
                    }
                    send_message(&peer, &ToGateway::Welcome(welcome())).await;
                }
                ToExecutor::Generate(generate) => self.generates.lock().unwrap().push(generate),
                ToExecutor::GetStats(request) => {
                    send_message(&peer, &ToGateway::Stats(Stats { request, ..Stats::default() })).await;
                }
                _ => {}
            }
        }
    }
}

async fn send_message((send, peer): &(RouterSendHalf, Vec<u8>), message: &ToGateway) {
    let mut frames = ZmqMessage::from(peer.clone());
    frames.push_back(message.to_bytes().into());
    // The gateway may have closed the connection.
    let _ = send.clone().send(frames).await;
}

pub(crate) fn welcome() -> Welcome {
    Welcome {
        version: PROTOCOL_VERSION,
        instance: 7,
        model_path: String::new(),
        base_hash: [0; 32],
        text_hash: [0; 32],
        device: DeviceFacts::default(),
        numbers: String::new(),
        context_length: 64,
        vocab_size: 64,
        adapter_budget_bytes: 0,
        device_budget_bytes: 0,
        cold_start: ColdStart::CpuAssist,
        kv_blocks: 64,
        block_tokens: 16,
        max_running: 2,
        max_waiting: 1,
        chunk_tokens: 64,
        adapters: Vec::new(),
    }
}

fn sequence() -> Generate {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Generate {
        request: 0,
        adapter: None,
        namespace: [0; 32],
        base_namespace: [0; 32],
        owner: [0; 32],
        prompt: vec![1],
        generated: 0,
        max_tokens: 4,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        sampling,
        logprobs: None,
        prompt_logprobs: None,
        deadline_ms: 0,
        provisional: ProvisionalMode::Unwanted,
        precision: Precision::Serving,
        grammar: None,
        pooling: None,
        expected: Vec::new(),
    }
}

async fn until(executor: &Executor, is_so: impl FnMut(&LinkState) -> bool) -> LinkState {
    let mut link = executor.link();
    timeout(WATCHDOG, link.wait_for(is_so)).await.expect("the link becomes so").unwrap().clone()
}

async fn up(executor: &Executor) -> u64 {
    match until(executor, |link| matches!(link, LinkState::Up { .. })).await {
        LinkState::Up { epoch, .. } => epoch,
        other => panic!("{other:?}"),
    }
}

async fn next(batch: &mut SequenceBatch) -> SequenceEvent {
    timeout(WATCHDOG, batch.next()).await.expect("something happens").unwrap().1
}

#[tokio::test]
async fn an_executor_that_loads_for_longer_than_the_silence_is_waited_for_while_it_says_so() {
    let steps = [3, 43, 97].map(|percent| Loading { stage: "reading weights".to_owned(), percent });
    let loading = Mutex::new(steps.to_vec());
    let (router, executor) = Router::start(FakeRouterState { loading, ..FakeRouterState::default() }).await;
    let is =
        |link: &LinkState, wanted| matches!(link, LinkState::Loading { percent, .. } if *percent == wanted);
    until(&executor, |link| is(link, 43)).await;
    assert_eq!(up(&executor).await, 1);
    assert_eq!(router.state.hellos.lock().unwrap().len(), 1, "one connection waited for it all");
}

#[tokio::test]
async fn more_sequences_than_the_executor_takes_are_refused_without_asking_it() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    assert_eq!(executor.load().limit, 3, "two run and one waits");
    let three = start(&executor, 1, 3).unwrap();
    router.eventually_generates(3).await;
    // The router no longer answers, so the refusal below cannot come from it.
    router.mute(true);
    let refused = start(&executor, 1, 1).unwrap_err();
    assert_eq!(refused, CallError::Busy { limit: 3, what: "sequences", wait_s: 1 });
    assert_eq!(router.generates().len(), 3);
    drop(three);
}

#[tokio::test]
async fn a_sequence_that_ends_makes_room_for_another() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    let mut three = start(&executor, 1, 3).unwrap();
    router.eventually_generates(3).await;
    router.end(router.generates()[0].request).await;
    assert!(matches!(next(&mut three).await, SequenceEvent::Output(_)));
    let _one = start(&executor, 1, 1).unwrap();
    assert!(start(&executor, 1, 1).is_err());
}

#[tokio::test]
async fn a_sequence_with_further_stages_keeps_its_slot_between_them() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    let all = vec![sequence(); 3];
    let mut three = executor.generate(1, all, EndedSlots::Keep, &mut Vec::new(), backlog()).unwrap();
    router.eventually_generates(3).await;
    for stage in 0..2 {
        router.end(router.generates().pop().unwrap().request).await;
        assert!(matches!(next(&mut three).await, SequenceEvent::Output(_)));
        assert!(start(&executor, 1, 1).is_err(), "nobody else gets the slot");
        if stage == 0 {
            executor.restart(&mut three, 2, 1, sequence()).unwrap();
            router.eventually_generates(4).await;
        }
    }
    three.release(2);
    start(&executor, 1, 1).unwrap();
}

#[tokio::test]
async fn an_idle_executor_that_stops_is_noticed_and_one_that_goes_on_is_welcome_again() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    router.mute(true);
    let down = until(&executor, |link| matches!(link, LinkState::Down { .. })).await;
    assert!(matches!(down, LinkState::Down { reason } if reason.contains("sent no message")));
    router.mute(false);
    assert_eq!(up(&executor).await, 2);
}

#[tokio::test]
async fn a_silence_shorter_than_the_limit_disturbs_nothing() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    let mut batch = start(&executor, 1, 1).unwrap();
    router.eventually_generates(1).await;
    router.mute(true);
    tokio::time::sleep(SILENCE / 2).await;
    router.mute(false);
    // The gateway pinged while the router was mute; the answer arrives now.
    router.end(router.generates()[0].request).await;
    assert!(matches!(next(&mut batch).await, SequenceEvent::Output(output) if output.finish.is_some()));
    assert_eq!((up(&executor).await, router.generates().len()), (1, 1));
}

#[tokio::test]
async fn what_was_prepared_for_another_connection_is_lost_and_never_sent() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    let epoch = up(&executor).await;
    for other in [epoch - 1, epoch + 1] {
        let mut batch = start(&executor, other, 1).unwrap();
        assert!(matches!(next(&mut batch).await, SequenceEvent::Lost { epoch } if epoch == other));
        assert!(router.generates().is_empty());
        executor.restart(&mut batch, 0, epoch, sequence()).unwrap();
        router.eventually_generates(1).await;
        router.state.generates.lock().unwrap().clear();
    }
}

#[tokio::test]
async fn a_lost_sequence_keeps_its_place_is_redone_once_and_hears_nothing_late() {
    let (router, executor) = Router::start(FakeRouterState::default()).await;
    up(&executor).await;
    let mut three = start(&executor, 1, 3).unwrap();
    router.eventually_generates(3).await;
    let former = router.generates();
    router.mute(true);
    for _ in 0..3 {
        assert!(matches!(next(&mut three).await, SequenceEvent::Lost { epoch: 1 }));
    }
    router.mute(false);
    up(&executor).await;
    assert!(start(&executor, 2, 1).is_err(), "the places are those of the lost ones");
    executor.restart(&mut three, 1, 2, sequence()).unwrap();
    router.eventually_generates(4).await;
    // A late output of the former connection.
    router.end(former[1].request).await;
    router.end(router.generates()[3].request).await;
    let SequenceEvent::Output(output) = next(&mut three).await else { panic!("it ends") };
    assert_eq!(output.request, router.generates()[3].request);
    assert!(timeout(WATCHDOG, three.next()).await.unwrap().is_none(), "and only once");
    assert_eq!(router.generates().len(), 4, "nothing else was sent again");
    drop(three);
    assert!(start(&executor, 2, 3).is_ok(), "given up, they make room");
}
