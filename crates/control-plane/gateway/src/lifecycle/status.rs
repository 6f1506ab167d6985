//! Whether requests can be served, and what is served then.

use std::sync::Arc;

use shmproto::message::Welcome;

use crate::{adapters::Base, executors::executor_handle::ReadyExecutor, text::Text};

/// What is served, as long as somebody serves it.
#[derive(Debug, Clone)]
pub(super) struct ServedIdentity {
    pub(super) text: Arc<dyn Text>,
    pub(super) base_name: String,
    pub(super) since: u64,
}

/// What is served, over connections to executors.
#[derive(Debug)]
pub struct ServingState {
    /// The executors that serve it; there is at least one.
    pub ready: Vec<ReadyExecutor>,
    /// What the first of them said of itself; about the base all say the same.
    pub welcome: Arc<Welcome>,
    /// Tokenizer and chat template.
    pub text: Arc<dyn Text>,
    /// What the base model is called.
    pub base_name: String,
    /// Most tokens of prompt and completion together that each of them takes.
    pub context_tokens: usize,
    /// Seconds since 1970 when it began to be served.
    pub since: u64,
}

impl ServingState {
    pub(super) fn of(face: &ServedIdentity, ready: Vec<ReadyExecutor>) -> Self {
        let context = ready.iter().map(|one| context_tokens(&one.welcome)).min().unwrap_or(0);
        Self {
            welcome: Arc::clone(&ready[0].welcome),
            ready,
            text: Arc::clone(&face.text),
            base_name: face.base_name.clone(),
            context_tokens: usize::try_from(context).unwrap_or(usize::MAX),
            since: face.since,
        }
    }
}

impl<'a> From<&'a ServingState> for Base<'a> {
    fn from(serving: &'a ServingState) -> Self {
        Self { name: &serving.base_name, text: Some(&serving.text) }
    }
}

/// What the model can read, as far as there is room for it.
fn context_tokens(welcome: &Welcome) -> u64 {
    let pool = u64::from(welcome.kv_blocks) * u64::from(welcome.block_tokens);
    u64::from(welcome.context_length).min(pool)
}

/// Whether requests can be served.
#[derive(Debug, Clone)]
pub enum GatewayReadiness {
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
    Ready(Arc<ServingState>),
    /// The gateway ends.
    Closing,
}

impl GatewayReadiness {
    /// What is served, or why nothing is.
    pub fn serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
        match self {
            Self::Ready(serving) => Ok(Arc::clone(serving)),
            Self::Starting { stage, percent: None } => Err(ServingUnavailable::Starting(stage.clone())),
            Self::Starting { stage, percent: Some(percent) } => {
                Err(ServingUnavailable::Starting(format!("{stage}, {percent} %")))
            }
            Self::Lost { detail } => Err(ServingUnavailable::Lost(detail.clone())),
            Self::Closing => Err(ServingUnavailable::Closing),
        }
    }
}

/// Why no request can be served now.
#[derive(Debug, thiserror::Error)]
pub enum ServingUnavailable {
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
