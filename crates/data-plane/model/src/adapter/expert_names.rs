//! Names of experts in the configuration and the files of adapters.

use std::path::Path;

use super::{error::AdapterError, options::ConfigOptions, patterns::is_tail};
use crate::{
    shape::{
        config::ModelConfig,
        experts::{ExpertId, ExpertPart, ExpertTarget},
        source::TensorId,
    },
    sources::hf_names::{experts_name, linear_name},
};

/// Parameters of a block's experts in transformers 5, in the order in which PEFT wraps them.
pub(super) const PARAMETERS: [(&str, ExpertTarget); 2] =
    [("gate_up_proj", ExpertTarget::GateUp), ("down_proj", ExpertTarget::Down)];

/// Linear layers of a block's experts in Tinker's files.
pub(super) const STACKS: [(&str, ExpertTarget); 3] =
    [("w1", ExpertTarget::Gate), ("w3", ExpertTarget::Up), ("w2", ExpertTarget::Down)];

/// Names in `target_parameters`, each a parameter of experts or its last dotted parts.
#[derive(Debug)]
pub(super) struct ExpertParameters(Vec<String>);

impl ExpertParameters {
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let names = options.list("target_parameters")?;
        let is_known = |name: &String| PARAMETERS.iter().any(|(known, _)| is_tail(name, known));
        match names.iter().find(|name| !is_known(name)) {
            None => Ok(Self(names)),
            Some(name) => Err(AdapterError::Parameters {
                path: options.path().to_path_buf(),
                value: name.escape_debug().to_string(),
            }),
        }
    }

    pub(super) fn are_any(&self) -> bool {
        !self.0.is_empty()
    }

    pub(super) fn select(&self, parameter: &str) -> bool {
        self.0.iter().any(|name| is_tail(parameter, name))
    }

    /// Checks that each name selects a parameter of the base's experts; `written` translates a name to the
    /// spelling of the trained model.
    pub(super) fn check(
        &self,
        path: &Path,
        written: impl Fn(&str) -> String,
        model: &ModelConfig,
    ) -> Result<(), AdapterError> {
        let of = |layer| PARAMETERS.map(|(name, _)| written(&format!("{}.{name}", experts_name(layer))));
        let all: Vec<String> = sparse_layers(model).flat_map(of).collect();
        match self.0.iter().find(|name| !all.iter().any(|parameter| is_tail(parameter, name))) {
            None => Ok(()),
            Some(name) => Err(AdapterError::Parameters {
                path: path.to_path_buf(),
                value: name.escape_debug().to_string(),
            }),
        }
    }
}

/// Returns the blocks of a model that have experts.
pub(super) fn sparse_layers(model: &ModelConfig) -> impl Iterator<Item = usize> {
    (0..model.layers).filter(|&layer| model.experts_of(layer).is_some())
}

/// Returns the names that an expert's layer may have in a trained model, as patterns may match them.
pub(super) fn names_in_model(
    model: &ModelConfig,
    layer: usize,
    expert: ExpertId,
    target: ExpertTarget,
) -> Vec<String> {
    let tables = PARAMETERS.iter().chain(&STACKS).filter(|(_, of)| *of == target);
    let together = tables.map(|(name, _)| format!("{}.{name}", experts_name(layer)));
    let part = ExpertPart::ALL.into_iter().find(|part| target_of(*part) == target);
    let alone = part.map(|part| linear_name(model, TensorId::Expert(layer, expert, part)));
    together.chain(alone).collect()
}

/// Returns the adaptable layer with the weights of `part` alone.
pub(super) fn target_of(part: ExpertPart) -> ExpertTarget {
    match part {
        ExpertPart::Gate => ExpertTarget::Gate,
        ExpertPart::Up => ExpertTarget::Up,
        ExpertPart::Down => ExpertTarget::Down,
    }
}
