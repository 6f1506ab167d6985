//! From the first connection to the last: what is being served now, and what has to happen before it is.
//!
//! Each time the executor is reached, its model's text side is read (unless it is the one read before) and its adapters
//! are brought back. Only then the gateway is ready, and again so after every reconnection.
//!
//! A path is no promise: another model may have been put there since the executor read its weights, or before it did. So
//! the executor says what the text beside its weights was made of, and no other text is served.

use std::{path::Path, sync::Arc, time::Duration};

use shmproto::message::Welcome;
use tokio::{sync::watch, time::timeout};

use crate::{
    adapters::Registry,
    clock::seconds_since_1970,
    config::{Config, StartAdapter},
    executor::{Executor, link::Link},
    text::{LoadError, LoadedText, Text},
    thread,
};

/// How often files are looked at that are not those of the executor's model.
const LOOK: Duration = Duration::from_secs(2);

/// Reads the text side of the model at a path. Runs on a thread of its own.
pub type LoadText = Arc<dyn Fn(&Path) -> Result<LoadedText, LoadError> + Send + Sync>;

/// What is served over one connection to an executor.
#[derive(Debug)]
pub struct Serving {
    /// Number of the connection.
    pub epoch: u64,
    /// What the executor said of itself.
    pub welcome: Arc<Welcome>,
    /// Tokenizer and chat template.
    pub text: Arc<dyn Text>,
    /// What the base model is called.
    pub base_name: String,
    /// Most tokens of prompt and completion together.
    pub context_tokens: usize,
    /// Seconds since 1970 when it began to be served.
    pub since: u64,
}

/// Whether requests can be served.
#[derive(Debug, Clone)]
pub enum Status {
    /// Nothing has been served yet, or the executor has come back and is being prepared.
    Starting {
        /// What is being waited for.
        stage: String,
        /// How much of it is done, 0 to 100, if that is known.
        percent: Option<u32>,
    },
    /// The executor that was served is gone or cannot be used; requests under way wait for it.
    Lost {
        /// How the connection ended, or what keeps requests from being served, for a person.
        detail: String,
    },
    /// Requests are served, with what is said here.
    Ready(Arc<Serving>),
    /// The gateway ends.
    Closing,
}

impl Status {
    /// What is served, or why nothing is.
    pub fn serving(&self) -> Result<Arc<Serving>, NotServing> {
        match self {
            Self::Ready(serving) => Ok(Arc::clone(serving)),
            Self::Starting { stage, percent: None } => Err(NotServing::Starting(stage.clone())),
            Self::Starting { stage, percent: Some(percent) } => {
                Err(NotServing::Starting(format!("{stage}, {percent} %")))
            }
            Self::Lost { detail } => Err(NotServing::Lost(detail.clone())),
            Self::Closing => Err(NotServing::Closing),
        }
    }
}

/// Why no request can be served now.
#[derive(Debug, thiserror::Error)]
pub enum NotServing {
    /// Not yet: what is being waited for.
    #[error("still loading: {0}")]
    Starting(String),
    /// Not now: why.
    #[error("the base-executor was lost: {0}; try again shortly")]
    Lost(String),
    /// Never again.
    #[error("the gateway is shutting down")]
    Closing,
}

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
enum Again {
    /// When the link changes.
    OnChange,
    /// Then, and after [`LOOK`].
    Soon,
}

/// Watches the link and keeps [`Status`] true.
pub struct Lifecycle {
    executor: Executor,
    registry: Arc<Registry>,
    load_text: LoadText,
    served_model_name: Option<String>,
    /// Loaded the first time, then in the registry.
    start_adapters: Vec<StartAdapter>,
    status: watch::Sender<Status>,
    text: Option<LoadedText>,
    was_ready: bool,
}

impl std::fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lifecycle").field("was_ready", &self.was_ready).finish_non_exhaustive()
    }
}

impl Lifecycle {
    /// A lifecycle that has not begun, and the status it will keep.
    #[must_use]
    pub fn new(
        config: &Config,
        executor: Executor,
        registry: Arc<Registry>,
        load_text: LoadText,
    ) -> (Self, watch::Receiver<Status>) {
        let stage = "waiting for the base-executor".to_owned();
        let (status, receiver) = watch::channel(Status::Starting { stage, percent: None });
        let lifecycle = Self {
            executor,
            registry,
            load_text,
            served_model_name: config.served_model_name.clone(),
            start_adapters: config.adapters.clone(),
            status,
            text: None,
            was_ready: false,
        };
        (lifecycle, receiver)
    }

