//! Result of a request whose answer is fetched later.

use axum::{
    Json,
    body::{Body, Bytes},
    http::{HeaderValue, Response, header},
    response::IntoResponse as _,
};
use control_protocol::training::session::{Category, CommandRefusal};
use serde_json::{Value, json};

use crate::errors::ApiError;

/// Media type of protobuf.
pub(crate) const PROTOBUF: &str = "application/x-protobuf";

/// Converts an error; its category says whether the same request would fail again.
impl From<ApiError> for CommandRefusal {
    fn from(error: ApiError) -> Self {
        let category = if error.status().is_client_error() { Category::User } else { Category::Server };
        Self { message: error.to_string(), category }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum FutureResult {
    Json(Value),
    Protobuf(Bytes),
    Failed(CommandRefusal),
}

impl FutureResult {
    /// Bytes of the result besides those that every future counts, which cover small JSON results.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Json(_) => 0,
            Self::Failed(refusal) => refusal.message.len(),
            Self::Protobuf(bytes) => bytes.len(),
        }
    }

    /// Returns the HTTP response for the client.
    #[must_use]
    pub(crate) fn respond(&self) -> Response<Body> {
        match self {
            Self::Json(value) => Json(value).into_response(),
            Self::Failed(CommandRefusal { message, category }) => {
                Json(json!({ "error": message, "category": category })).into_response()
            }
            Self::Protobuf(bytes) => {
                let mut response = Response::new(Body::from(bytes.clone()));
                response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(PROTOBUF));
                response
            }
        }
    }
}

impl From<Result<Self, CommandRefusal>> for FutureResult {
    fn from(result: Result<Self, CommandRefusal>) -> Self {
        result.unwrap_or_else(Self::Failed)
    }
}
