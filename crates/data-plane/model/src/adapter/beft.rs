//! BEFT in PEFT's format: `beft_bias`, `[1, out]`, is added to the outputs of a linear layer.

use super::{
    error::AdapterError, matrix::StoredBias, options::ConfigOptions, selection::Selection,
    weight_file::WeightFile,
};
use crate::shape::config::ModelConfig;

/// PEFT's name of the method.
pub(super) const METHOD: &str = "BEFT";

#[derive(Debug)]
pub(super) struct BeftConfig(Selection);

impl BeftConfig {
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        let selection = Selection::from_options(options)?.with_layers(options)?;
        options.refuse_the_rest(&["init_weights"])?;
        Ok(Self(selection))
    }

    pub(super) fn biases(
        &self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
    ) -> Result<Vec<StoredBias>, AdapterError> {
        let mut biases = Vec::new();
        for layer in &self.0.trained_layers(model)? {
            let Some([bias]) = weights.take_layer(layer, ["beft_bias"])? else { continue };
            let values = weights.numbers(bias, &[1, layer.shape[0]])?;
            biases.extend(layer.parts.iter().map(|&((layer, target), ref rows)| StoredBias {
                layer,
                target,
                values: values[rows.clone()].to_vec(),
            }));
        }
        Ok(biases)
    }
}
