//! Lifecycle of the gateway: what it serves, and what must happen before it serves.
//!
//! Each time an executor connects, its model's text side is read, unless it is already loaded, and its
//! adapters are restored. Only then is the executor used. The gateway is ready while at least one executor
//! is.
//!
//! The files at a model's path may have been replaced before or after the executor read its weights. So the
//! executor reports the hash of the text beside its weights, and no other text is served.

mod status;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use model_files::location::{self, LocationError};
use shmproto::message::Welcome;
use tokio::{sync::watch, task::JoinSet, time::timeout};

use self::status::ServedIdentity;
pub(crate) use self::status::ServingUnavailable;
pub use self::status::{GatewayReadiness, ServingState};
use crate::{
    adapters::{Base, Registry},
    clock::seconds_since_1970,
    config::{BaseConfig, StartAdapter},
    executor::link_messages::LinkState,
    executors::{ExecutorHandle, ExecutorState, Executors, executor_handle::ReadyExecutor},
    lock::lock,
    served_base::{ServedBase, SleepPhase},
    text::{LoadError, LoadedText, Text},
    thread,
};

/// How often files are checked again that do not belong to the executor's model.
const LOOK: Duration = Duration::from_secs(2);

/// Reads the text side of the model at a path. Runs on its own thread.
pub type LoadText = Arc<dyn Fn(&Path) -> Result<LoadedText, LoadError> + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Text(#[from] LoadError),
    #[error("--adapter {name}: {reason}")]
    Adapter {
        name: String,
        /// Error of its files or of the load, in readable form.
        reason: String,
    },
    #[error("the connection task ended; restart the gateway")]
    Closed,
}

/// When the follower checks an executor again.
#[derive(Clone, Copy)]
enum RetryTrigger {
    OnChange,
    /// When the link changes, and after [`LOOK`].
    Soon,
}

/// Watches the links and keeps [`GatewayReadiness`] up to date.
pub(crate) struct Lifecycle {
    base: Arc<ServedBase>,
    /// Whether the registry belongs to one base model alone.
    binds_base: bool,
    executors: Executors,
    registry: Arc<Registry>,
    load_text: LoadText,
    /// Model that executors are expected to have.
    model: Option<String>,
    /// Adapters of `--adapter`, loaded once and afterwards in the registry.
    start_adapters: tokio::sync::Mutex<Vec<StartAdapter>>,
    status: watch::Sender<GatewayReadiness>,
    /// Serving state that a sleeping base had last.
    last: Mutex<Option<Arc<ServingState>>>,
    text: tokio::sync::Mutex<Option<LoadedText>>,
    /// Held while the status is computed.
    face: Mutex<Option<ServedIdentity>>,
}

impl std::fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lifecycle").field("face", &*lock(&self.face)).finish_non_exhaustive()
    }
}

impl Lifecycle {
    /// Creates a lifecycle that has not begun, and a receiver of its status.
    #[must_use]
    pub(crate) fn new(
        config: &BaseConfig,
        base: Arc<ServedBase>,
        executors: Executors,
        registry: Arc<Registry>,
        load_text: LoadText,
    ) -> (Self, watch::Receiver<GatewayReadiness>) {
        let stage = "waiting for the base-executor".to_owned();
        let (status, receiver) = watch::channel(match base.phase() {
            SleepPhase::Asleep => GatewayReadiness::Asleep(None),
            _ => GatewayReadiness::Starting { stage, percent: None },
        });
        let lifecycle = Self {
            base,
            binds_base: !config.is_first,
            executors,
            registry,
            load_text,
            model: config.model.clone(),
            start_adapters: tokio::sync::Mutex::new(config.adapters.clone()),
            status,
            last: Mutex::default(),
            text: tokio::sync::Mutex::default(),
            face: Mutex::default(),
        };
        (lifecycle, receiver)
    }

