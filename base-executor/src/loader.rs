//! The loader thread: brings adapters from disk into the form the forward pass takes, so that the compute thread
//! never waits for a disk.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use failpoint::FailpointOutcome;
use model::adapter::{
    AnyAdapter,
    merge::{AdapterMergeError, sum},
};
use shmproto::message::{AdapterPart, ErrorCode, LoadAdapter, WireError};
use tokio::sync::mpsc;
use types::{AdapterId, TenantId};

use crate::{
    adapters::{AdapterLoadOutcome, AdapterRole, Budget, ClaimError, ResidentAdapter},
    engine::event::{ConnectionId, EngineEvent, RequestKey},
};

/// Reads adapters and prepares them for one forward pass.
pub trait Loader: Send + 'static {
    /// What the forward pass takes.
    type Adapter: Send + Sync + 'static;

    /// Bytes that the adapter at `path` will take at least, judged by its files without reading them.
    fn foreseeable_bytes(&self, path: &Path) -> u64 {
        let _ = path;
        0
    }

    /// Reads an adapter's files and checks them against the base model.
    ///
    /// # Errors
    /// If they are not usable; the text reaches the caller.
    fn read(&self, path: &Path) -> anyhow::Result<AnyAdapter>;

    /// Bytes that [`prepare`](Self::prepare) will take at least; claimed from the budget before it is called.
    fn least_bytes(&self, adapter: &AnyAdapter) -> u64 {
        adapter.least_bytes()
    }

    /// Brings an adapter into the form the forward pass takes.
    ///
    /// # Errors
    /// If there is no memory, or no descriptor, for it, or a draft that cannot be served; the text reaches the caller.
    fn prepare(&self, adapter: AnyAdapter) -> Result<PassReadyAdapter<Self::Adapter>, PrepareError>;
}

/// An adapter in the form the forward pass takes.
#[derive(Debug)]
pub struct PassReadyAdapter<A> {
    /// It.
    pub adapter: Arc<A>,
    /// Bytes that form has.
    pub bytes: u64,
    /// What it is for.
    pub role: AdapterRole,
}

/// Why an adapter that was read cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// It never can be here.
    #[error(transparent)]
    Invalid(anyhow::Error),
    /// There is no memory, or no descriptor, for it now.
    #[error(transparent)]
    NoRoom(anyhow::Error),
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
    #[error(
        "there is no room for the adapter at {path}: {cause:#}; unload an adapter, or raise the limits of memory and of open files"
    )]
    NoRoom { path: String, cause: anyhow::Error },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("these adapters cannot be added up: {0}")]
    Sum(#[from] AdapterMergeError),
    #[error("loading the adapter at {path} failed by a fault of the executor; its log says more")]
    Internal { path: String },
}

impl From<LoadError> for WireError {
    fn from(error: LoadError) -> Self {
        let code = match &error {
            LoadError::Invalid { .. } | LoadError::Sum(_) => ErrorCode::InvalidAdapter,
            LoadError::NoRoom { .. } | LoadError::Claim(_) => ErrorCode::AdapterBudgetExceeded,
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
    engine: &mpsc::Sender<EngineEvent<L::Adapter>>,
) {
    while let Some(LoadCall { connection, call }) = calls.blocking_recv() {
        let caller = RequestKey { connection, request: call.request };
        let loaded = catch_unwind(AssertUnwindSafe(|| load(loader, budget, &call)))
            .unwrap_or_else(|_| Err(LoadError::Internal { path: paths_text(&call) }));
        let loaded = match loaded {
            Ok(prepared) => AdapterLoadOutcome::New(prepared),
            Err(LoadError::Claim(ClaimError::Known(id))) => AdapterLoadOutcome::Known(id),
            Err(error) => AdapterLoadOutcome::Failed(error.into()),
        };
        if engine.blocking_send(EngineEvent::AdapterLoaded { caller, loaded }).is_err() {
            return;
        }
    }
}

fn load<L: Loader>(
    loader: &L,
    budget: &Budget,
    call: &LoadAdapter,
) -> Result<ResidentAdapter<L::Adapter>, LoadError> {
    let foreseeable = call.parts.iter().map(|part| loader.foreseeable_bytes(Path::new(&part.path)));
    // Reading takes several times the memory, so what can never fit is not read. What is here already always fits.
    budget.could_hold(foreseeable.fold(0, u64::saturating_add))?;
    let adapter = read(loader, call)?;
    failpoint::pass("executor.adapter_read");
    let (generation, method) = (adapter.adapter().generation, &adapter.adapter().method);
    let id = AdapterId::new(TenantId(call.owner), generation);
    let mut claim = budget.claim(id, loader.least_bytes(&adapter))?;
    let (rank, modules) = (saturate(method.rank()), saturate(adapter.modules()));
    let (virtual_tokens, invocation) = (method.virtual_tokens(), method.invocation().cloned());
    failpoint::pass("executor.adapter_claimed");
    let PassReadyAdapter { adapter, bytes, role } = loader.prepare(adapter).map_err(|error| match error {
        PrepareError::Invalid(cause) => LoadError::Invalid { path: paths_text(call), cause },
        PrepareError::NoRoom(cause) => LoadError::NoRoom { path: paths_text(call), cause },
    })?;
    if failpoint::hit("executor.adapter_prepared") == FailpointOutcome::Fail {
        return Err(LoadError::Internal { path: paths_text(call) });
    }
    claim.resize(bytes)?;
    Ok(ResidentAdapter { adapter, claim, generation, rank, modules, virtual_tokens, invocation, role })
}

/// Reads the adapter, or adds up those that there are.
fn read<L: Loader>(loader: &L, call: &LoadAdapter) -> Result<AnyAdapter, LoadError> {
    let read = |part: &AdapterPart| {
        let adapter = loader.read(Path::new(&part.path));
        adapter.map_err(|cause| LoadError::Invalid { path: part.path.clone(), cause })
    };
    match call.parts.as_slice() {
        [only] if only.weight == 1.0 => read(only),
        parts => {
            let parts = parts.iter().map(|part| Ok((read(part)?, part.weight)));
            Ok(sum(parts.collect::<Result<_, LoadError>>()?)?.into())
        }
    }
}

/// Where its files are, for a person.
fn paths_text(call: &LoadAdapter) -> String {
    call.parts.iter().map(|part| part.path.as_str()).collect::<Vec<_>>().join(" + ")
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
