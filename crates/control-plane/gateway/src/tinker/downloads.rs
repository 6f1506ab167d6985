//! Signed addresses for downloads of a checkpoint's files without a key; each is valid for one hour.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::{HeaderMap, Uri, header},
    response::Response,
};
use blake3::Hash;
use serde::Deserialize;
use serde_json::{Value, json};

use super::checkpoints::RunPath;
use crate::{
    adapters::AdapterError, app::App, caller::Caller, clock::seconds_since_1970, errors::ApiError,
    openai::adapter_files,
};

/// Validity of an address in seconds; clients request new addresses five minutes before the end.
const GOOD_S: u64 = 3600;

#[derive(Debug, Deserialize)]
pub(crate) struct SignedQuery {
    adapter: String,
    generation: String,
    expires: u64,
    signature: String,
}

/// Signs an adapter's file for downloads until `expires`, in seconds since 1970.
fn signature(secret: &[u8; 32], file: &str, adapter: &str, generation: &str, expires: u64) -> Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    for part in [file, adapter, generation, &expires.to_string()] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.finalize()
}

/// Returns this server's address as the client knows it.
fn server(headers: &HeaderMap, uri: &Uri) -> Result<String, ApiError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST.as_str()).or_else(|| uri.authority().map(|authority| authority.as_str()));
    let host = host
        .ok_or_else(|| ApiError::missing("host", "the header 'host' is required for download addresses"))?;
    let scheme = if text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    Ok(format!("{scheme}://{host}"))
}

/// `GET training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls`: one address per file of an
/// adapter.
pub(crate) async fn urls(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(place): Path<(String, String, String)>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let entry = RunPath::read(place)?.adapter(&app, &caller)?;
    let secret = app.registry.download_secret().await.map_err(AdapterError::from)?;
    let (expires, server) = (seconds_since_1970() + GOOD_S, server(&headers, &uri)?);
    let (adapter, generation) = (&entry.record.name, entry.record.generation.to_string());
    let address = |file: &str| {
        let signature = signature(secret, file, adapter, &generation, expires);
        // Names of runs and files contain only plain characters, so nothing is escaped.
        format!(
            "{server}/api/v1/downloads/{file}?adapter={adapter}&generation={generation}&expires={expires}&signature={signature}"
        )
    };
    let files = app.registry.download(&entry).await?.files;
    let urls: serde_json::Map<String, Value> =
        files.iter().map(|(file, _)| (file.clone(), address(file).into())).collect();
    Ok(Json(json!({ "urls": urls, "expires": expires })))
}

/// `GET downloads/{file}`: sends a file to any client with a signed address.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(file): Path<String>,
    Query(signed): Query<SignedQuery>,
) -> Result<Response, ApiError> {
    let SignedQuery { adapter, generation, expires, signature: given } = signed;
    let secret = app.registry.download_secret().await.map_err(AdapterError::from)?;
    let is_signed = Hash::from_hex(&given)
        .is_ok_and(|given| given == signature(secret, &file, &adapter, &generation, expires));
    if !is_signed || expires <= seconds_since_1970() {
        return Err(ApiError::forbidden(
            "this address was not signed by this server, or has expired; request a new one",
        ));
    }
    let entry = app.registry.entries().get(&adapter).cloned();
    let entry = entry.filter(|entry| entry.record.generation.to_string() == generation);
    let entry = entry.ok_or_else(|| ApiError::not_found("the file of this address no longer exists"))?;
    adapter_files::send(app.registry.download(&entry).await?, &file).await
}
