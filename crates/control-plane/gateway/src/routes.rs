//! The table of all routes: the router is built from it, so every served route is listed here.

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    handler::Handler as _,
    http::{HeaderValue, Method, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, post, put},
};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    anthropic,
    app::App,
    auth::guard,
    batches::records::BatchEndpoint,
    body::drain,
    caller::Access,
    error_format,
    errors::ApiError,
    executor_drain, fleet, health,
    http_api::HttpApi,
    metrics::text::CONTENT_TYPE,
    ollama,
    openai::{
        adapter_files, adapters, batches, chat, classify, collect, completions, embeddings, files,
        fine_tuning, generation_request::GenerationRequest, generation_response::GenerationResponse, models,
        push, request_context::RequestContext, responses, scoring, sse, stream::OpenAiStream,
        stream_options::ResponseMode, tokens, upload,
    },
    origin, pages, request,
    tinker::{checkpoints, downloads, sampling, sessions, training},
};

/// A route with its required role and its handler.
pub struct HttpRoute {
    pub method: Method,
    /// Path pattern; `{*id}` matches the rest of the path.
    pub path: &'static str,
    pub access: Access,
    handler: MethodRouter<Arc<App>>,
}

impl std::fmt::Debug for HttpRoute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.method, self.path, self.access)
    }
}

#[must_use]
pub fn table() -> Vec<HttpRoute> {
    let get = |path, access, handler| HttpRoute { method: Method::GET, path, access, handler };
    let post = |path, access, handler| HttpRoute { method: Method::POST, path, access, handler };
    let delete = |path, access, handler| HttpRoute { method: Method::DELETE, path, access, handler };
    let mut table = vec![
        get("/", Access::Open, self::get(pages::index)),
        get("/page/{part}", Access::Open, self::get(pages::part)),
        get("/docs", Access::Open, self::get(pages::docs)),
        get("/openapi.json", Access::Open, self::get(pages::openapi)),
        get("/health", Access::Open, self::get(health::health)),
        get("/ready", Access::Open, self::get(health::ready)),
        get("/metrics", Access::Metrics, self::get(metrics)),
        get(control_protocol::fleet::PATH, Access::Metrics, self::get(fleet::load)),
        get("/version", Access::User, self::get(health::version)),
        get("/v1/models", Access::User, self::get(list_models)),
        get("/v1/models/{*id}", Access::User, self::get(one_model)),
        delete("/v1/models/{*id}", Access::User, self::delete(models::delete)),
        post("/v1/chat/completions", Access::User, self::post(chat_completions)),
        post("/v1/completions", Access::User, self::post(text_completions)),
        post("/v1/embeddings", Access::User, self::post(embeddings::create)),
        post("/v1/responses", Access::User, self::post(responses::create)),
        post("/v1/responses/input_tokens", Access::User, self::post(responses::input_tokens)),
        post("/v1/responses/compact", Access::User, self::post(responses::compact)),
        get("/v1/responses/{id}", Access::User, self::get(responses::one)),
        delete("/v1/responses/{id}", Access::User, self::delete(responses::delete)),
        get("/v1/responses/{id}/input_items", Access::User, self::get(responses::input_items)),
        post("/tokenize", Access::User, self::post(tokens::tokenize)),
        post("/detokenize", Access::User, self::post(tokens::detokenize)),
        get("/tokenizer_info", Access::User, self::get(tokens::info)),
        get("/v1/status", Access::Admin, self::get(health::status)),
        post("/v1/executors/{name}/drain", Access::Admin, self::post(executor_drain::drain)),
        post("/v1/executors/{name}/undrain", Access::Admin, self::post(executor_drain::undrain)),
        get("/v1/lora_adapters", Access::Admin, self::get(adapters::list)),
        get("/v1/lora_adapter_files", Access::User, self::get(adapter_files::list)),
        get("/v1/lora_adapter_files/{file}", Access::User, self::get(adapter_files::one)),
        post("/v1/load_lora_adapter", Access::Admin, self::post(adapters::load)),
        // Uploads are written to disk as they arrive, where their bytes are counted.
        post(
            "/v1/upload_lora_adapter",
            Access::Admin,
            self::post(upload::upload).layer(DefaultBodyLimit::disable()),
        ),
        post("/v1/unload_lora_adapter", Access::Admin, self::post(adapters::unload)),
        post("/v1/pin_lora_adapter", Access::Admin, self::post(adapters::pin)),
        // Weights are written and counted as they arrive.
        post(ADAPTER, Access::Admin, self::post(push::push).layer(DefaultBodyLimit::disable())),
        get(ADAPTER, Access::Admin, self::get(push::one)),
        delete(ADAPTER, Access::Admin, self::delete(push::delete)),
        // Files are streamed to disk like uploaded adapters.
        post("/v1/files", Access::User, self::post(files::upload).layer(DefaultBodyLimit::disable())),
        get("/v1/files", Access::User, self::get(files::list)),
        get("/v1/files/{id}", Access::User, self::get(files::one)),
        delete("/v1/files/{id}", Access::User, self::delete(files::delete)),
        get("/v1/files/{id}/content", Access::User, self::get(files::content)),
        post("/v1/fine_tuning/jobs", Access::User, self::post(fine_tuning::create)),
        get("/v1/fine_tuning/jobs", Access::User, self::get(fine_tuning::list)),
        get("/v1/fine_tuning/jobs/{id}", Access::User, self::get(fine_tuning::one)),
        get("/v1/fine_tuning/jobs/{id}/events", Access::User, self::get(fine_tuning::events)),
        get("/v1/fine_tuning/jobs/{id}/checkpoints", Access::User, self::get(fine_tuning::checkpoints)),
        post("/v1/fine_tuning/jobs/{id}/cancel", Access::User, self::post(fine_tuning::cancel)),
        post("/v1/fine_tuning/jobs/{id}/pause", Access::User, self::post(fine_tuning::pause)),
        post("/v1/fine_tuning/jobs/{id}/resume", Access::User, self::post(fine_tuning::resume)),
    ];
    table.extend(scoring_routes());
    table.extend(anthropic_routes());
    table.extend(batch_routes());
    table.extend(tinker_routes());
    table.extend(ollama_routes());
    table
}

