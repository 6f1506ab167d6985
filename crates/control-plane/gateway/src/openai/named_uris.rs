//! Requests whose model is a URI.
//!
//! A request that names a URI is answered after the adapter is fetched and loaded. The URIs are found in the
//! body before its route reads it, so every route that takes a model has them.

use std::sync::Arc;

use memchr::memmem;
use serde_json::Value;

use super::{adapter_switches::MAX_SWITCHES, strict_fields::StrictFields};
use crate::{
    adapters::{
        FetchError, FetchRefusal,
        uri::{AdapterUri, is_uri},
    },
    app::App,
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
};

/// Beginnings of JSON strings with a URI.
const URI_STARTS: [&[u8]; 3] = [b"\"hf:", b"\"s3:", b"\"file:"];
/// Tag that clients of Ollama append to names.
const OLLAMA_TAG: &str = ":latest";

/// Returns the URIs that a body names as models, each once; none if the body is not valid JSON.
fn named(body: &[u8]) -> Vec<String> {
    let Ok(mut fields) = StrictFields::parse(body) else { return Vec::new() };
    let mut models = vec![fields.take("model"), fields.take("adapter")];
    if let Some(Value::Array(switches)) = fields.take("adapter_switches") {
        for mut switch in switches.into_iter().take(MAX_SWITCHES) {
            models.extend(["model", "adapter"].map(|name| switch.get_mut(name).map(Value::take)));
        }
    }
    let mut uris = Vec::new();
    for uri in models.into_iter().flatten().filter_map(uri_of) {
        if !uris.contains(&uri) {
            uris.push(uri);
        }
    }
    uris
}

/// Returns the URI that a model's name is; `None` for other names.
fn uri_of(model: Value) -> Option<String> {
    let Value::String(name) = model else { return None };
    let name = name.strip_suffix(OLLAMA_TAG).unwrap_or(&name);
    // An expression such as hf://a/b:0.5+c merges loaded adapters.
    let is_sum = name.contains('+') || name.matches(':').count() > 1;
    (is_uri(name) && !is_sum).then(|| name.to_owned())
}

/// Fetches and loads the adapters that a request of `caller` names by URI.
pub(crate) async fn fetch_named(
    app: &Arc<App>,
    caller: &Caller,
    body: JsonBody,
) -> Result<JsonBody, ApiError> {
    if !URI_STARTS.iter().any(|start| memmem::find(&body, start).is_some()) {
        return Ok(body);
    }
    let (serving, origin) = (app.serving()?, body.origin());
    let read = move || {
        let uris = named(&body);
        Ok((body, uris))
    };
    let (body, uris) = app.bodies.run(origin, read).await?;
    for text in uris {
        if app.registry.entries().find(&text, caller).is_some() {
            continue;
        }
        let (uri, owner) = AdapterUri::parse_name(&text).map_err(FetchError::from)?;
        if owner.is_some_and(|owner| *owner != *caller.tenant) {
            return Err(ApiError::model_not_found(&text));
        }
        app.registry.load_named(uri, caller, (&*serving).into()).await?;
    }
    Ok(body)
}

impl From<FetchRefusal> for ApiError {
    fn from(refusal: FetchRefusal) -> Self {
        let error = Self::from(refusal.error);
        match refusal.retry_after {
            None => error,
            Some(wait) => error.after(wait),
        }
    }
}

impl From<FetchError> for ApiError {
    fn from(error: FetchError) -> Self {
        let message = error.to_string();
        let error = match error {
            FetchError::Uri(_) => Self::bad_request("adapter_uri_invalid", message),
            FetchError::Disabled(_) | FetchError::NotAllowed(_) => Self::uri_forbidden(message),
            FetchError::Missing { .. } => Self::uri_not_found(message),
            FetchError::Offline { .. } | FetchError::Failed { .. } | FetchError::Timeout { .. } => {
                Self::unavailable("adapter_fetch_failed", message)
            }
            FetchError::OtherDigest { .. } => Self::conflict("adapter_digest_mismatch", message),
            FetchError::Quota { .. } => Self::no_room("adapter_quota_exceeded", message),
            FetchError::Busy(_) => Self::busy("adapter_fetch_busy", message),
            FetchError::Load(error) => Self::from(&*error),
            FetchError::Stopped(_) => Self::internal(message),
        };
        error.of("model")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named_in(body: &str) -> Vec<String> {
        named(body.as_bytes())
    }

    #[test]
    fn the_uris_of_a_body_are_those_of_its_models() {
        let body = r#"{"model": "hf://a/b", "prompt": "\"hf://no/model\"",
            "adapter_switches": [{"model": "s3://c/d"}, {"adapter": "hf://a/b"}, {"model": "sql"}]}"#;
        assert_eq!(named_in(body), ["hf://a/b", "s3://c/d"]);
        assert_eq!(named_in(r#"{"model": "base", "adapter": "file:///x"}"#), ["file:///x"]);
        assert_eq!(named_in(r#"{"model": "hf://a/b:latest"}"#), ["hf://a/b"]);
    }

    #[test]
    fn other_bodies_name_no_uri() {
        for body in [
            r#"{"model": "sql", "prompt": "hf://a/b"}"#,
            r#"{"model": "hf://a/b:0.5+sql"}"#,
            r#"{"model": "hf://a/b:0.5"}"#,
            r#"{"model": "https://a/b"}"#,
            r#"{"model": ["hf://a/b"]}"#,
            r#"{"model": "hf://a/b""#,
        ] {
            assert!(named_in(body).is_empty(), "{body}");
        }
    }

    #[test]
    fn one_request_names_no_more_uris_than_it_may_have_switches() {
        let switches: Vec<_> = (0..100).map(|index| format!(r#"{{"model":"hf://a/b{index}"}}"#)).collect();
        let body = format!(r#"{{"adapter_switches":[{}]}}"#, switches.join(","));
        assert_eq!(named_in(&body).len(), MAX_SWITCHES);
    }
}
