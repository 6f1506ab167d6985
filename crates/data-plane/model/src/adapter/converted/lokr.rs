//! LoKr: the Kronecker product of two matrices, `W1 ⊗ W2`, each whole or a product of two factors.
//!
//! `(U1 V1) ⊗ (U2 V2) = (U1 ⊗ U2) (V1 ⊗ V2)`, so the ranks of both matrices are multiplied. If the result
//! has too many ranks, the singular values of both matrices give its own: these are the products of all
//! pairs.

use super::{
    super::{
        error::AdapterError,
        limits::MAX_RANK,
        options::ConfigOptions,
        selection::{Selected, TrainedLayer},
        svd::{OuterProducts, SingularValues, missing},
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, unit_matrix},
    rank::RankOptions,
};

#[derive(Debug)]
struct LoKr(RankOptions);

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    Ok(Box::new(LoKr(RankOptions::take(options, "alpha", 8)?)))
}

/// One of the two matrices, as a product of factors.
struct Side {
    rank: usize,
    outputs: usize,
    inputs: usize,
    /// Matrix of shape `[rank, inputs]`.
    a: Vec<f32>,
    /// Matrix of shape `[outputs, rank]`.
    b: Vec<f32>,
}

impl ConvertedMethod for LoKr {
    fn history(&self) -> &'static [&'static str] {
        &[
            "decompose_both",
            "decompose_factor",
            "init_weights",
            "module_dropout",
            "rank_dropout",
            "rank_dropout_scale",
            "use_effective_conv2d",
        ]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let (_, scale) = self.0.of(weights, layer)?;
        let Some(first) = self.side(weights, layer, "lokr_w1")? else { return Ok(None) };
        let Some(second) = self.side(weights, layer, "lokr_w2")? else { return Ok(None) };
        let found = [first.outputs * second.outputs, first.inputs * second.inputs];
        if found != layer.shape {
            let (path, tensor) = (weights.path().to_path_buf(), format!("{}.lokr_w1", layer.name));
            let (expected, found) = (layer.shape.to_vec(), found.to_vec());
            return Err(AdapterError::Shape { path, tensor, expected, found });
        }
        let rank = first.rank * second.rank;
        if rank <= MAX_RANK || layer.shape.iter().any(|&side| side <= MAX_RANK) {
            budget.check(weights.path(), rank, layer.shape)?;
            return Ok(Some(first.times(&second, scale)));
        }
        for side in [&first, &second] {
            let operations = OuterProducts::operations(side.rank, [side.outputs, side.inputs]);
            budget.work(weights.path(), layer, rank, operations)?;
        }
        Ok(Some(largest(&first.decompose(), &second.decompose(), scale)))
    }
}

impl LoKr {
    /// Takes one of the two matrices.
    fn side(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        part: &str,
    ) -> Result<Option<Side>, AdapterError> {
        let dims = |shape: &[usize]| match *shape {
            [rows, columns] if rows > 0 && columns > 0 => [rows, columns],
            _ => [1, 1],
        };
        let names = ["a", "b"].map(|factor| format!("{part}_{factor}"));
        if weights.has(&format!("{}.{}", layer.name, names[0])) {
            let taken = weights.take_layer(layer, names.each_ref().map(String::as_str))?;
            let Some([b, a]) = taken else { return Ok(None) };
            let (rank, _) = self.0.of(weights, layer)?;
            let ([outputs, _], [_, inputs]) = (dims(&b.1.shape), dims(&a.1.shape));
            let b = weights.numbers(b, &[outputs, rank])?;
            let a = weights.numbers(a, &[rank, inputs])?;
            return Ok(Some(Side { rank, outputs, inputs, a, b }));
        }
        let Some([whole]) = weights.take_layer(layer, [part])? else {
            debug_assert_eq!(layer.selected, Selected::No);
            return Ok(None);
        };
        let [outputs, inputs] = dims(&whole.1.shape);
        let matrix = weights.numbers(whole, &[outputs, inputs])?;
        Ok(Some(if inputs <= outputs {
            Side { rank: inputs, outputs, inputs, a: unit_matrix(inputs), b: matrix }
        } else {
            Side { rank: outputs, outputs, inputs, a: matrix, b: unit_matrix(outputs) }
        }))
    }
}

impl Side {
    fn times(&self, other: &Self, scale: f32) -> LowRankProduct {
        let a = kronecker((&self.a, self.inputs), (&other.a, other.inputs));
        let b = kronecker((&self.b, self.rank), (&other.b, other.rank));
        LowRankProduct::exact(self.rank * other.rank, scale, a, b)
    }

    fn decompose(&self) -> SingularValues {
        OuterProducts::of(self.rank, &self.a, &self.b).decompose()
    }
}

/// Returns the Kronecker product of two matrices, each given with its number of columns.
fn kronecker((one, one_columns): (&[f32], usize), (other, other_columns): (&[f32], usize)) -> Vec<f32> {
    let mut product = Vec::with_capacity(one.len() * other.len());
    for one in one.chunks_exact(one_columns) {
        for other in other.chunks_exact(other_columns) {
            product.extend(one.iter().flat_map(|x| other.iter().map(move |y| x * y)));
        }
    }
    product
}

/// Returns the largest [`MAX_RANK`] singular values of a Kronecker product.
fn largest(one: &SingularValues, other: &SingularValues, scale: f32) -> LowRankProduct {
    let pairs = one.values.iter().enumerate();
    let mut pairs: Vec<(f64, usize, usize)> =
        pairs.flat_map(|(i, x)| other.values.iter().enumerate().map(move |(j, y)| (x * y, i, j))).collect();
    pairs.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
    let values: Vec<f64> = pairs.iter().map(|(value, ..)| *value).collect();
    pairs.truncate(MAX_RANK);
    let outer = |value: f64, one: &[f64], other: &[f64]| {
        let root = value.sqrt();
        one.iter().flat_map(|x| other.iter().map(move |y| root * x * y)).collect()
    };
    let columns = pairs.iter().map(|&(value, i, j)| outer(value, &one.columns[i], &other.columns[j]));
    let rows = pairs.iter().map(|&(value, i, j)| outer(value, &one.rows[i], &other.rows[j]));
    let products = OuterProducts { columns: columns.collect(), rows: rows.collect() };
    let error = missing(&values, MAX_RANK);
    LowRankProduct { error, ..LowRankProduct::of_products(&products, scale) }
}
