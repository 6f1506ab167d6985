//! The loader thread: loads adapters into the form of the forward pass, so that the compute thread never
//! waits for a disk.

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
use shmproto::message::{AdapterPart, ColdStart, ErrorCode, LoadAdapter, ToGateway, WireError};
use tokio::sync::mpsc;
use types::{AdapterId, TenantId};

use crate::{
    adapters::{AdapterLoadOutcome, AdapterRole, Budget, ClaimError, ResidentAdapter},
    engine::event::{ConnectionId, EngineEvent, RequestKey},
};

/// Maximum warnings about one adapter that are kept.
const MAX_WARNINGS: usize = 16;

/// Reads adapters and prepares them for one forward pass.
pub trait Loader: Send + 'static {
    type Adapter: Send + Sync + 'static;

    /// Returns a lower bound of the bytes of the adapter at `path`, without reading its files.
    fn foreseeable_bytes(&self, path: &Path) -> u64 {
        let _ = path;
        0
    }

    /// Reads an adapter's files and checks them against the base model; also returns warnings about the
    /// files.
    ///
    /// # Errors
    /// Fails if the files are unusable; the client that loads the adapter receives the text.
    fn read(&self, path: &Path) -> anyhow::Result<(AnyAdapter, Vec<String>)>;

    /// Returns a lower bound of the bytes of [`prepare`](Self::prepare), which are claimed before it.
    fn least_bytes(&self, adapter: &AnyAdapter) -> u64 {
        adapter.least_bytes()
    }

    /// Brings an adapter into the form of the forward pass.
    ///
    /// # Errors
    /// If memory or descriptors are exhausted, or a draft adapter is unusable; the text reaches the caller.
    fn prepare(&self, adapter: AnyAdapter) -> Result<PassReadyAdapter<Self::Adapter>, PrepareError>;
}

/// An adapter in the form of the forward pass.
#[derive(Debug)]
pub struct PassReadyAdapter<A> {
    pub adapter: Arc<A>,
    pub bytes: u64,
    pub role: AdapterRole,
}

#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The adapter can never be used with this base.
    #[error(transparent)]
    Invalid(anyhow::Error),
    /// Memory or file descriptors are exhausted at the moment.
    #[error(transparent)]
    NoRoom(anyhow::Error),
}

/// A load call, see [`ToExecutor::LoadAdapter`](shmproto::message::ToExecutor).
#[derive(Debug)]
pub struct LoadCall {
    pub connection: ConnectionId,
    pub call: LoadAdapter,
    /// Queue of the gateway, for a reply that waits for no step.
    pub outbox: mpsc::WeakSender<ToGateway>,
}

/// The thread that answers a load that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadReply {
    /// The loader answers as soon as the adapter is in the engine's queue, before any later message of the
    /// gateway. So the reply does not wait for the current step.
    ByLoader,
    /// The engine answers, because the adapter must get a place on the device first.
    ByEngine,
}

impl From<ColdStart> for LoadReply {
    fn from(cold_start: ColdStart) -> Self {
        match cold_start {
            ColdStart::CpuAssist => Self::ByLoader,
            ColdStart::OnDemand | ColdStart::Cached => Self::ByEngine,
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("cannot use the adapter at {path}: {cause:#}")]
    Invalid { path: String, cause: anyhow::Error },
    #[error(
        "no memory for the adapter at {path}: {cause:#}; unload an adapter, or raise the limits of \
         memory and open files"
    )]
    NoRoom { path: String, cause: anyhow::Error },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("cannot merge these adapters: {0}")]
    Sum(#[from] AdapterMergeError),
    #[error("the executor failed while it loaded the adapter at {path}; see its log")]
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

/// Serves `calls` in order until their channel is closed. Loads that succeed are answered by `reply`.
pub fn run<L: Loader>(
    loader: &L,
    budget: &Budget,
    mut calls: mpsc::Receiver<LoadCall>,
    engine: &mpsc::Sender<EngineEvent<L::Adapter>>,
    reply: LoadReply,
) {
    while let Some(LoadCall { connection, call, outbox }) = calls.blocking_recv() {
        let caller = RequestKey { connection, request: call.request };
        let loaded = catch_unwind(AssertUnwindSafe(|| load(loader, budget, &call)))
            .unwrap_or_else(|_| Err(LoadError::Internal { path: paths_text(&call) }));
        let loaded = match loaded {
            Ok(prepared) => AdapterLoadOutcome::New(prepared),
            Err(LoadError::Claim(ClaimError::Known(id))) => AdapterLoadOutcome::Known(id),
            Err(error) => AdapterLoadOutcome::Failed(error.into()),
        };
        let outbox = outbox.upgrade().filter(|_| reply == LoadReply::ByLoader);
        // If the gateway's queue is full, the engine answers later, or gives the gateway up.
        let place = outbox.as_ref().and_then(|outbox| outbox.try_reserve().ok());
        let answer = match (&loaded, place) {
            (AdapterLoadOutcome::New(adapter), Some(place)) => Some((place, adapter.reply(call.request))),
            _ => None,
        };
        let caller = answer.is_none().then_some(caller);
        if engine.blocking_send(EngineEvent::AdapterLoaded { caller, loaded }).is_err() {
            return;
        }
        if let Some((place, answer)) = answer {
            place.send(ToGateway::AdapterLoaded(answer));
        }
    }
}

fn load<L: Loader>(
    loader: &L,
    budget: &Budget,
    call: &LoadAdapter,
) -> Result<ResidentAdapter<L::Adapter>, LoadError> {
    let foreseeable = call.parts.iter().map(|part| loader.foreseeable_bytes(Path::new(&part.path)));
    // Reading takes several times the adapter's memory, so what can never fit is not read. Residents fit.
    budget.could_hold(foreseeable.fold(0, u64::saturating_add))?;
    let (adapter, mut warnings) = read(loader, call)?;
    warnings.truncate(MAX_WARNINGS);
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
    Ok(ResidentAdapter {
        adapter,
        claim,
        generation,
        rank,
        modules,
        virtual_tokens,
        invocation,
        role,
        warnings,
    })
}

/// Reads one adapter, or sums several into a merged adapter.
fn read<L: Loader>(loader: &L, call: &LoadAdapter) -> Result<(AnyAdapter, Vec<String>), LoadError> {
    let read = |part: &AdapterPart| {
        let adapter = loader.read(Path::new(&part.path));
        adapter.map_err(|cause| LoadError::Invalid { path: part.path.clone(), cause })
    };
    match call.parts.as_slice() {
        [only] if only.weight == 1.0 => read(only),
        parts => {
            let parts = parts.iter().map(|part| Ok((read(part)?.0, part.weight)));
            Ok((sum(parts.collect::<Result<_, LoadError>>()?)?.into(), Vec::new()))
        }
    }
}

fn paths_text(call: &LoadAdapter) -> String {
    call.parts.iter().map(|part| part.path.as_str()).collect::<Vec<_>>().join(" + ")
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
