//! Reads the body of a fine-tuning request, field by field.

use std::{collections::BTreeMap, ops::RangeInclusive};

use serde_json::Value;

use super::strict_fields::{StrictFields, whole, wrong};
use crate::{
    errors::ApiError,
    training::records::{JobHyperparameters, JobSpec, TrainingMethod},
};

/// Maximum length of a suffix, as in OpenAI's API.
const MAX_SUFFIX_BYTES: usize = 64;
/// Maximum number of metadata pairs, and maximum length of a key and a value, as in OpenAI's API.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);

impl JobSpec {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let model = fields.required_text("model")?;
        let training_file = fields.required_text("training_file")?;
        let validation_file = fields.text("validation_file")?;
        let suffix = fields.text("suffix")?.map(checked_suffix).transpose()?;
        let mut choices = JobHyperparameters {
            seed: count(&mut fields, "seed", 0..=i64::MAX)?,
            ..JobHyperparameters::default()
        };
        let method = method(&mut fields, &mut choices)?;
        if let Some(lora) = fields.take("lora") {
            read_lora(lora, &mut choices).map_err(|error| error.within("lora"))?;
        }
        let metadata = metadata(&mut fields)?;
        fields.finish()?;
        Ok(Self { model, training_file, validation_file, suffix, method, choices, metadata })
    }
}

/// Reads an integer in `range`, or "auto" as `None`.
fn count(fields: &mut StrictFields, name: &str, range: RangeInclusive<i64>) -> Result<Option<u64>, ApiError> {
    match fields.take(name) {
        None => Ok(None),
        Some(Value::String(word)) if word == "auto" => Ok(None),
        Some(value) => match whole(&value).and_then(|number| i64::try_from(number).ok()) {
            Some(number) if range.contains(&number) => Ok(u64::try_from(number).ok()),
            _ => {
                let expected = format!("an integer from {} to {}, or \"auto\"", range.start(), range.end());
                Err(wrong(name, &expected, &value))
            }
        },
    }
}

/// Reads a number above 0, or "auto" as `None`.
fn positive(fields: &mut StrictFields, name: &str) -> Result<Option<f64>, ApiError> {
    match fields.take(name) {
        None => Ok(None),
        Some(Value::String(word)) if word == "auto" => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) if number > 0.0 && number < 1e6 => Ok(Some(number)),
            _ => Err(wrong(name, "a number above 0, or \"auto\"", &value)),
        },
    }
}

fn share(fields: &mut StrictFields, name: &str) -> Result<Option<f64>, ApiError> {
    let Some(value) = fields.take(name) else { return Ok(None) };
    match value.as_f64() {
        Some(share) if (0.0..=0.9).contains(&share) => Ok(Some(share)),
        _ => Err(wrong(name, "a number from 0 to 0.9", &value)),
    }
}

/// Reads the method; OpenAI's older field `hyperparameters` sets the hyperparameters of `supervised`.
fn method(fields: &mut StrictFields, choices: &mut JobHyperparameters) -> Result<TrainingMethod, ApiError> {
    if let Some(old) = fields.take("hyperparameters") {
        read_hyperparameters(old, TrainingMethod::Supervised, choices)
            .map_err(|error| error.within("hyperparameters"))?;
    }
    let Some(method) = fields.take("method") else { return Ok(TrainingMethod::Supervised) };
    read_method(method, choices).map_err(|error| error.within("method"))
}

fn read_method(method: Value, choices: &mut JobHyperparameters) -> Result<TrainingMethod, ApiError> {
    let mut fields = StrictFields::of(method, "method")?;
    let kind = match fields.required_text("type")?.as_str() {
        "supervised" => TrainingMethod::Supervised,
        "dpo" => TrainingMethod::Dpo,
        "kto" => TrainingMethod::Kto,
        other => return Err(wrong("type", "\"supervised\", \"dpo\" or \"kto\"", &Value::from(other))),
    };
    let name = kind.as_str();
    if let Some(own) = fields.take(name) {
        let mut own = StrictFields::of(own, name)?;
        if let Some(hyper) = own.take("hyperparameters") {
            read_hyperparameters(hyper, kind, choices).map_err(|error| error.within(name))?;
        }
        own.finish()?;
    }
    fields.finish()?;
    Ok(kind)
}

fn read_hyperparameters(
    value: Value,
    method: TrainingMethod,
    choices: &mut JobHyperparameters,
) -> Result<(), ApiError> {
    let mut fields = StrictFields::of(value, "hyperparameters")?;
    choices.n_epochs = count(&mut fields, "n_epochs", 1..=1000)?;
    choices.batch_size = count(&mut fields, "batch_size", 1..=4096)?;
    choices.learning_rate_multiplier = positive(&mut fields, "learning_rate_multiplier")?;
    if method != TrainingMethod::Supervised {
        choices.beta = positive(&mut fields, "beta")?;
    }
    if method == TrainingMethod::Kto {
        choices.desirable_weight = positive(&mut fields, "desirable_weight")?;
        choices.undesirable_weight = positive(&mut fields, "undesirable_weight")?;
    }
    fields.finish()
}

