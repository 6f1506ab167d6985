//! T1: the executor computed the noises' effects, so it knows the noises. A row carries the noise whose
//! removal leaves the smallest rest; the norm before the site gives the amount.

use crate::{
    algebra::{dot, to_f64},
    executor::FloatRows,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CarriedNoise {
    pub(crate) noise: usize,
}

/// Finds the noise whose removal leaves the smallest rest of each of `rows`.
pub(crate) fn recognise(rows: &FloatRows, noises: &FloatRows) -> Vec<CarriedNoise> {
    let noises: Vec<Vec<f64>> = noises.iter().map(to_f64).collect();
    let squares: Vec<f64> = noises.iter().map(|noise| dot(noise, noise)).collect();
    let carried = |row: &[f32]| {
        let row = to_f64(row);
        // Noise is added with a positive factor.
        let taken = |noise: usize| dot(&row, &noises[noise]).max(0.0).powi(2) / squares[noise];
        let noise = (0..noises.len()).max_by(|&a, &b| taken(a).total_cmp(&taken(b))).unwrap();
        CarriedNoise { noise }
    };
    rows.iter().map(carried).collect()
}

/// Amount of noise in all rows of a site. After a norm with `gains`, `|x / gains|² = d` gives a quadratic
/// equation in the amount per row; all rows share one of its two solutions.
pub(crate) fn amount(rows: &FloatRows, noises: &FloatRows, carried: &[CarriedNoise], gains: &[f32]) -> f64 {
    let flat = |row: &[f32]| -> Vec<f64> {
        row.iter().zip(gains).map(|(x, gain)| f64::from(*x) / f64::from(*gain)).collect()
    };
    let equation = |(row, carried): (&[f32], &CarriedNoise)| {
        let (row, noise) = (flat(row), flat(noises.row(carried.noise)));
        let width = row.len() as f64;
        [dot(&noise, &noise) / width, dot(&noise, &row) / width, dot(&row, &row) / width - 1.0]
    };
    let equations: Vec<[f64; 3]> = rows.iter().zip(carried).map(equation).collect();
    let solutions = equations.iter().flat_map(|&[a, b, c]| {
        let root = (b * b - a * c).max(0.0).sqrt();
        [(b - root) / a, (b + root) / a]
    });
    let miss = |amount: f64| {
        let mut misses: Vec<f64> =
            equations.iter().map(|[a, b, c]| (a * amount * amount - 2.0 * b * amount + c).abs()).collect();
        misses.sort_by(f64::total_cmp);
        misses[misses.len() / 2]
    };
    solutions.min_by(|&a, &b| miss(a).total_cmp(&miss(b))).unwrap()
}

pub(crate) fn denoised(
    rows: &FloatRows,
    noises: &FloatRows,
    carried: &[CarriedNoise],
    amount: f64,
) -> FloatRows {
    let bare = |(row, carried): (&[f32], &CarriedNoise)| {
        let noise = noises.row(carried.noise).iter();
        let difference = |(x, n): (&f32, &f32)| (f64::from(*x) - amount * f64::from(*n)) as f32;
        row.iter().zip(noise).map(difference).collect::<Vec<f32>>()
    };
    FloatRows { width: rows.width, values: rows.iter().zip(carried).flat_map(bare).collect() }
}

/// Each row without its component along its noise.
pub(crate) fn projected(rows: &FloatRows, noises: &FloatRows, carried: &[CarriedNoise]) -> FloatRows {
    let bare = |(row, carried): (&[f32], &CarriedNoise)| {
        let (row, noise) = (to_f64(row), to_f64(noises.row(carried.noise)));
        let amount = dot(&row, &noise) / dot(&noise, &noise);
        row.iter().zip(&noise).map(|(x, n)| (x - amount * n) as f32).collect::<Vec<f32>>()
    };
    FloatRows { width: rows.width, values: rows.iter().zip(carried).flat_map(bare).collect() }
}
