//! SHiRA and SuperTuning: some elements of a layer's weights have an addend each.
//!
//! SHiRA stores `shira_weight`, `[n]`, and the rows and columns in `shira_indices`, `[2, n]`. SuperTuning
//! stores `supertuning_values`, `[n]`, and positions in `supertuning_indices`, `[n]`, counted row by row, and
//! perhaps a LoRA besides. The rank is the number of rows or columns with such elements, whichever is less.

use std::collections::BTreeMap;

use super::{
    super::{
        error::AdapterError,
        limits::MAX_RANK,
        options::{ConfigOptions, option_error},
        selection::TrainedLayer,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
};

#[derive(Debug)]
struct Shira;

pub(super) fn read_shira(_options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    Ok(Box::new(Shira))
}

impl ConvertedMethod for Shira {
    fn history(&self) -> &'static [&'static str] {
        &["init_weights", "mask_type", "r", "random_seed"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([values]) = weights.take_layer(layer, ["shira_weight"])? else { return Ok(None) };
        let count = values.1.shape.first().copied().unwrap_or(0);
        let values = weights.numbers(values, &[count])?;
        let name = format!("{}.shira_indices", layer.name);
        let places = positions(weights, &name, &[2, count])?;
        let (rows, columns) = places.split_at(count);
        let elements = rows.iter().zip(columns).map(|(&row, &column)| (row, column)).zip(values);
        product(weights, layer, &name, elements.collect(), budget).map(Some)
    }
}

#[derive(Debug)]
struct SuperTuning {
    /// Rank of the LoRA besides, with its scale.
    beside: Option<(usize, f32)>,
}

pub(super) fn read_supertuning(
    options: &mut ConfigOptions<'_>,
) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let (rank, alpha) = (options.count("r")?, options.number("lora_alpha")?);
    let beside = match (rank, alpha) {
        (None, _) => None,
        (Some(rank), Some(alpha)) if (1..=MAX_RANK).contains(&rank) => {
            Some((rank, rounded(alpha / rank as f64)))
        }
        _ => return Err(options.problem("r", format!("must be 1 to {MAX_RANK}, beside `lora_alpha`"))),
    };
    Ok(Box::new(SuperTuning { beside }))
}

impl ConvertedMethod for SuperTuning {
    fn history(&self) -> &'static [&'static str] {
        &["init_weights", "lora_dropout", "save_precomputed_indices", "select_top", "sparsity"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([values]) = weights.take_layer(layer, ["supertuning_values"])? else { return Ok(None) };
        let [outputs, inputs] = layer.shape;
        let count = values.1.shape.first().copied().unwrap_or(0);
        let values = weights.numbers(values, &[count])?;
        let name = format!("{}.supertuning_indices", layer.name);
        let elements = positions(weights, &name, &[count])?.into_iter().zip(values);
        let elements = elements.map(|(at, value)| ((at / inputs, at % inputs), value)).collect();
        let sparse = product(weights, layer, &name, elements, budget)?;
        let Some((rank, scale)) = self.beside else { return Ok(Some(sparse)) };
        let parts = ["supertuning_lora_A.weight", "supertuning_lora_B.weight"];
        let Some([a, b]) = weights.take_layer(layer, parts)? else { return Ok(None) };
        let (a, b) = (weights.numbers(a, &[rank, inputs])?, weights.numbers(b, &[outputs, rank])?);
        budget.check(weights.path(), sparse.rank + rank, layer.shape)?;
        Ok(Some(sparse.plus(&LowRankProduct::exact(rank, scale, a, b), layer.shape)))
    }
}

/// Takes the tensor `name` of positions.
fn positions(weights: &mut WeightFile<'_>, name: &str, shape: &[usize]) -> Result<Vec<usize>, AdapterError> {
    let Some(found) = weights.take_integers(name, shape)? else {
        let (path, tensor) = (weights.path().to_path_buf(), name.to_owned());
        return Err(AdapterError::Missing { path, tensor, foreign: None });
    };
    // A negative position is refused as one outside the weights.
    Ok(found.into_iter().map(|at| usize::try_from(at).unwrap_or(usize::MAX)).collect())
}

/// Returns the matrix of elements `(row, column)`, where elements of one place add up.
fn product(
    weights: &WeightFile<'_>,
    layer: &TrainedLayer,
    name: &str,
    elements: Vec<((usize, usize), f32)>,
    budget: &ConversionBudget,
) -> Result<LowRankProduct, AdapterError> {
    let shape @ [outputs, inputs] = layer.shape;
    let is_outside = |((row, column), _): &&((usize, usize), f32)| *row >= outputs || *column >= inputs;
    if let Some(((row, column), _)) = elements.iter().find(is_outside) {
        let problem = format!("has the position ({row}, {column}), outside the shape {shape:?}");
        return Err(option_error(weights.path(), name, problem));
    }
    let numbered = |places: &mut dyn Iterator<Item = usize>| {
        let mut numbers: BTreeMap<usize, usize> = places.map(|place| (place, 0)).collect();
        numbers.values_mut().enumerate().for_each(|(nth, number)| *number = nth);
        numbers
    };
    let rows = numbered(&mut elements.iter().map(|((row, _), _)| *row));
    let columns = numbered(&mut elements.iter().map(|((_, column), _)| *column));
    let (by_rows, ranks) = if rows.len() <= columns.len() { (true, &rows) } else { (false, &columns) };
    let rank = ranks.len();
    budget.check(weights.path(), rank, shape)?;
    let (mut a, mut b) = (vec![0.0; rank * inputs], vec![0.0; outputs * rank]);
    for (&place, &nth) in ranks {
        if by_rows { b[place * rank + nth] = 1.0 } else { a[nth * inputs + place] = 1.0 }
    }
    for ((row, column), value) in elements {
        if by_rows {
            a[rows[&row] * inputs + column] += value
        } else {
            b[row * rank + columns[&column]] += value
        }
    }
    Ok(LowRankProduct::exact(rank, 1.0, a, b))
}
