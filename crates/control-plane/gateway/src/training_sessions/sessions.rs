//! Training sessions with their models and samplers. A session without requests is closed after some time.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::task::AbortHandle;

use super::{
    work_queue::{ModelProgress, WorkQueue},
    worker::{ModelWorker, WorkerContext},
};
use crate::{
    clock::seconds_since_1970, errors::ApiError, lock::lock, random::random_u64, tenant_memory::Reservation,
};

/// Time without requests or heartbeats after which a session is closed.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Maximum number of sessions per tenant.
const MAX_SESSIONS: usize = 256;
/// Maximum number of models per session.
const MAX_MODELS: usize = 16;
/// Maximum number of samplers per session.
const MAX_SAMPLERS: usize = 16_384;

/// Bytes of tenant memory that a session counts.
pub(crate) const SESSION_BYTES: usize = 1024;
/// Bytes of tenant memory that a model counts besides its commands, for its task and connection buffers.
pub(crate) const MODEL_BYTES: usize = 32 << 10;
/// Bytes of tenant memory that a sampler counts besides the client's model path.
pub(crate) const SAMPLER_BYTES: usize = 1024;

/// Separator between session and model number in a model id.
const TRAINED: &str = ":train:";

#[derive(Debug)]
pub struct TrainedModel {
    /// Id for clients: `SESSION:train:NUMBER`, which some clients build themselves.
    pub id: String,
    /// Name of the model in checkpoint paths.
    pub run: String,
    /// Queue of the model's commands.
    pub work_queue: Arc<WorkQueue>,
    worker: AbortHandle,
    /// Reservation that ends with the model.
    _memory: Reservation,
}

impl Drop for TrainedModel {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

/// A model as status and run lists show it.
#[derive(Debug, Clone)]
pub(crate) struct ActiveModel {
    /// Name of the model in checkpoint paths.
    pub run: String,
    pub tenant: Arc<str>,
    /// Time of the session's last request or heartbeat, in seconds since 1970.
    pub at: u64,
    /// Rank of the adapter, once there is one.
    pub rank: Option<usize>,
    pub progress: ModelProgress,
}

#[derive(Debug)]
pub struct Sampler {
    /// Model path as the client gave it.
    pub model_path: Option<String>,
    /// Name of the adapter; `None` for the base.
    pub adapter: Option<String>,
    /// Reservation that ends with the sampler.
    pub memory: Reservation,
}

#[derive(Debug)]
struct TrainingSession {
    tenant: Arc<str>,
    touched: Instant,
    models: HashMap<String, Arc<TrainedModel>>,
    samplers: HashMap<String, Arc<Sampler>>,
    /// Reservation that ends with the session.
    _memory: Reservation,
}

#[derive(Debug, Default)]
pub struct TrainingSessions(Mutex<HashMap<String, TrainingSession>>);

impl TrainingSessions {
    /// Begins a session of the tenant of `memory`; returns its id.
    ///
    /// # Errors
    /// If the tenant has too many sessions.
    pub fn begin(&self, memory: Reservation) -> Result<String, ApiError> {
        let (mut sessions, tenant) = (lock(&self.0), memory.tenant());
        if sessions.values().filter(|session| session.tenant == *tenant).count() >= MAX_SESSIONS {
            let message = format!(
                "{MAX_SESSIONS} sessions are open, which is the limit; close some, or wait a few minutes"
            );
            return Err(ApiError::busy("too_many_sessions", message));
        }
        let id = format!("{:016x}{:016x}", random_u64(), random_u64());
        let session = TrainingSession {
            tenant: Arc::clone(tenant),
            touched: Instant::now(),
            models: HashMap::new(),
            samplers: HashMap::new(),
            _memory: memory,
        };
        sessions.insert(id.clone(), session);
        Ok(id)
    }

    /// Ends a session with its models and samplers.
    pub fn end(&self, id: &str, tenant: &str) {
        let mut sessions = lock(&self.0);
        if sessions.get(id).is_some_and(|session| *session.tenant == *tenant) {
            sessions.remove(id);
        }
    }

    /// Records a heartbeat.
    ///
    /// # Errors
    /// If there is no such session.
    pub(crate) fn touch(&self, id: &str, tenant: &str) -> Result<(), ApiError> {
        self.with(id, tenant, |_| Ok(()))
    }

