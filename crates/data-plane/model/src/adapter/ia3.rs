//! IA3 in PEFT's format: a vector for each linear layer, `ia3_l`, which scales its outputs, `[out, 1]`, or, for those
//! that `feedforward_modules` names, its inputs, `[1, in]`.

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

/// Options that say how an IA3 adapter was made, not what it computes.
const HISTORY: [&str; 1] = ["init_ia3_weights"];

/// What the configuration of an IA3 adapter says.
#[derive(Debug)]
pub(super) struct Ia3Config {
    selection: Selection,
    /// Layers whose inputs are scaled.
    feed_forward: Option<ModuleNames>,
}

impl Ia3Config {
    /// Takes and checks all of `options`.
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let selection = Selection::from_options(options)?;
        if !options.has(FEED_FORWARD) {
            // PEFT would choose by the kind of model; it never saves an adapter that leaves this open.
            return Err(options.problem(FEED_FORWARD, "is missing"));
        }
        let feed_forward = options.names(FEED_FORWARD)?;
        options.refuse_the_rest(&HISTORY)?;
        Ok(Self { selection, feed_forward })
    }

    /// The scaled linear layer, if there is one.
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

    /// What is scaled of the linear layer called `module`.
    fn side(&self, module: &str, target: Target) -> Result<ScaledSide, AdapterError> {
        let problem = |problem| option_error(self.selection.path(), FEED_FORWARD, problem);
        let scales_input = match &self.feed_forward {
            None => false,
            Some(names) => names.select_by_ending(module).map_err(problem)?,
        };
        match target {
            _ if !scales_input => Ok(ScaledSide::Output),
            Target::O | Target::Down | Target::LmHead => Ok(ScaledSide::Input),
            Target::Q | Target::K | Target::V | Target::Gate | Target::Up => Err(problem(format!(
                "selects `{module}`, which shares its inputs with other layers; only those of o_proj, down_proj and \
                 lm_head can be scaled"
            ))),
        }
    }
}
