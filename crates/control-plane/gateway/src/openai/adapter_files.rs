//! `GET /v1/lora_adapter_files`: lets an adapter's tenant and administrators download its files.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    adapters::{
        AdapterEntry,
        download::{Download, DownloadError},
    },
    app::App,
    body,
    caller::{Caller, KeyRole},
    errors::ApiError,
};

/// Query that names an adapter.
#[derive(Debug, Deserialize)]
pub(crate) struct AdapterFilesQuery {
    lora_name: String,
    /// Adapter version that the caller expects; any other is a conflict.
    expected_generation: Option<String>,
}

impl AdapterFilesQuery {
    /// Returns the adapter if the caller may download its files.
    fn entry(&self, app: &App, caller: &Caller) -> Result<Arc<AdapterEntry>, ApiError> {
        let name = &self.lora_name;
        let entry = app.registry.entries().find(name, caller).cloned();
        let entry = entry.ok_or_else(|| ApiError::model_not_found(name).of("lora_name"))?;
        if entry.record.tenant.as_deref() != Some(&*caller.tenant) && caller.role != KeyRole::Admin {
            let message =
                format!("'{name}' belongs to no tenant; only an administrator may download its files");
            return Err(ApiError::forbidden(message));
        }
        let found = entry.record.generation.to_string();
        match &self.expected_generation {
            Some(expected) if *expected != found => {
                let message = format!("'{name}' now has the generation {found}; request its files again");
                Err(ApiError::conflict("generation_mismatch", message))
            }
            _ => Ok(entry),
        }
    }
}

pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(asked): Query<AdapterFilesQuery>,
) -> Result<Json<Value>, ApiError> {
    let entry = asked.entry(&app, &caller)?;
    let download = app.registry.download(&entry).await?;
    let files = download.files.iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes }));
    Ok(Json(json!({
        "object": "list",
        "lora_name": asked.lora_name,
        "generation": entry.record.generation.to_string(),
        "data": files.collect::<Vec<_>>(),
    })))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(file): Path<String>,
    Query(asked): Query<AdapterFilesQuery>,
) -> Result<Response, ApiError> {
    let entry = asked.entry(&app, &caller)?;
    send(app.registry.download(&entry).await?, &file).await
}

pub(crate) async fn send(download: Download, name: &str) -> Result<Response, ApiError> {
    let opened = download.open(name).await;
    let opened = opened.map_err(|error| ApiError::internal(format!("cannot read '{name}': {error}")))?;
    let (file, bytes) = opened.ok_or_else(|| {
        let names: Vec<_> = download.files.iter().map(|(name, _)| name.as_str()).collect();
        ApiError::not_found(format!("the adapter has no such file; it has {}", names.join(", ")))
    })?;
    Ok(body::file::respond(file, bytes, download))
}

impl From<DownloadError> for ApiError {
    fn from(error: DownloadError) -> Self {
        match error {
            DownloadError::Files(error) => error.into(),
            error @ DownloadError::Read { .. } => Self::internal(error.to_string()),
        }
    }
}
