//! IA3 in PEFT's format. Each linear layer has a vector `ia3_l`, which scales its outputs, `[out, 1]`, or its
//! inputs, `[1, in]`, if `feedforward_modules` names the layer.

use super::{
    error::AdapterError,
    matrix::StoredVector,
    method::ScaledSide,
    options::{ConfigOptions, option_error},
    patterns::ModuleNames,
    selection::Selection,
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::hf_names::module_name,
};

const FEED_FORWARD: &str = "feedforward_modules";

/// Options that describe how an IA3 adapter was made, and not its result.
const HISTORY: [&str; 1] = ["init_ia3_weights"];

#[derive(Debug)]
pub(super) struct Ia3Config {
    selection: Selection,
    feed_forward: Option<ModuleNames>,
}

impl Ia3Config {
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let selection = Selection::from_options(options)?;
        if !options.has(FEED_FORWARD) {
            // PEFT derives a default from the model type, but always saves an explicit value.
            return Err(options.problem(FEED_FORWARD, "is missing"));
        }
        let feed_forward = options.names(FEED_FORWARD)?;
        options.refuse_the_rest(&HISTORY)?;
        Ok(Self { selection, feed_forward })
    }

    pub(super) fn vector<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
        (layer, target): (usize, Target),
    ) -> Result<Option<StoredVector<'a>>, AdapterError> {
        let name = module_name(layer, target);
        let (module, selected) = self.selection.named(model, (layer, target))?;
        let Some([values]) = weights.take_all(&name, [format!("{name}.ia3_l")], selected)? else {
            return Ok(None);
        };
        let side = self.side(&module, target)?;
        let [rows, cols] = linear_shape(model, target);
        let shape = match side {
            ScaledSide::Input => [1, cols],
            ScaledSide::Output => [rows, 1],
        };
        Ok(Some(StoredVector { layer, target, side, values: weights.matrix(values, shape)? }))
    }

    fn side(&self, module: &str, target: Target) -> Result<ScaledSide, AdapterError> {
        let problem = |problem| option_error(self.selection.path(), FEED_FORWARD, problem);
        let scales_input = match &self.feed_forward {
            None => false,
            Some(names) => names.select_by_ending(module).map_err(problem)?,
        };
        match target {
            _ if !scales_input => Ok(ScaledSide::Output),
            Target::O | Target::Down | Target::LmHead => Ok(ScaledSide::Input),
            Target::Q | Target::K | Target::V | Target::Gate | Target::Up | Target::Expert(..) => {
                Err(problem(format!(
                    "selects `{module}`, which shares its inputs with other layers; only those of o_proj, down_proj and \
                 lm_head can be scaled"
                )))
            }
        }
    }
}
