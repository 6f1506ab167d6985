//! FourierFT: the change is the real part of an inverse Fourier transform of a few trained coefficients.
//!
//! The coefficients are `fourierft_spectrum`, `[n]`. The frequencies of the coefficients are the first `n`
//! entries of a random permutation, which PyTorch draws from `random_loc_seed`. Coefficients of one row
//! frequency u add up to `cos(2 pi u j / out) C[k] - sin(2 pi u j / out) S[k]`, so the rank is twice the
//! number of these frequencies.

use std::{collections::BTreeMap, f64::consts::TAU};

use super::{
    super::{
        error::AdapterError,
        options::{ConfigOptions, as_count, option_error},
        patterns::ByPattern,
        selection::TrainedLayer,
        torch_random::TorchGenerator,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
};

const COUNT: &str = "n_frequency";

#[derive(Debug)]
struct FourierFt {
    count: usize,
    counts: ByPattern<usize>,
    scaling: f64,
    seed: u64,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    Ok(Box::new(FourierFt {
        count: options.count(COUNT)?.unwrap_or(1000),
        counts: options.by_pattern("n_frequency_pattern", as_count)?,
        scaling: options.number("scaling")?.unwrap_or(150.0),
        seed: options.seed("random_loc_seed")?.unwrap_or(777),
    }))
}

impl ConvertedMethod for FourierFt {
    fn history(&self) -> &'static [&'static str] {
        &["init_weights"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([spectrum]) = weights.take_layer(layer, ["fourierft_spectrum"])? else { return Ok(None) };
        let shape @ [outputs, inputs] = layer.shape;
        let problem = |problem| option_error(weights.path(), COUNT, problem);
        let count = self.counts.get(&layer.written, self.count).map_err(problem)?;
        if count == 0 || count > outputs * inputs {
            return Err(problem(format!("is {count}, but must be 1 to {}", outputs * inputs)));
        }
        let spectrum = weights.numbers(spectrum, &[count])?;
        let places = TorchGenerator::new(self.seed).permutation(outputs * inputs, count);
        let Some(places) = places else {
            return Err(problem("belongs to a layer that is too large".to_owned()));
        };
        let mut by_row: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
        for (place, value) in places.into_iter().zip(&spectrum) {
            by_row.entry(place / inputs).or_default().push((place % inputs, f64::from(*value)));
        }
        let rank = 2 * by_row.len();
        budget.check(weights.path(), rank, shape)?;
        budget.work(weights.path(), layer, rank, (count * inputs + rank * outputs) as u64)?;
        let scale = rounded(self.scaling / (outputs * inputs) as f64);
        Ok(Some(product(&by_row, shape, scale)))
    }
}

/// Returns the transform of coefficients `(column frequency, value)` by row frequency.
fn product(
    by_row: &BTreeMap<usize, Vec<(usize, f64)>>,
    [outputs, inputs]: [usize; 2],
    scale: f32,
) -> LowRankProduct {
    let (rank, mut a) = (2 * by_row.len(), Vec::with_capacity(2 * by_row.len() * inputs));
    for coefficients in by_row.values() {
        let [mut cosines, mut sines] = [(); 2].map(|()| vec![0.0; inputs]);
        for &(frequency, value) in coefficients {
            for at in 0..inputs {
                let (sine, cosine) = angle(frequency, at, inputs).sin_cos();
                cosines[at] += value * cosine;
                sines[at] -= value * sine;
            }
        }
        a.extend(cosines.into_iter().chain(sines).map(rounded));
    }
    let row = |at: usize| {
        by_row.keys().flat_map(move |&frequency| {
            let (sine, cosine) = angle(frequency, at, outputs).sin_cos();
            [rounded(cosine), rounded(sine)]
        })
    };
    LowRankProduct::exact(rank, scale, a, (0..outputs).flat_map(row).collect())
}

#[expect(clippy::cast_precision_loss, reason = "layers are small")]
fn angle(frequency: usize, at: usize, length: usize) -> f64 {
    // The remainder keeps the angle exact.
    TAU * (frequency * at % length) as f64 / length as f64
}
