//! What comes of a request whose answer is fetched later.

use axum::{
    Json,
    body::{Body, Bytes},
    http::{HeaderValue, Response, header},
    response::IntoResponse as _,
};
use control_protocol::training::session::{Category, CommandRefusal};
use serde_json::{Value, json};

use crate::errors::ApiError;

/// What protobuf is called in HTTP.
pub const PROTOBUF: &str = "application/x-protobuf";

/// A failure in the client's words: the same again would fail again, or not.
impl From<ApiError> for CommandRefusal {
    fn from(error: ApiError) -> Self {
        let category = if error.status().is_client_error() { Category::User } else { Category::Server };
        Self { message: error.to_string(), category }
    }
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum FutureResult {
    /// A result in JSON.
    Json(Value),
    /// A result in protobuf.
    Protobuf(Bytes),
    /// None.
    Failed(CommandRefusal),
}

impl FutureResult {
    /// Bytes that it takes besides those that every promise is counted with, which cover small results in JSON.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Json(_) => 0,
            Self::Failed(refusal) => refusal.message.len(),
            Self::Protobuf(bytes) => bytes.len(),
        }
    }

    /// As the client wants it.
    #[must_use]
    pub fn respond(&self) -> Response<Body> {
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
