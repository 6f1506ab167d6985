//! What every handler shares.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::header,
};
use tokio::sync::{Semaphore, watch};

use crate::{
    adapters::Registry,
    auth::Keys,
    executor::Executor,
    lifecycle::{Serving, Status},
    metrics::Metrics,
    openai::errors::ApiError,
};

/// Bodies above this are worked on where blocking does no harm.
const INLINE_BYTES: usize = 4 * 1024;
/// Large bodies worked on at once.
const HEAVY_WORK: usize = 2;

/// What every handler shares.
#[derive(Debug)]
pub struct App {
    /// The executor.
    pub executor: Executor,
    /// Whether requests can be served, and what with.
    pub status: watch::Receiver<Status>,
    /// The adapters.
    pub registry: Arc<Registry>,
    /// The figures.
    pub metrics: Arc<Metrics>,
    /// Who may ask.
    pub keys: Keys,
    /// Longest body of a request.
    pub max_body_bytes: usize,
    heavy: Semaphore,
}

impl App {
    /// Puts it together.
    #[must_use]
    pub fn new(
        executor: Executor,
        status: watch::Receiver<Status>,
        registry: Arc<Registry>,
        keys: Keys,
        max_body_bytes: usize,
    ) -> Self {
        let (metrics, heavy) = (Arc::new(Metrics::new()), Semaphore::new(HEAVY_WORK));
        Self { executor, status, registry, metrics, keys, max_body_bytes, heavy }
    }

    /// What is served, or a typed 503.
    pub fn serving(&self) -> Result<Arc<Serving>, ApiError> {
        self.status.borrow().serving()
    }

    /// Runs `work` on a body of `bytes`: at once if it is small, otherwise on a thread that may block.
    pub async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        // The semaphore is never closed.
        let _turn = self.heavy.acquire().await;
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|panic| Err(ApiError::internal(format!("reading the request failed: {panic}"))))
    }
}

/// A body that says it is JSON, not longer than allowed. Browsers cannot send one to another site unasked.
#[derive(Debug)]
pub struct JsonBody(pub Bytes);

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("nothing");
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::not_json(kind));
        }
        read(request.into_body(), app.max_body_bytes).await.map(Self)
    }
}

async fn read(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    use axum::body::HttpBody as _;
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    // What cannot be read is too long, or its sender is gone and will not see the answer.
    axum::body::to_bytes(body, limit).await.map_err(|_| ApiError::too_large(limit))
}
