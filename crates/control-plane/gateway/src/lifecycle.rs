//! From the first connection to the last: what is being served now, and what has to happen before it is.
//!
//! Each time an executor is reached, its model's text side is read (unless it is the one read before) and its adapters
//! are brought back. Only then it is used, and again so after every reconnection. The gateway is ready as long as one
//! executor is.
//!
//! A path is no promise: another model may have been put there since the executor read its weights, or before it did. So
//! the executor says what the text beside its weights was made of, and no other text is served.

mod status;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use model_files::location::{self, HubAccess, HubSettings, LocationError};
use shmproto::message::Welcome;
use tokio::{sync::watch, task::JoinSet, time::timeout};

use self::status::ServedIdentity;
pub use self::status::{GatewayReadiness, ServingState, ServingUnavailable};
use crate::{
    adapters::{Base, Registry},
    clock::seconds_since_1970,
    config::{GatewayConfig, StartAdapter},
    executor::link_messages::LinkState,
    executors::{ExecutorHandle, ExecutorState, Executors, executor_handle::ReadyExecutor},
    lock::lock,
    text::{LoadError, LoadedText, Text},
    thread,
};

/// How often files are looked at that are not those of the executor's model.
const LOOK: Duration = Duration::from_secs(2);

/// Reads the text side of the model at a path. Runs on a thread of its own.
pub type LoadText = Arc<dyn Fn(&Path) -> Result<LoadedText, LoadError> + Send + Sync>;

/// Why the gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model's text side cannot be read.
    #[error(transparent)]
    Text(#[from] LoadError),
    /// An adapter that was to be there from the start is not.
    #[error("--adapter {name}: {reason}")]
    Adapter {
        /// Its name, as `--adapter` gave it.
        name: String,
        /// What was wrong with its files or with loading them, for a person.
        reason: String,
    },
    /// The executor went away for good.
    #[error("the connection task ended; restart the gateway")]
    Closed,
}

/// When there is something to do again.
#[derive(Clone, Copy)]
enum RetryTrigger {
    /// When the link changes.
    OnChange,
    /// Then, and after [`LOOK`].
    Soon,
}

/// Watches the links and keeps [`GatewayReadiness`] true.
pub struct Lifecycle {
    executors: Executors,
    registry: Arc<Registry>,
    load_text: LoadText,
    served_model_name: Option<String>,
    /// The model that executors are expected to have.
    model: Option<String>,
    /// Loaded the first time, then in the registry.
    start_adapters: tokio::sync::Mutex<Vec<StartAdapter>>,
    status: watch::Sender<GatewayReadiness>,
    text: tokio::sync::Mutex<Option<LoadedText>>,
    /// Held while the status is put together.
    face: Mutex<Option<ServedIdentity>>,
}

impl std::fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lifecycle").field("face", &*lock(&self.face)).finish_non_exhaustive()
    }
}

impl Lifecycle {
    /// A lifecycle that has not begun, and the status it will keep.
    #[must_use]
    pub fn new(
        config: &GatewayConfig,
        executors: Executors,
        registry: Arc<Registry>,
        load_text: LoadText,
    ) -> (Self, watch::Receiver<GatewayReadiness>) {
        let stage = "waiting for the base-executor".to_owned();
        let (status, receiver) = watch::channel(GatewayReadiness::Starting { stage, percent: None });
        let lifecycle = Self {
            executors,
            registry,
            load_text,
            served_model_name: config.served_model_name.clone(),
            model: config.model.clone(),
            start_adapters: tokio::sync::Mutex::new(config.adapters.clone()),
            status,
            text: tokio::sync::Mutex::default(),
            face: Mutex::default(),
        };
        (lifecycle, receiver)
    }

    /// Runs until the executors' handles are closed. Fails if a start cannot succeed.
    pub async fn run(self) -> Result<(), StartError> {
        let shared = Arc::new(self);
        tokio::spawn(Arc::clone(&shared).read_ahead());
        let mut followed = JoinSet::new();
        for index in 0..shared.executors.all().len() {
            followed.spawn(LinkFollower { shared: Arc::clone(&shared), index, was_ready: false }.run());
        }
        // The first that fails ends the others.
        while let Some(ended) = followed.join_next().await {
            ended.unwrap_or(Err(StartError::Closed))?;
        }
        shared.status.send_replace(GatewayReadiness::Closing);
        Ok(())
    }