    /// Returns the model `number` of a session, and starts its worker if the model is new. `memory` belongs
    /// to the model's tenant.
    ///
    /// # Errors
    /// If there is no such session, or it has too many models.
    pub fn model(
        &self,
        session: &str,
        number: u64,
        memory: Reservation,
        means: &WorkerContext,
    ) -> Result<Arc<TrainedModel>, ApiError> {
        let tenant = Arc::clone(memory.tenant());
        self.with(session, &tenant, |open| {
            let run = format!("{session}-{number}");
            if let Some(model) = open.models.get(&run) {
                return Ok(Arc::clone(model));
            }
            if open.models.len() >= MAX_MODELS {
                let message =
                    format!("a session may have at most {MAX_MODELS} models; begin another session");
                return Err(ApiError::bad_request("too_many_models", message));
            }
            let id = format!("{session}{TRAINED}{number}");
            let work_queue = Arc::<WorkQueue>::default();
            let worker = ModelWorker {
                work_queue: Arc::clone(&work_queue),
                tenant: Arc::clone(&tenant),
                model_id: id.clone(),
                run: run.clone(),
                means: means.clone(),
                running: None,
                snapshots: VecDeque::new(),
            };
            let worker = tokio::spawn(worker.work()).abort_handle();
            let model = Arc::new(TrainedModel { id, run: run.clone(), work_queue, worker, _memory: memory });
            open.models.insert(run, Arc::clone(&model));
            Ok(model)
        })
    }

    /// Returns the model with this id.
    ///
    /// # Errors
    /// If the tenant has no such model.
    pub(crate) fn find_model(&self, id: &str, tenant: &str) -> Result<Arc<TrainedModel>, ApiError> {
        let (session, number) = id.split_once(TRAINED).unwrap_or_default();
        let run = format!("{session}-{number}");
        let gone = || {
            ApiError::not_found(format!(
                "there is no model '{}', because its session has ended; begin a new one from the last \
                 saved state",
                id.chars().take(64).collect::<String>()
            ))
        };
        self.with(session, tenant, |open| open.models.get(&run).cloned().ok_or_else(gone)).map_err(|_| gone())
    }

    /// Registers the sampler `number` of a session, and returns its id.
    ///
    /// # Errors
    /// If there is no such session, or it has too many samplers.
    pub fn sampler(
        &self,
        session: &str,
        number: u64,
        tenant: &str,
        sampler: Sampler,
    ) -> Result<String, ApiError> {
        self.with(session, tenant, |open| {
            if open.samplers.len() >= MAX_SAMPLERS {
                let message =
                    format!("a session may have at most {MAX_SAMPLERS} samplers; begin another session");
                return Err(ApiError::bad_request("too_many_samplers", message));
            }
            let id = format!("{session}.{number}");
            open.samplers.entry(id.clone()).or_insert_with(|| Arc::new(sampler));
            Ok(id)
        })
    }

    /// Returns the sampler with this id.
    ///
    /// # Errors
    /// If the tenant has no such sampler.
    pub(crate) fn find_sampler(&self, id: &str, tenant: &str) -> Result<Arc<Sampler>, ApiError> {
        let session = id.split_once('.').map_or("", |(session, _)| session);
        let gone = || {
            ApiError::not_found("there is no such sampler, because its session has ended; create a new one")
        };
        self.with(session, tenant, |open| open.samplers.get(id).cloned().ok_or_else(gone)).map_err(|_| gone())
    }

    /// Returns all models, sorted by name.
    #[must_use]
    pub(crate) fn active_models(&self) -> Vec<ActiveModel> {
        let now = Instant::now();
        let of_session = |session: &TrainingSession| -> Vec<ActiveModel> {
            let at = seconds_since_1970().saturating_sub((now - session.touched).as_secs());
            let live = |model: &Arc<TrainedModel>| ActiveModel {
                run: model.run.clone(),
                tenant: Arc::clone(&session.tenant),
                at,
                rank: model.work_queue.lora.get().map(|lora| lora.rank),
                progress: model.work_queue.progress(),
            };
            session.models.values().map(live).collect()
        };
        let mut all: Vec<ActiveModel> = lock(&self.0).values().flat_map(of_session).collect();
        all.sort_by(|a, b| a.run.cmp(&b.run));
        all
    }

    /// Whether there is a model with this run name.
    #[must_use]
    pub(crate) fn has_run(&self, run: &str) -> bool {
        lock(&self.0).values().any(|session| session.models.contains_key(run))
    }

    /// Ends sessions without a recent request or heartbeat.
    pub fn sweep(&self) {
        let now = Instant::now();
        lock(&self.0).retain(|_, session| now.saturating_duration_since(session.touched) < PATIENCE);
    }

    fn with<T>(
        &self,
        id: &str,
        tenant: &str,
        then: impl FnOnce(&mut TrainingSession) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut sessions = lock(&self.0);
        let session = sessions.get_mut(id).filter(|session| *session.tenant == *tenant);
        let gone = || {
            ApiError::not_found("there is no such session, because it has ended; create a new ServiceClient")
        };
        let session = session.ok_or_else(gone)?;
        session.touched = Instant::now();
        then(session)
    }
}
