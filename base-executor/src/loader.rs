//! The loader thread: brings adapters from disk into the form the forward pass takes, so that the compute thread
//! never waits for a disk.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use model::adapter::Adapter;
use shmproto::message::{ErrorCode, LoadAdapter, WireError};
use tokio::sync::mpsc;

use crate::{
    adapters::{Budget, ClaimError, Prepared},
    engine::event::{Caller, ConnectionId, Event, Loaded},
};

/// Reads adapters and prepares them for one forward pass.
pub trait Loader: Send + 'static {
    /// What the forward pass takes.
    type Adapter: Send + Sync + 'static;

    /// Reads an adapter's files and checks them against the base model.
    ///
    /// # Errors
    /// If they are not usable; the text reaches the caller.
    fn read(&self, path: &Path) -> anyhow::Result<Adapter>;

    /// Bytes that [`prepare`](Self::prepare) will take at least; claimed from the budget before it is called.
    fn least_bytes(&self, adapter: &Adapter) -> u64 {
        let elements: usize = adapter.modules.iter().map(|module| module.a.len() + module.b.len()).sum();
        2 * elements as u64
    }

    /// Brings an adapter into the form the forward pass takes; also says how many bytes that form has.
    ///
    /// # Errors
    /// If the adapter cannot be used; the text reaches the caller.
    fn prepare(&self, adapter: Adapter) -> anyhow::Result<(Arc<Self::Adapter>, u64)>;
}

/// A call of [`ToExecutor::LoadAdapter`](shmproto::message::ToExecutor).
#[derive(Debug)]
pub struct LoadCall {
    /// Who calls.
    pub connection: ConnectionId,
    /// What is to be loaded.
    pub call: LoadAdapter,
}

/// Why an adapter was not loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("the adapter at {path} cannot be used: {cause:#}")]
    Invalid { path: String, cause: anyhow::Error },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("loading the adapter at {path} failed by a fault of the executor; its log says more")]
    Internal { path: String },
}

impl From<LoadError> for WireError {
    fn from(error: LoadError) -> Self {
        let code = match &error {
            LoadError::Invalid { .. } => ErrorCode::InvalidAdapter,
            LoadError::Claim(_) => ErrorCode::AdapterBudgetExceeded,
            LoadError::Internal { .. } => ErrorCode::Internal,
        };
        Self { code, message: error.to_string() }
    }
}

/// Serves `calls` one after the other until their channel is closed.
pub fn run<L: Loader>(
    loader: &L,
    budget: &Budget,
    mut calls: mpsc::Receiver<LoadCall>,
    engine: &mpsc::Sender<Event<L::Adapter>>,
) {
    while let Some(LoadCall { connection, call }) = calls.blocking_recv() {
        let caller = Caller { connection, request: call.request };
        let loaded = catch_unwind(AssertUnwindSafe(|| load(loader, budget, &call.path)))
            .unwrap_or_else(|_| Err(LoadError::Internal { path: call.path }));
        let loaded = match loaded {
            Ok(prepared) => Loaded::New(prepared),
            Err(LoadError::Claim(ClaimError::Known(generation))) => Loaded::Known(generation),
            Err(error) => Loaded::Failed(error.into()),
        };
        if engine.blocking_send(Event::AdapterLoaded { caller, loaded }).is_err() {
            return;
        }
    }
}

fn load<L: Loader>(loader: &L, budget: &Budget, path: &str) -> Result<Prepared<L::Adapter>, LoadError> {
    let invalid = |cause| LoadError::Invalid { path: path.to_owned(), cause };
    let adapter = loader.read(Path::new(path)).map_err(invalid)?;
    let mut claim = budget.claim(adapter.generation, loader.least_bytes(&adapter))?;
    let rank = adapter.modules.iter().map(|module| module.rank).max().unwrap_or(0);
    let modules = adapter.modules.len();
    let (adapter, bytes) = loader.prepare(adapter).map_err(invalid)?;
    claim.resize(bytes)?;
    Ok(Prepared { adapter, claim, rank: saturate(rank), modules: saturate(modules) })
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