/// Path of one adapter, whose name may contain slashes.
const ADAPTER: &str = "/v1/adapters/{*id}";

fn user(method: Method, path: &'static str, handler: MethodRouter<Arc<App>>) -> HttpRoute {
    HttpRoute { method, path, access: Access::User, handler }
}

/// Returns the routes that score, rank and classify texts, with the paths of vLLM and Cohere.
fn scoring_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::POST, "/v1/score", post(scoring::score)),
        user(Method::POST, "/score", post(scoring::score)),
        user(Method::POST, "/v1/rerank", post(scoring::rerank)),
        user(Method::POST, "/v2/rerank", post(scoring::rerank)),
        user(Method::POST, "/rerank", post(scoring::rerank)),
        user(Method::POST, "/v1/classify", post(classify::create)),
        user(Method::POST, "/classify", post(classify::create)),
    ]
}

/// Returns the routes of Anthropic's API. `/v1/models` stands in the table for all APIs.
fn anthropic_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::POST, "/v1/messages", post(anthropic::create)),
        user(Method::POST, "/v1/messages/count_tokens", post(anthropic::count_tokens)),
    ]
}

/// Returns the routes of the Batch API.
fn batch_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::POST, "/v1/batches", post(batches::create)),
        user(Method::GET, "/v1/batches", get(batches::list)),
        user(Method::GET, "/v1/batches/{id}", get(batches::one)),
        user(Method::POST, "/v1/batches/{id}/cancel", post(batches::cancel)),
    ]
}

/// Path of a run's checkpoint, a state or an adapter.
const CHECKPOINT: &str = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}";
const CHECKPOINT_URLS: &str = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls";
const CHECKPOINT_TTL: &str = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl";
const CHECKPOINT_PUBLISH: &str = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish";

