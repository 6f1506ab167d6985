//! The gateway before and after a run: what has the name, and the adapter put under it.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{errors::TuneError, name::RunName};
use crate::{
    client::{ClientError, GatewayClient},
    terminal::quoted,
};

/// What the gateway says before a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublishTarget {
    /// Below here it reads adapters.
    pub(super) adapter_root: PathBuf,
    /// The generation of the adapter that has the name.
    pub(super) taken_by: Option<String>,
}

/// Looks where the adapter `name` will be put, and whether it can be.
pub(super) fn find_target(client: &GatewayClient, name: &RunName) -> Result<PublishTarget, TuneError> {
    let status = client.get("/v1/status")?;
    if status["model"] == name.as_str() {
        return Err(TuneError::NameOfBase(name.clone()));
    }
    let root = status["adapter_root"].as_str().map(PathBuf::from).filter(|root| root.is_dir());
    let adapters = client.adapters()?;
    // One that is draining has lost the name already.
    let mut named = adapters.into_iter().filter(|adapter| adapter.state != "draining");
    let taken_by = named.find(|adapter| adapter.name == name.as_str()).map(|adapter| adapter.generation);
    Ok(PublishTarget { adapter_root: root.ok_or(TuneError::NoAdapterRoot)?, taken_by })
}

/// The model that requests call `name`, or the base: its name, and what it is.
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

/// Puts the adapter in `output` under `name`, if the name still stands for `replaces`; the gateway's answer.
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
        // Whatever has come to the name meanwhile is for a person to judge.
        let came = matches!(&source, ClientError::Refused { code: Some(code), .. } if code == "adapter_already_loaded");
        let verb = if came || replaces.is_some() { "replace" } else { "add" };
        let path = quoted(&output.to_string_lossy());
        let serve = format!("holobiont adapters {verb} {} {path}", quoted(name.as_str()));
        TuneError::NotServed { output: output.to_owned(), serve, source }
    })
}
