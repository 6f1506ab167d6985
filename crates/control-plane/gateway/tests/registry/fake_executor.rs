//! A ROUTER socket that loads and unloads adapters within a budget, and records the order.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use shmproto::{
    codec::Wire as _,
    message::{
        AdapterLoaded, AdapterUnloaded, ColdStart, DeviceFacts, ErrorCode, Failed, LoadAdapter,
        PROTOCOL_VERSION, Stats, ToExecutor, ToGateway, Welcome, WireError,
    },
};
use tokio::task::JoinHandle;
use types::{AdapterId, AdapterVersion, TenantId};
use zeromq::{RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

pub(crate) const ADAPTER_BYTES: u64 = 1000;

/// Received command, with the first bytes of the adapter's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LoadCommand {
    Load(String),
    Unload([u8; 32]),
}

#[derive(Debug, Default)]
struct FakeRegistryState {
    /// Root of the gateway's paths, if it has a file system of its own.
    view: Option<PathBuf>,
    held: BTreeMap<[u8; 32], u64>,
    told: Vec<LoadCommand>,
}

pub(crate) struct FakeExecutor {
    memory: Arc<Mutex<FakeRegistryState>>,
    task: JoinHandle<()>,
}

impl Drop for FakeExecutor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeExecutor {
    /// Starts an executor with memory for `adapters`, where a load takes `load_time`.
    pub(crate) async fn start(socket: &Path, adapters: u64, load_time: Duration) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut router = RouterSocket::new();
        router.bind(&format!("ipc://{}", socket.display())).await.unwrap();
        let memory = Arc::new(Mutex::new(FakeRegistryState::default()));
        let task = tokio::spawn(serve(router, Arc::clone(&memory), adapters * ADAPTER_BYTES, load_time));
        Self { memory, task }
    }

    /// Resolves paths as process `pid` sees them from now on.
    pub(crate) fn look_from(&self, pid: u32) {
        self.memory.lock().unwrap().view = Some(PathBuf::from(format!("/proc/{pid}/root")));
    }

    pub(crate) fn commands(&self) -> Vec<LoadCommand> {
        self.memory.lock().unwrap().told.clone()
    }

    pub(crate) fn loads(&self) -> Vec<String> {
        let told = self.commands();
        told.into_iter()
            .filter_map(|told| if let LoadCommand::Load(weights) = told { Some(weights) } else { None })
            .collect()
    }

    pub(crate) fn held(&self) -> usize {
        self.memory.lock().unwrap().held.len()
    }

    pub(crate) fn holds(&self, owner: TenantId, weights: &str) -> bool {
        let id = AdapterId::new(owner, AdapterVersion(generation(weights.as_bytes()))).0;
        self.memory.lock().unwrap().held.contains_key(&id)
    }
}

pub(crate) fn generation(weights: &[u8]) -> [u8; 32] {
    *blake3::hash(weights).as_bytes()
}

async fn serve(
    mut router: RouterSocket,
    memory: Arc<Mutex<FakeRegistryState>>,
    budget_bytes: u64,
    load_time: Duration,
) {
    while let Ok(message) = router.recv().await {
        let peer = message.get(0).unwrap().to_vec();
        let asked = ToExecutor::from_bytes(message.get(1).unwrap()).unwrap();
        if matches!(asked, ToExecutor::LoadAdapter(_)) {
            tokio::time::sleep(load_time).await;
        }
        let answer = memory.lock().unwrap().answer(asked, budget_bytes);
        let mut frames = ZmqMessage::from(peer);
        frames.push_back(answer.to_bytes().into());
        // The gateway may be gone already.
        let _ = router.send(frames).await;
    }
}

impl FakeRegistryState {
    fn answer(&mut self, asked: ToExecutor, budget_bytes: u64) -> ToGateway {
        match asked {
            ToExecutor::Hello(_) => ToGateway::Welcome(Welcome {
                version: PROTOCOL_VERSION,
                instance: 7,
                model_path: "models/tiny.gguf".to_owned(),
                base_hash: [1; 32],
                text_hash: [2; 32],
                device: DeviceFacts::default(),
                numbers: String::new(),
                context_length: 512,
                vocab_size: 256,
                adapter_budget_bytes: budget_bytes,
                device_budget_bytes: budget_bytes,
                cold_start: ColdStart::CpuAssist,
                kv_blocks: 64,
                block_tokens: 16,
                max_running: 64,
                max_waiting: 64,
                chunk_tokens: 512,
                adapters: self.held.keys().copied().collect(),
            }),
            ToExecutor::LoadAdapter(load) => self.load(&load, budget_bytes),
            ToExecutor::UnloadAdapter(unload) => {
                self.told.push(LoadCommand::Unload(unload.adapter));
                let freed_bytes = self.held.remove(&unload.adapter).unwrap_or(0);
                let (request, adapter) = (unload.request, unload.adapter);
                ToGateway::AdapterUnloaded(AdapterUnloaded { request, adapter, freed_bytes })
            }
            // The connection probes the executor with this request.
            ToExecutor::GetStats(request) => ToGateway::Stats(Stats { request, ..Stats::default() }),
            other => unreachable!("the registry never sends {other:?}"),
        }
    }

    fn load(&mut self, load: &LoadAdapter, budget_bytes: u64) -> ToGateway {
        let view = self.view.clone().unwrap_or_else(|| PathBuf::from("/"));
        let path = view.join(Path::new(&load.parts[0].path).strip_prefix("/").unwrap());
        let file = if path.is_dir() { path.join("adapter_model.safetensors") } else { path };
        let weights = match std::fs::read(&file) {
            Ok(weights) => weights,
            Err(error) => return failed(load, ErrorCode::InvalidAdapter, &error.to_string()),
        };
        self.told
            .push(LoadCommand::Load(String::from_utf8_lossy(&weights[..weights.len().min(32)]).into_owned()));
        let generation = generation(&weights);
        let adapter = AdapterId::new(TenantId(load.owner), AdapterVersion(generation)).0;
        let others: u64 = self.held.iter().filter(|(id, _)| **id != adapter).map(|(_, bytes)| bytes).sum();
        if others + ADAPTER_BYTES > budget_bytes {
            return failed(load, ErrorCode::AdapterBudgetExceeded, "the budget is used up");
        }
        self.held.insert(adapter, ADAPTER_BYTES);
        ToGateway::AdapterLoaded(AdapterLoaded {
            request: load.request,
            generation,
            adapter,
            rank: 16,
            bytes: ADAPTER_BYTES,
            modules: u32::from(weights != b"empty"),
            draft_layers: if weights.starts_with(b"draft") { 2 } else { 0 },
            labels: if weights.starts_with(b"labels") { vec!["no".into(), "yes".into()] } else { Vec::new() },
            warnings: Vec::new(),
        })
    }
}

fn failed(load: &LoadAdapter, code: ErrorCode, message: &str) -> ToGateway {
    let error = WireError { code, message: message.to_owned() };
    ToGateway::Failed(Failed { request: load.request, error })
}
