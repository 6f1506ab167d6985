//! Messages of Envoy's `ext_proc` and gRPC's health protocol. Fields that the picker does not use are omitted
//! and skipped on reading.
//!
//! Field numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`,
//! `envoy/config/core/v3/base.proto` and `grpc/health/v1/health.proto`.

use std::collections::HashMap;

use prost::{Enumeration, Message, Oneof};
use prost_types::Struct;

/// One part of an HTTP request or response, sent by Envoy.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    #[prost(oneof = "RequestPart", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<RequestPart>,
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// True if Envoy ignores the answer.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// Transfer modes of bodies; only in the first message of a stream.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum RequestPart {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(Empty),
    #[prost(message, tag = "7")]
    ResponseTrailers(Empty),
}

/// A message whose fields are neither read nor set.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

/// Metadata by the filter that set them.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct ProtocolConfiguration {
    /// [`BodySendMode`] of request bodies.
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    /// [`BodySendMode`] of response bodies.
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
}

/// Transfer mode of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum BodySendMode {
    /// No body is sent.
    None = 0,
    /// The body comes in pieces; an answer releases each piece.
    Streamed = 1,
    /// The body comes in one piece.
    Buffered = 2,
    /// The body comes in one piece, which may be only the beginning.
    BufferedPartial = 3,
    /// The body comes in pieces, which Envoy forwards only if the picker returns them.
    FullDuplexStreamed = 4,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// True if no body follows.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

impl HeaderMap {
    /// Returns the first value of a field; names are in lower case.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|header| header.key == name).map(HeaderValue::bytes)
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value from an Envoy that sends text.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Value as bytes; empty if `value` is set.
    #[prost(bytes = "vec", tag = "3")]
    pub raw_value: Vec<u8>,
}

impl HeaderValue {
    fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { self.value.as_bytes() } else { &self.raw_value }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpBody {
    #[prost(bytes = "vec", tag = "1")]
    pub body: Vec<u8>,
    /// True if no piece follows.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    #[prost(oneof = "PartAnswer", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub answer: Option<PartAnswer>,
    /// Metadata for later filters, by namespace.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum PartAnswer {
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    #[prost(message, tag = "5")]
    RequestTrailers(Empty),
    #[prost(message, tag = "6")]
    ResponseTrailers(Empty),
    /// A response to the client that ends the request.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `HeadersResponse` and `BodyResponse`, which have the same fields.
#[derive(Clone, PartialEq, Message)]
pub struct CommonAnswer {
    /// Changes of the part; `None` for no change.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
}

#[derive(Clone, PartialEq, Message)]
pub struct BodyMutation {
    /// Piece that Envoy forwards, in [`BodySendMode::FullDuplexStreamed`].
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<HttpBody>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// [`AppendAction`] for an existing field.
    #[prost(enumeration = "AppendAction", tag = "3")]
    pub append_action: i32,
}

impl HeaderValueOption {
    /// Returns a field that replaces existing values.
    #[must_use]
    pub(crate) fn overwriting(name: &str, value: impl Into<Vec<u8>>) -> Self {
        let header = HeaderValue { key: name.to_owned(), value: String::new(), raw_value: value.into() };
        Self { header: Some(header), append_action: AppendAction::OverwriteIfExistsOrAdd.into() }
    }
}

/// Effect on an existing field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum AppendAction {
    /// Adds one more value.
    AppendIfExistsOrAdd = 0,
    /// Replaces the existing values.
    OverwriteIfExistsOrAdd = 2,
}

/// A response in place of the host's.
#[derive(Clone, PartialEq, Message)]
pub struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    #[prost(bytes = "vec", tag = "3")]
    pub body: Vec<u8>,
    /// Reason, for Envoy's log.
    #[prost(string, tag = "5")]
    pub details: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthCheckRequest {
    /// Service name; empty for the whole process.
    #[prost(string, tag = "1")]
    pub service: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
}
