//! Every route there is, in one table: the router is built from it, and nothing is served that is not in it.

use std::sync::Arc;

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use serde_json::json;
use tower_http::{
    catch_panic::CatchPanicLayer,
    request_id::{MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer},
};

use crate::{
    app::{App, JsonBody},
    auth::{Access, Caller, Role, guard},
    executor::random_u64,
    lifecycle::Status,
    openai::{
        adapters, chat, collect, completions, errors::ApiError, job::Job, models, params::Delivery, stream,
        tokens,
    },
};

const USER: Access = Access::Role(Role::User);
const ADMIN: Access = Access::Role(Role::Admin);
/// What requests that match no route are counted as.
const NO_ROUTE: &str = "none";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A route, who may use it, and what answers.
pub struct Route {
    /// Its method.
    pub method: Method,
    /// Its path, with `{*id}` for a rest.
    pub path: &'static str,
    /// Who may use it.
    pub access: Access,
    handler: MethodRouter<Arc<App>>,
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.method, self.path, self.access)
    }
}

/// The table.
#[must_use]
pub fn table() -> Vec<Route> {
    let get = |path, access, handler| Route { method: Method::GET, path, access, handler };
    let post = |path, access, handler| Route { method: Method::POST, path, access, handler };
    vec![
        get("/health", Access::Open, self::get(health)),
        get("/version", USER, self::get(version)),
        get("/metrics", ADMIN, self::get(metrics)),
        get("/v1/models", USER, self::get(models::list)),
        get("/v1/models/{*id}", USER, self::get(models::one)),
        post("/v1/chat/completions", USER, self::post(chat_completions)),
        post("/v1/completions", USER, self::post(text_completions)),
        post("/tokenize", USER, self::post(tokens::tokenize)),
        post("/detokenize", USER, self::post(tokens::detokenize)),
        get("/tokenizer_info", USER, self::get(tokens::info)),
        get("/v1/lora_adapters", ADMIN, self::get(adapters::list)),
        post("/v1/load_lora_adapter", ADMIN, self::post(adapters::load)),
        post("/v1/unload_lora_adapter", ADMIN, self::post(adapters::unload)),
    ]
}

/// The router of the table.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for route in table() {
        let guarded = middleware::from_fn_with_state((Arc::clone(app), route.access), guard);
        let counted = middleware::from_fn_with_state((Arc::clone(app), route.path), count);
        router = router.route(route.path, route.handler.route_layer(guarded).route_layer(counted));
    }
    router
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(PropagateRequestIdLayer::new(REQUEST_ID))
        .layer(SetRequestIdLayer::new(REQUEST_ID, RandomId))
        .with_state(Arc::clone(app))
}

async fn chat_completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    let job = app.work(body.len(), move || chat::job(&shared, &caller, serving, &body)).await?;
    generate(&app, job).await
}

async fn text_completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    let job = app.work(body.len(), move || completions::job(&shared, &caller, serving, &body)).await?;
    generate(&app, job).await
}

/// Starts a job and answers when its first step is there: what fails before has a status of its own.
async fn generate(app: &App, job: Job) -> Result<Response, ApiError> {
    let delivery = job.params.delivery;
    let mut answer = job.start(app)?;
    let first = answer.next().await.unwrap_or_else(|| Err(ApiError::internal("nothing was generated")))?;
    match delivery {
        Delivery::Whole => collect::respond(answer, first).await,
        Delivery::Stream(usage) => Ok(stream::respond(answer, first, usage)),
    }
}

/// 200 when requests are served, 503 with the reason when they are not.
async fn health(State(app): State<Arc<App>>) -> Response {
    let status = app.status.borrow().clone();
    let (code, name, detail) = match status {
        Status::Ready(_) => (StatusCode::OK, "ok", None),
        Status::Starting { detail } => (StatusCode::SERVICE_UNAVAILABLE, "loading", Some(detail)),
        Status::Lost { detail } => (StatusCode::SERVICE_UNAVAILABLE, "executor_unavailable", Some(detail)),
        Status::Closing => (StatusCode::SERVICE_UNAVAILABLE, "stopping", None),
    };
    let body = match detail {
        None => json!({ "status": name }),
        Some(detail) => json!({ "status": name, "detail": detail }),
    };
    (code, Json(body)).into_response()
}

async fn version() -> Json<serde_json::Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.render(&app.registry);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn unknown(State(app): State<Arc<App>>, uri: Uri) -> ApiError {
    app.metrics.answered(NO_ROUTE, 404);
    let routes: Vec<&str> = table().iter().map(|route| route.path).collect();
    ApiError::not_found(format!("there is no route '{}'; there are {}", uri.path(), routes.join(", ")))
}

async fn wrong_method(State(app): State<Arc<App>>, method: Method, uri: Uri) -> ApiError {
    app.metrics.answered(NO_ROUTE, 405);
    ApiError::method_not_allowed(format!("'{}' does not answer to {method}", uri.path()))
}

async fn count(
    State((app, route)): State<(Arc<App>, &'static str)>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    app.metrics.answered(route, response.status().as_u16());
    response
}

#[expect(clippy::needless_pass_by_value, reason = "the signature is the layer's")]
fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response<Body> {
    let text =
        panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    tracing::error!(panic = text.unwrap_or("unknown"), "a handler panicked");
    ApiError::internal("this server made a mistake; its log says which").into_response()
}

#[derive(Clone)]
struct RandomId;

impl MakeRequestId for RandomId {
    fn make_request_id<B>(&mut self, _: &axum::http::Request<B>) -> Option<RequestId> {
        HeaderValue::from_str(&format!("{:016x}", random_u64())).ok().map(RequestId::new)
    }
}
