//! Selects the linear layers that an adapter changes by the names in its configuration.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use super::{
    error::AdapterError,
    options::{ConfigOptions, option_error},
    patterns::{LayerFilter, ModuleNames},
    tensor_names::TensorNameScheme,
};
use crate::{
    shape::{
        config::ModelConfig,
        layout::{layer_targets, linear_shape},
        source::Target,
    },
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

/// A linear layer of the trained model: one of the base, or several that the base's files fuse.
#[derive(Debug)]
pub(super) struct TrainedLayer {
    /// Name in transformers' text models.
    pub(super) name: String,
    /// Name in the trained model, against which patterns are matched.
    pub(super) written: String,
    pub(super) selected: Selected,
    /// Shape of the weights, `[out, in]`.
    pub(super) shape: [usize; 2],
    /// Linear layers of the base, each with its rows.
    pub(super) parts: Vec<((usize, Target), Range<usize>)>,
}

impl TrainedLayer {
    /// Returns the number of features of the shorter side, the largest rank of a change.
    pub(super) fn least(&self) -> usize {
        let [outputs, inputs] = self.shape;
        outputs.min(inputs)
    }
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

    /// Returns the linear layers of the trained model.
    pub(super) fn trained_layers(&self, model: &ModelConfig) -> Result<Vec<TrainedLayer>, AdapterError> {
        let mut layers: Vec<TrainedLayer> = Vec::new();
        for (layer, target) in linear_layers(model) {
            let (written, selected) = self.named(model, (layer, target))?;
            let [outputs, inputs] = linear_shape(model, target);
            let own = module_name(layer, target);
            let fused = Fused::of(model, target).filter(|_| written != self.written(&own));
            let (name, rows, outputs) = match fused {
                Some(fused) => (fused_module_name(layer, fused.group), fused.rows, fused.all_rows),
                None => (own, 0..outputs, outputs),
            };
            match layers.last_mut() {
                Some(last) if last.name == name => last.parts.push(((layer, target), rows)),
                _ => {
                    let (shape, parts) = ([outputs, inputs], vec![((layer, target), rows)]);
                    layers.push(TrainedLayer { name, written, selected, shape, parts });
                }
            }
        }
        Ok(layers)
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
