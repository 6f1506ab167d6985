//! One HTTP request, which Envoy sends part by part, and the picker's answers.
//!
//! ```text
//! head, body in one piece:       head -> continue       body -> destination, or the answer to the caller
//! head, body that is sent back:  head -> (nothing)      last piece -> head with destination, then the pieces
//! head alone:                    head -> destination
//! response:                      every part -> continue unchanged
//! ```
//!
//! Envoy names the mode in its first message. The picker does not wait for a streamed body, because Envoy
//! forwards the head before the picker could read the body. [`answers`] builds the messages.
//!
//! Bodies that are sent back are held until a host is chosen, at most
//! [`MAX_HELD_BYTES`](crate::picker::MAX_HELD_BYTES) in all. Beyond that limit the picker chooses by the part
//! received so far, and the rest passes piece by piece.

pub(crate) mod answers;

use std::{collections::VecDeque, sync::Arc};

use prost_types::{Struct, Value, value::Kind};
use tokio::sync::OwnedSemaphorePermit;

use self::answers::{
    body_goes_on, choice_in_body, choice_in_head, choice_in_trailers, head_goes_on, refused, sent_back,
    too_large,
};
use crate::{
    fleet::choice::{Pick, Subset},
    messages::{
        BodySendMode, CommonAnswer, Empty, HttpBody, HttpHeaders, Metadata, PartAnswer, ProcessingRequest,
        ProcessingResponse, RequestPart,
    },
    picker::Picker,
    request_parser::RequestHead,
};

/// Metadata key of the hosts that may be chosen.
const SUBSET: (&str, &str) = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
/// Metadata key of the host that answered a request.
const SERVED: (&str, &str) = ("envoy.lb", "x-gateway-destination-endpoint-served");
/// Maximum number of hosts in a subset.
const MAX_SUBSET: usize = 4_096;

/// A message that is not allowed at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnexpectedMessage {
    #[error("the message has no known part of a request")]
    Nothing,
    #[error("a part of the request arrived before its head")]
    NoHead,
}

/// Progress of a request.
#[derive(Debug)]
enum ExchangeStage {
    Begin,
    /// The head was received; the body is outstanding.
    Asking(RequestHead),
    /// The request was sent to a host.
    Sent(Pick),
    /// The picker answered the request itself.
    Refused,
}

/// State of one request and its response.
#[derive(Debug)]
pub struct Exchange {
    picker: Arc<Picker>,
    stage: ExchangeStage,
    request_mode: BodySendMode,
    response_mode: BodySendMode,
    subset: Subset,
    body: Vec<u8>,
    /// Permit for the held bytes, until the body has been sent back.
    held: Option<OwnedSemaphorePermit>,
}

impl Exchange {
    #[must_use]
    pub fn new(picker: Arc<Picker>) -> Self {
        Self {
            picker,
            stage: ExchangeStage::Begin,
            request_mode: BodySendMode::Buffered,
            response_mode: BodySendMode::None,
            subset: None,
            body: Vec::new(),
            held: None,
        }
    }

    /// Whether the choice of a host needs more of the request.
    #[must_use]
    pub(crate) fn is_asking(&self) -> bool {
        matches!(self.stage, ExchangeStage::Begin | ExchangeStage::Asking(_))
    }

    /// Releases the permit once the body has been sent back. The caller has taken all answers from `out`.
    pub fn said(&mut self) {
        if self.body.is_empty() {
            self.held = None;
        }
    }

