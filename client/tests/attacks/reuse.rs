//! T2: rows that share a noise reveal it, even to an observer who never saw the noise.
//!
//! Differences of such rows are free of the noise. After a norm with gains g, x lies on a sphere: with y =
//! z/g and m = n/g, `|y - m|² = d`, so `2 y·m - c = |y|²` for every row, linear in m and in one constant c.

use crate::{
    algebra::{Matrix, dot, least_squares},
    executor::FloatRows,
};

/// Solves for the noise that all `rows` of a site after a norm with `gains` share.
pub(crate) fn shared_noise(rows: &FloatRows, gains: &[f32]) -> Vec<f64> {
    let flat = |row: &[f32]| -> Vec<f64> {
        row.iter().zip(gains).map(|(x, gain)| f64::from(*x) / f64::from(*gain)).collect()
    };
    let squares: Vec<f64> = rows.iter().map(flat).map(|row| dot(&row, &row)).collect();
    let equations = rows.iter().map(|row| {
        let mut equation = flat(row);
        equation.iter_mut().for_each(|y| *y *= 2.0);
        equation.push(-1.0);
        equation
    });
    let left = Matrix::from_rows(rows.width + 1, equations);
    let right = Matrix::from_columns(rows.count(), [squares]);
    let solved = least_squares(left, right);
    solved.column(0).iter().zip(gains).map(|(m, gain)| m * f64::from(*gain)).collect()
}
