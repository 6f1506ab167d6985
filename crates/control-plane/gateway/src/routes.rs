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
    base_choice::{BaseChoice, dispatched},
    base_sleep,
    bases::Bases,
    batches::records::BatchEndpoint,
    body::drain,
    caller::Access,
    error_format,
    errors::ApiError,
    executor_drain, fleet, health,
    http_api::HttpApi,
    metrics::{ReportedBase, text::CONTENT_TYPE},
    ollama,
    openai::{
        adapter_files, adapters, batches, chat, classify, collect, completions, embeddings, files,
        fine_tuning, generation_request::GenerationRequest, generation_response::GenerationResponse, models,
        push, receipts, request_context::RequestContext, responses, scoring, sse, stream::OpenAiStream,
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
    handler: RouteHandler,
}

/// Handler of a route.
#[derive(Clone)]
enum RouteHandler {
    /// A handler of one base, and where requests name the base.
    OfBase(BaseChoice, MethodRouter<Arc<App>>),
    /// A handler of all bases.
    OfAll(MethodRouter<Arc<Bases>>),
}

impl HttpRoute {
    fn of_base(method: Method, path: &'static str, access: Access, handler: MethodRouter<Arc<App>>) -> Self {
        Self { method, path, access, handler: RouteHandler::OfBase(BaseChoice::First, handler) }
    }

    fn of_all(method: Method, path: &'static str, access: Access, handler: MethodRouter<Arc<Bases>>) -> Self {
        Self { method, path, access, handler: RouteHandler::OfAll(handler) }
    }

    /// Finds the base of each request by `choice`.
    fn by(mut self, choice: BaseChoice) -> Self {
        if let RouteHandler::OfBase(known, _) = &mut self.handler {
            *known = choice;
        }
        self
    }

    /// Returns the handler with the bases that it serves.
    fn serving(self, bases: &Arc<Bases>) -> MethodRouter<Arc<App>> {
        match self.handler {
            RouteHandler::OfAll(handler) => handler.with_state(Arc::clone(bases)),
            RouteHandler::OfBase(_, handler) if bases.is_plain() => handler,
            // Routes without a caller use no base.
            RouteHandler::OfBase(_, handler) if self.access == Access::Open => handler,
            RouteHandler::OfBase(choice, handler) => dispatched(bases, &self.method, choice, handler),
        }
    }
}

impl std::fmt::Debug for HttpRoute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.method, self.path, self.access)
    }
}