    /// Puts together what all executors are.
    fn publish(&self) {
        let mut face = lock(&self.face);
        let states = self.executors.all().iter().map(ExecutorHandle::state);
        let (mut ready, mut others) = (Vec::new(), Vec::new());
        for (state, member) in states.zip(self.executors.all()) {
            match state {
                ExecutorState::Ready(one) => ready.push(one),
                other => others.push(self.unavailable_status(other, member.name())),
            }
        }
        let status = match (ready.is_empty(), &*face) {
            (false, Some(face)) => GatewayReadiness::Ready(Arc::new(ServingState::of(face, ready))),
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

    /// What an executor that is not used means for a gateway that has no other.
    fn unavailable_status(&self, state: ExecutorState, name: &str) -> GatewayReadiness {
        let named = |text: String| {
            if self.executors.are_several() { format!("executor '{name}': {text}") } else { text }
        };
        match state {
            ExecutorState::Starting { stage, percent } => {
                GatewayReadiness::Starting { stage: named(stage), percent }
            }
            ExecutorState::Lost { detail } | ExecutorState::Refused { detail } => {
                GatewayReadiness::Lost { detail: named(detail) }
            }
            ExecutorState::Ready(_) => unreachable!("it is used"),
        }
    }

    /// The text that belongs to the executor's weights; `None` if another is at `path`.
    async fn text_of(&self, path: PathBuf, welcome: &Welcome) -> Result<Option<Arc<dyn Text>>, LoadError> {
        let belongs = |loaded: &&LoadedText| loaded.hash.0 == welcome.text_hash;
        let mut text = self.text.lock().await;
        if text.as_ref().filter(belongs).is_none() {
            let load = Arc::clone(&self.load_text);
            *text = Some(thread::run("tokenizer", move || load(&path)).await.map_err(LoadError::from)??);
        }
        Ok(text.as_ref().filter(belongs).map(|loaded| Arc::clone(&loaded.text)))
    }

    /// Reads the text of the model that executors are expected to have, while they load it. If theirs is another, or this
    /// cannot be read, nothing is lost: text is read again once they say what they have, and what is wrong is said then.
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

/// Where a model is on this host.
fn resolved(model: &str) -> Result<PathBuf, LocationError> {
    let offline = HubSettings { access: HubAccess::Offline, ..HubSettings::from_env() };
    location::resolve(model, &offline)
}

/// Why a model's text cannot be served.
enum NoText {
    /// It may be later: why, for a person.
    Yet(String),
    /// It never will.
    Never(LoadError),
}

impl NoText {
    fn other(path: &Path, next: &str) -> Self {
        let path = path.display();
        Self::Yet(format!(
            "the tokenizer at '{path}' is not that of the model which the base-executor serves: {next}"
        ))
    }
}

/// Follows the link of one executor.
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

    /// What was ready once is lost, what never was is still being waited for.
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

    /// It is there, and what it serves is not what the others do.
    fn refuse(&self, detail: String) -> RetryTrigger {
        if !matches!(self.member().state(), ExecutorState::Refused { .. }) {
            tracing::error!(executor = self.member().name(), reason = detail, "an executor is not used");
        }
        self.set(ExecutorState::Refused { detail });
        RetryTrigger::Soon
    }

    async fn prepare(&mut self, epoch: u64, welcome: Arc<Welcome>) -> Result<RetryTrigger, StartError> {
        if let Err(reason) = self.shared.executors.claim(self.index, &welcome) {
            return Ok(self.refuse(reason));
        }
        self.set_loading("reading the tokenizer".to_owned(), None);
        let text = match self.text(&welcome).await {
            Ok(text) => text,
            Err(NoText::Never(error)) => return Err(error.into()),
            Err(NoText::Yet(reason)) => {
                tracing::error!(reason, "the model's text cannot be served");
                self.set_down(reason);
                return Ok(RetryTrigger::Soon);
            }
        };
        self.set_loading("loading adapters".to_owned(), None);
        let base_name = self.base_name(&welcome);
        if !self.shared.registry.restore(self.index, &welcome.adapters, &base_name).await {
            // The link went down meanwhile; its change is the next thing seen.
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

    /// The model's text. An executor of this host says where its model is; what one of another host would say means nothing
    /// here, and whatever is wrong with ours is no reason to end.
    async fn text(&self, welcome: &Welcome) -> Result<Arc<dyn Text>, NoText> {
        let far_model = self.shared.model.as_deref().filter(|_| self.member().executor().far().is_some());
        let Some(model) = far_model else {
            let path = PathBuf::from(&welcome.model_path);
            let text = self.shared.text_of(path.clone(), welcome).await.map_err(NoText::Never)?;
            let next = "its files were replaced; restart the base-executor, or put them back";
            return text.ok_or_else(|| NoText::other(&path, next));
        };
        let unread = |error: &dyn std::error::Error| {
            NoText::Yet(format!("its model's text cannot be read on this host: {error}"))
        };
        let path = resolved(model).map_err(|error| unread(&error))?;
        let text = self.shared.text_of(path.clone(), welcome).await.map_err(|error| unread(&error))?;
        text.ok_or_else(|| NoText::other(&path, "give --model the same model as there"))
    }

    /// What the base is called: as long as it is served, as whoever served it first called it.
    fn base_name(&self, welcome: &Welcome) -> String {
        let served = lock(&self.shared.face).as_ref().map(|face| face.base_name.clone());
        let given = self.shared.served_model_name.clone();
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

/// A name for the model at `path`: the repository's for one in a hub's cache, otherwise the file's or folder's.
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