/// Returns the routes of Tinker's API.
fn tinker_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::POST, "/api/v1/client/config", post(sessions::config)),
        user(Method::POST, "/api/v1/create_session", post(sessions::create)),
        user(Method::POST, "/api/v1/session_heartbeat", post(sessions::heartbeat)),
        user(Method::POST, "/api/v1/sessions/{id}/finish", post(sessions::finish)),
        user(Method::GET, "/api/v1/get_server_capabilities", get(sessions::capabilities)),
        user(Method::POST, "/api/v1/retrieve_future", post(sessions::retrieve)),
        user(Method::POST, "/api/v1/telemetry", post(sessions::telemetry)),
        user(Method::POST, "/api/v1/create_model", post(training::create)),
        user(Method::POST, "/api/v1/get_info", post(training::info)),
        user(Method::POST, "/api/v1/forward_backward", post(training::forward_backward)),
        user(Method::POST, "/api/v1/optim_step", post(training::optim_step)),
        user(Method::POST, "/api/v1/save_weights", post(training::save)),
        user(Method::POST, "/api/v1/load_weights", post(training::load)),
        user(Method::POST, "/api/v1/save_weights_for_sampler", post(training::save_for_sampler)),
        user(Method::POST, "/api/v1/save_weights_external", post(training::save_external)),
        user(Method::POST, "/api/v1/create_sampling_session", post(sampling::create)),
        user(Method::GET, "/api/v1/samplers/{id}", get(sampling::one)),
        user(Method::GET, "/api/v1/training_runs", get(checkpoints::runs)),
        user(Method::GET, "/api/v1/training_runs/{run}", get(checkpoints::run)),
        user(Method::GET, "/api/v1/training_runs/{run}/checkpoints", get(checkpoints::of_run)),
        user(Method::DELETE, CHECKPOINT, delete(checkpoints::delete)),
        user(Method::GET, CHECKPOINT_URLS, get(downloads::urls)),
        HttpRoute {
            method: Method::GET,
            path: "/api/v1/downloads/{file}",
            access: Access::Open,
            handler: get(downloads::one),
        },
        user(Method::PUT, CHECKPOINT_TTL, put(checkpoints::set_ttl)),
        user(Method::POST, CHECKPOINT_PUBLISH, post(checkpoints::publish)),
        user(Method::DELETE, CHECKPOINT_PUBLISH, delete(checkpoints::publish)),
        user(Method::GET, "/api/v1/checkpoints", get(checkpoints::list)),
        user(Method::POST, "/api/v1/weights_info", post(checkpoints::weights_info)),
        user(Method::POST, "/api/v1/asample", post(sampling::sample)),
    ]
}

/// Returns the routes of Ollama's API.
fn ollama_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::POST, "/api/chat", post(ollama::chat)),
        user(Method::POST, "/api/generate", post(ollama::generate)),
        user(Method::GET, "/api/tags", get(ollama::listing::tags)),
        user(Method::GET, "/api/ps", get(ollama::listing::ps)),
        user(Method::POST, "/api/show", post(ollama::listing::show)),
        user(Method::GET, "/api/version", get(ollama::listing::version)),
        user(Method::POST, "/api/pull", post(ollama::unsupported::pull)),
        user(Method::POST, "/api/push", post(ollama::unsupported::push)),
        user(Method::POST, "/api/create", post(ollama::unsupported::create)),
        user(Method::POST, "/api/copy", post(ollama::unsupported::copy)),
        user(Method::DELETE, "/api/delete", delete(ollama::unsupported::delete)),
        user(Method::POST, "/api/embed", post(ollama::embeddings::many)),
        user(Method::POST, "/api/embeddings", post(ollama::embeddings::one)),
    ]
}

/// Builds the router from the table.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for route in table() {
        let guarded = middleware::from_fn_with_state((Arc::clone(app), route.access), guard);
        router = router.route(route.path, route.handler.route_layer(guarded));
    }
    around(router.fallback(unknown).method_not_allowed_fallback(wrong_method), app)
}

/// Router for connections above the limit: probes are answered, all other requests are refused.
pub(crate) fn refusals(app: &Arc<App>) -> Router {
    let router = Router::new().route("/health", get(health::health)).route("/ready", get(health::ready));
    around(router.fallback(full), app)
}

/// Prefix of the routes of batches' lines, under which logs and metrics report them.
pub(crate) const BATCH_LINES: &str = "/batch";

