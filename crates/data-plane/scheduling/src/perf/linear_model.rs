//! Planes through timings: `seconds = c0 · t0 + c1 · t1 + ...`, with no negative coefficient. A plane is for
//! several kinds of work at once, as a [`LinearFit`](super::linear_fit::LinearFit) is for one.

use super::linear_fit::{CostCurve, MAX_SECONDS, MAX_WORK, TimingSample, within};

/// Smallest pivot relative to the largest; below it the terms differ too little to be separated.
const LEAST_PIVOT: f64 = 1e-9;

/// Ridge penalty that pulls undetermined coefficients to zero, in squared relative errors of a timing.
const RIDGE: f64 = 1e-7;

/// Highest octave of a term; larger terms share it.
const MAX_OCTAVE: u8 = 63;

/// Plane from `N` terms to seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearModel<const N: usize> {
    /// Seconds per unit of each term; finite and not negative.
    pub seconds_each: [f64; N],
}

impl<const N: usize> CostCurve for LinearModel<N> {
    type Work = [f64; N];
    type Bucket = [u8; N];

    fn bucket(work: [f64; N]) -> [u8; N] {
        work.map(|term| (within(term, 0.0, MAX_WORK) + 1.0).log2().min(f64::from(MAX_OCTAVE)) as u8)
    }

    fn pace(sample: TimingSample<[f64; N]>) -> f64 {
        sample.seconds
    }

    fn weighted(samples: impl Iterator<Item = (TimingSample<[f64; N]>, f64)> + Clone) -> Option<Self> {
        let rows: Vec<Vec<f64>> = samples
            .map(|(sample, weight)| {
                let root = weight.sqrt();
                sample.work.iter().chain([&sample.seconds]).map(|term| term * root).collect()
            })
            .collect();
        let found = nonnegative(&rows, RIDGE)?;
        let mut seconds_each = [0.0; N];
        seconds_each.iter_mut().zip(found).for_each(|(cell, found)| *cell = found);
        Some(Self { seconds_each })
    }

    fn at(self, work: [f64; N]) -> f64 {
        let terms = work.into_iter().zip(self.seconds_each);
        terms.map(|(term, each)| within(term, 0.0, MAX_WORK) * each).sum::<f64>().min(MAX_SECONDS)
    }
}

/// Returns the non-negative coefficients that predict the last number of each row with the least squares
/// error. `None` if there are no rows or the rows do not separate the terms. A coefficient that would be
/// negative is noise and becomes 0. With `ridge` above 0 undetermined coefficients become 0 instead.
#[must_use]
pub fn nonnegative(rows: &[Vec<f64>], ridge: f64) -> Option<Vec<f64>> {
    let terms = rows.first()?.len().checked_sub(1)?;
    let mut active: Vec<usize> = (0..terms).collect();
    let mut all = vec![0.0; terms];
    if ridge > 0.0 {
        active.retain(|&term| rows.iter().any(|row| row[term] != 0.0));
    }
    while !active.is_empty() {
        let found = least_squares(rows, &active, ridge)?;
        let least = (0..active.len()).min_by(|&a, &b| found[a].total_cmp(&found[b]))?;
        if found[least] >= 0.0 {
            active.iter().zip(found).for_each(|(&term, found)| all[term] = found);
            break;
        }
        active.remove(least);
    }
    all.iter().all(|found| found.is_finite()).then_some(all)
}

fn least_squares(rows: &[Vec<f64>], active: &[usize], ridge: f64) -> Option<Vec<f64>> {
    let n = active.len();
    // Scaling each term by its largest value makes pivots comparable.
    let largest = |&term: &usize| rows.iter().map(|row| row[term].abs()).fold(0.0, f64::max);
    let scales: Vec<f64> = active.iter().map(largest).collect();
    if scales.contains(&0.0) {
        return None;
    }
    let mut normal = vec![vec![0.0; n + 1]; n];
    for row in rows {
        let scaled: Vec<f64> = active.iter().zip(&scales).map(|(&term, scale)| row[term] / scale).collect();
        let right = row.last()?;
        for (sums, left) in normal.iter_mut().zip(&scaled) {
            sums.iter_mut().zip(scaled.iter().chain([right])).for_each(|(sum, right)| *sum += left * right);
        }
    }
    normal.iter_mut().enumerate().for_each(|(index, sums)| sums[index] += ridge);
    let solved = solve(normal)?;
    Some(solved.iter().zip(&scales).map(|(found, scale)| found / scale).collect())
}

/// Solves by Gauss-Jordan elimination with the largest pivot of each column.
fn solve(mut rows: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let n = rows.len();
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()))?;
        rows.swap(column, pivot);
        let pivot = rows[column].clone();
        if pivot[column].abs() < LEAST_PIVOT {
            return None;
        }
        for (_, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != column) {
            let factor = row[column] / pivot[column];
            row.iter_mut().zip(&pivot).for_each(|(cell, pivot)| *cell -= factor * pivot);
        }
    }
    Some((0..n).map(|index| rows[index][n] / rows[index][index]).collect())
}
