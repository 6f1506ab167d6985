//! Messages to Envoy.

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

/// Header, and field in the `envoy.lb` metadata, with the destination of a request.
const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Maximum size of a body piece that is sent on, in bytes.
const MAX_PIECE_BYTES: usize = 60 << 10;

pub(super) fn head_goes_on() -> ProcessingResponse {
    plain(PartAnswer::RequestHeaders(CommonAnswer::default()))
}

pub(super) fn body_goes_on() -> ProcessingResponse {
    plain(PartAnswer::RequestBody(CommonAnswer::default()))
}

/// Sets the destination in the request's head.
pub(super) fn choice_in_head(endpoints: &[String]) -> ProcessingResponse {
    choice(PartAnswer::RequestHeaders, endpoints)
}

/// Sets the destination after the body was buffered.
pub(super) fn choice_in_body(endpoints: &[String]) -> ProcessingResponse {
    choice(PartAnswer::RequestBody, endpoints)
}

/// Sets the destination in metadata only, because the head has already gone.
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

/// Returns the destination for later filters, equal to the header.
fn metadata(list: String) -> Struct {
    let field = |name: &str, kind| Struct { fields: [(name.to_owned(), Value { kind: Some(kind) })].into() };
    field("envoy.lb", Kind::StructValue(field(DESTINATION, Kind::StringValue(list))))
}

/// Returns a body piece to Envoy, which forwards it.
pub(super) fn sent_back(piece: HttpBody) -> CommonAnswer {
    let body_mutation = Some(BodyMutation { streamed_response: Some(piece) });
    CommonAnswer { response: Some(CommonResponse { header_mutation: None, body_mutation }) }
}

/// Appends a whole body in pieces to `out`. The last piece ends the stream if `is_last`.
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

pub(super) fn refused(refusal: PickRefusal) -> ProcessingResponse {
    let message = refusal.to_string();
    match refusal {
        PickRefusal::Nobody => failure(503, "server_error", "no_host_ready", &message, Some(1)),
        PickRefusal::Late { retry_after_s } => {
            failure(429, "rate_limit_error", "slo_unattainable", &message, Some(retry_after_s))
        }
    }
}

pub(super) fn too_large(limit: usize) -> ProcessingResponse {
    let message = format!("the request body is longer than {limit} bytes (--picker-max-body-bytes)");
    failure(413, "invalid_request_error", "body_too_large", &message, None)
}

/// Returns an error answer in the gateway's JSON format.
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
