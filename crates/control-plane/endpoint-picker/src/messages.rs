//! Messages of Envoy's `ext_proc` and of gRPC's health protocol, as far as they are used here: what is left out is skipped
//! when it is read.
//!
//! Field numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`, `envoy/config/core/v3/base.proto` and
//! `grpc/health/v1/health.proto`.

use std::collections::HashMap;

use prost::{Enumeration, Message, Oneof};
use prost_types::Struct;

/// What Envoy says: one part of an HTTP request or of its answer.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    /// The part.
    #[prost(oneof = "RequestPart", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<RequestPart>,
    /// What filters know of the request.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// Nobody listens for an answer.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// How bodies will come; in the first message of a stream alone.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

/// Parts of an HTTP request and its answer.
#[derive(Clone, PartialEq, Oneof)]
pub enum RequestPart {
    /// The request's head.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// The answer's head.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A piece of the request's body.
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    /// A piece of the answer's body.
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    /// What follows the request's body.
    #[prost(message, tag = "6")]
    RequestTrailers(Empty),
    /// What follows the answer's body.
    #[prost(message, tag = "7")]
    ResponseTrailers(Empty),
}

/// Of whose fields none is looked at or set.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

/// Metadata by the filter that set them.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    /// Untyped ones.
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// How bodies come.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ProtocolConfiguration {
    /// Those of requests.
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    /// Those of answers.
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
}

/// How a body comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum BodySendMode {
    /// Not at all.
    None = 0,
    /// In pieces, each of which is let through by its answer.
    Streamed = 1,
    /// In one piece.
    Buffered = 2,
    /// In one piece, which may be the first of a longer body.
    BufferedPartial = 3,
    /// In pieces, which are sent on only if they are sent back.
    FullDuplexStreamed = 4,
}

/// A head.
#[derive(Clone, PartialEq, Message)]
pub struct HttpHeaders {
    /// Its fields.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// No body follows.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

/// Fields of a head.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderMap {
    /// In their order.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

impl HeaderMap {
    /// The first value of a field; names are in lower case.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|header| header.key == name).map(HeaderValue::bytes)
    }
}

/// A field of a head.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value, from an Envoy that says it as text.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Its value.
    #[prost(bytes = "vec", tag = "3")]
    pub raw_value: Vec<u8>,
}

impl HeaderValue {
    fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { self.value.as_bytes() } else { &self.raw_value }
    }
}

/// A piece of a body.
#[derive(Clone, PartialEq, Message)]
pub struct HttpBody {
    /// Its bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub body: Vec<u8>,
    /// Nothing follows.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// What Envoy is told.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    /// To which part.
    #[prost(oneof = "PartAnswer", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub answer: Option<PartAnswer>,
    /// What later filters are to know, by namespace.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

/// Answers to parts.
#[derive(Clone, PartialEq, Oneof)]
pub enum PartAnswer {
    /// To the request's head.
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    /// To the answer's head.
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    /// To a piece of the request's body.
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    /// To a piece of the answer's body.
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    /// To the request's trailers.
    #[prost(message, tag = "5")]
    RequestTrailers(Empty),
    /// To the answer's trailers.
    #[prost(message, tag = "6")]
    ResponseTrailers(Empty),
    /// To anything: the request ends here.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `HeadersResponse` and `BodyResponse`, which are alike.
#[derive(Clone, PartialEq, Message)]
pub struct CommonAnswer {
    /// What becomes of the part; nothing if there is none.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// What becomes of a part; it goes on.
#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    /// Fields of the head.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    /// The piece of the body that is sent on.
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
}

/// What becomes of a piece of a body.
#[derive(Clone, PartialEq, Message)]
pub struct BodyMutation {
    /// What is sent on, where pieces are only sent on if they are sent back.
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<HttpBody>,
}

/// What becomes of a head.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderMutation {
    /// Fields that are set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
}

/// A field that is set.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValueOption {
    /// The field.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// What becomes of one that is there.
    #[prost(enumeration = "AppendAction", tag = "3")]
    pub append_action: i32,
}

impl HeaderValueOption {
    /// This value, whatever there was.
    #[must_use]
    pub fn overwriting(name: &str, value: impl Into<Vec<u8>>) -> Self {
        let header = HeaderValue { key: name.to_owned(), value: String::new(), raw_value: value.into() };
        Self { header: Some(header), append_action: AppendAction::OverwriteIfExistsOrAdd.into() }
    }
}

/// What becomes of a field that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum AppendAction {
    /// It gets one more value.
    AppendIfExistsOrAdd = 0,
    /// It is replaced.
    OverwriteIfExistsOrAdd = 2,
}

/// An answer in the place of a host's.
#[derive(Clone, PartialEq, Message)]
pub struct ImmediateResponse {
    /// Its status.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Fields of its head.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// Its body.
    #[prost(bytes = "vec", tag = "3")]
    pub body: Vec<u8>,
    /// Why, for Envoy's log.
    #[prost(string, tag = "5")]
    pub details: String,
}

/// A status of HTTP.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct HttpStatus {
    /// As HTTP numbers them.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// Whether a service is there.
#[derive(Clone, PartialEq, Message)]
pub struct HealthCheckRequest {
    /// What it is called; the whole process if empty.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// That it is, or not.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct HealthCheckResponse {
    /// Which of both.
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// Whether a service is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum ServingStatus {
    /// Nothing is known.
    Unknown = 0,
    /// It is.
    Serving = 1,
    /// It is not.
    NotServing = 2,
}