    /// Runs until the executor's handle is closed. Fails if the first start cannot succeed.
    pub async fn run(mut self) -> Result<(), StartError> {
        let mut link = self.executor.link();
        loop {
            let now = link.borrow_and_update().clone();
            let again = match now {
                Link::Down { reason } => self.set_down(reason),
                Link::Loading { stage, percent } => self.set_loading(stage, Some(percent)),
                Link::Up { epoch, welcome } => self.prepare(epoch, welcome).await?,
            };
            let changed = match again {
                Again::OnChange => link.changed().await,
                Again::Soon => timeout(LOOK, link.changed()).await.unwrap_or(Ok(())),
            };
            if changed.is_err() {
                self.status.send_replace(Status::Closing);
                return Ok(());
            }
        }
    }

    /// What was ready once is lost, what never was is still being waited for.
    fn set_down(&self, detail: String) -> Again {
        if !self.was_ready {
            return self.set_loading(detail, None);
        }
        self.status.send_replace(Status::Lost { detail });
        Again::OnChange
    }

    fn set_loading(&self, stage: String, percent: Option<u32>) -> Again {
        self.status.send_replace(Status::Starting { stage, percent });
        Again::OnChange
    }

    async fn prepare(&mut self, epoch: u64, welcome: Arc<Welcome>) -> Result<Again, StartError> {
        self.set_loading("reading the tokenizer".to_owned(), None);
        let Some(text) = self.text_of(&welcome).await? else {
            let reason = format!(
                "the tokenizer at '{}' is not that of the model which the base-executor serves: its files were replaced; \
                 restart the base-executor, or put them back",
                welcome.model_path
            );
            tracing::error!(reason, "the model's text cannot be served");
            self.set_down(reason);
            return Ok(Again::Soon);
        };
        self.set_loading("loading adapters".to_owned(), None);
        let base_name = self.served_model_name.clone().unwrap_or_else(|| model_name(&welcome.model_path));
        if !self.registry.restore(&welcome.adapters, &base_name).await {
            // The link went down meanwhile; its change is the next thing seen.
            return Ok(Again::OnChange);
        }
        self.load_start_adapters(&base_name).await?;
        let pool = u64::from(welcome.kv_blocks) * u64::from(welcome.block_tokens);
        let context = u64::from(welcome.context_length).min(pool);
        let serving = Serving {
            epoch,
            welcome,
            text,
            base_name,
            context_tokens: usize::try_from(context).unwrap_or(usize::MAX),
            since: seconds_since_1970(),
        };
        tracing::info!(model = %serving.base_name, adapters = self.registry.len(), "ready");
        self.was_ready = true;
        failpoint::pass("gateway.ready");
        self.status.send_replace(Status::Ready(Arc::new(serving)));
        Ok(Again::OnChange)
    }

    /// The text that belongs to the executor's weights; `None` if another is at the path.
    async fn text_of(&mut self, welcome: &Welcome) -> Result<Option<Arc<dyn Text>>, StartError> {
        let belongs = |loaded: &&LoadedText| loaded.hash.0 == welcome.text_hash;
        if self.text.as_ref().filter(belongs).is_none() {
            let (load, path) = (Arc::clone(&self.load_text), welcome.model_path.clone());
            let loaded = thread::run("tokenizer", move || load(Path::new(&path))).await;
            self.text = Some(loaded.map_err(LoadError::from)??);
        }
        Ok(self.text.as_ref().filter(belongs).map(|loaded| Arc::clone(&loaded.text)))
    }

    async fn load_start_adapters(&mut self, base_name: &str) -> Result<(), StartError> {
        for adapter in std::mem::take(&mut self.start_adapters) {
            let loaded = self.registry.load_trusted(&adapter.name, &adapter.path, base_name).await;
            loaded.map_err(|error| StartError::Adapter { name: adapter.name, reason: error.to_string() })?;
        }
        Ok(())
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
