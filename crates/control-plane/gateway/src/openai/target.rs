//! Resolves the model of a request: the base, or an adapter by name or version. Unknown names never resolve
//! to the base.

use std::sync::Arc;

use control_protocol::fleet::adapter_of;
use serde_json::Value;
use types::AdapterVersion;

use super::{
    models::usable_names,
    strict_fields::{StrictFields, wrong},
};
use crate::{
    adapters::{AdapterEntry, Lease, LeaseError, WeightedMergeError},
    app::App,
    caller::Caller,
    errors::ApiError,
    lifecycle::ServingState,
    text::Text,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRef {
    /// The base, an adapter, `base:adapter` or `base::adapter`; a merged adapter is written `a:0.7+b:0.3`.
    pub model: String,
    pub adapter: Option<AdapterRef>,
}

/// The request's field `adapter`: a name or a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterRef {
    Named(String),
    /// Content hash in 64 hexadecimal digits, which identifies the version under any name.
    AdapterVersion(String),
}

#[derive(Debug)]
pub struct ModelTarget {
    /// The model as the request named it.
    pub name: String,
    /// Lease of the adapter until the request ends; `None` for the base model.
    pub lease: Option<Lease>,
}

impl ModelTarget {
    /// Returns the tokenizer and chat template of the model; an adapter may have a chat template of its own.
    pub fn text(&self, serving: &ServingState) -> Arc<dyn Text> {
        match &self.lease {
            None => Arc::clone(&serving.text),
            Some(lease) => lease.entry().text(&serving.text),
        }
    }

    /// Returns a second target with a lease of its own.
    #[must_use]
    pub fn again(&self) -> Self {
        Self { name: self.name.clone(), lease: self.lease.as_ref().map(Lease::again) }
    }
}

impl ModelRef {
    pub fn read(fields: &mut StrictFields) -> Result<Self, ApiError> {
        Ok(Self { model: fields.required_text("model")?, adapter: adapter(fields)? })
    }

    /// Resolves the model among those that `caller` may use; other callers' adapters count as unknown.
    pub fn find(self, app: &App, serving: &ServingState, caller: &Caller) -> Result<ModelTarget, ApiError> {
        let named = adapter_of(&self.model, &serving.base_name);
        let lease = match (named, &self.adapter) {
            (None, None) => None,
            (Some(alias), None) => Some(lease(app, serving, caller, alias, &self.model)?),
            (None, Some(AdapterRef::Named(alias))) => Some(lease(app, serving, caller, alias, alias)?),
            (None, Some(AdapterRef::AdapterVersion(generation))) => {
                Some(of_generation(app, serving, caller, generation)?)
            }
            (Some(alias), Some(AdapterRef::Named(other))) => {
                if alias != other {
                    let message =
                        format!("'model' names the adapter '{alias}' and 'adapter' '{other}'; send one");
                    return Err(ApiError::invalid("adapter", message));
                }
                Some(lease(app, serving, caller, alias, &self.model)?)
            }
            (Some(alias), Some(AdapterRef::AdapterVersion(generation))) => {
                let lease = lease(app, serving, caller, alias, &self.model)?;
                check_generation(&lease.generation, generation, alias)?;
                Some(lease)
            }
        };
        Ok(ModelTarget { name: self.model, lease })
    }
}

fn adapter(fields: &mut StrictFields) -> Result<Option<AdapterRef>, ApiError> {
    match fields.take("adapter") {
        None => Ok(None),
        Some(Value::String(name)) if !name.is_empty() => Ok(Some(AdapterRef::Named(name))),
        Some(value @ Value::Object(_)) => {
            let mut inside = StrictFields::of(value, "adapter")?;
            let generation = inside.required_text("generation").map_err(|error| error.within("adapter"))?;
            inside.finish().map_err(|error| error.within("adapter"))?;
            let is_hash = generation.len() == 64 && generation.bytes().all(|byte| byte.is_ascii_hexdigit());
            if !is_hash {
                let message =
                    "'adapter.generation' must be 64 hexadecimal digits, as 'adapter_generation' in answers";
                return Err(ApiError::invalid("adapter.generation", message));
            }
            Ok(Some(AdapterRef::AdapterVersion(generation.to_ascii_lowercase())))
        }
        Some(other) => Err(wrong("adapter", "an adapter's name or {\"generation\": \"...\"}", &other)),
    }
}

/// Maximum number of models that the error of an unknown name lists.
pub(crate) const MAX_LISTED: usize = 8;

/// Returns the error of the unknown model `asked`, with the names of models that `caller` may use.
fn unknown(app: &App, serving: &ServingState, caller: &Caller, asked: &str) -> ApiError {
    let names = std::iter::once(serving.base_name.clone()).chain(usable_names(app, caller));
    ApiError::model_not_found(asked).naming_models(&names.take(MAX_LISTED).collect::<Vec<_>>())
}

/// Leases the adapter `alias`; errors name it `asked`.
fn lease(
    app: &App,
    serving: &ServingState,
    caller: &Caller,
    alias: &str,
    asked: &str,
) -> Result<Lease, ApiError> {
    match app.registry.lease_any(alias, caller) {
        Err(LeaseError::Sum(WeightedMergeError::Unknown(name))) if name == serving.base_name => {
            Err(LeaseError::from(WeightedMergeError::Base(name)).into())
        }
        Err(LeaseError::Sum(WeightedMergeError::Unknown(name))) => Err(unknown(app, serving, caller, &name)),
        lease => lease?.ok_or_else(|| unknown(app, serving, caller, asked)),
    }
}

fn of_generation(
    app: &App,
    serving: &ServingState,
    caller: &Caller,
    wanted: &str,
) -> Result<Lease, ApiError> {
    let entries = app.registry.entries();
    let is = |entry: &&Arc<AdapterEntry>| {
        entry.is_for(caller) && entry.fault().is_none() && entry.record.generation.to_string() == wanted
    };
    let found = entries.values().find(is).map(|entry| entry.record.name.clone());
    let name = found.ok_or_else(|| unknown(app, serving, caller, wanted))?;
    let lease = lease(app, serving, caller, &name, wanted)?;
    // The name may have been reassigned between look-up and lease.
    check_generation(&lease.generation, wanted, &name)?;
    Ok(lease)
}

fn check_generation(generation: &AdapterVersion, wanted: &str, name: &str) -> Result<(), ApiError> {
    let now = generation.to_string();
    if now == wanted {
        return Ok(());
    }
    let message = format!(
        "the adapter '{name}' now has the generation {now}, not {wanted}; request that one, or remove \
         'adapter'"
    );
    Err(ApiError::conflict("generation_mismatch", message).of("adapter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<ModelRef, ApiError> {
        ModelRef::read(&mut StrictFields::parse(body.as_bytes())?)
    }

    #[test]
    fn a_generation_is_64_hexadecimal_digits() {
        let hash = "AB".repeat(32);
        let wanted = read(&format!(r#"{{"model":"m","adapter":{{"generation":"{hash}"}}}}"#)).unwrap();
        assert_eq!(wanted.adapter, Some(AdapterRef::AdapterVersion(hash.to_lowercase())));
        for bad in
            [r#"{"generation":"ab"}"#, r#"{"generation":7}"#, r#"{"generation":"","x":1}"#, "7", r#""""#]
        {
            let error = read(&format!(r#"{{"model":"m","adapter":{bad}}}"#)).unwrap_err();
            assert_eq!(error.status().as_u16(), 400, "{bad}");
        }
    }
}
