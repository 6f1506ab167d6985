//! Which linear layers an adapter changes, by the names in its configuration.

use std::path::{Path, PathBuf};

use super::{
    error::AdapterError,
    options::{ConfigOptions, option_error},
    patterns::{LayerFilter, ModuleNames},
    tensor_names::Spelling,
};
use crate::{
    shape::{config::ModelConfig, layout::layer_targets, source::Target},
    sources::{
        fused::Fused,
        hf_names::{EMBEDDING, fused_module_name, module_name},
    },
};

/// Whether a configuration selects a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Selected {
    Yes,
    No,
}

/// What `target_modules` and the options beside it select.
#[derive(Debug)]
pub(super) struct Selection {
    /// The configuration, for messages.
    path: PathBuf,
    /// How the model that was trained calls its layers.
    spelling: Spelling,
    targets: ModuleNames,
    excluded: Option<ModuleNames>,
    layers: Option<LayerFilter>,
}

impl Selection {
    /// Takes `target_modules` and `exclude_modules`.
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let (path, spelling) = (options.path().to_path_buf(), options.spelling().clone());
        let (targets, excluded) = (options.targets()?, options.names("exclude_modules")?);
        Ok(Self { path, spelling, targets, excluded, layers: None })
    }

    /// Takes `layers_to_transform` and `layers_pattern` too, which not all methods have.
    pub(super) fn with_layers(mut self, options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        self.layers = options.layers(&self.targets)?;
        Ok(self)
    }

    /// The configuration it is from.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the model that was trained calls `target`, and whether it is adapted: by the name of a layer of its own, or by that of the one that it is a
    /// part of in the base's files.
    pub(super) fn named(
        &self,
        model: &ModelConfig,
        (layer, target): (usize, Target),
    ) -> Result<(String, Selected), AdapterError> {
        if let Some(fused) = Fused::of(model, target) {
            let whole = fused_module_name(layer, fused.group);
            if self.selects(&whole)? {
                return Ok((self.written(&whole), Selected::Yes));
            }
        }
        let own = module_name(layer, target);
        let selected = self.of(&own)?;
        Ok((self.written(&own), selected))
    }

    /// What the model that was trained calls the layer `module` of a text model.
    pub(super) fn written(&self, module: &str) -> String {
        self.spelling.written(module).into_owned()
    }

    /// Whether the linear layer called `module` is adapted.
    pub(super) fn of(&self, module: &str) -> Result<Selected, AdapterError> {
        Ok(if self.selects(module)? { Selected::Yes } else { Selected::No })
    }

    fn selects(&self, module: &str) -> Result<bool, AdapterError> {
        let problem = |option| move |problem| option_error(&self.path, option, problem);
        let is_absent = matches!(self.targets, ModuleNames::AllLinear) && !self.spelling.has_kind_of(module);
        if is_absent || (module == EMBEDDING && self.spelling.is_head_at_embedding()) {
            return Ok(false);
        }
        let module = &*self.spelling.written(module);
        if let Some(excluded) = &self.excluded
            && excluded.select(module).map_err(problem("exclude_modules"))?
        {
            return Ok(false);
        }
        if !self.targets.select(module).map_err(problem("target_modules"))? {
            return Ok(false);
        }
        match &self.layers {
            None => Ok(true),
            Some(layers) => layers.select(module).map_err(problem("layers_pattern")),
        }
    }
}

/// Every linear layer of the base model.
pub(super) fn linear_layers(model: &ModelConfig) -> impl Iterator<Item = (usize, Target)> {
    (0..model.layers)
        .flat_map(|layer| layer_targets(model, layer).iter().map(move |&target| (layer, target)))
        .chain([(0, Target::LmHead)])
}
