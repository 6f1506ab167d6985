//! DeLoRA: ranks of unit norm, times a trained strength and the norms of the base's columns.
//!
//! The tensors are `delora_A`, `[rank, in]`, `delora_B`, `[out, rank]`, `delora_lambda`, `[1]`, and
//! `delora_w_norm`, `[in]`, the norms of the base's columns when training began.

use super::{
    super::{
        error::AdapterError,
        options::{ConfigOptions, as_count, option_error},
        patterns::ByPattern,
        selection::TrainedLayer,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::check_rank,
};

const PARTS: [&str; 4] = ["delora_A", "delora_B", "delora_lambda", "delora_w_norm"];

/// Least norm of a row or column in PEFT.
const LEAST: f64 = 1e-4;

#[derive(Debug)]
struct DeLora {
    rank: usize,
    ranks: ByPattern<usize>,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    options.take("lambda_pattern");
    let rank = options.count("r")?.unwrap_or(8);
    Ok(Box::new(DeLora { rank, ranks: options.by_pattern("rank_pattern", as_count)? }))
}

impl ConvertedMethod for DeLora {
    fn history(&self) -> &'static [&'static str] {
        &["delora_lambda", "init_weights", "module_dropout"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        _budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([a, b, strength, norms]) = weights.take_layer(layer, PARTS)? else { return Ok(None) };
        let [outputs, inputs] = layer.shape;
        let problem = |problem| option_error(weights.path(), "rank_pattern", problem);
        let rank = self.ranks.get(&layer.written, self.rank).map_err(problem)?;
        check_rank(weights, layer, rank)?;
        let mut a = weights.numbers(a, &[rank, inputs])?;
        let b = weights.numbers(b, &[outputs, rank])?;
        let strength = f64::from(weights.numbers(strength, &[1])?[0]) / rank as f64;
        let column_norms = weights.numbers(norms, &[inputs])?;
        for (at, row) in a.chunks_exact_mut(inputs).enumerate() {
            let norms = norm(row.iter()) * norm(b.iter().skip(at).step_by(rank));
            let factor = rounded(strength / norms);
            row.iter_mut().zip(&column_norms).for_each(|(value, norm)| *value *= factor * norm);
        }
        Ok(Some(LowRankProduct::exact(rank, 1.0, a, b)))
    }
}

fn norm<'a>(values: impl Iterator<Item = &'a f32>) -> f64 {
    values.map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt().max(LEAST)
}
