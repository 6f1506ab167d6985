//! The error body of Ollama's API: `{"error": "..."}`.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::Response,
};
use serde_json::json;

use crate::{body::is_of_ollama, errors::ErrorMessage};

/// Rewrites every error on Ollama's paths to Ollama's format.
pub(crate) async fn reshape(request: Request, next: Next) -> Response {
    let is_ours = is_of_ollama(request.uri().path());
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ErrorMessage>() {
        Some(ErrorMessage(text)) if is_ours => {
            let body = json!({ "error": &*text }).to_string();
            response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
            response.map(|_| Body::from(body))
        }
        _ => response,
    }
}
