//! Rewrites errors to the format of the API that the request uses.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::Response,
};

use crate::{anthropic, errors::ErrorMessage, http_api::HttpApi, ollama};

/// Rewrites the error of an answer, and gives answers of Anthropic's API the header with their request id.
pub(crate) async fn rewrite(request: Request, next: Next) -> Response {
    let api = HttpApi::of(request.uri().path(), request.headers());
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ErrorMessage>();
    if api == HttpApi::Anthropic {
        anthropic::errors::name_request(&mut response);
    }
    let body = match (api, error) {
        (HttpApi::OpenAi, _) | (_, None) => return response,
        (HttpApi::Ollama, Some(error)) => ollama::errors::body(&error),
        (HttpApi::Anthropic, Some(error)) => anthropic::errors::rewrite(&mut response, &error),
    };
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    response.map(|_| Body::from(body))
}
