//! Selects the linear layers that an adapter changes by the names in its configuration.

use std::path::{Path, PathBuf};

use super::{
    error::AdapterError,
    options::{ConfigOptions, option_error},
    patterns::{LayerFilter, ModuleNames},
    tensor_names::TensorNameScheme,
};
use crate::{
    shape::{config::ModelConfig, layout::layer_targets, source::Target},
    sources::{
        fused::Fused,
        hf_names::{EMBEDDING, fused_module_name, module_name},
    },
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Selected {
    Yes,
    No,
}

#[derive(Debug)]
pub(super) struct Selection {
    path: PathBuf,
    /// Spelling of layer names in the trained model.
    spelling: TensorNameScheme,
    targets: ModuleNames,
    excluded: Option<ModuleNames>,
    layers: Option<LayerFilter>,
}

impl Selection {
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

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of `target` in the trained model, and whether it is adapted. A target that is part of
    /// a fused layer in the base's files is also selected by the fused layer's name.
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

    /// Translates the layer name `module` to the spelling of the trained model.
    pub(super) fn written(&self, module: &str) -> String {
        self.spelling.written(module).into_owned()
    }

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

pub(super) fn linear_layers(model: &ModelConfig) -> impl Iterator<Item = (usize, Target)> {
    (0..model.layers)
        .flat_map(|layer| layer_targets(model, layer).iter().map(move |&target| (layer, target)))
        .chain([(0, Target::LmHead)])
}
