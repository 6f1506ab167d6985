//! Lists of models in Ollama's format: the base, and every adapter that the caller may use.

use std::{path::Path, sync::Arc, time::Duration};

use axum::{Extension, Json, extract::State};
use model_files::model_summary::ModelSummary;
use serde_json::{Value, json};

use crate::{
    adapters::AdapterEntry,
    app::App,
    bases::Bases,
    body::JsonBody,
    caller::Caller,
    clock::rfc3339,
    errors::ApiError,
    lifecycle::{ServingState, ServingUnavailable},
    openai::{
        adapters::placed,
        models::{answers, is_listed},
        reasoning::ReasoningFormat,
        strict_fields::StrictFields,
        tools,
    },
};

/// Release of Ollama whose API these routes implement; clients refuse older releases.
const API_VERSION: &str = "0.12.11";

/// `GET /api/version`: Ollama's and this server's version.
pub(crate) async fn version() -> Json<Value> {
    let server = concat!("holobiont ", env!("CARGO_PKG_VERSION"));
    Json(json!({ "version": API_VERSION, "server": server }))
}

/// `GET /api/tags`: all models that the caller may use.
pub(crate) async fn tags(
    State(bases): State<Arc<Bases>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({ "models": bases.listed(|app| tags_of(app, &caller))? })))
}

fn tags_of(app: &App, caller: &Caller) -> Result<Vec<Value>, ApiError> {
    let serving = app.last_serving()?;
    let entries = app.registry.entries();
    let usable = entries.values().filter(|entry| entry.is_for(caller) && is_listed(entry));
    Ok(std::iter::once(base(&serving)).chain(usable.map(|entry| adapter(entry, &serving))).collect())
}

/// `GET /api/ps`: the models that are on the device now.
pub(crate) async fn ps(
    State(bases): State<Arc<Bases>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({ "models": bases.listed(|app| on_device(app, &caller))? })))
}

fn on_device(app: &App, caller: &Caller) -> Result<Vec<Value>, ApiError> {
    let serving = match app.serving() {
        Err(ServingUnavailable::Asleep) => return Ok(Vec::new()),
        serving => serving?,
    };
    let entries = app.registry.entries();
    let placed = placed(app);
    let here =
        entries.values().filter(|entry| entry.is_for(caller) && is_listed(entry)).filter_map(|entry| {
            let bytes = placed.find(entry.id()).device_bytes;
            (bytes > 0).then(|| (adapter(entry, &serving), bytes))
        });
    let base = base(&serving);
    let bytes = base["size"].as_u64().unwrap_or(0);
    let models = std::iter::once((base, bytes)).chain(here).map(|(mut model, bytes)| {
        model["size_vram"] = bytes.into();
        model["context_length"] = serving.context_tokens.into();
        model
    });
    Ok(models.collect())
}

/// `POST /api/show`: details of one model.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let mut fields = StrictFields::parse(&body)?;
    // Older clients send `name`.
    let (new, old) = (fields.text("model")?, fields.text("name")?);
    let named = new.or(old).filter(|name| !name.is_empty());
    let name = named.ok_or_else(|| ApiError::missing("model", "'model' is required: the name of a model"))?;
    // Accepted without effect: the answer always has all details.
    fields.flag("verbose", false)?;
    fields.finish()?;
    let name = name.strip_suffix(":latest").unwrap_or(&name);
    let (model, text) = if name == serving.base_name {
        (base(&serving), Arc::clone(&serving.text))
    } else {
        let named = control_protocol::fleet::adapter_of(name, &serving.base_name).unwrap_or(name);
        let entry = app.registry.entries().find(named, &caller).filter(|entry| answers(entry)).cloned();
        let entry = entry.ok_or_else(|| ApiError::model_not_found(name))?;
        (adapter(&entry, &serving), entry.text(&serving.text))
    };
    let template = text.info().chat_template.as_deref();
    let mut capabilities = vec!["completion", "embedding"];
    if tools::are_called(app.parsers.calls, &*text) {
        capabilities.push("tools");
    }
    if ReasoningFormat::of(app.parsers.reasoning, template).is_some() {
        capabilities.push("thinking");
    }
    Ok(Json(json!({
        "modelfile": format!("FROM {name}\n"),
        "parameters": "",
        "template": template.unwrap_or(""),
        "details": model["details"],
        "model_info": model_info(&serving),
        "capabilities": capabilities,
        "modified_at": model["modified_at"],
    })))
}

