//! Requests of the tests, each with a time limit.

use std::path::Path;

use serde_json::{Value, json};
use ureq::{
    Agent, Body, SendBody,
    http::{Request, Response},
    middleware::MiddlewareNext,
};

use crate::{answer::Reply, stream::CompletionStream, watchdog::WATCHDOG};

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestFault {
    /// The gateway refused with a typed error, without effect.
    Refused {
        /// HTTP status code of the refusal.
        status: u16,
        /// Stable code of the error.
        code: String,
    },
    /// The answer is missing or incomplete, so the effect is unknown.
    Silence(String),
}

impl std::fmt::Display for RequestFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused { status, code } => write!(f, "refused with {status} {code}"),
            Self::Silence(why) => write!(f, "no answer: {why}"),
        }
    }
}

/// Temperature of completions with a seed.
pub const TEMPERATURE: f32 = 0.8;

/// A completion request: greedy, unless it has a seed.
#[derive(Debug, Clone)]
pub struct CompletionRequest {
    /// Name of the base or an adapter.
    pub model: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Exact number of tokens, since the end token does not stop; an answer with an expression may end
    /// earlier.
    pub max_tokens: u32,
    /// Seed with which tokens are sampled.
    pub seed: Option<u64>,
    /// Expression that the answer has to match, after which it may end.
    pub expression: Option<&'static str>,
    /// Whether a stream also sends draft tokens.
    pub provisional: bool,
    /// Whether the answer carries a receipt.
    pub receipt: bool,
}

impl CompletionRequest {
    /// Creates a greedy request to `model` for `prompt`.
    #[must_use]
    pub fn new(model: &str, prompt: Vec<u32>, max_tokens: u32) -> Self {
        let model = model.to_owned();
        Self { model, prompt, max_tokens, seed: None, expression: None, provisional: false, receipt: false }
    }

    /// Returns the request for another model.
    #[must_use]
    pub fn of(&self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self.clone() }
    }

    fn body(&self) -> Value {
        let mut body = json!({
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "logprobs": 5,
            "temperature": if self.seed.is_some() { TEMPERATURE } else { 0.0 },
            "seed": self.seed.unwrap_or(0),
            "receipt": self.receipt,
        });
        match self.expression {
            Some(expression) => body["structured_outputs"] = json!({ "regex": expression }),
            None => body["ignore_eos"] = true.into(),
        }
        body
    }

    fn stream_body(&self) -> Value {
        let mut body = self.body();
        body["stream"] = true.into();
        body["stream_options"] = json!({ "provisional": self.provisional });
        body
    }
}

/// Client of one gateway. Clones share their connections.
#[derive(Debug, Clone)]
pub struct Client {
    agent: Agent,
    url: String,
}

