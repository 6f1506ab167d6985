//! HTTP client of a gateway: models, adapters and completion streams.

mod errors;
pub(crate) mod listing;
mod push;
pub(crate) mod sse;

use std::{
    io::{self, BufReader},
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;

use crate::terminal::{Terminal, printable};
pub(crate) use errors::ClientError;
pub(crate) use listing::{LoadedAdapter, ServedModel, list_in};
pub(crate) use push::{CONFIG_FILE, PushedFile, WEIGHT_FILE};
use sse::Events;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of answers from the gateway's memory; completions have none.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection settings for one gateway.
#[derive(Debug, Clone)]
pub(crate) struct GatewayClient {
    agent: ureq::Agent,
    url: String,
    key: Option<String>,
    terminal: Terminal,
}

impl GatewayClient {
    /// Creates a client of the gateway at `url`. The key comes from `HOLOBIONT_API_KEY`, never from the
    /// command line, because every user of the machine can read command lines.
    pub(crate) fn new(url: &str, terminal: Terminal) -> Self {
        let key = std::env::var("HOLOBIONT_API_KEY").ok().filter(|key| !key.is_empty());
        // OpenAI's clients use a base URL that ends in `/v1`.
        let url = url.trim_end_matches('/').trim_end_matches("/v1");
        Self { agent: agent(), url: url.to_owned(), key, terminal }
    }

    /// Returns a client of the same gateway with separate connections, and a handle that closes them.
    pub(crate) fn apart(&self) -> (Self, ConnectionCloser) {
        let client = Self { agent: agent(), ..self.clone() };
        let hang_up = ConnectionCloser(client.agent.clone());
        (client, hang_up)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Returns the models that requests may name: the base and its adapters.
    pub(crate) fn models(&self) -> Result<Vec<ServedModel>, ClientError> {
        list_in(self.get("/v1/models")?)
    }

    /// Returns the state and size of all adapters; for administrators only.
    pub(crate) fn adapters(&self) -> Result<Vec<LoadedAdapter>, ClientError> {
        list_in(self.get("/v1/lora_adapters")?)
    }

    /// Returns the progress of a gateway that does not take requests yet. Returns `None` if the gateway is
    /// ready, unreachable or answers anything but 503.
    pub(crate) fn still_loading(&self) -> Option<Loading> {
        let response = self.agent.get(format!("{}/ready", self.url));
        let mut response = response.config().timeout_global(Some(ANSWER_TIMEOUT)).build().call().ok()?;
        if response.status().as_u16() != 503 {
            return None;
        }
        let body = response.body_mut().read_to_string().unwrap_or_default();
        Some(serde_json::from_str(&body).unwrap_or_default())
    }

    /// Returns the parsed body of `route`.
    pub(crate) fn get(&self, route: &str) -> Result<Value, ClientError> {
        serde_json::from_str(&self.get_text(route)?).map_err(ClientError::Garbled)
    }

    /// Returns the body of `route` as text.
    pub(crate) fn get_text(&self, route: &str) -> Result<String, ClientError> {
        let mut request = self.agent.get(format!("{}{route}", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let response = request.config().timeout_global(Some(ANSWER_TIMEOUT)).build().call();
        self.text(response)
    }

    /// Returns a reader of the body of `route` with the parameters `query`.
    pub(crate) fn read(
        &self,
        route: &str,
        query: &[(&str, &str)],
    ) -> Result<impl io::Read + use<>, ClientError> {
        let mut request = self.agent.get(format!("{}{route}", self.url));
        for (name, value) in query {
            request = request.query(name, value);
        }
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        Ok(self.accept(request.call())?.into_reader())
    }

    /// Posts `body` to `route` and returns the answer's body as text, without a timeout.
    pub(crate) fn post_text(&self, route: &str, body: &Value) -> Result<String, ClientError> {
        let mut request = self.agent.post(format!("{}{route}", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        self.text(request.send_json(body))
    }

    fn text(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<String, ClientError> {
        self.accept(response)?.read_to_string().map_err(|cause| self.unreachable(cause))
    }

    /// Posts `body` to `route` and returns the answer as a stream.
    pub(crate) fn stream(&self, route: &str, body: &Value) -> Result<AnswerStream, ClientError> {
        let mut request = self.agent.post(format!("{}{route}", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let body = self.accept(request.send_json(body))?;
        Ok(AnswerStream { events: Events::new(BufReader::new(body.into_reader())), state: StreamState::Open })
    }

    /// Returns the body of an answer with status 200, else an error.
    fn accept(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<ureq::Body, ClientError> {
        let response = response.map_err(|cause| self.unreachable(cause))?;
        let status = response.status().as_u16();
        let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok()).unwrap_or("none");
        self.terminal.detail(format_args!("{} answered {status}, request id {}", self.url, printable(id)));
        let mut body = response.into_body();
        if status == 200 {
            return Ok(body);
        }
        Err(refusal(status, &body.read_to_string().unwrap_or_default()))
    }

    fn unreachable(&self, cause: ureq::Error) -> ClientError {
        ClientError::Unreachable { url: self.url.clone(), source: Box::new(cause) }
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .proxy(None)
        .max_redirects(0)
        // `bench` has many requests under way; the pool avoids the cost of new connections for each.
        .max_idle_connections(4096)
        .max_idle_connections_per_host(4096)
        .build()
        .into()
}

/// Handle that closes a client's connections, even while requests wait on them.
#[derive(Debug)]
pub(crate) struct ConnectionCloser(ureq::Agent);

impl ConnectionCloser {
    /// Closes the connections: current and later requests fail.
    pub(crate) fn hang_up(self) {
        self.0.shutdown();
    }
}

/// Body of `/ready` while the gateway is not ready.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Loading {
    /// Current stage, as `reading weights`.
    pub(crate) stage: Option<String>,
    /// Progress within the stage, in percent.
    pub(crate) percent: Option<u8>,
    /// Description in words, also present where nothing is loaded.
    pub(crate) detail: Option<String>,
}

impl Loading {
    /// Returns one line for people.
    pub(crate) fn text(&self) -> String {
        match (&self.stage, self.percent, &self.detail) {
            (Some(stage), Some(percent), _) => format!("{} {:>3} %", printable(stage), percent.min(100)),
            (_, _, Some(detail)) => printable(detail),
            _ => "loading".into(),
        }
    }
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// Piece of a streamed answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StreamDelta {
    /// New text, often of one token; empty in pieces that only end the answer or count tokens.
    pub(crate) text: String,
    /// New reasoning content, which precedes the text.
    pub(crate) thought: String,
    /// Finish reason, in the piece that ends the answer.
    pub(crate) finish: Option<String>,
    /// Token counts, in the last piece.
    pub(crate) usage: Option<Usage>,
    /// Number of provisional characters that the gateway retracts, counted from the end.
    pub(crate) retracted: usize,
    /// Provisional text of draft tokens, if the request asked for it; new text replaces it.
    pub(crate) provisional: String,
}

/// Stream of an answer's pieces, which ends after `[DONE]`; an earlier end is an error.
#[derive(Debug)]
pub(crate) struct AnswerStream<R = BufReader<ureq::BodyReader<'static>>> {
    events: Events<R>,
    state: StreamState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    Open,
    Ended,
}

impl<R: io::BufRead> Iterator for AnswerStream<R> {
    type Item = Result<StreamDelta, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == StreamState::Ended {
            return None;
        }
        let piece = match self.events.next_data() {
            Ok(Some(data)) if data == "[DONE]" => {
                self.state = StreamState::Ended;
                return None;
            }
            Ok(Some(data)) => parse_piece(&data),
            Ok(None) => Err(ClientError::Lost(None)),
            Err(cause) => Err(ClientError::Lost(Some(cause))),
        };
        if piece.is_err() {
            self.state = StreamState::Ended;
        }
        Some(piece)
    }
}

fn parse_piece(data: &str) -> Result<StreamDelta, ClientError> {
    #[derive(Deserialize)]
    struct StreamChunk {
        #[serde(default)]
        choices: Vec<StreamChoice>,
        usage: Option<Usage>,
        error: Option<Value>,
    }
    #[derive(Deserialize)]
    struct StreamChoice {
        delta: Option<Delta>,
        text: Option<String>,
        finish_reason: Option<String>,
        provisional: Option<ProvisionalText>,
        retract: Option<RetractedText>,
    }
    #[derive(Deserialize)]
    struct ProvisionalText {
        text: String,
    }
    #[derive(Deserialize)]
    struct RetractedText {
        characters: usize,
    }
    #[derive(Deserialize)]
    struct Delta {
        content: Option<String>,
        reasoning_content: Option<String>,
    }

    let chunk: StreamChunk = serde_json::from_str(data).map_err(ClientError::Garbled)?;
    if let Some(error) = chunk.error {
        return Err(ClientError::Broken { message: message_of(&error).unwrap_or_else(|| error.to_string()) });
    }
    let mut piece = StreamDelta { usage: chunk.usage, ..StreamDelta::default() };
    if let Some(choice) = chunk.choices.into_iter().next() {
        let (said, thought) =
            choice.delta.map_or((None, None), |delta| (delta.content, delta.reasoning_content));
        piece.text = said.or(choice.text).unwrap_or_default();
        piece.thought = thought.unwrap_or_default();
        piece.finish = choice.finish_reason;
        piece.retracted = choice.retract.map_or(0, |retract| retract.characters);
        piece.provisional = choice.provisional.map(|provisional| provisional.text).unwrap_or_default();
    }
    Ok(piece)
}

/// Returns the error of a body in OpenAI's format. Any other body is quoted and shortened.
fn refusal(status: u16, body: &str) -> ClientError {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    let error = value.get("error").unwrap_or(&Value::Null);
    let code = error.get("code").and_then(Value::as_str).map(printable);
    let quoted = || printable(&body.chars().take(200).collect::<String>());
    ClientError::Refused { status, code, message: message_of(error).unwrap_or_else(quoted) }
}

fn message_of(error: &Value) -> Option<String> {
    error.get("message").and_then(Value::as_str).map(printable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, Explain as _};

    fn quiet() -> Terminal {
        Terminal::new(crate::terminal::PrintFormat::Human, crate::terminal::Verbosity::Quiet)
    }

    fn pieces(stream: &str) -> Vec<Result<StreamDelta, ClientError>> {
        AnswerStream { events: Events::new(stream.as_bytes()), state: StreamState::Open }.collect()
    }

    #[test]
    fn chat_and_completion_chunks_become_pieces_and_done_ends_the_stream() {
        let stream = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"Ahoy\"}}]}\n\n\
            data: {\"choices\":[{\"text\":\"!\",\"finish_reason\":\"stop\"}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\n\
            data: [DONE]\n\n";
        let pieces: Vec<_> = pieces(stream).into_iter().map(Result::unwrap).collect();
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(text, "Ahoy!");
        assert_eq!(pieces[2].finish.as_deref(), Some("stop"));
        assert_eq!(pieces[3].usage, Some(Usage { prompt_tokens: 3, completion_tokens: 2 }));
    }

    #[test]
    fn what_is_drafted_and_taken_back_comes_beside_the_text() {
        let stream = "data: {\"choices\":[{\"delta\":{},\"provisional\":{\"text\":\" fox\"}}]}\n\n\
            data: {\"choices\":[{\"text\":\"\",\"retract\":{\"characters\":2}}]}\n\n\
            data: [DONE]\n\n";
        let pieces: Vec<_> = pieces(stream).into_iter().map(Result::unwrap).collect();
        let provisional = StreamDelta { provisional: " fox".to_owned(), ..StreamDelta::default() };
        assert_eq!(pieces, [provisional, StreamDelta { retracted: 2, ..StreamDelta::default() }]);
    }

    #[test]
    fn a_stream_that_just_stops_is_an_error() {
        let pieces = pieces("data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
        assert!(matches!(pieces.as_slice(), [Ok(_), Err(ClientError::Lost(None))]));
    }

    #[test]
    fn an_error_event_ends_the_stream_with_its_message() {
        let stream = "data: {\"error\":{\"message\":\"executor died\",\"code\":\"executor_lost\"}}\n\ndata: [DONE]\n\n";
        let pieces = pieces(stream);
        assert_eq!(pieces.len(), 1);
        assert!(pieces[0].as_ref().unwrap_err().to_string().contains("executor died"));
    }

    #[test]
    fn an_error_body_gives_status_code_and_message() {
        let error = refusal(404, r#"{"error":{"message":"no model `x`","code":"model_not_found"}}"#);
        assert_eq!(error.to_string(), "the gateway refused (404, model_not_found): no model `x`");
        assert_eq!(error.exit(), Exit::NotFound);
        assert_eq!(refusal(502, "<html>").to_string(), "the gateway refused (502): <html>");
    }

    #[test]
    fn a_gateway_that_is_not_there_is_unavailable() {
        // Nothing listens on this port, which was just free.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = GatewayClient::new(&format!("http://127.0.0.1:{port}/"), quiet()).models().unwrap_err();
        assert_eq!(error.exit(), Exit::Unavailable);
    }
}
