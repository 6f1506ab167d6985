//! Classification heads as stored in PEFT's files, and their assembly to an adapter.
//!
//! transformers' classes for sequences name the head `score`, some models `classifier`. PEFT saves the head
//! as one of the `modules_to_save`.

use std::{path::Path, sync::Arc};

use serde_json::Value;

use super::{
    classification::ClassificationHead,
    error::AdapterError,
    hasher::VersionHasher,
    limits::{MAX_LABEL_BYTES, MAX_LABELS},
    matrix::{StoredMatrix, StoredModule, assemble_modules, decode},
    method::{Adapter, ClassificationAdapter},
    options::ConfigOptions,
    weight_file::WeightFile,
};
use crate::shape::config::ModelConfig;

/// Names of the head's module; PEFT lists both, and the file has one.
pub(super) const HEADS: [&str; 2] = ["score", "classifier"];

/// Option with the names of the labels by their index, as in a model's `config.json`.
const LABELS: &str = "id2label";

/// Names of the labels in the configuration, by index; the file of the weights says how many labels exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LabelNames(Vec<(usize, String)>);

pub(super) struct StoredClassificationHead<'a> {
    labels: Vec<String>,
    /// Matrix of shape `[labels, hidden]`.
    weight: StoredMatrix<'a>,
    /// Matrix of shape `[1, labels]`.
    bias: Option<StoredMatrix<'a>>,
}

impl LabelNames {
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let map = match options.take(LABELS) {
            None => return Ok(Self(Vec::new())),
            Some(Value::Object(map)) => map,
            Some(_) => return Err(options.problem(LABELS, "is not an object from numbers to names")),
        };
        let name = |(id, name): (&String, &Value)| {
            let id = id.parse().ok().filter(|id| *id < MAX_LABELS)?;
            let name = name.as_str().filter(|name| name.len() <= MAX_LABEL_BYTES)?;
            Some((id, name.to_owned()))
        };
        let names: Option<Vec<_>> = map.iter().map(name).collect();
        let problem = format!(
            "must have numbers below {MAX_LABELS} as keys, and names of at most {MAX_LABEL_BYTES} bytes"
        );
        names.map(Self).ok_or_else(|| options.problem(LABELS, problem))
    }

    /// Returns a name for each of `count` labels: that of the configuration, or the one that transformers
    /// gives to a label without name.
    fn resolve(&self, count: usize, path: &Path) -> Result<Vec<String>, AdapterError> {
        let mut labels: Vec<String> = (0..count).map(|label| format!("LABEL_{label}")).collect();
        for (id, name) in &self.0 {
            let Some(label) = labels.get_mut(*id) else {
                let path = path.to_path_buf();
                return Err(AdapterError::Labels { path, label: *id, labels: count });
            };
            label.clone_from(name);
        }
        Ok(labels)
    }
}

impl<'a> StoredClassificationHead<'a> {
    /// Takes the head's tensors; a missing weight is an error.
    pub(super) fn read(
        names: &LabelNames,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<Self, AdapterError> {
        let is_there = |module: &&&str| weights.has(&format!("{module}.weight"));
        let module = HEADS.iter().find(is_there).unwrap_or(&HEADS[0]);
        let bias = weights.take(&format!("{module}.bias"));
        let weight = weights.required(&format!("{module}.weight"))?;
        let path = weights.path().to_path_buf();
        let count = weight.1.shape.first().copied().unwrap_or_default();
        if count == 0 || count > MAX_LABELS {
            return Err(AdapterError::LabelCount { path, tensor: weight.0, labels: count });
        }
        Ok(Self {
            labels: names.resolve(count, &path)?,
            weight: weights.matrix(weight, [count, model.hidden_size])?,
            bias: bias.map(|bias| weights.vector(bias, count)).transpose()?,
        })
    }

    fn decode(&self, path: &Path) -> Result<ClassificationHead, AdapterError> {
        let bias = self.bias.as_ref().map(|bias| decode(path, bias)).transpose()?;
        Ok(ClassificationHead::new(self.labels.clone(), decode(path, &self.weight)?, bias))
    }
}

pub(super) fn assemble_classification(
    path: &Path,
    modules: Vec<StoredModule<'_>>,
    head: &StoredClassificationHead<'_>,
    base_model: Option<String>,
) -> Result<ClassificationAdapter, AdapterError> {
    let mut hasher = VersionHasher::classification(modules.len(), &head.labels);
    hasher.matrix(head.weight.kind, &head.weight.bytes);
    match &head.bias {
        None => hasher.nothing(),
        Some(bias) => hasher.replaced(bias.kind, &bias.bytes),
    }
    let (method, generation, stored_in_16_bits) = assemble_modules(path, hasher, modules)?;
    let adapter = Adapter { generation, method, base_model, stored_in_16_bits };
    Ok(ClassificationAdapter { adapter, head: Arc::new(head.decode(path)?) })
}