    /// Runs until the executors' handles are closed. Fails if a start cannot succeed.
    pub(crate) async fn run(self) -> Result<(), StartError> {
        let shared = Arc::new(self);
        tokio::spawn(Arc::clone(&shared).read_ahead());
        let mut sleep = JoinSet::new();
        sleep.spawn(Arc::clone(&shared).follow_sleep());
        let mut followed = JoinSet::new();
        for index in 0..shared.executors.all().len() {
            followed.spawn(LinkFollower { shared: Arc::clone(&shared), index, was_ready: false }.run());
        }
        // The first failure ends the other followers.
        while let Some(ended) = followed.join_next().await {
            ended.unwrap_or(Err(StartError::Closed))?;
        }
        shared.status.send_replace(GatewayReadiness::Closing);
        Ok(())
    }

    /// Publishes a new status whenever the base falls asleep or wakes.
    async fn follow_sleep(self: Arc<Self>) {
        let mut phases = self.base.phases();
        while phases.changed().await.is_ok() {
            self.publish();
        }
    }

    /// Publishes the status that follows from the states of all executors.
    fn publish(&self) {
        let mut face = lock(&self.face);
        if self.base.phase() == SleepPhase::Asleep {
            *face = None;
            self.status.send_replace(GatewayReadiness::Asleep(lock(&self.last).clone()));
            return;
        }
        let states = self.executors.all().iter().map(ExecutorHandle::state);
        let (mut ready, mut others) = (Vec::new(), Vec::new());
        for (state, member) in states.zip(self.executors.all()) {
            match state {
                ExecutorState::Ready(one) if !self.base.ends(one.welcome.instance) => ready.push(one),
                other => others.push(self.unavailable_status(other, member.name())),
            }
        }
        let status = match (ready.is_empty(), &*face) {
            (false, Some(face)) => {
                let serving = Arc::new(ServingState::of(face, ready));
                *lock(&self.last) = Some(Arc::clone(&serving));
                self.base.serves();
                GatewayReadiness::Ready(serving)
            }
            _ => {
                *face = None;
                let is_starting =
                    |status: &GatewayReadiness| matches!(status, GatewayReadiness::Starting { .. });
                let first = others.iter().position(is_starting).unwrap_or(0);
                others.swap_remove(first)
            }
        };
        self.status.send_replace(status);
    }

    /// Returns the status of a gateway that has no executor but this one, which is not ready.
    fn unavailable_status(&self, state: ExecutorState, name: &str) -> GatewayReadiness {
        let named = |text: String| {
            if self.executors.are_several() { format!("executor '{name}': {text}") } else { text }
        };
        match state {
            ExecutorState::Starting { stage, percent } => {
                GatewayReadiness::Starting { stage: named(stage), percent }
            }
            ExecutorState::Lost { .. } if self.base.phase() == SleepPhase::Waking => {
                GatewayReadiness::Starting { stage: named("waking".to_owned()), percent: None }
            }
            ExecutorState::Lost { detail } | ExecutorState::Refused { detail } => {
                GatewayReadiness::Lost { detail: named(detail) }
            }
            // The executor was sent to sleep, and another process takes its place.
            ExecutorState::Ready(_) => {
                GatewayReadiness::Starting { stage: named("waking".to_owned()), percent: None }
            }
        }
    }

    /// Returns the text that belongs to the executor's weights; `None` if another text is at `path`.
    async fn text_of(&self, path: PathBuf, welcome: &Welcome) -> Result<Option<Arc<dyn Text>>, LoadError> {
        let belongs = |loaded: &&LoadedText| loaded.hash.0 == welcome.text_hash;
        let mut text = self.text.lock().await;
        if text.as_ref().filter(belongs).is_none() {
            let load = Arc::clone(&self.load_text);
            *text = Some(thread::run("tokenizer", move || load(&path)).await.map_err(LoadError::from)??);
        }
        Ok(text.as_ref().filter(belongs).map(|loaded| Arc::clone(&loaded.text)))
    }

