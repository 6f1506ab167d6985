//! `POST`, `GET` and `DELETE /v1/adapters/NAME`: one adapter as a resource, pushed with its weights as the
//! body.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, Query, Request, State},
    http::HeaderMap,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    adapters::{check_is_adapter, describe_one, loaded, unloaded},
    load_request::load_request,
    upload::load_field,
};
use crate::{
    adapters::{Durability, push::PushRequest},
    app::App,
    body::stream::BinaryBody,
    errors::ApiError,
};

/// Header with PEFT's configuration, for weights that do not contain it.
const CONFIG_HEADER: &str = "x-adapter-config";

/// Receives the weights of an adapter; answers when the next step can use it.
pub(crate) async fn push(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(fields): Query<Vec<(String, String)>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let asked = push_request(&name, fields, config(request.headers())?, &serving.base_name)?;
    app.registry.check_load(&asked.load, &serving.base_name)?;
    let mut body = BinaryBody::of(request, &app)?;
    let mut push = app.registry.begin_push(asked, body.declared_bytes())?;
    while let Some(bytes) = body.next().await? {
        push = push.take(&bytes).await?;
    }
    let entry = app.registry.end_push(push, (&*serving).into()).await?;
    Ok(Json(loaded(&app, &entry)))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let entry = app.registry.entries().get(&name).cloned();
    let entry = entry.ok_or_else(|| ApiError::model_not_found(&name).of("lora_name"))?;
    Ok(Json(describe_one(&app, &entry)))
}

/// Query of a removal.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemovalQuery {
    /// Adapter version that the caller expects; any other is a conflict.
    expected_generation: Option<String>,
}

pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(RemovalQuery { expected_generation }): Query<RemovalQuery>,
) -> Result<Json<Value>, ApiError> {
    check_is_adapter(&name, &app.serving()?.base_name)?;
    let freed_bytes = app.registry.unload(&name, expected_generation.as_deref()).await?;
    Ok(Json(unloaded(&name, freed_bytes)))
}

fn config(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let config = headers.get(CONFIG_HEADER).map(|config| config.to_str().map(str::to_owned));
    config
        .transpose()
        .map_err(|_| ApiError::invalid(CONFIG_HEADER, "escape characters outside of ASCII as \\uXXXX"))
}

/// Builds the request of a push, which replaces the adapter with this name unless `load_inplace` is false.
fn push_request(
    name: &str,
    fields: Vec<(String, String)>,
    config: Option<String>,
    base_name: &str,
) -> Result<PushRequest, ApiError> {
    let mut load = Map::new();
    // A load request needs a path, but pushed weights have none on this host.
    load.insert("lora_path".to_owned(), name.into());
    let mut durability = None;
    for (field, text) in fields {
        let value = load_field(&field, &text).filter(|_| field != "lora_name");
        let is_new = match (value, field.as_str(), text.as_str()) {
            (Some(value), ..) => load.insert(field.clone(), value?).is_none(),
            (None, "durable", "true") => durability.replace(Durability::Durable).is_none(),
            (None, "durable", "false") => durability.replace(Durability::Ephemeral).is_none(),
            (None, "durable", _) => {
                return Err(ApiError::invalid("durable", "'durable' must be 'true' or 'false'"));
            }
            _ => return Err(ApiError::unsupported(&field)),
        };
        if !is_new {
            return Err(ApiError::invalid(&field, format!("'{field}' appears twice; send it once")));
        }
    }
    load.insert("lora_name".to_owned(), name.into());
    load.entry("load_inplace").or_insert(true.into());
    let load = load_request(Value::Object(load).to_string().as_bytes(), base_name)?;
    Ok(PushRequest { load, durability: durability.unwrap_or(Durability::Durable), config })
}
