//! The port's routes: gRPC for Envoy and probes, HTTP for probes and Prometheus.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{Stream, stream};
use serde_json::json;
use tokio::time::timeout;
use tonic::{
    Status, Streaming,
    server::{Grpc, StreamingService, UnaryService},
};
use tonic_prost::ProstCodec;

use crate::{
    exchange::Exchange,
    messages::{
        HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse, ServingStatus,
    },
    picker::Picker,
};

const PROCESSOR: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
/// Bytes that heads and metadata add to a message.
const HEAD_BYTES: usize = 1 << 20;
/// Maximum wait for the next part of a request while no host is chosen.
const PART_LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn router(picker: Arc<Picker>) -> Router {
    Router::new()
        .route("/envoy.service.ext_proc.v3.ExternalProcessor/Process", post(process))
        .route("/grpc.health.v1.Health/Check", post(check))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(picker)
}

async fn health() -> Json<serde_json::Value> {
    Json(json!({ "status": "ok" }))
}

/// Reports whether any host is ready.
async fn ready(State(picker): State<Arc<Picker>>) -> Response {
    if picker.is_ready() {
        return Json(json!({ "status": "ready" })).into_response();
    }
    let body = json!({ "status": "loading", "detail": "no gateway is ready" });
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

async fn metrics(State(picker): State<Arc<Picker>>) -> Response {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], picker.metrics.render(&picker.fleet)).into_response()
}

async fn check(State(picker): State<Arc<Picker>>, request: Request) -> Response {
    let mut grpc = Grpc::new(ProstCodec::default());
    grpc.unary(HealthService(picker), request).await.map(axum::body::Body::new)
}

async fn process(State(picker): State<Arc<Picker>>, request: Request) -> Response {
    let limit = picker.max_body_bytes.saturating_add(HEAD_BYTES);
    let mut grpc = Grpc::new(ProstCodec::default()).max_decoding_message_size(limit);
    grpc.streaming(ExtProcService(picker), request).await.map(axum::body::Body::new)
}

/// The gRPC health service.
struct HealthService(Arc<Picker>);

impl UnaryService<HealthCheckRequest> for HealthService {
    type Response = HealthCheckResponse;
    type Future = std::future::Ready<Result<tonic::Response<HealthCheckResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let is_serving = match request.get_ref().service.as_str() {
            "" | "liveness" => true,
            "readiness" | PROCESSOR => self.0.is_ready(),
            other => {
                let message = format!(
                    "there is no service '{other}'; the services are liveness, readiness and {PROCESSOR}"
                );
                return std::future::ready(Err(Status::not_found(message)));
            }
        };
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        std::future::ready(Ok(tonic::Response::new(HealthCheckResponse { status: status.into() })))
    }
}

/// The `ext_proc` service; one stream is one HTTP request.
struct ExtProcService(Arc<Picker>);

impl StreamingService<ProcessingRequest> for ExtProcService {
    type Response = ProcessingResponse;
    type ResponseStream = stream::BoxStream<'static, Result<ProcessingResponse, Status>>;
    type Future = std::future::Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let answers = answers(Exchange::new(Arc::clone(&self.0)), request.into_inner());
        std::future::ready(Ok(tonic::Response::new(Box::pin(answers))))
    }
}

/// Returns the answers to a stream of request parts.
fn answers(
    exchange: Exchange,
    parts: Streaming<ProcessingRequest>,
) -> impl Stream<Item = Result<ProcessingResponse, Status>> {
    let begin = (exchange, parts, VecDeque::new());
    stream::try_unfold(begin, |(mut exchange, mut parts, mut out)| async move {
        loop {
            if let Some(next) = out.pop_front() {
                return Ok(Some((next, (exchange, parts, out))));
            }
            exchange.said();
            let Some(part) = next_part(&exchange, &mut parts).await? else { return Ok(None) };
            exchange
                .handle_message(part, &mut out)
                .map_err(|error| Status::invalid_argument(error.to_string()))?;
        }
    })
}

/// Waits for the next part: with a time limit before the choice, without one for the response.
async fn next_part(
    exchange: &Exchange,
    parts: &mut Streaming<ProcessingRequest>,
) -> Result<Option<ProcessingRequest>, Status> {
    if !exchange.is_asking() {
        return parts.message().await;
    }
    let late = |_| Status::deadline_exceeded("the rest of the request did not arrive in time");
    timeout(PART_LIMIT, parts.message()).await.map_err(late)?
}