    /// Reads the text of the expected model while executors load it. Errors and a wrong text are ignored
    /// here, because the text is read again for each connected executor, and errors are reported then.
    async fn read_ahead(self: Arc<Self>) {
        let Some(path) = self.model.as_deref().and_then(|model| resolved(model).ok()) else { return };
        let mut text = self.text.lock().await;
        let load = Arc::clone(&self.load_text);
        if let Ok(Ok(loaded)) = thread::run("tokenizer", move || load(&path)).await {
            text.get_or_insert(loaded);
        }
    }

    async fn load_start_adapters(&self, base: Base<'_>) -> Result<(), StartError> {
        let mut adapters = self.start_adapters.lock().await;
        for adapter in std::mem::take(&mut *adapters) {
            let loaded = self.registry.load_trusted(&adapter.name, &adapter.path, base).await;
            loaded.map_err(|error| StartError::Adapter { name: adapter.name, reason: error.to_string() })?;
        }
        Ok(())
    }
}

fn resolved(model: &str) -> Result<PathBuf, LocationError> {
    location::resolve(model, &location::hub_cache())
}

enum NoText {
    /// Not servable now; the reason in readable form.
    Yet(String),
    Never(LoadError),
}

impl NoText {
    fn other(path: &Path, next: &str) -> Self {
        let path = path.display();
        Self::Yet(format!("the tokenizer at '{path}' differs from that of the base-executor's model: {next}"))
    }
}

struct LinkFollower {
    shared: Arc<Lifecycle>,
    index: usize,
    was_ready: bool,
}

impl LinkFollower {
    /// Runs until the executor's handle is closed. Fails if its start cannot succeed.
    async fn run(mut self) -> Result<(), StartError> {
        let mut link = self.member().executor().link();
        loop {
            let now = link.borrow_and_update().clone();
            let again = match now {
                LinkState::Down { reason } => self.set_down(reason),
                LinkState::Loading { stage, percent } => self.set_loading(stage, Some(percent)),
                LinkState::Up { epoch, welcome } => self.prepare(epoch, welcome).await?,
            };
            let changed = match again {
                RetryTrigger::OnChange => link.changed().await,
                RetryTrigger::Soon => timeout(LOOK, link.changed()).await.unwrap_or(Ok(())),
            };
            if changed.is_err() {
                return Ok(());
            }
        }
    }

    fn member(&self) -> &ExecutorHandle {
        self.shared.executors.member(self.index)
    }

    fn set(&self, state: ExecutorState) -> RetryTrigger {
        self.member().set_state(state);
        self.shared.publish();
        RetryTrigger::OnChange
    }

    /// Reports an executor that was ready as lost, and other executors as still starting.
    fn set_down(&self, detail: String) -> RetryTrigger {
        self.shared.executors.release(self.index);
        let state = if self.was_ready {
            ExecutorState::Lost { detail }
        } else {
            ExecutorState::Starting { stage: detail, percent: None }
        };
        self.set(state)
    }

    fn set_loading(&self, stage: String, percent: Option<u32>) -> RetryTrigger {
        self.set(ExecutorState::Starting { stage, percent })
    }

    /// Refuses a connected executor whose base or numeric settings differ from the others'.
    fn refuse(&self, detail: String) -> RetryTrigger {
        if !matches!(self.member().state(), ExecutorState::Refused { .. }) {
            tracing::error!(executor = self.member().name(), reason = detail, "cannot use an executor");
        }
        self.set(ExecutorState::Refused { detail });
        RetryTrigger::Soon
    }