#[must_use]
pub fn table() -> Vec<HttpRoute> {
    let get = |path, access, handler| HttpRoute::of_base(Method::GET, path, access, handler);
    let post = |path, access, handler| HttpRoute::of_base(Method::POST, path, access, handler);
    let delete = |path, access, handler| HttpRoute::of_base(Method::DELETE, path, access, handler);
    let all = |path, access, handler| HttpRoute::of_all(Method::GET, path, access, handler);
    let mut table = vec![
        get("/", Access::Open, self::get(pages::index)),
        get("/page/{part}", Access::Open, self::get(pages::part)),
        get("/docs", Access::Open, self::get(pages::docs)),
        get("/openapi.json", Access::Open, self::get(pages::openapi)),
        all("/health", Access::Open, self::get(health::health)),
        all("/ready", Access::Open, self::get(health::ready)),
        all("/metrics", Access::Metrics, self::get(metrics)),
        get(control_protocol::fleet::PATH, Access::Metrics, self::get(fleet::load)),
        get("/version", Access::User, self::get(health::version)),
        all("/v1/models", Access::User, self::get(list_models)),
        get("/v1/models/{*id}", Access::User, self::get(one_model)).by(BaseChoice::Path),
        delete("/v1/models/{*id}", Access::User, self::delete(models::delete)).by(BaseChoice::Path),
        post("/v1/chat/completions", Access::User, self::post(chat_completions)).by(BaseChoice::Model),
        post("/v1/completions", Access::User, self::post(text_completions)).by(BaseChoice::Model),
        post("/v1/embeddings", Access::User, self::post(embeddings::create)).by(BaseChoice::Model),
        post("/v1/responses", Access::User, self::post(responses::create)).by(BaseChoice::Model),
        post("/v1/responses/input_tokens", Access::User, self::post(responses::input_tokens))
            .by(BaseChoice::Model),
        post("/v1/responses/compact", Access::User, self::post(responses::compact)).by(BaseChoice::Model),
        get("/v1/responses/{id}", Access::User, self::get(responses::one)),
        delete("/v1/responses/{id}", Access::User, self::delete(responses::delete)),
        get("/v1/responses/{id}/input_items", Access::User, self::get(responses::input_items)),
        post("/tokenize", Access::User, self::post(tokens::tokenize)).by(BaseChoice::Model),
        post("/detokenize", Access::User, self::post(tokens::detokenize)).by(BaseChoice::Model),
        get("/tokenizer_info", Access::User, self::get(tokens::info)),
        all("/v1/status", Access::Admin, self::get(health::status)),
        post("/v1/executors/{name}/drain", Access::Admin, self::post(executor_drain::drain))
            .by(BaseChoice::Executor),
        post("/v1/executors/{name}/undrain", Access::Admin, self::post(executor_drain::undrain))
            .by(BaseChoice::Executor),
        all("/v1/lora_adapters", Access::Admin, self::get(adapters::list)),
        get("/v1/lora_adapter_files", Access::User, self::get(adapter_files::list)),
        get("/v1/lora_adapter_files/{file}", Access::User, self::get(adapter_files::one)),
        post("/v1/load_lora_adapter", Access::Admin, self::post(adapters::load)).by(BaseChoice::AdapterBody),
        // Uploads are written to disk as they arrive, where their bytes are counted.
        post(
            "/v1/upload_lora_adapter",
            Access::Admin,
            self::post(upload::upload).layer(DefaultBodyLimit::disable()),
        )
        .by(BaseChoice::AdapterPath),
        post("/v1/unload_lora_adapter", Access::Admin, self::post(adapters::unload))
            .by(BaseChoice::AdapterBody),
        post("/v1/pin_lora_adapter", Access::Admin, self::post(adapters::pin)).by(BaseChoice::AdapterBody),
        // Weights are written and counted as they arrive.
        post(ADAPTER, Access::Admin, self::post(push::push).layer(DefaultBodyLimit::disable()))
            .by(BaseChoice::AdapterPath),
        get(ADAPTER, Access::Admin, self::get(push::one)).by(BaseChoice::AdapterPath),
        delete(ADAPTER, Access::Admin, self::delete(push::delete)).by(BaseChoice::AdapterPath),
    ];
    table.extend(job_routes());
    table.extend(scoring_routes());
    table.extend(anthropic_routes());
    table.extend(batch_routes());
    table.extend(tinker_routes());
    table.extend(ollama_routes());
    table.extend(base_routes());
    table.extend(receipt_routes());
    table
}

/// Path of one adapter, whose name may contain slashes.
const ADAPTER: &str = "/v1/adapters/{*id}";

fn user(method: Method, path: &'static str, handler: MethodRouter<Arc<App>>) -> HttpRoute {
    HttpRoute::of_base(method, path, Access::User, handler)
}

/// Returns the routes of files and of fine-tuning jobs.
fn job_routes() -> Vec<HttpRoute> {
    vec![
        // Files are streamed to disk like uploaded adapters.
        user(Method::POST, "/v1/files", post(files::upload).layer(DefaultBodyLimit::disable())),
        user(Method::GET, "/v1/files", get(files::list)),
        user(Method::GET, "/v1/files/{id}", get(files::one)),
        user(Method::DELETE, "/v1/files/{id}", delete(files::delete)),
        user(Method::GET, "/v1/files/{id}/content", get(files::content)),
        user(Method::POST, "/v1/fine_tuning/jobs", post(fine_tuning::create))
            .by(BaseChoice::FirstOnly("fine-tuning")),
        user(Method::GET, "/v1/fine_tuning/jobs", get(fine_tuning::list)),
        user(Method::GET, "/v1/fine_tuning/jobs/{id}", get(fine_tuning::one)),
        user(Method::GET, "/v1/fine_tuning/jobs/{id}/events", get(fine_tuning::events)),
        user(Method::GET, "/v1/fine_tuning/jobs/{id}/checkpoints", get(fine_tuning::checkpoints)),
        user(Method::POST, "/v1/fine_tuning/jobs/{id}/cancel", post(fine_tuning::cancel)),
        user(Method::POST, "/v1/fine_tuning/jobs/{id}/pause", post(fine_tuning::pause)),
        user(Method::POST, "/v1/fine_tuning/jobs/{id}/resume", post(fine_tuning::resume)),
    ]
}

