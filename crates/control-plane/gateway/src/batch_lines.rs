//! Answers the lines of batches through the handlers of the online routes, so that a line gets the bits of
//! the online answer.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Request, Response, StatusCode, header},
    response::IntoResponse as _,
};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;

use crate::{
    bases::Bases,
    batches::line::{LineAnswer, LineRequest, LineService},
    caller::{Caller, KeyRole},
    errors::ApiError,
    routes,
};

/// The routes of lines, as one caller after the other.
pub(crate) struct BatchLines {
    bases: Arc<Bases>,
    router: TowerToHyperService<Router>,
}

impl fmt::Debug for BatchLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchLines").finish_non_exhaustive()
    }
}

impl BatchLines {
    #[must_use]
    pub(crate) fn new(bases: Arc<Bases>) -> Self {
        let router = TowerToHyperService::new(routes::batch_lines(&bases));
        Self { bases, router }
    }

    async fn respond(&self, caller: Caller, line: LineRequest) -> Response<Body> {
        let request = Request::post(format!("{}{}", routes::BATCH_LINES, line.endpoint.path()))
            .header(header::CONTENT_TYPE, "application/json")
            .header("x-request-id", &*line.id)
            // The default seed follows from this header.
            .header("idempotency-key", &*line.id)
            .extension(caller)
            .body(Body::from(line.body));
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                return ApiError::internal(format!("a line is no request: {error}")).into_response();
            }
        };
        // A router never fails.
        let Ok(response) = self.router.call(request).await;
        if response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream") {
            let message = "a line of a batch is not streamed; remove 'stream' or set it to false";
            return ApiError::invalid("stream", message).into_response();
        }
        response
    }
}

#[async_trait]
impl LineService for BatchLines {
    fn caller(&self, tenant: &str, role: KeyRole) -> Option<Caller> {
        self.bases.first().keys.background_caller(tenant, role)
    }

    async fn answer(&self, caller: Caller, request: LineRequest) -> LineAnswer {
        let response = self.respond(caller, request).await;
        let (status, retry_after) = (response.status(), retry_after(response.headers()));
        // An answer in one piece is in memory already, so its length needs no limit here.
        let read = axum::body::to_bytes(response.into_body(), usize::MAX).await;
        let body = read.unwrap_or_else(|_| Bytes::from_static(b"{}"));
        let retry_after = retry_after.filter(|_| may_pass(status));
        LineAnswer { status: status.as_u16(), body, retry_after }
    }
}

/// Whether a failure with this status may pass without a change of the request.
fn may_pass(status: StatusCode) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}
