//! DoRA: a LoRA with a magnitude for each output of a layer.
//!
//! `y = m / |W + s B A| * (W + s B A) x + bias`, where `|.|` is the norm of each row. With `g = m / |W + s B
//! A|` this is `g * (W x) + bias + s (g B) A x`: the base's outputs are scaled, and the rest is a LoRA. A
//! load needs the base's weights once; the forward pass does not know of DoRA.

use super::method::{Adapter, DoraAdapter, LoraModule, MethodWeights, ScaleVector, ScaledSide, Scales};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::hf_names::module_name,
};

/// Decodes a row of a weight into a buffer of its length.
type ReadRow<'a> = Box<dyn Fn(usize, &mut [f32]) + 'a>;

/// A linear layer of the base with access to its weights.
#[allow(missing_debug_implementations, reason = "there is nothing to say of a function")]
pub struct BaseLayer<'a> {
    /// Writes one row of the weights, `[out, in]`.
    pub read_row: ReadRow<'a>,
    /// Bias of the layer, shape `[out]`.
    pub bias: Option<&'a [f32]>,
}

/// Reasons why a DoRA cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DoraError {
    /// The base's weights of a layer are not in host memory.
    #[error(
        "it is a DoRA (`use_dora`), which needs the base's weights of `{module}` in host memory; raise \
         --resident-weight-bytes, or use a base on the CPU"
    )]
    NoWeights {
        /// Name of the layer.
        module: String,
    },
    /// A zero row has no direction to scale.
    #[error(
        "`{module}`: row {row} of the sum of base and adapter is zero, so it has no direction; the \
         training went wrong"
    )]
    NoDirection {
        /// Name of the layer.
        module: String,
        /// Index of the zero row.
        row: usize,
    },
}

impl DoraAdapter {
    /// Returns a LoRA and output scales over a base of shape `config`, whose layers `layer` finds.
    ///
    /// # Errors
    /// See [`DoraError`].
    pub fn over<'a>(
        &self,
        config: &ModelConfig,
        layer: impl Fn(usize, Target) -> Option<BaseLayer<'a>>,
    ) -> Result<(Adapter, Scales), DoraError> {
        let (mut modules, mut vectors, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        for (module, magnitude) in self.adapter.modules().iter().zip(&self.magnitudes) {
            let place = (module.layer, module.target);
            let name = || module_name(module.layer, module.target);
            let base =
                layer(module.layer, module.target).ok_or_else(|| DoraError::NoWeights { module: name() })?;
            let [_, inputs] = linear_shape(config, module.target);
            let values = gains(module, magnitude, inputs, &base)
                .map_err(|row| DoraError::NoDirection { module: name(), row })?;
            if let Some(bias) = base.bias {
                // The gain scales the bias as well, so an offset restores the bias.
                offsets.push((
                    place,
                    bias.iter().zip(&values).map(|(bias, gain)| bias * (1.0 - gain)).collect(),
                ));
            }
            let rows = module.b.chunks_exact(module.rank).zip(&values);
            let b = rows.flat_map(|(row, gain)| row.iter().map(move |number| number * gain)).collect();
            modules.push(LoraModule { b, ..module.clone() });
            vectors.push(ScaleVector { layer: place.0, target: place.1, side: ScaledSide::Output, values });
        }
        let adapter = Adapter {
            method: MethodWeights::Lora(modules),
            stored_in_16_bits: false,
            ..self.adapter.clone()
        };
        Ok((adapter, Scales::new(vectors).with_offsets(offsets)))
    }
}

/// Returns `m / |W + s B A|` for each row, or the index of a row that is zero.
fn gains(
    module: &LoraModule,
    magnitude: &[f32],
    inputs: usize,
    base: &BaseLayer<'_>,
) -> Result<Vec<f32>, usize> {
    let mut row = vec![0.0f32; inputs];
    let each = module.b.chunks_exact(module.rank).zip(magnitude).enumerate();
    each.map(|(index, (b, magnitude))| {
        (base.read_row)(index, &mut row);
        for (b, a) in b.iter().zip(module.a.chunks_exact(inputs)) {
            let times = module.scale * b;
            row.iter_mut().zip(a).for_each(|(sum, a)| *sum += times * a);
        }
        let squares: f64 = row.iter().map(|number| f64::from(*number).powi(2)).sum();
        #[expect(clippy::cast_possible_truncation, reason = "a norm of numbers of 32 bits")]
        let norm = squares.sqrt() as f32;
        if norm > 0.0 { Ok(magnitude / norm) } else { Err(index) }
    })
    .collect()
}
