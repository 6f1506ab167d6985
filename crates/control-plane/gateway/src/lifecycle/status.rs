//! Status of the gateway: whether it can serve requests, and with which model.

use std::sync::Arc;

use shmproto::message::Welcome;

use crate::{adapters::Base, executors::executor_handle::ReadyExecutor, text::Text};

/// The base's text and name, while any executor serves it.
#[derive(Debug, Clone)]
pub(super) struct ServedIdentity {
    pub(super) text: Arc<dyn Text>,
    pub(super) base_name: String,
    pub(super) since: u64,
}

/// The served base, with the executors that serve it.
#[derive(Debug)]
pub struct ServingState {
    /// Executors that serve the base; at least one.
    pub ready: Vec<ReadyExecutor>,
    /// Welcome of the first executor; all executors agree about the base.
    pub welcome: Arc<Welcome>,
    pub text: Arc<dyn Text>,
    pub base_name: String,
    /// Maximum number of prompt and completion tokens together that every executor accepts.
    pub context_tokens: usize,
    /// Seconds since 1970 at which serving began.
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

/// Context length of the model, limited by the KV cache.
fn context_tokens(welcome: &Welcome) -> u64 {
    let pool = u64::from(welcome.kv_blocks) * u64::from(welcome.block_tokens);
    u64::from(welcome.context_length).min(pool)
}

#[derive(Debug, Clone)]
pub enum GatewayReadiness {
    /// Nothing has been served yet, or a returned executor is being prepared.
    Starting {
        stage: String,
        /// Progress in percent, 0 to 100, if it is known.
        percent: Option<u32>,
    },
    /// The executor is lost or cannot be used; running requests wait for it.
    Lost {
        detail: String,
    },
    Ready(Arc<ServingState>),
    /// The executors do not run until a request wakes the base; contains the last serving state.
    Asleep(Option<Arc<ServingState>>),
    Closing,
}

impl GatewayReadiness {
    /// Whether requests are answered, if need be after a wake.
    #[must_use]
    pub fn answers(&self) -> bool {
        matches!(self, Self::Ready(_) | Self::Asleep(_))
    }

    /// Returns what is served, or why nothing is.
    pub(crate) fn serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
        match self {
            Self::Ready(serving) => Ok(Arc::clone(serving)),
            Self::Starting { stage, percent: None } => Err(ServingUnavailable::Starting(stage.clone())),
            Self::Starting { stage, percent: Some(percent) } => {
                Err(ServingUnavailable::Starting(format!("{stage}, {percent} %")))
            }
            Self::Lost { detail } => Err(ServingUnavailable::Lost(detail.clone())),
            Self::Asleep(_) => Err(ServingUnavailable::Asleep),
            Self::Closing => Err(ServingUnavailable::Closing),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ServingUnavailable {
    /// Serving has not begun; contains the current activity.
    #[error("still loading: {0}")]
    Starting(String),
    /// The executor was lost; contains the reason.
    #[error("the base-executor was lost: {0}; try again shortly")]
    Lost(String),
    /// The executors of the base do not run.
    #[error("the base model sleeps; a request for an answer wakes it")]
    Asleep,
    #[error("the gateway is shutting down")]
    Closing,
}
