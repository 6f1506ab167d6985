//! AdaLoRA: `B diag(E) A`, where training removes singular values.
//!
//! The tensors are `lora_A`, `[rank, in]`, `lora_E`, `[rank, 1]`, and `lora_B`, `[out, rank]`. PEFT cuts them
//! to the values that `rank_pattern` keeps, so the tensors tell the rank. A layer may have lost every value.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::check_rank,
};

/// PEFT's addend to the number of ranks.
const EPSILON: f32 = 1e-5;

#[derive(Debug)]
struct AdaLora {
    alpha: f64,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    options.take("rank_pattern");
    Ok(Box::new(AdaLora { alpha: options.number("lora_alpha")?.unwrap_or(8.0) }))
}

impl ConvertedMethod for AdaLora {
    fn history(&self) -> &'static [&'static str] {
        &[
            "beta1",
            "beta2",
            "deltaT",
            "init_lora_weights",
            "init_r",
            "loftq_config",
            "lora_dropout",
            "megatron_core",
            "orth_reg_weight",
            "qalora_group_size",
            "r",
            "target_r",
            "tfinal",
            "tinit",
            "total_step",
        ]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        _budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([a, e, b]) = weights.take_layer(layer, ["lora_A", "lora_E", "lora_B"])? else {
            return Ok(None);
        };
        let [outputs, inputs] = layer.shape;
        let rank = a.1.shape.first().copied().unwrap_or(0);
        let (a, b) = (weights.numbers(a, &[rank, inputs])?, weights.numbers(b, &[outputs, rank])?);
        let e = weights.numbers(e, &[rank, 1])?;
        if rank == 0 {
            return Ok(None);
        }
        check_rank(weights, layer, rank)?;
        let a = a.chunks_exact(inputs).zip(e).flat_map(|(row, e)| row.iter().map(move |x| x * e)).collect();
        #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
        let ranks = rank as f32;
        let alpha = if self.alpha > 0.0 { rounded(self.alpha) } else { ranks };
        Ok(Some(LowRankProduct::exact(rank, alpha / (ranks + EPSILON), a, b)))
    }
}
