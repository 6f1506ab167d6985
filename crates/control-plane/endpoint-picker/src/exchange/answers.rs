//! What Envoy is told.

use std::collections::VecDeque;

use prost_types::{Struct, Value, value::Kind};
use serde_json::json;

use crate::{
    fleet::choice::PickRefusal,
    messages::{
        BodyMutation, CommonAnswer, CommonResponse, Empty, HeaderMutation, HeaderValueOption, HttpBody,
        HttpStatus, ImmediateResponse, PartAnswer, ProcessingResponse,
    },
};

/// The header, and in the metadata of `envoy.lb` the field, that says where a request goes.
const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Longest piece of a body that is sent on, in bytes.
const MAX_PIECE_BYTES: usize = 60 << 10;

/// A head goes on as it is.
pub(super) fn head_goes_on() -> ProcessingResponse {
    plain(PartAnswer::RequestHeaders(CommonAnswer::default()))
}

/// A piece of a body goes on as it is.
pub(super) fn body_goes_on() -> ProcessingResponse {
    plain(PartAnswer::RequestBody(CommonAnswer::default()))
}

/// A request's head goes to one of `endpoints`.
pub(super) fn choice_in_head(endpoints: &[String]) -> ProcessingResponse {
    choice(PartAnswer::RequestHeaders, endpoints)
}

/// A request whose body was waited for goes to one of `endpoints`.
pub(super) fn choice_in_body(endpoints: &[String]) -> ProcessingResponse {
    choice(PartAnswer::RequestBody, endpoints)
}

/// A request without a body goes to one of `endpoints`; its head is gone.
pub(super) fn choice_in_trailers(endpoints: &[String]) -> ProcessingResponse {
    let metadata = Some(metadata(endpoints.join(",")));
    ProcessingResponse { answer: Some(PartAnswer::RequestTrailers(Empty {})), dynamic_metadata: metadata }
}

fn choice(part: fn(CommonAnswer) -> PartAnswer, endpoints: &[String]) -> ProcessingResponse {
    let list = endpoints.join(",");
    let metadata = Some(metadata(list.clone()));
    let mutation = HeaderMutation { set_headers: vec![HeaderValueOption::overwriting(DESTINATION, list)] };
    let response = CommonResponse { header_mutation: Some(mutation), body_mutation: None };
    ProcessingResponse {
        answer: Some(part(CommonAnswer { response: Some(response) })),
        dynamic_metadata: metadata,
    }
}

/// What later filters are told: the same as the header says.
fn metadata(list: String) -> Struct {
    let field = |name: &str, kind| Struct { fields: [(name.to_owned(), Value { kind: Some(kind) })].into() };
    field("envoy.lb", Kind::StructValue(field(DESTINATION, Kind::StringValue(list))))
}

/// A piece that goes on because it is sent back.
pub(super) fn sent_back(piece: HttpBody) -> CommonAnswer {
    let body_mutation = Some(BodyMutation { streamed_response: Some(piece) });
    CommonAnswer { response: Some(CommonResponse { header_mutation: None, body_mutation }) }
}

/// A whole body, piece by piece; nothing follows it if `is_last`.
pub(super) fn pieces(body: &[u8], is_last: bool, out: &mut VecDeque<ProcessingResponse>) {
    let count = body.len().div_ceil(MAX_PIECE_BYTES).max(usize::from(is_last));
    for index in 0..count {
        let end = body.len().min((index + 1) * MAX_PIECE_BYTES);
        let piece = HttpBody {
            body: body[index * MAX_PIECE_BYTES..end].to_vec(),
            end_of_stream: is_last && index + 1 == count,
        };
        out.push_back(plain(PartAnswer::RequestBody(sent_back(piece))));
    }
}

/// A request that goes nowhere.
pub(super) fn refused(refusal: PickRefusal) -> ProcessingResponse {
    let message = refusal.to_string();
    match refusal {
        PickRefusal::Nobody => failure(503, "server_error", "no_host_ready", &message, Some(1)),
        PickRefusal::Late { retry_after_s } => {
            failure(429, "rate_limit_error", "slo_unattainable", &message, Some(retry_after_s))
        }
    }
}

/// A request whose body is longer than `limit` bytes.
pub(super) fn too_large(limit: usize) -> ProcessingResponse {
    let message = format!("the request body is longer than {limit} bytes (--picker-max-body-bytes)");
    failure(413, "invalid_request_error", "body_too_large", &message, None)
}

/// A failure in the shape that gateways give it.
fn failure(
    code: i32,
    kind: &str,
    name: &str,
    message: &str,
    retry_after_s: Option<u64>,
) -> ProcessingResponse {
    let body = json!({ "error": { "message": message, "type": kind, "param": null, "code": name } });
    let mut set_headers = vec![HeaderValueOption::overwriting("content-type", "application/json")];
    let after =
        retry_after_s.map(|seconds| HeaderValueOption::overwriting("retry-after", seconds.to_string()));
    set_headers.extend(after);
    plain(PartAnswer::Immediate(ImmediateResponse {
        status: Some(HttpStatus { code }),
        headers: Some(HeaderMutation { set_headers }),
        body: body.to_string().into_bytes(),
        details: name.to_owned(),
    }))
}

fn plain(answer: PartAnswer) -> ProcessingResponse {
    ProcessingResponse { answer: Some(answer), dynamic_metadata: None }
}