    async fn prepare(&mut self, epoch: u64, welcome: Arc<Welcome>) -> Result<RetryTrigger, StartError> {
        if self.shared.base.ends(welcome.instance) {
            return Ok(self.set_loading("ending before a new start".to_owned(), None));
        }
        if let Err(reason) = self.shared.executors.claim(self.index, &welcome) {
            return Ok(self.refuse(reason));
        }
        if self.shared.binds_base
            && let Err(error) = self.shared.registry.bind_base(welcome.base_hash).await
        {
            self.shared.executors.release(self.index);
            return Ok(self.refuse(error.to_string()));
        }
        self.set_loading("reading the tokenizer".to_owned(), None);
        let text = match self.text(&welcome).await {
            Ok(text) => text,
            Err(NoText::Never(error)) => return Err(error.into()),
            Err(NoText::Yet(reason)) => {
                tracing::error!(reason, "cannot use the model's tokenizer");
                self.set_down(reason);
                return Ok(RetryTrigger::Soon);
            }
        };
        self.set_loading("loading adapters".to_owned(), None);
        let base_name = self.base_name(&welcome);
        if !self.shared.registry.restore(self.index, &welcome.adapters, &base_name).await {
            // The link went down meanwhile; the next iteration sees its change.
            return Ok(RetryTrigger::OnChange);
        }
        let base = Base { name: &base_name, text: Some(&text) };
        self.shared.load_start_adapters(base).await?;
        self.be_ready(
            ReadyExecutor { index: self.index, epoch, welcome },
            ServedIdentity { text, base_name, since: seconds_since_1970() },
        );
        Ok(RetryTrigger::OnChange)
    }

    /// Returns the model's text. For an executor on this host the path comes from its welcome. For an
    /// executor on another host the path comes from `--model`, and errors of the local files do not end the
    /// gateway.
    async fn text(&self, welcome: &Welcome) -> Result<Arc<dyn Text>, NoText> {
        let far_model = self.shared.model.as_deref().filter(|_| self.member().executor().far().is_some());
        let Some(model) = far_model else {
            let path = PathBuf::from(&welcome.model_path);
            let text = self.shared.text_of(path.clone(), welcome).await.map_err(NoText::Never)?;
            let next = "its files were replaced; restart the base-executor, or restore the files";
            return text.ok_or_else(|| NoText::other(&path, next));
        };
        let unread = |error: &dyn std::error::Error| {
            NoText::Yet(format!("cannot read its model's tokenizer on this host: {error}"))
        };
        let path = resolved(model).map_err(|error| unread(&error))?;
        let text = self.shared.text_of(path.clone(), welcome).await.map_err(|error| unread(&error))?;
        text.ok_or_else(|| NoText::other(&path, "set --model to the executor's model"))
    }

    /// Name of the base: as configured, or else as named by the first executor while the base is served.
    fn base_name(&self, welcome: &Welcome) -> String {
        let served = lock(&self.shared.face).as_ref().map(|face| face.base_name.clone());
        let given = self.shared.base.served_name().map(str::to_owned);
        given.or(served).unwrap_or_else(|| model_name(&welcome.model_path))
    }

    fn be_ready(&mut self, ready: ReadyExecutor, face: ServedIdentity) {
        let (member, shared) = (self.member(), &self.shared);
        tracing::info!(
            model = %face.base_name, executor = member.name(), adapters = shared.registry.len(), "ready"
        );
        failpoint::pass("gateway.ready");
        lock(&shared.face).get_or_insert(face);
        member.set_state(ExecutorState::Ready(ready));
        shared.publish();
        self.was_ready = true;
    }
}

/// Name of the model at `path`: the repository in a hub's cache, otherwise the file or folder.
fn model_name(path: &str) -> String {
    let path = Path::new(path);
    let in_hub =
        path.components().filter_map(|part| part.as_os_str().to_str()?.strip_prefix("models--")).next_back();
    let own = || {
        let name = if path.extension().is_some_and(|extension| extension == "gguf") {
            path.file_stem()
        } else {
            path.file_name()
        };
        name.map_or_else(|| "base".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    in_hub.map_or_else(own, |repository| repository.replace("--", "/"))
}

#[cfg(test)]
mod tests {
    use super::model_name;

    #[test]
    fn a_model_is_named_after_its_file_folder_or_repository() {
        assert_eq!(model_name("models/Small-Q4_1.gguf"), "Small-Q4_1");
        assert_eq!(model_name("models/small"), "small");
        assert_eq!(model_name("hub/models--org--small/snapshots/abc"), "org/small");
    }
}
