//! Gateway requests of a training run: finds who uses the adapter's name before the run, and publishes the
//! adapter after it.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{errors::TuneError, name::RunName};
use crate::{
    client::{ClientError, GatewayClient},
    terminal::quoted,
};

/// Where the gateway will publish the adapter of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublishTarget {
    /// Directory from which the gateway reads adapters.
    pub(super) adapter_root: PathBuf,
    /// Version of the adapter that has the name now.
    pub(super) taken_by: Option<String>,
}

/// Finds the place of the adapter `name` on the gateway; fails if the name is the base's.
pub(super) fn find_target(client: &GatewayClient, name: &RunName) -> Result<PublishTarget, TuneError> {
    let status = client.get("/v1/status")?;
    if status["model"] == name.as_str() {
        return Err(TuneError::NameOfBase(name.clone()));
    }
    let root = status["adapter_root"].as_str().map(PathBuf::from).filter(|root| root.is_dir());
    let adapters = client.adapters()?;
    // A draining adapter no longer owns its name.
    let mut named = adapters.into_iter().filter(|adapter| adapter.state != "draining");
    let taken_by = named.find(|adapter| adapter.name == name.as_str()).map(|adapter| adapter.generation);
    Ok(PublishTarget { adapter_root: root.ok_or(TuneError::NoAdapterRoot)?, taken_by })
}

/// Returns name and version of the adapter `name`, or name and model path of the base.
pub(super) fn target(client: &GatewayClient, name: Option<&str>) -> Result<(String, String), TuneError> {
    let status = client.get("/v1/status")?;
    let base = status["model"].as_str().unwrap_or_default();
    let Some(name) = name.filter(|name| *name != base) else {
        return Ok((base.to_owned(), status["model_path"].as_str().unwrap_or_default().to_owned()));
    };
    let served = client.adapters()?.into_iter().find(|adapter| adapter.name == name);
    match served {
        Some(adapter) => Ok((adapter.name, adapter.generation)),
        None => Err(TuneError::NoModel(name.to_owned())),
    }
}

/// Publishes the adapter in `output` under `name` if the name still stands for `replaces`. Returns the
/// gateway's answer.
pub(super) fn publish(
    client: &GatewayClient,
    name: &RunName,
    output: &Path,
    replaces: Option<&str>,
) -> Result<Value, TuneError> {
    let mut body = json!({"lora_name": name.as_str(), "lora_path": output.to_string_lossy()});
    if let Some(generation) = replaces {
        body["expected_generation"] = generation.into();
    }
    let answer = client.post_text("/v1/load_lora_adapter", &body);
    let answer = answer.and_then(|text| serde_json::from_str(&text).map_err(ClientError::Garbled));
    answer.map_err(|source| {
        // Only a person can decide about an adapter that took the name meanwhile.
        let came = matches!(&source, ClientError::Refused { code: Some(code), .. } if code == "adapter_already_loaded");
        let verb = if came || replaces.is_some() { "replace" } else { "add" };
        let path = quoted(&output.to_string_lossy());
        let serve = format!("holobiont adapters {verb} {} {path}", quoted(name.as_str()));
        TuneError::NotServed { output: output.to_owned(), serve, source }
    })
}