/// Returns the route of requests that name their model in the body.
fn by_model(path: &'static str, handler: MethodRouter<Arc<App>>) -> HttpRoute {
    user(Method::POST, path, handler).by(BaseChoice::Model)
}

/// Returns the routes of the bases themselves.
fn base_routes() -> Vec<HttpRoute> {
    let admin = |method, path, handler| HttpRoute::of_all(method, path, Access::Admin, handler);
    vec![
        admin(Method::GET, "/v1/bases", get(base_sleep::list)),
        admin(Method::POST, "/v1/bases/{name}/sleep", post(base_sleep::sleep)),
        admin(Method::POST, "/v1/bases/{name}/wake", post(base_sleep::wake)),
    ]
}

/// Returns the routes of receipts.
fn receipt_routes() -> Vec<HttpRoute> {
    vec![
        user(Method::GET, "/v1/receipts/key", get(receipts::key)),
        by_model("/v1/receipts/verify", post(receipts::verify)),
    ]
}

/// Returns the routes that score, rank and classify texts, with the paths of vLLM and Cohere.
fn scoring_routes() -> Vec<HttpRoute> {
    vec![
        by_model("/v1/score", post(scoring::score)),
        by_model("/score", post(scoring::score)),
        by_model("/v1/rerank", post(scoring::rerank)),
        by_model("/v2/rerank", post(scoring::rerank)),
        by_model("/rerank", post(scoring::rerank)),
        by_model("/v1/classify", post(classify::create)),
        by_model("/classify", post(classify::create)),
    ]
}

