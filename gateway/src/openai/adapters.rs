//! `POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter`, `GET /v1/lora_adapters`.

use std::{path::PathBuf, sync::Arc};

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{errors::ApiError, fields::Fields};
use crate::{
    adapters::{AdapterError, Entry, LoadRequest, Replace, Unusable},
    app::{App, JsonBody},
};

/// Every adapter with what it is and who uses it.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.registry.entries().values().map(|entry| describe(entry)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// Loads an adapter, or replaces one; answers when it is durable and serving.
pub async fn load(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Json<Value>, ApiError> {
    let base_name = app.serving()?.base_name.clone();
    let mut fields = Fields::parse(&body)?;
    let name = fields.required_text("lora_name")?;
    let path = PathBuf::from(fields.required_text("lora_path")?);
    let in_place = fields.flag("load_inplace", false)?;
    let replace = match (fields.text("expected_generation")?, in_place) {
        (Some(generation), _) => Replace::Only(generation),
        (None, true) => Replace::Always,
        (None, false) => Replace::Never,
    };
    fields.finish()?;
    let registry = Arc::clone(&app.registry);
    let request = LoadRequest { name, path, replace };
    let entry = finish(async move { registry.load(request, &base_name).await }).await?;
    let mut answer = describe(&entry);
    answer["status"] = "loaded".into();
    Ok(Json(answer))
}

/// Refuses new requests, waits for those that run, and answers when the adapter's bytes are free.
pub async fn unload(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Json<Value>, ApiError> {
    app.serving()?;
    let mut fields = Fields::parse(&body)?;
    let name = fields.required_text("lora_name")?;
    // vLLM's number for the same adapter; names are enough here.
    fields.integer("lora_int_id", 0..=i64::MAX)?;
    fields.finish()?;
    let (registry, unloaded) = (Arc::clone(&app.registry), name.clone());
    let freed_bytes = finish(async move { registry.unload(&unloaded).await }).await?;
    Ok(Json(json!({ "status": "unloaded", "name": name, "freed_bytes": freed_bytes })))
}

/// Lets a change run to its end even if the caller goes away.
async fn finish<T: Send + 'static>(
    change: impl Future<Output = Result<T, AdapterError>> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::spawn(change).await;
    let done = done.map_err(|panic| ApiError::internal(format!("changing the registry failed: {panic}")))?;
    Ok(done?)
}

fn describe(entry: &Entry) -> Value {
    let record = &entry.record;
    let fault = entry.fault();
    json!({
        "name": record.name,
        "generation": record.generation,
        "rank": record.rank,
        "bytes": record.bytes,
        "modules": record.modules,
        "requests": entry.requests(),
        "loaded_at": record.loaded_at,
        "state": if fault.is_none() { "ready" } else { "failed" },
        "error": fault,
    })
}

impl From<AdapterError> for ApiError {
    fn from(error: AdapterError) -> Self {
        let message = error.to_string();
        match error {
            AdapterError::BadName(_) | AdapterError::NameOfBase(_) => Self::invalid("lora_name", message),
            AdapterError::NoSuchPath { .. } => {
                Self::bad_request("invalid_adapter_path", message).of("lora_path")
            }
            AdapterError::OutsideRoot { .. } => {
                Self::bad_request("adapter_outside_root", message).of("lora_path")
            }
            AdapterError::NameTaken(_) => {
                Self::bad_request("adapter_already_loaded", message).of("lora_name")
            }
            AdapterError::OtherGeneration { .. } => Self::conflict("generation_mismatch", message),
            AdapterError::NotFound(name) => Self::model_not_found(&name).of("lora_name"),
            AdapterError::NoModules(_) => Self::bad_request("invalid_adapter", message).of("lora_path"),
            AdapterError::Full => Self::bad_request("too_many_adapters", message),
            AdapterError::Call(call) => call.into(),
            AdapterError::Journal(_) => Self::internal(message),
        }
    }
}

impl From<Unusable> for ApiError {
    fn from(error: Unusable) -> Self {
        Self::adapter_unusable(error.to_string())
    }
}
