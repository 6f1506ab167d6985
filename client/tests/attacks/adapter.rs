//! T4: the adapter's change of the value projection, from prompts' first tokens.
//!
//! At position 0 attention sees one token, so the input of `o` is `v = v_base + x ΔW`, for each query head of
//! the group. The executor receives x, computes v_base, and receives v: one linear equation in ΔW per prompt
//! with another first token. If rows carry one of a few noises, each recognised noise adds a constant, hence
//! one unknown per noise; neither its size nor its effect is needed. All sites use their noises in turn, so a
//! token's rows carry the same one at both.

use model::{
    adapter::{Adapter, LoraModule},
    shape::{config::ModelConfig, source::Target},
};

use crate::{
    algebra::{Matrix, dot, least_squares, subspace, to_f64},
    executor::FloatRows,
    noises::CarriedNoise,
};

#[derive(Debug)]
pub(crate) struct ObservedRows {
    /// Inputs of `[q | k | v]`.
    pub(crate) inputs: FloatRows,
    pub(crate) base: FloatRows,
    pub(crate) attended: FloatRows,
}

#[derive(Debug)]
pub(crate) struct StolenAdapter {
    pub(crate) rank: usize,
    /// ΔW, `[in, out]`, of that rank.
    pub(crate) delta: Matrix,
}

const MAX_RANKS: usize = 32;

/// Solves for the change of the value projection; `carried` names the noises of the rows, if there are any.
pub(crate) fn steal(crossed: &ObservedRows, config: &ModelConfig, carried: &[CarriedNoise]) -> StolenAdapter {
    let width = crossed.inputs.width;
    let noises = carried.iter().map(|carried| carried.noise + 1).max().unwrap_or(0);
    let equation = |(index, row): (usize, &[f32])| {
        let mut equation = to_f64(row);
        equation.resize(width + noises, 0.0);
        if let Some(CarriedNoise { noise }) = carried.get(index) {
            equation[width + noise] = 1.0;
        }
        equation
    };
    let left = Matrix::from_rows(width + noises, crossed.inputs.iter().enumerate().map(equation));
    let values = config.kv_heads * config.head_dim;
    let change = |(attended, base): (&[f32], &[f32])| -> Vec<f64> {
        let base = &base[base.len() - values..];
        first_values(attended, config).iter().zip(base).map(|(v, base)| v - f64::from(*base)).collect()
    };
    let right = Matrix::from_rows(values, crossed.attended.iter().zip(crossed.base.iter()).map(change));
    let delta = least_squares(left, right).upper(width);
    // Changes of values lie in the few directions of B; the rest of the solution is noise.
    let changes = differences(&crossed.inputs, carried).map(|row| changes(&row, &delta));
    let (rank, directions) = subspace(&Matrix::from_columns(values, changes), MAX_RANKS);
    let rows = delta.transposed();
    let rows = Matrix::from_columns(values, rows.columns().map(|row| directions.projection(row)));
    StolenAdapter { rank, delta: rows.transposed() }
}

/// Differences of rows that carry the same noise, if any.
fn differences<'a>(rows: &'a FloatRows, carried: &'a [CarriedNoise]) -> impl Iterator<Item = Vec<f64>> + 'a {
    let noise_of = |row: usize| carried.get(row).map_or(0, |carried| carried.noise);
    let mut last: Vec<Option<usize>> = Vec::new();
    (0..rows.count()).filter_map(move |row| {
        let noise = noise_of(row);
        last.resize(last.len().max(noise + 1), None);
        let before = last[noise].replace(row)?;
        let pairs = rows.row(row).iter().zip(rows.row(before));
        Some(pairs.map(|(x, y)| f64::from(*x) - f64::from(*y)).collect())
    })
}

/// Product `x ΔW` of a row.
pub(crate) fn changes(row: &[f64], delta: &Matrix) -> Vec<f64> {
    delta.columns().map(|column| dot(row, column)).collect()
}

/// Values of a first token's heads, averaged over the query heads of each group.
fn first_values(attended: &[f32], config: &ModelConfig) -> Vec<f64> {
    let (shared, head_dim) = (config.heads / config.kv_heads, config.head_dim);
    let mut values = vec![0.0; config.kv_heads * head_dim];
    for (head, attended) in attended.chunks_exact(head_dim).enumerate() {
        let values = &mut values[head / shared * head_dim..][..head_dim];
        values.iter_mut().zip(attended).for_each(|(v, x)| *v += f64::from(*x) / shared as f64);
    }
    values
}

/// True change of a value projection by the adapter, `[in, out]`, and its rank.
pub(crate) fn own_delta(adapter: &Adapter, layer: usize) -> (usize, Matrix) {
    let wanted = |module: &&LoraModule| (module.layer, module.target) == (layer, Target::V);
    let LoraModule { rank, scale, a, b, .. } = adapter.modules().iter().find(wanted).unwrap();
    let width = a.len() / rank;
    let column = |b: &[f32]| {
        let mut column = vec![0.0; width];
        for (b, a) in b.iter().zip(a.chunks_exact(width)) {
            column.iter_mut().zip(a).for_each(|(w, a)| *w += f64::from(scale * b) * f64::from(*a));
        }
        column
    };
    (*rank, Matrix::from_columns(width, b.chunks_exact(*rank).map(column)))
}
