//! From the first connection to the last: what is being served now, and what has to happen before it is.
//!
//! Each time the executor is reached, its model's text side is read (unless it is the model read before) and
//! its adapters are brought back. Only then the gateway is ready, and again so after every reconnection.

use std::{path::Path, sync::Arc};

use shmproto::message::Welcome;
use tokio::sync::watch;

use crate::{
    adapters::Registry,
    clock::seconds_since_1970,
    config::{Config, StartAdapter},
    executor::{Executor, link::Link},
    text::{LoadError, Text},
};

/// Reads the text side of the model at a path. Runs on a thread that may block.
pub type LoadText = Arc<dyn Fn(&Path) -> Result<Arc<dyn Text>, LoadError> + Send + Sync>;

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
    /// Not yet.
    Starting {
        /// What is being waited for.
        stage: String,
        /// How much of it is done, 0 to 100, if that is known.
        percent: Option<u32>,
    },
    /// Not now.
    Lost {
        /// Why.
        detail: String,
    },
    /// Yes.
    Ready(Arc<Serving>),
    /// Never again.
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
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// The executor went away for good.
    #[error("the connection task ended; restart the gateway")]
    Closed,
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
    text: Option<(String, Arc<dyn Text>)>,
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
            match now {
                Link::Down { reason } => self.set_down(reason),
                Link::Loading { stage, percent } => self.set_loading(stage, Some(percent)),
                Link::Up { epoch, welcome } => self.prepare(epoch, welcome).await?,
            }
            if link.changed().await.is_err() {
                self.status.send_replace(Status::Closing);
                return Ok(());
            }
        }
    }

    /// What was ready once is lost, what never was is still being waited for.
    fn set_down(&self, detail: String) {
        match self.was_ready {
            true => drop(self.status.send_replace(Status::Lost { detail })),
            false => self.set_loading(detail, None),
        }
    }

    fn set_loading(&self, stage: String, percent: Option<u32>) {
        self.status.send_replace(Status::Starting { stage, percent });
    }

    async fn prepare(&mut self, epoch: u64, welcome: Arc<Welcome>) -> Result<(), StartError> {
        self.set_loading("reading the tokenizer".to_owned(), None);
        let text = self.text_of(&welcome.model_path).await?;
        self.set_loading("loading adapters".to_owned(), None);
        let base_name = self.served_model_name.clone().unwrap_or_else(|| model_name(&welcome.model_path));
        if !self.registry.restore(&welcome.adapters, &base_name).await {
            // The link went down meanwhile; its change is the next thing seen.
            return Ok(());
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
        Ok(())
    }

    async fn text_of(&mut self, model_path: &str) -> Result<Arc<dyn Text>, StartError> {
        if let Some((path, text)) = &self.text
            && path == model_path
        {
            return Ok(Arc::clone(text));
        }
        let (load, path) = (Arc::clone(&self.load_text), model_path.to_owned());
        let loaded = tokio::task::spawn_blocking(move || load(Path::new(&path))).await;
        let text = loaded.map_err(|panic| LoadError::Stopped(panic.to_string()))??;
        self.text = Some((model_path.to_owned(), Arc::clone(&text)));
        Ok(text)
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