/// Returns the routes of Anthropic's API. `/v1/models` stands in the table for all APIs.
fn anthropic_routes() -> Vec<HttpRoute> {
    vec![
        by_model("/v1/messages", post(anthropic::create)),
        by_model("/v1/messages/count_tokens", post(anthropic::count_tokens)),
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
    let tinker =
        |path, handler| user(Method::POST, path, handler).by(BaseChoice::FirstOnly("training step by step"));
    vec![
        user(Method::POST, "/api/v1/client/config", post(sessions::config)),
        user(Method::POST, "/api/v1/client/dynamic_config", post(sessions::dynamic_config)),
        user(Method::POST, "/api/v1/create_session", post(sessions::create)),
        user(Method::POST, "/api/v1/session_heartbeat", post(sessions::heartbeat)),
        user(Method::POST, "/api/v1/sessions/{id}/finish", post(sessions::finish)),
        user(Method::GET, "/api/v1/get_server_capabilities", get(sessions::capabilities)),
        user(Method::POST, "/api/v1/retrieve_future", post(sessions::retrieve)),
        user(Method::POST, "/api/v1/telemetry", post(sessions::telemetry)),
        tinker("/api/v1/create_model", post(training::create)),
        tinker("/api/v1/get_info", post(training::info)),
        tinker("/api/v1/forward_backward", post(training::forward_backward)),
        tinker("/api/v1/optim_step", post(training::optim_step)),
        tinker("/api/v1/save_weights", post(training::save)),
        tinker("/api/v1/load_weights", post(training::load)),
        tinker("/api/v1/save_weights_for_sampler", post(training::save_for_sampler)),
        tinker("/api/v1/save_weights_external", post(training::save_external)),
        tinker("/api/v1/create_sampling_session", post(sampling::create)),
        user(Method::GET, "/api/v1/samplers/{id}", get(sampling::one)),
        user(Method::GET, "/api/v1/training_runs", get(checkpoints::runs)),
        user(Method::GET, "/api/v1/training_runs/{run}", get(checkpoints::run)),
        user(Method::GET, "/api/v1/training_runs/{run}/checkpoints", get(checkpoints::of_run)),
        user(Method::DELETE, CHECKPOINT, delete(checkpoints::delete)),
        user(Method::GET, CHECKPOINT_URLS, get(downloads::urls)),
        HttpRoute::of_base(Method::GET, "/api/v1/downloads/{file}", Access::Open, get(downloads::one)),
        user(Method::PUT, CHECKPOINT_TTL, put(checkpoints::set_ttl)),
        user(Method::POST, CHECKPOINT_PUBLISH, post(checkpoints::publish)),
        user(Method::DELETE, CHECKPOINT_PUBLISH, delete(checkpoints::publish)),
        user(Method::GET, "/api/v1/checkpoints", get(checkpoints::list)),
        user(Method::POST, "/api/v1/weights_info", post(checkpoints::weights_info)),
        tinker("/api/v1/asample", post(sampling::sample)),
    ]
}

/// Returns the routes of Ollama's API.
fn ollama_routes() -> Vec<HttpRoute> {
    vec![
        by_model("/api/chat", post(ollama::chat)),
        by_model("/api/generate", post(ollama::generate)),
        HttpRoute::of_all(Method::GET, "/api/tags", Access::User, get(ollama::listing::tags)),
        HttpRoute::of_all(Method::GET, "/api/ps", Access::User, get(ollama::listing::ps)),
        by_model("/api/show", post(ollama::listing::show)),
        user(Method::GET, "/api/version", get(ollama::listing::version)),
        user(Method::POST, "/api/pull", post(ollama::unsupported::pull)),
        user(Method::POST, "/api/push", post(ollama::unsupported::push)),
        user(Method::POST, "/api/create", post(ollama::unsupported::create)),
        user(Method::POST, "/api/copy", post(ollama::unsupported::copy)),
        user(Method::DELETE, "/api/delete", delete(ollama::unsupported::delete)),
        by_model("/api/embed", post(ollama::embeddings::many)),
        by_model("/api/embeddings", post(ollama::embeddings::one)),
    ]
}

/// Builds the router from the table.
pub(crate) fn router(bases: &Arc<Bases>) -> Router {
    let app = bases.first();
    let mut router = Router::new();
    for route in table() {
        let guarded = middleware::from_fn_with_state((Arc::clone(app), route.access), guard);
        let path = route.path;
        router = router.route(path, route.serving(bases).route_layer(guarded));
    }
    around(router.fallback(unknown).method_not_allowed_fallback(wrong_method), app)
}

/// Router for connections above the limit: probes are answered, all other requests are refused.
pub(crate) fn refusals(bases: &Arc<Bases>) -> Router {
    let state = || Arc::clone(bases);
    let router = Router::new()
        .route("/health", get(health::health).with_state(state()))
        .route("/ready", get(health::ready).with_state(state()));
    around(router.fallback(full), bases.first())
}

/// Prefix of the routes of batches' lines, under which logs and metrics report them.
pub(crate) const BATCH_LINES: &str = "/batch";

/// Router for the lines of batches, whose callers are known. The handlers are those of the online routes.
pub(crate) fn batch_lines(bases: &Arc<Bases>) -> Router {
    let app = bases.first();
    let answers_lines =
        |route: &HttpRoute| BatchEndpoint::ALL.iter().any(|endpoint| endpoint.path() == route.path);
    let mut router = Router::new();
    for route in table().into_iter().filter(answers_lines) {
        router = router.route(&format!("{BATCH_LINES}{}", route.path), route.serving(bases));
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
async fn list_models(State(bases): State<Arc<Bases>>, request: Request) -> Response {
    match HttpApi::of(request.uri().path(), request.headers()) {
        HttpApi::Anthropic => anthropic::models::list.call(request, bases).await,
        HttpApi::OpenAi | HttpApi::Ollama => models::list.call(request, bases).await,
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

async fn metrics(State(bases): State<Arc<Bases>>) -> Response {
    let each: Vec<_> = bases.all().iter().map(|app| reported(app)).collect();
    let app = bases.first();
    let rendered = app.metrics.render(&each, (&app.training, &app.batches), &app.classes);
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], rendered).into_response()
}

fn reported(app: &App) -> ReportedBase<'_> {
    ReportedBase {
        base: &app.base,
        metrics: &app.metrics,
        registry: &app.registry,
        admission: &app.admission,
    }
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