fn read_lora(value: Value, choices: &mut JobHyperparameters) -> Result<(), ApiError> {
    let mut fields = StrictFields::of(value, "lora")?;
    choices.rank = count(&mut fields, "rank", 1..=256)?;
    choices.alpha = positive(&mut fields, "alpha")?;
    choices.use_rslora = fields.flag("use_rslora", false)?;
    choices.dropout = share(&mut fields, "dropout")?;
    let targets = fields.array("target_modules")?.unwrap_or_default();
    let name = |target: Value| match target {
        Value::String(name) if name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_') => Ok(name),
        other => Err(wrong("target_modules", "names such as \"q_proj\"", &other)),
    };
    choices.target_modules = targets.into_iter().map(name).collect::<Result<_, _>>()?;
    fields.finish()
}

fn checked_suffix(suffix: String) -> Result<String, ApiError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_good = (1..=MAX_SUFFIX_BYTES).contains(&suffix.len())
        && suffix.chars().all(allowed)
        && suffix.chars().any(|c| c != '.');
    if is_good {
        return Ok(suffix);
    }
    let expected = format!("1 to {MAX_SUFFIX_BYTES} of the characters A-Z a-z 0-9 - _ .");
    Err(wrong("suffix", &expected, &Value::from(suffix)))
}

pub(super) fn metadata(fields: &mut StrictFields) -> Result<BTreeMap<String, String>, ApiError> {
    let Some(value) = fields.take("metadata") else { return Ok(BTreeMap::new()) };
    let (pairs, key_bytes, value_bytes) = MAX_METADATA;
    let short = |(key, value): (String, Value)| match value {
        Value::String(text) if key.len() <= key_bytes && text.len() <= value_bytes => Some((key, text)),
        _ => None,
    };
    let read = match value.clone() {
        Value::Object(map) if map.len() <= pairs => map.into_iter().map(short).collect(),
        _ => None,
    };
    let expected = format!("up to {pairs} texts of {value_bytes} bytes by keys of {key_bytes}");
    read.ok_or_else(|| wrong("metadata", &expected, &value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(more: &Value) -> Result<JobSpec, ApiError> {
        let mut body = json!({ "model": "base", "training_file": "file-1" });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        JobSpec::read(body.to_string().as_bytes())
    }

    #[test]
    fn an_order_is_read_in_all_its_forms() {
        let plain = read(&json!({})).unwrap();
        assert_eq!(
            (plain.method, plain.choices),
            (TrainingMethod::Supervised, JobHyperparameters::default())
        );
        let auto = json!({ "n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto" });
        assert_eq!(read(&json!({ "hyperparameters": auto })).unwrap().choices, JobHyperparameters::default());
        let hyper = json!({ "n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 0.5 });
        let old = read(&json!({ "hyperparameters": hyper })).unwrap();
        let method = json!({ "type": "supervised", "supervised": { "hyperparameters": hyper } });
        assert_eq!(old, read(&json!({ "method": method })).unwrap());
        assert_eq!((old.choices.n_epochs, old.choices.batch_size), (Some(2), Some(8)));
        let dpo = json!({ "type": "dpo", "dpo": { "hyperparameters": { "beta": 0.2 } } });
        let dpo =
            read(&json!({ "method": dpo, "seed": 7, "suffix": "v1.2", "metadata": { "a": "b" } })).unwrap();
        assert_eq!(
            (dpo.method, dpo.choices.beta, dpo.choices.seed),
            (TrainingMethod::Dpo, Some(0.2), Some(7))
        );
        let kto = json!({ "type": "kto", "kto": { "hyperparameters": { "undesirable_weight": 1.5 } } });
        let kto = read(&json!({ "method": kto })).unwrap();
        assert_eq!((kto.method, kto.choices.undesirable_weight), (TrainingMethod::Kto, Some(1.5)));
        assert_eq!((dpo.suffix.as_deref(), dpo.metadata.len()), (Some("v1.2"), 1));
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        for (more, param) in [
            (json!({ "hyperparameters": { "n_epochs": 0 } }), "hyperparameters.n_epochs"),
            (json!({ "hyperparameters": { "momentum": 1 } }), "hyperparameters.momentum"),
            (json!({ "method": { "type": "reinforcement" } }), "method.type"),
            (json!({ "method": { "type": "supervised", "dpo": { "x": 1 } } }), "method.dpo"),
            (
                json!({ "method": { "type": "dpo", "dpo": { "hyperparameters": { "desirable_weight": 1 } } } }),
                "method.dpo.desirable_weight",
            ),
            (json!({ "lora": { "rank": 257 } }), "lora.rank"),
            (json!({ "lora": { "target_modules": ["--help"] } }), "lora.target_modules"),
            (json!({ "suffix": "a/b" }), "suffix"),
            (json!({ "suffix": ".." }), "suffix"),
            (json!({ "metadata": { "a": 1 } }), "metadata"),
            (json!({ "integrations": [{ "type": "wandb" }] }), "integrations"),
            (json!({ "training_file": 1 }), "training_file"),
        ] {
            let error = serde_json::to_value(format!("{:?}", read(&more).unwrap_err())).unwrap();
            assert!(
                error.to_string().contains(&format!("{param:?}").replace('"', "\\\"")),
                "{more}: {error}"
            );
        }
    }
}
