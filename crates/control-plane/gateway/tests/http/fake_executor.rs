//! A ROUTER socket with canned answers that records its requests.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use shmproto::{
    codec::Wire as _,
    layer::control::SessionStats,
    message::{
        AdapterLoaded, AdapterPart, AdapterStats, AdapterUnloaded, BlockUpdate, ColdStart, DeviceFacts,
        DeviceKind, DraftKind, ErrorCode, Failed, Finish, Generate, LayerRoute, LayerSession, LayerStats,
        LoadAdapter, MemoryAccountStats, MemoryStats, Output, PROTOCOL_VERSION, SpeculationStats, Stats,
        TenantUse, ToExecutor, ToGateway, TokenOutput, WeightStats, Welcome, WireError, WorkerStats,
    },
};
use tokio::task::{AbortHandle, JoinHandle};
use types::{AdapterId, AdapterVersion, TenantId};
use zeromq::{RouterSendHalf, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use crate::text::{END, TEXT_HASH, VOCAB_SIZE, tokens};

pub(crate) const CONTEXT_TOKENS: u32 = 512;
/// Number of adapters that exhaust its budget.
pub(crate) const MAX_RESIDENT: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct ReplyScript {
    pub(crate) outputs: Vec<Output>,
    pub(crate) pause: Duration,
}

pub(crate) type Reply = Arc<dyn Fn(&Generate) -> ReplyScript + Send + Sync>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct FakeModelIdentity {
    pub(crate) base_hash: [u8; 32],
    pub(crate) text_hash: [u8; 32],
    /// Number of split clients.
    pub(crate) sessions: u32,
    pub(crate) device: DeviceKind,
}

impl Default for FakeModelIdentity {
    fn default() -> Self {
        Self { base_hash: [1; 32], text_hash: TEXT_HASH, sessions: 3, device: DeviceKind::Cuda }
    }
}

pub(crate) struct FakeExecutor {
    socket: PathBuf,
    pub(crate) log: Arc<Mutex<Vec<ToExecutor>>>,
    task: JoinHandle<()>,
    running: RunningReplies,
}

type RunningReplies = Arc<Mutex<HashMap<u64, AbortHandle>>>;

impl FakeExecutor {
    pub(crate) async fn start(path: &Path, reply: Reply) -> Self {
        Self::start_with(path, reply, FakeModelIdentity::default()).await
    }

    pub(crate) async fn start_with(path: &Path, reply: Reply, model: FakeModelIdentity) -> Self {
        let _ = std::fs::remove_file(path);
        let mut socket = RouterSocket::new();
        socket.bind(&format!("ipc://{}", path.display())).await.unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let running = RunningReplies::default();
        let task = tokio::spawn(serve(socket, reply, model, Arc::clone(&log), Arc::clone(&running)));
        Self { socket: path.to_owned(), log, task, running }
    }

    /// Ends the executor without notice to the gateway.
    pub(crate) async fn kill(self) {
        self.task.abort();
        self.running.lock().unwrap().values().for_each(AbortHandle::abort);
        // The library removes the socket's file on drop, which must not hit the file of the next one.
        crate::harness::eventually("the socket is gone", || !self.socket.exists()).await;
    }

    pub(crate) fn generates(&self) -> Vec<Generate> {
        self.pick(|message| match message {
            ToExecutor::Generate(generate) => Some(generate.clone()),
            _ => None,
        })
    }

    pub(crate) fn cancels(&self) -> Vec<u64> {
        self.pick(|message| match message {
            ToExecutor::Cancel(id) => Some(*id),
            _ => None,
        })
    }

    pub(crate) fn loads(&self) -> Vec<String> {
        self.pick(|message| match message {
            ToExecutor::LoadAdapter(load) => Some(paths(load)),
            _ => None,
        })
    }

    pub(crate) fn unloads(&self) -> Vec<[u8; 32]> {
        self.pick(|message| match message {
            ToExecutor::UnloadAdapter(unload) => Some(unload.adapter),
            _ => None,
        })
    }

    fn pick<T>(&self, pick: impl FnMut(&ToExecutor) -> Option<T>) -> Vec<T> {
        self.log.lock().unwrap().iter().filter_map(pick).collect()
    }
}

async fn serve(
    socket: RouterSocket,
    reply: Reply,
    model: FakeModelIdentity,
    log: Arc<Mutex<Vec<ToExecutor>>>,
    running: RunningReplies,
) {
    static INSTANCES: AtomicU64 = AtomicU64::new(1);
    let mut memory =
        FakeExecutorState { instance: INSTANCES.fetch_add(1, Relaxed), model, adapters: HashSet::new() };
    let (send, mut receive) = socket.split();
    while let Ok(message) = receive.recv().await {
        let peer = message.get(0).unwrap().to_vec();
        let message = ToExecutor::from_bytes(message.get(1).unwrap()).unwrap();
        log.lock().unwrap().push(message.clone());
        match message {
            ToExecutor::Generate(generate) => {
                let script = reply(&generate);
                let task = tokio::spawn(play(send.clone(), peer, generate.request, script));
                running.lock().unwrap().insert(generate.request, task.abort_handle());
            }
            ToExecutor::Cancel(id) => {
                if let Some(task) = running.lock().unwrap().remove(&id) {
                    task.abort();
                }
            }
            other => answer(&send, &peer, &memory.call(other)).await,
        }
    }
}

struct FakeExecutorState {
    instance: u64,
    model: FakeModelIdentity,
    adapters: HashSet<[u8; 32]>,
}

impl FakeExecutorState {
    fn call(&mut self, message: ToExecutor) -> ToGateway {
        match message {
            ToExecutor::LoadAdapter(load) if self.adapters.len() == MAX_RESIDENT => {
                let message = "the adapter budget is used up".to_owned();
                let error = WireError { code: ErrorCode::AdapterBudgetExceeded, message };
                return ToGateway::Failed(Failed { request: load.request, error });
            }
            ToExecutor::UnloadAdapter(ref unload) => {
                self.adapters.remove(&unload.adapter);
            }
            ToExecutor::GetStats(request) => return ToGateway::Stats(self.stats(request)),
            _ => {}
        }
        let mut answer = call(message);
        match &mut answer {
            ToGateway::AdapterLoaded(loaded) => {
                self.adapters.insert(loaded.adapter);
            }
            ToGateway::Welcome(welcome) => {
                welcome.instance = self.instance;
                (welcome.base_hash, welcome.text_hash) = (self.model.base_hash, self.model.text_hash);
                welcome.device.kind = self.model.device;
            }
            _ => {}
        }
        answer
    }

    fn stats(&self, request: u64) -> Stats {
        let stats = |adapter: &[u8; 32]| AdapterStats {
            adapter: *adapter,
            rank: 16,
            bytes: 1000,
            running: 1,
            waiting: 0,
            device_bytes: 250,
            cold_starts: 2,
            load_wait_us: 3000,
            rank_rows_device: 50,
            rank_rows_workers: 40,
            rank_rows_executor: 10,
            drafted: 12,
            accepted: 9,
            least_confidence: 0.5,
        };
        let worker = |core| WorkerStats { core, pid: 100 + core, slices: 6, rank_rows: 20, taken_back: 1 };
        Stats {
            request,
            waiting: 3,
            running: 2,
            kv_blocks_total: 64,
            kv_blocks_used: 16,
            kv_blocks_cached: 8,
            memory: MemoryStats {
                block_bytes: 1000,
                adapter_blocks: 4,
                disk_blocks_total: 64,
                disk_blocks_used: 32,
                fetched_disk_blocks: 3,
                spilled_blocks: 30,
                adapters_required: 2.5,
                held: MemoryAccountStats {
                    limit_bytes: 1 << 20,
                    weights_bytes: 1 << 19,
                    ..MemoryAccountStats::default()
                },
                weights: WeightStats { read_bytes: 4096, read_us: 8000, waited_us: 2000 },
                ..MemoryStats::default()
            },
            adapter_bytes: 1000 * self.adapters.len() as u64,
            adapters: self.adapters.iter().map(stats).collect(),
            prompt_tokens: 21,
            cached_tokens: 5,
            generated_tokens: 11,
            preemptions: 1,
            cancelled: 1,
            steps: 9,
            device_free_bytes: 1 << 29,
            device_bytes: 250 * self.adapters.len() as u64,
            cold_starts: 4,
            load_wait_us: 6000,
            worker_wait_us: 7000,
            copied_bytes: 8000,
            copy_us: 9000,
            link_bytes_per_s: 125_000_000,
            workers_lost: 1,
            speculation: speculation_stats(),
            workers: vec![worker(2), worker(3)],
            layers: LayerStats { open: self.model.sessions, ..layer_stats() },
        }
    }
}

fn speculation_stats() -> SpeculationStats {
    SpeculationStats {
        kind: DraftKind::Itself,
        adapter: [7; 32],
        verifications: 5,
        drafted: 20,
        accepted: 15,
        accepted_counts: [1, 0, 1, 2, 0, 0, 1],
        model_drafted: 8,
        model_accepted: 6,
        drafting_us: 1500,
        least_confidence: 0.25,
        ahead: 8,
        kept: 6,
        hidden_us: 2_500,
    }
}

fn layer_stats() -> LayerStats {
    let used = SessionStats {
        calls: 10,
        refused: 1,
        rows: [7, 0, 3, 0, 0],
        bytes_in: 100,
        bytes_out: 300,
        wait_us: 2000,
        compute_us: 4000,
        batch_rows: 25,
    };
    let session = |session, tenant: &str, route| LayerSession {
        session,
        tenant: tenant.to_owned(),
        name: format!("client {session}"),
        masking: "off".to_owned(),
        route,
        used: used.clone(),
        waiting_rows: 2,
        slab_bytes: 4096,
    };
    let sessions = vec![
        session(1, "acme", LayerRoute::Tls),
        session(2, "acme", LayerRoute::Ipc),
        session(3, "zeta", LayerRoute::SharedMemory),
    ];
    let of = |tenant: &str| TenantUse { tenant: tenant.to_owned(), used: used.clone(), waiting_rows: 2 };
    let tenants = vec![of("acme"), of("zeta")];
    LayerStats {
        open: 3,
        refused: 4,
        broken: 5,
        batches: 6,
        joined_rows: 8,
        used: used.clone(),
        tenants,
        sessions,
    }
}

fn call(message: ToExecutor) -> ToGateway {
    match message {
        ToExecutor::Hello(_) => ToGateway::Welcome(Welcome {
            version: PROTOCOL_VERSION,
            instance: 7,
            model_path: "models/tiny.gguf".to_owned(),
            base_hash: [1; 32],
            text_hash: TEXT_HASH,
            device: DeviceFacts {
                kind: DeviceKind::Cuda,
                name: "A GPU".to_owned(),
                memory_bytes: 1 << 30,
                group_weight_bytes: vec![5, 7],
            },
            numbers: "activations mixed".to_owned(),
            context_length: CONTEXT_TOKENS,
            vocab_size: VOCAB_SIZE,
            adapter_budget_bytes: 1 << 20,
            device_budget_bytes: 1 << 19,
            cold_start: ColdStart::CpuAssist,
            kv_blocks: 64,
            block_tokens: 16,
            max_running: 64,
            max_waiting: 64,
            chunk_tokens: 512,
            adapters: Vec::new(),
        }),
        ToExecutor::LoadAdapter(load) => {
            let request = load.request;
            let failed = |message| {
                let error = WireError { code: ErrorCode::InvalidAdapter, message };
                ToGateway::Failed(Failed { request, error })
            };
            let read = |part: &AdapterPart| {
                let path = Path::new(&part.path);
                let is_gguf = path.extension().is_some_and(|ending| ending == "gguf");
                std::fs::read(if is_gguf { path.to_owned() } else { path.join("adapter_model.safetensors") })
            };
            match load.parts.iter().map(read).collect::<Result<Vec<_>, _>>() {
                Ok(weights) if weights.len() > 1 && weights.iter().any(|one| one == b"stubborn") => {
                    failed("cannot merge these adapters".to_owned())
                }
                Ok(weights) if weights[0] == b"misfit" => {
                    failed(format!("{}/adapter_config.json: `r` is too large", load.parts[0].path))
                }
                Ok(weights) => ToGateway::AdapterLoaded(loaded(&load, &weights)),
                Err(error) => failed(error.to_string()),
            }
        }
        ToExecutor::UnloadAdapter(unload) => ToGateway::AdapterUnloaded(AdapterUnloaded {
            request: unload.request,
            adapter: unload.adapter,
            freed_bytes: 1000,
        }),
        ToExecutor::WatchBlocks => ToGateway::Blocks(vec![BlockUpdate::Cleared]),
        ToExecutor::GetStats(_) | ToExecutor::Generate(_) | ToExecutor::Cancel(_) => {
            unreachable!("not a call")
        }
    }
}

fn loaded(load: &LoadAdapter, weights: &[Vec<u8>]) -> AdapterLoaded {
    let generation = match (&load.parts[..], weights) {
        ([only], [weights]) if only.weight == 1.0 => AdapterVersion(generation(weights)),
        (parts, weights) => {
            let parts = parts.iter().zip(weights);
            let of = |(part, weights): (&AdapterPart, &Vec<u8>)| {
                (AdapterVersion(generation(weights)), part.weight.to_bits())
            };
            AdapterVersion::of_sum(parts.map(of).collect())
        }
    };
    AdapterLoaded {
        request: load.request,
        generation: generation.0,
        adapter: AdapterId::new(TenantId(load.owner), generation).0,
        rank: if weights[0].starts_with(b"ia3") { 0 } else { 16 * weights.len() as u32 },
        bytes: 1000 * weights.len() as u64,
        modules: u32::from(weights[0] != b"empty"),
        draft_layers: if weights[0].starts_with(b"draft") { 2 } else { 0 },
        labels: labels(&weights[0]),
        warnings: if weights[0].starts_with(b"lossy") {
            vec!["a part is missing".to_owned()]
        } else {
            Vec::new()
        },
    }
}

fn paths(load: &LoadAdapter) -> String {
    load.parts.iter().map(|part| part.path.as_str()).collect::<Vec<_>>().join("+")
}

/// Labels of an adapter whose weights are `labels:` and names with commas between.
fn labels(weights: &[u8]) -> Vec<String> {
    let names = weights.strip_prefix(b"labels:").map(String::from_utf8_lossy);
    names.iter().flat_map(|names| names.split(',')).map(str::to_owned).collect()
}

pub(crate) fn generation(weights: &[u8]) -> [u8; 32] {
    *blake3::hash(weights).as_bytes()
}

async fn play(send: RouterSendHalf, peer: Vec<u8>, request: u64, script: ReplyScript) {
    for output in script.outputs {
        tokio::time::sleep(script.pause).await;
        answer(&send, &peer, &ToGateway::Outputs(vec![Output { request, ..output }])).await;
    }
}

async fn answer(send: &RouterSendHalf, peer: &[u8], message: &ToGateway) {
    let mut frames = ZmqMessage::from(peer.to_vec());
    frames.push_back(message.to_bytes().into());
    // The gateway may be gone already.
    let _ = send.clone().send(frames).await;
}

fn scored(token: u32) -> TokenOutput {
    TokenOutput { token, logprob: -0.25, top: vec![(token, -0.25), (u32::from(b'?'), -1.5)] }
}

/// Outputs of one token each, without an end.
pub(crate) fn spoken(text: &str) -> Vec<Output> {
    tokens(text)
        .into_iter()
        .map(|token| Output { tokens: vec![scored(token)], ..Output::default() })
        .collect()
}

/// Returns `text`, token by token, within the limits of the request, and then its end token.
pub(crate) fn reply_with(text: &'static str) -> Reply {
    say_slowly(text, Duration::ZERO)
}

pub(crate) fn say_slowly(text: &'static str, pause: Duration) -> Reply {
    Arc::new(move |generate| {
        let mut outputs = spoken(text);
        if generate.stop_tokens.contains(&END) {
            outputs.push(Output {
                tokens: vec![scored(END)],
                finish: Some(Finish::Stop),
                ..Output::default()
            });
        }
        outputs.truncate(generate.max_tokens as usize);
        match outputs.last_mut() {
            Some(last) => last.finish = last.finish.or(Some(Finish::Length)),
            None => outputs.push(Output { finish: Some(Finish::Length), ..Output::default() }),
        }
        outputs[0].cached_tokens = 4;
        outputs[0].queued_us = 1500;
        outputs[0].load_wait_us = if generate.adapter.is_some() { 1200 } else { 0 };
        if generate.prompt_logprobs.is_some() {
            outputs[0].prompt = generate.prompt[1..].iter().map(|token| scored(*token)).collect();
        }
        ReplyScript { outputs, pause }
    })
}

pub(crate) fn hang_after(text: &'static str) -> Reply {
    Arc::new(move |_| ReplyScript { outputs: spoken(text), pause: Duration::ZERO })
}

pub(crate) fn fail_after(text: &'static str, code: ErrorCode) -> Reply {
    Arc::new(move |_| {
        let error = Some(WireError { code, message: "as the test wants it".to_owned() });
        let mut outputs = spoken(text);
        outputs.push(Output { error, ..Output::default() });
        ReplyScript { outputs, pause: Duration::ZERO }
    })
}