/// Router for the lines of batches, whose callers are known. The handlers are those of the online routes.
pub(crate) fn batch_lines(app: &Arc<App>) -> Router {
    let answers_lines =
        |route: &HttpRoute| BatchEndpoint::ALL.iter().any(|endpoint| endpoint.path() == route.path);
    let mut router = Router::new();
    for route in table().into_iter().filter(answers_lines) {
        router = router.route(&format!("{BATCH_LINES}{}", route.path), route.handler);
    }
    router
        .layer(CatchPanicLayer::custom(request::panicked))
        .layer(middleware::from_fn_with_state(Arc::clone(app), request::identify))
        .with_state(Arc::clone(app))
}

/// Adds the layers that requests of all routes pass. The last layer is the outermost.
fn around(router: Router<Arc<App>>, app: &Arc<App>) -> Router {
    let mut router = router
        .layer(CatchPanicLayer::custom(request::panicked))
        .layer(middleware::from_fn_with_state(Arc::clone(app), origin::check));
    if !app.origins.allowed.is_empty() {
        router = router.layer(origin::cors(&app.origins.allowed, methods()));
    }
    router
        .layer(middleware::from_fn_with_state(Arc::clone(app), request::identify))
        .layer(middleware::from_fn(error_format::rewrite))
        .layer(middleware::from_fn(drain::read))
        .with_state(Arc::clone(app))
}

/// Returns all methods of the table.
fn methods() -> Vec<Method> {
    let mut methods: Vec<Method> = table().into_iter().map(|route| route.method).collect();
    methods.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    methods.dedup();
    methods
}

/// Lists models in the format of the request's API.
async fn list_models(State(app): State<Arc<App>>, request: Request) -> Response {
    match HttpApi::of(request.uri().path(), request.headers()) {
        HttpApi::Anthropic => anthropic::models::list.call(request, app).await,
        HttpApi::OpenAi | HttpApi::Ollama => models::list.call(request, app).await,
    }
}

/// Describes a model in the format of the request's API.
async fn one_model(State(app): State<Arc<App>>, request: Request) -> Response {
    match HttpApi::of(request.uri().path(), request.headers()) {
        HttpApi::Anthropic => anthropic::models::one.call(request, app).await,
        HttpApi::OpenAi | HttpApi::Ollama => models::one.call(request, app).await,
    }
}

async fn chat_completions(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    let shared = Arc::clone(&app);
    let job = app.bodies.run_blocking(ask.body.origin(), move || chat::job(&shared, ask)).await?;
    generate(&app, job).await
}

async fn text_completions(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    let shared = Arc::clone(&app);
    let job = app.bodies.run(ask.body.origin(), move || completions::job(&shared, ask)).await?;
    generate(&app, job).await
}

async fn generate(app: &App, job: GenerationRequest) -> Result<Response, ApiError> {
    let (choices, delivery) = (job.choices(), job.params.delivery);
    let (answer, first) = GenerationResponse::begin(app, job).await?;
    match delivery {
        ResponseMode::Whole => collect::respond(answer, first).await,
        ResponseMode::Stream(options) => {
            Ok(sse::respond(answer, first, OpenAiStream::new(choices, options.usage)))
        }
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let figures =
        app.metrics.render(&app.registry, (&app.training, &app.batches), (&app.classes, &app.turns));
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], figures).into_response()
}

async fn full(State(app): State<Arc<App>>) -> Response {
    let mut response = ApiError::too_many_connections(app.connections.max_connections).into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

async fn unknown(uri: Uri) -> ApiError {
    let near = near(uri.path()).join(", ");
    ApiError::not_found(format!(
        "there is no route '{}'; similar routes are {near}; GET /docs lists all",
        uri.path()
    ))
}

/// Returns the routes whose paths are most similar to `path`, each once.
fn near(path: &str) -> Vec<&'static str> {
    const MOST: usize = 5;
    /// Longer than any route's path; a comparison takes time in proportion to both lengths.
    const MAX_CHARS: usize = 128;
    let path: String = path.chars().take(MAX_CHARS).collect();
    let mut paths: Vec<&str> = table().iter().map(|route| route.path).collect();
    paths.sort_unstable();
    paths.dedup();
    paths.sort_by_cached_key(|known| strsim::damerau_levenshtein(known, &path));
    paths.truncate(MOST);
    paths
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(format!("'{}' does not support {method}", uri.path()))
}