/// Returns properties of the base; clients read the context length under the architecture's name.
fn model_info(serving: &ServingState) -> Value {
    let ModelSummary { architecture, parameters, .. } = &serving.text.info().description;
    let architecture = if architecture.is_empty() { "base" } else { architecture };
    let mut info = json!({
        "general.architecture": architecture,
        format!("{architecture}.context_length"): serving.context_tokens,
        format!("{architecture}.vocab_size"): serving.welcome.vocab_size,
    });
    if let Some(parameters) = parameters {
        info["general.parameter_count"] = (*parameters).into();
    }
    info
}

fn base(serving: &ServingState) -> Value {
    let path = Path::new(&serving.welcome.model_path);
    let digest = types::AdapterVersion(serving.welcome.base_hash).to_string();
    let format = if path.is_file() { "gguf" } else { "safetensors" };
    model(&serving.base_name, serving.since, bytes_of(path), &digest, ("", format), serving)
}

fn adapter(entry: &AdapterEntry, serving: &ServingState) -> Value {
    let record = &entry.record;
    let digest = record.generation.to_string();
    model(&record.name, record.loaded_at, record.bytes, &digest, (&serving.base_name, "safetensors"), serving)
}

fn model(
    name: &str,
    since: u64,
    bytes: u64,
    digest: &str,
    (parent, format): (&str, &str),
    serving: &ServingState,
) -> Value {
    let ModelSummary { architecture, weights, parameters } = &serving.text.info().description;
    let families: Vec<&str> =
        Some(architecture.as_str()).filter(|name| !name.is_empty()).into_iter().collect();
    json!({
        "name": name, "model": name, "modified_at": rfc3339(Duration::from_secs(since)), "size": bytes, "digest": digest,
        // Unknown values are empty, as in Ollama's answers.
        "details": {
            "parent_model": parent, "format": format, "family": architecture, "families": families,
            "parameter_size": parameters.map(shortened).unwrap_or_default(), "quantization_level": weights,
        },
    })
}

/// Formats a parameter count as Ollama does (`format.HumanNumber`).
fn shortened(parameters: u64) -> String {
    const UNITS: [(u64, usize, char); 3] = [(1_000_000_000, 1, 'B'), (1_000_000, 2, 'M'), (1_000, 0, 'K')];
    let Some((unit, decimals, letter)) = UNITS.into_iter().find(|(unit, ..)| parameters >= *unit) else {
        return parameters.to_string();
    };
    let decimals = if parameters.is_multiple_of(unit) { 0 } else { decimals };
    format!("{:.decimals$}{letter}", parameters as f64 / unit as f64)
}

/// Returns the size of a model's file, or of the weights in its folder; 0 if the model is on another host.
fn bytes_of(path: &Path) -> u64 {
    let length = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    let Ok(folder) = path.read_dir() else { return length(path) };
    let files = folder.filter_map(|entry| Some(entry.ok()?.path()));
    files
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .map(|path| length(&path))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_parameters_look_as_ollamas_do() {
        for (parameters, text) in [
            (134_515_008, "134.52M"),
            (7_248_023_552, "7.2B"),
            (2_000_000_000, "2B"),
            (3_000_000, "3M"),
            (113_088, "113K"),
            (999, "999"),
        ] {
            assert_eq!(shortened(parameters), text);
        }
    }
}
