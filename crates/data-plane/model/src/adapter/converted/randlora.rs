//! RandLoRA: a sum of random bases that all layers share, with trained scales.
//!
//! The bases are `randlora_A`, `[rank, 1, shorter side]`, and `randlora_B`, `[longer side, bases, rank]`, of
//! the largest layer. The scales are `randlora_lambda`, `[rank, bases]`, and `randlora_gamma`, `[bases,
//! shorter side]`. There are as many bases as the shorter side needs for its full rank.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::take_rank,
};

const SAVED: &str = "save_projection";

/// The shared bases, which PEFT also stores with each layer.
const SHARED: [&str; 2] = ["randlora_A", "randlora_B"];

#[derive(Debug)]
struct RandLora {
    rank: usize,
    alpha: f64,
    bases: RandomBases,
}

/// The shared bases, once they are taken.
#[derive(Debug, Default)]
struct RandomBases {
    /// Matrix of shape `[rank, shorter]`.
    a: Vec<f32>,
    shorter: usize,
    /// Tensor of shape `[longer, count, rank]`.
    b: Vec<f32>,
    longer: usize,
    count: usize,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    if options.has(SAVED) && !options.flag(SAVED)? {
        return Err(options.problem(SAVED, "is false, so the file has no bases; save the adapter with them"));
    }
    let (rank, alpha) = (take_rank(options, 32)?, options.number("randlora_alpha")?.unwrap_or(640.0));
    Ok(Box::new(RandLora { rank, alpha, bases: RandomBases::default() }))
}

impl ConvertedMethod for RandLora {
    fn history(&self) -> &'static [&'static str] {
        // The bases are in the file, however they were drawn.
        &["init_weights", "projection_prng_key", "randlora_dropout", "sparse", "very_sparse"]
    }

    fn share(&mut self, weights: &mut WeightFile<'_>, layers: &[TrainedLayer]) -> Result<(), AdapterError> {
        let [a, b] = SHARED.map(|part| format!("base_model.{part}"));
        let (a, b) = (weights.required(&a)?, weights.required(&b)?);
        let shorter = a.1.shape.last().copied().unwrap_or(0);
        let [longer, count] = [0, 1].map(|at| b.1.shape.get(at).copied().unwrap_or(0));
        let a_values = weights.numbers(a, &[self.rank, 1, shorter])?;
        let b_values = weights.numbers(b, &[longer, count, self.rank])?;
        // In PEFT, a layer's copies are the same buffers.
        for layer in layers {
            SHARED.iter().for_each(|part| drop(weights.take(&format!("{}.{part}", layer.name))));
        }
        self.bases = RandomBases { a: a_values, shorter, b: b_values, longer, count };
        Ok(())
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([lambda, gamma]) = weights.take_layer(layer, ["randlora_lambda", "randlora_gamma"])? else {
            return Ok(None);
        };
        let ([outputs, inputs], rank) = (layer.shape, self.rank);
        let (shorter, longer) = (outputs.min(inputs), outputs.max(inputs));
        let count = shorter.div_ceil(rank);
        let (lambda, gamma) =
            (weights.numbers(lambda, &[rank, count])?, weights.numbers(gamma, &[count, shorter])?);
        let RandomBases { a, b, .. } = &self.bases;
        if self.bases.shorter < shorter || self.bases.longer < longer || self.bases.count < count {
            let (path, tensor) = (weights.path().to_path_buf(), "base_model.randlora_B".to_owned());
            let found = vec![self.bases.longer, self.bases.count, rank];
            return Err(AdapterError::Shape { path, tensor, expected: vec![longer, count, rank], found });
        }
        let ranks = rank * count;
        budget.check(weights.path(), ranks, layer.shape)?;
        let mut short = Vec::with_capacity(ranks * shorter);
        for (at, lambda) in lambda.iter().enumerate() {
            let row = &a[at / count * self.bases.shorter..][..shorter];
            let gamma = &gamma[at % count * shorter..][..shorter];
            short.extend(row.iter().zip(gamma).map(|(value, gamma)| lambda * value * gamma));
        }
        let width = self.bases.count * rank;
        let long: Vec<f32> = (0..longer).flat_map(|row| &b[row * width..][..ranks]).copied().collect();
        let scale = rounded(self.alpha / rank as f64);
        Ok(Some(if inputs == shorter {
            LowRankProduct::exact(ranks, scale, short, long)
        } else {
            LowRankProduct::exact(ranks, scale, transposed(&long, ranks), transposed(&short, shorter))
        }))
    }
}

/// Transposes a matrix with rows of `columns` values.
fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}