impl Client {
    /// Creates a client of the gateway at `url`.
    #[must_use]
    pub fn new(url: &str) -> Self {
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(WATCHDOG));
        Self { agent: config.build().into(), url: url.to_owned() }
    }

    /// Creates a client with an API key.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        let key = format!("Bearer {key}");
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(WATCHDOG));
        let config =
            config.middleware(move |mut request: Request<SendBody<'_>>, next: MiddlewareNext<'_>| {
                request.headers_mut().insert("authorization", key.parse().expect("a key is printable"));
                next.handle(request)
            });
        Self { agent: config.build().into(), url: self.url.clone() }
    }

    /// Returns the URL of the gateway.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the whole answer.
    pub fn ask(&self, ask: &CompletionRequest) -> Reply {
        let (status, body) = self.post("/v1/completions", &ask.body());
        assert_eq!(status, 200, "{}: {body}", ask.model);
        Reply::read(&body)
    }

    /// Returns the status and error code of a refused request.
    #[must_use]
    pub fn refusal(&self, ask: &CompletionRequest) -> (u16, String) {
        let (status, body) = self.post("/v1/completions", &ask.body());
        let code = body["error"]["code"].as_str();
        (status, code.unwrap_or_else(|| panic!("no error: {body}")).to_owned())
    }

    /// Returns the streamed answer.
    #[must_use]
    pub fn stream(&self, ask: &CompletionRequest) -> CompletionStream {
        let mut response = self.send("/v1/completions", &ask.stream_body());
        if response.status() != 200 {
            panic!("{}: {}", ask.model, response.body_mut().read_to_string().unwrap_or_default());
        }
        CompletionStream::new(response.into_body().into_reader())
    }

    /// Returns the whole answer, or the failure.
    pub fn try_ask(&self, ask: &CompletionRequest) -> Result<Reply, RequestFault> {
        self.try_post("/v1/completions", &ask.body()).map(|body| Reply::read(&body))
    }

    /// Returns the streamed answer, or the failure.
    pub fn try_stream(&self, ask: &CompletionRequest) -> Result<CompletionStream, RequestFault> {
        let response = self.try_send("/v1/completions", &ask.stream_body())?;
        Ok(CompletionStream::new(response.into_body().into_reader()))
    }

    /// Posts `body`; returns the response if successful.
    pub fn try_post(&self, route: &str, body: &Value) -> Result<Value, RequestFault> {
        let mut response = self.try_send(route, body)?;
        response.body_mut().read_json().map_err(|error| RequestFault::Silence(error.to_string()))
    }

    /// Gets `route`; returns the response if successful.
    pub fn try_get(&self, route: &str) -> Result<Value, RequestFault> {
        let mut response = Self::success(self.agent.get(format!("{}{route}", self.url)).call())?;
        response.body_mut().read_json().map_err(|error| RequestFault::Silence(error.to_string()))
    }

    /// Returns the text at `route` if successful.
    pub fn try_get_text(&self, route: &str) -> Result<String, RequestFault> {
        let mut response = Self::success(self.agent.get(format!("{}{route}", self.url)).call())?;
        response.body_mut().read_to_string().map_err(|error| RequestFault::Silence(error.to_string()))
    }

    /// Deletes the resource at `route`.
    pub fn delete(&self, route: &str) -> Result<(), RequestFault> {
        Self::success(self.agent.delete(format!("{}{route}", self.url)).call()).map(drop)
    }

    /// Uploads a training file; returns its id.
    pub fn upload(&self, name: &str, text: &str) -> String {
        self.try_upload(name, text).expect("a file is taken")
    }

    /// Uploads a training file; returns its id or the refusal.
    pub fn try_upload(&self, name: &str, text: &str) -> Result<String, RequestFault> {
        self.try_upload_as("fine-tune", name, text)
    }

    /// Uploads a file for a purpose; returns its id or the refusal.
    pub fn try_upload_as(&self, purpose: &str, name: &str, text: &str) -> Result<String, RequestFault> {
        let part = |head: String, body: &str| {
            format!("--part\r\nContent-Disposition: form-data; {head}\r\n\r\n{body}\r\n")
        };
        let form = [
            part("name=\"purpose\"".to_owned(), purpose),
            part(format!("name=\"file\"; filename=\"{name}\""), text),
            "--part--\r\n".to_owned(),
        ];
        let request = self.agent.post(format!("{}/v1/files", self.url));
        let request = request.header("content-type", "multipart/form-data; boundary=part");
        let mut response = Self::success(request.send(form.concat()))?;
        let file: Value = response.body_mut().read_json().expect("the answer is JSON");
        Ok(file["id"].as_str().expect("an id").to_owned())
    }

    /// Posts `body` with an `Idempotency-Key`; returns the response if successful.
    pub fn try_post_keyed(&self, route: &str, key: &str, body: &Value) -> Result<Value, RequestFault> {
        let request = self.agent.post(format!("{}{route}", self.url)).header("idempotency-key", key);
        let mut response = Self::success(request.send_json(body))?;
        response.body_mut().read_json().map_err(|error| RequestFault::Silence(error.to_string()))
    }

    /// Posts bytes of the content type `kind`; returns the response if successful.
    pub fn try_post_bytes(&self, route: &str, kind: &str, bytes: &[u8]) -> Result<Value, RequestFault> {
        let request = self.agent.post(format!("{}{route}", self.url)).header("content-type", kind);
        let mut response = Self::success(request.send(bytes))?;
        response.body_mut().read_json().map_err(|error| RequestFault::Silence(error.to_string()))
    }

    /// Posts `body`; returns the bytes of the response and whether these are JSON, if successful.
    pub fn try_post_for_bytes(&self, route: &str, body: &Value) -> Result<(Vec<u8>, bool), RequestFault> {
        let mut response = self.try_send(route, body)?;
        let is_json = response.body().mime_type() == Some("application/json");
        let bytes = response.body_mut().read_to_vec();
        Ok((bytes.map_err(|error| RequestFault::Silence(error.to_string()))?, is_json))
    }

    fn try_send(&self, route: &str, body: &Value) -> Result<Response<Body>, RequestFault> {
        Self::success(self.agent.post(format!("{}{route}", self.url)).send_json(body))
    }

    fn success(sent: Result<Response<Body>, ureq::Error>) -> Result<Response<Body>, RequestFault> {
        testkit::step();
        let mut response = sent.map_err(|error| RequestFault::Silence(error.to_string()))?;
        let status = response.status().as_u16();
        if status == 200 {
            return Ok(response);
        }
        let body: Value =
            response.body_mut().read_json().map_err(|error| RequestFault::Silence(error.to_string()))?;
        let code = body["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {body}")).to_owned();
        Err(RequestFault::Refused { status, code })
    }

    /// Loads an adapter under a free name; returns its adapter version.
    pub fn load(&self, name: &str, path: &Path) -> String {
        self.load_with(&json!({ "lora_name": name, "lora_path": path }))
    }

    /// Replaces the adapter of a used name; returns the new adapter version.
    pub fn reload(&self, name: &str, path: &Path) -> String {
        self.load_with(&json!({ "lora_name": name, "lora_path": path, "load_inplace": true }))
    }

    /// Unloads an adapter; returns the freed bytes.
    pub fn unload(&self, name: &str) -> u64 {
        let (status, body) = self.post("/v1/unload_lora_adapter", &json!({ "lora_name": name }));
        assert_eq!(status, 200, "{body}");
        body["freed_bytes"].as_u64().expect("freed bytes")
    }

    /// Returns name and version of every adapter; all of them must be usable.
    #[must_use]
    pub fn adapters(&self) -> Vec<(String, String)> {
        let body = self.get("/v1/lora_adapters");
        let text = |entry: &Value, field: &str| entry[field].as_str().expect("a string").to_owned();
        let entries = body["data"].as_array().expect("a list").iter();
        entries
            .inspect(|entry| assert_eq!(entry["state"], "ready", "{entry}"))
            .map(|entry| (text(entry, "name"), text(entry, "generation")))
            .collect()
    }

    /// Returns names and versions, usable or not; `None` without an answer.
    #[must_use]
    pub fn registered(&self) -> Option<Vec<(String, String)>> {
        let mut response = self.agent.get(format!("{}/v1/lora_adapters", self.url)).call().ok()?;
        let body: Value = response.body_mut().read_json().ok()?;
        let text = |entry: &Value, field: &str| entry[field].as_str().expect("a string").to_owned();
        // A draining adapter has already lost its name.
        let entries = body["data"].as_array()?.iter().filter(|entry| entry["state"] != "draining");
        Some(entries.map(|entry| (text(entry, "name"), text(entry, "generation"))).collect())
    }

    /// True if the gateway serves requests.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.agent.get(format!("{}/health", self.url)).call().is_ok_and(|response| response.status() == 200)
    }

    /// Returns `/v1/status`. The executor's stats are up to a second old.
    #[must_use]
    pub fn status(&self) -> Value {
        self.get("/v1/status")
    }

    /// Returns the entry of adapter `name` in `/v1/lora_adapters`, up to a second old.
    #[must_use]
    pub fn adapter(&self, name: &str) -> Value {
        // Adapters of Tinker runs are listed separately.
        let lists = ["/v1/lora_adapters", "/v1/lora_adapters?runs=true"].map(|route| self.get(route));
        let mut entries = lists.iter().flat_map(|body| body["data"].as_array().expect("a list"));
        let entry = entries.find(|entry| entry["name"] == name);
        entry.unwrap_or_else(|| panic!("there is no adapter {name} in {lists:?}")).clone()
    }

    /// Returns a metric of `/metrics` by its name with labels. The executor's metrics are up to a second old.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let response = self.agent.get(format!("{}/metrics", self.url)).call();
        let text = response.expect("/metrics answers").body_mut().read_to_string().expect("figures");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("there is no figure {name} in\n{text}"))
    }

    fn load_with(&self, body: &Value) -> String {
        let (status, answer) = self.post("/v1/load_lora_adapter", body);
        assert_eq!(status, 200, "{body}: {answer}");
        answer["generation"].as_str().expect("a generation").to_owned()
    }

    fn get(&self, route: &str) -> Value {
        let mut response = self.agent.get(format!("{}{route}", self.url)).call().expect("an answer");
        response.body_mut().read_json().expect("the answer is JSON")
    }

    fn post(&self, route: &str, body: &Value) -> (u16, Value) {
        let mut response = self.send(route, body);
        let value = response.body_mut().read_json().expect("the answer is JSON");
        (response.status().as_u16(), value)
    }

    fn send(&self, route: &str, body: &Value) -> Response<Body> {
        let request = self.agent.post(format!("{}{route}", self.url));
        let sent = request.send_json(body);
        testkit::step();
        sent.unwrap_or_else(|error| panic!("{route} did not answer: {error}"))
    }
}