    /// Handles one message and appends the answers to `out`.
    ///
    /// # Errors
    /// If the message is not allowed at its position; the stream must end.
    pub fn handle_message(
        &mut self,
        request: ProcessingRequest,
        out: &mut VecDeque<ProcessingResponse>,
    ) -> Result<(), UnexpectedMessage> {
        if let Some(config) = &request.protocol_config {
            self.request_mode = config.request_body_mode();
            self.response_mode = config.response_body_mode();
        }
        if request.observability_mode {
            return Ok(());
        }
        let metadata = request.metadata_context.as_ref();
        match request.part.ok_or(UnexpectedMessage::Nothing)? {
            RequestPart::RequestHeaders(headers) => {
                self.subset = metadata.and_then(subset);
                self.head(&headers, out);
            }
            RequestPart::RequestBody(body) => self.piece(body, out)?,
            RequestPart::RequestTrailers(_) => self.trailers(out)?,
            RequestPart::ResponseHeaders(_) => {
                self.served(metadata);
                out.push_back(answer(PartAnswer::ResponseHeaders(CommonAnswer::default())));
            }
            RequestPart::ResponseBody(body) => out.push_back(match self.response_mode {
                BodySendMode::FullDuplexStreamed => answer(PartAnswer::ResponseBody(sent_back(body))),
                _ => answer(PartAnswer::ResponseBody(CommonAnswer::default())),
            }),
            RequestPart::ResponseTrailers(_) => out.push_back(answer(PartAnswer::ResponseTrailers(Empty {}))),
        }
        Ok(())
    }

    fn head(&mut self, headers: &HttpHeaders, out: &mut VecDeque<ProcessingResponse>) {
        let head = head(headers);
        match self.request_mode {
            BodySendMode::None | BodySendMode::Streamed => self.choose(&head, choice_in_head, out),
            _ if headers.end_of_stream => self.choose(&head, choice_in_head, out),
            BodySendMode::FullDuplexStreamed => self.stage = ExchangeStage::Asking(head),
            BodySendMode::Buffered | BodySendMode::BufferedPartial => {
                self.stage = ExchangeStage::Asking(head);
                out.push_back(head_goes_on());
            }
        }
    }

    fn piece(
        &mut self,
        body: HttpBody,
        out: &mut VecDeque<ProcessingResponse>,
    ) -> Result<(), UnexpectedMessage> {
        let is_sent_back = self.request_mode == BodySendMode::FullDuplexStreamed;
        match std::mem::replace(&mut self.stage, ExchangeStage::Refused) {
            ExchangeStage::Begin => return Err(UnexpectedMessage::NoHead),
            // The caller already has an answer, so Envoy ignores the rest.
            ExchangeStage::Refused => {}
            ExchangeStage::Sent(pick) => {
                self.stage = ExchangeStage::Sent(pick);
                out.push_back(if is_sent_back {
                    answer(PartAnswer::RequestBody(sent_back(body)))
                } else {
                    body_goes_on()
                });
            }
            ExchangeStage::Asking(_) if self.body.len() + body.body.len() > self.picker.max_body_bytes => {
                self.body = Vec::new();
                out.push_back(too_large(self.picker.max_body_bytes));
            }
            ExchangeStage::Asking(head) if is_sent_back => self.buffer_body(head, &body, out),
            ExchangeStage::Asking(head) => {
                self.body = body.body;
                self.choose(&head, choice_in_body, out);
                self.body = Vec::new();
            }
        }
        Ok(())
    }

    /// Holds a body piece; chooses a host when the body is complete or exceeds the limit.
    fn buffer_body(&mut self, head: RequestHead, piece: &HttpBody, out: &mut VecDeque<ProcessingResponse>) {
        let has_room = self.reserve(piece.body.len());
        self.body.extend_from_slice(&piece.body);
        if has_room && !piece.end_of_stream {
            self.stage = ExchangeStage::Asking(head);
            return;
        }
        self.choose(&head, choice_in_head, out);
        self.send_back(if piece.end_of_stream { EndOfStream::Yes } else { EndOfStream::No }, out);
    }

    /// Reserves `bytes` more held bytes; returns false if the limit is reached.
    fn reserve(&mut self, bytes: usize) -> bool {
        let Ok(bytes) = u32::try_from(bytes) else { return false };
        let Ok(more) = Arc::clone(&self.picker.body_permits).try_acquire_many_owned(bytes) else {
            return false;
        };
        match &mut self.held {
            Some(held) => held.merge(more),
            held @ None => *held = Some(more),
        }
        true
    }

    fn trailers(&mut self, out: &mut VecDeque<ProcessingResponse>) -> Result<(), UnexpectedMessage> {
        match std::mem::replace(&mut self.stage, ExchangeStage::Refused) {
            ExchangeStage::Begin => return Err(UnexpectedMessage::NoHead),
            ExchangeStage::Refused => return Ok(()),
            ExchangeStage::Sent(pick) => self.stage = ExchangeStage::Sent(pick),
            // The body was empty, so the trailers carry the choice.
            ExchangeStage::Asking(head) if self.request_mode != BodySendMode::FullDuplexStreamed => {
                self.choose(&head, choice_in_trailers, out);
                return Ok(());
            }
            ExchangeStage::Asking(head) => {
                self.choose(&head, choice_in_head, out);
                self.send_back(EndOfStream::No, out);
            }
        }
        if matches!(self.stage, ExchangeStage::Sent(_)) {
            out.push_back(answer(PartAnswer::RequestTrailers(Empty {})));
        }
        Ok(())
    }

    /// Chooses a host, once the needed parts are there.
    fn choose(
        &mut self,
        head: &RequestHead,
        say: fn(&[String]) -> ProcessingResponse,
        out: &mut VecDeque<ProcessingResponse>,
    ) {
        match self.picker.decide(head, &self.body, &self.subset) {
            Ok(pick) => {
                out.push_back(say(&pick.endpoints));
                self.stage = ExchangeStage::Sent(pick);
            }
            Err(refusal) => {
                out.push_back(refused(refusal));
                self.stage = ExchangeStage::Refused;
            }
        }
    }

    /// Sends the held body on, if a host was chosen.
    fn send_back(&mut self, last: EndOfStream, out: &mut VecDeque<ProcessingResponse>) {
        let body = std::mem::take(&mut self.body);
        if matches!(self.stage, ExchangeStage::Sent(_)) {
            answers::pieces(&body, last == EndOfStream::Yes, out);
        }
    }

    fn served(&self, metadata: Option<&Metadata>) {
        let ExchangeStage::Sent(pick) = &self.stage else { return };
        if let Some(Kind::StringValue(endpoint)) = metadata.and_then(|metadata| find(metadata, SERVED)) {
            self.picker.metrics.served(pick.endpoints.first().is_some_and(|first| first == endpoint));
            self.picker.fleet.served(pick, endpoint);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndOfStream {
    Yes,
    No,
}

fn answer(answer: PartAnswer) -> ProcessingResponse {
    ProcessingResponse { answer: Some(answer), dynamic_metadata: None }
}

fn head(headers: &HttpHeaders) -> RequestHead {
    let find = |name| headers.headers.as_ref().and_then(|headers| headers.find(name));
    let path = String::from_utf8_lossy(find(":path").unwrap_or_default());
    let path = path.split(['?', '#']).next().unwrap_or_default().to_owned();
    let key = find("authorization").or_else(|| find("x-api-key")).unwrap_or_default().to_vec();
    RequestHead { path, key }
}

fn find<'a>(metadata: &'a Metadata, (namespace, key): (&str, &str)) -> Option<&'a Kind> {
    let fields: &Struct = metadata.filter_metadata.get(namespace)?;
    fields.fields.get(key)?.kind.as_ref()
}

/// Returns the hosts that metadata allow, as a list or comma-separated. Any other value allows none.
fn subset(metadata: &Metadata) -> Option<Vec<String>> {
    let named = |text: &str| text.split(',').map(|one| one.trim().to_owned()).take(MAX_SUBSET).collect();
    Some(match find(metadata, SUBSET)? {
        Kind::StringValue(text) => named(text),
        Kind::ListValue(list) => {
            let text = |value: &Value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.clone()),
                _ => None,
            };
            list.values.iter().filter_map(text).take(MAX_SUBSET).collect()
        }
        _ => Vec::new(),
    })
}

#[cfg(test)]
mod tests;
