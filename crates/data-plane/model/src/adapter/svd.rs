//! Truncated singular value decomposition of a matrix of few ranks, in 64 bits.
//!
//! The matrix is a sum of outer products, `sum_i c_i r_iᵀ`. Both sides are orthogonalized first, so the
//! decomposition itself (one-sided Jacobi) works on a matrix with as many rows as there are products.

/// Vectors of equal length.
pub(super) type Vectors = Vec<Vec<f64>>;

/// Sweeps over all pairs of vectors; Jacobi's method needs about ten.
const MAX_SWEEPS: usize = 40;

/// Cosine below which two vectors count as orthogonal.
const ORTHOGONAL: f64 = 1e-14;

/// Norm of a vector's remainder, as a share of its norm, below which the vector depends on earlier ones.
const DEPENDENT: f64 = 1e-13;

/// A matrix as a sum of outer products, one for each column and row vector.
#[derive(Debug, Clone)]
pub(super) struct OuterProducts {
    /// Column vectors, each of the matrix's number of rows.
    pub(super) columns: Vectors,
    /// Row vectors, each of the matrix's number of columns.
    pub(super) rows: Vectors,
}

/// Singular values in descending order, with unit vectors.
#[derive(Debug, Clone)]
pub(super) struct SingularValues {
    pub(super) values: Vec<f64>,
    pub(super) columns: Vectors,
    pub(super) rows: Vectors,
}

impl OuterProducts {
    /// Returns the products of `b`, `[out, rank]`, and `a`, `[rank, in]`.
    pub(super) fn of(rank: usize, a: &[f32], b: &[f32]) -> Self {
        let column = |at| b.iter().skip(at).step_by(rank).map(|&value| value.into()).collect();
        let row = |row: &[f32]| row.iter().map(|&value| value.into()).collect();
        let rows = a.chunks_exact((a.len() / rank.max(1)).max(1)).map(row).collect();
        Self { columns: (0..rank).map(column).collect(), rows }
    }

    /// Returns about how many multiplications [`decompose`](Self::decompose) needs for these sizes.
    pub(super) fn operations(rank: usize, [outputs, inputs]: [usize; 2]) -> u64 {
        let [rank, both] = [rank as u64, (outputs + inputs) as u64];
        let square = rank.saturating_mul(rank);
        square.saturating_mul(2 * both).saturating_add(square.saturating_mul(40 * rank))
    }

    pub(super) fn decompose(mut self) -> SingularValues {
        let left = orthonormalize(&mut self.columns);
        let right = orthonormalize(&mut self.rows);
        // Row i of the core has the coefficients of all columns along unit column i, times those of the rows.
        let rank = self.columns.len();
        let core = |i: usize| combined(&right, (0..rank).map(|product| left[product][i]), rank);
        let mut core: Vectors = (0..rank).map(core).collect();
        let mut turns: Vectors = (0..rank).map(|i| unit(i, rank)).collect();
        orthogonalize(&mut core, &mut turns);
        let mut found: Vec<(f64, usize)> =
            core.iter().map(|row| norm(row)).enumerate().map(|(i, value)| (value, i)).collect();
        found.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let along = |vectors: &Vectors, weights: &[f64], by: f64| {
            let length = vectors.first().map_or(0, Vec::len);
            combined(vectors, weights.iter().map(|weight| weight / by), length)
        };
        let columns = found.iter().map(|&(_, i)| along(&self.columns, &turns[i], 1.0)).collect();
        let row = |&(value, i): &(f64, usize)| along(&self.rows, &core[i], value.max(f64::MIN_POSITIVE));
        let rows = found.iter().map(row).collect();
        SingularValues { values: found.into_iter().map(|(value, _)| value).collect(), columns, rows }
    }
}

impl SingularValues {
    /// Returns the products of the largest `rank` values, and the norm of the rest as a share of the whole.
    pub(super) fn truncated(self, rank: usize) -> (OuterProducts, f64) {
        let error = missing(&self.values, rank);
        let take = |vectors: Vectors| {
            let scaled = vectors.into_iter().zip(&self.values).take(rank);
            scaled.map(|(vector, value)| vector.iter().map(|x| x * value.sqrt()).collect()).collect()
        };
        let (columns, rows) = (take(self.columns), take(self.rows));
        (OuterProducts { columns, rows }, error)
    }
}

/// Returns the norm of all but the first `rank` of the descending `values`, as a share of the norm of all.
pub(super) fn missing(values: &[f64], rank: usize) -> f64 {
    let squares = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
    let all = squares(values);
    if all > 0.0 { (squares(&values[rank.min(values.len())..]) / all).sqrt() } else { 0.0 }
}

/// Makes `vectors` orthonormal, or zero where one depends on those before it. Returns the coefficients of
/// each original vector along the new ones.
fn orthonormalize(vectors: &mut Vectors) -> Vectors {
    let count = vectors.len();
    let mut coefficients = vec![vec![0.0; count]; count];
    for (at, along_units) in coefficients.iter_mut().enumerate() {
        let (done, rest) = vectors.split_at_mut(at);
        let Some(vector) = rest.first_mut() else { break };
        let before = norm(vector);
        // The second round removes what rounding left of the first.
        for _ in 0..2 {
            for (unit, coefficient) in done.iter().zip(along_units.iter_mut()) {
                let along = dot(unit, vector);
                *coefficient += along;
                vector.iter_mut().zip(unit).for_each(|(x, unit)| *x -= along * unit);
            }
        }
        let remainder = norm(vector);
        if remainder <= DEPENDENT * before {
            vector.fill(0.0);
        } else {
            along_units[at] = remainder;
            vector.iter_mut().for_each(|x| *x /= remainder);
        }
    }
    coefficients
}

/// Rotates pairs of `vectors` until all are orthogonal, and the vectors `with` them in the same way.
fn orthogonalize(vectors: &mut Vectors, with: &mut Vectors) {
    for _ in 0..MAX_SWEEPS {
        let mut is_done = true;
        for i in 0..vectors.len() {
            for j in i + 1..vectors.len() {
                let (one, other) = (dot(&vectors[i], &vectors[i]), dot(&vectors[j], &vectors[j]));
                let both = dot(&vectors[i], &vectors[j]);
                if both.abs() <= ORTHOGONAL * (one * other).sqrt() {
                    continue;
                }
                is_done = false;
                let zeta = (other - one) / (2.0 * both);
                let tangent = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                rotate(vectors, i, j, tangent);
                rotate(with, i, j, tangent);
            }
        }
        if is_done {
            break;
        }
    }
}

fn rotate(vectors: &mut Vectors, i: usize, j: usize, tangent: f64) {
    let cosine = 1.0 / tangent.hypot(1.0);
    let sine = cosine * tangent;
    let (before, after) = vectors.split_at_mut(j);
    for (x, y) in before[i].iter_mut().zip(&mut after[0]) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

/// Returns the sum of `vectors` times `weights`, of `length` elements.
fn combined(vectors: &Vectors, weights: impl Iterator<Item = f64>, length: usize) -> Vec<f64> {
    let mut sum = vec![0.0; length];
    for (vector, weight) in vectors.iter().zip(weights) {
        sum.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * x);
    }
    sum
}

fn unit(at: usize, length: usize) -> Vec<f64> {
    (0..length).map(|i| if i == at { 1.0 } else { 0.0 }).collect()
}

fn dot(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(x, y)| x * y).sum()
}

fn norm(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of small numbers without a pattern.
    fn vectors(count: usize, length: usize, salt: usize) -> Vectors {
        let number = |at: usize| ((at * 7919 + salt * 104_729) % 1009) as f64 / 504.5 - 1.0;
        (0..count).map(|i| (0..length).map(|j| number(i * length + j + i * i)).collect()).collect()
    }

    fn matrix(products: &OuterProducts) -> Vectors {
        let rows = products.columns[0].len();
        let row = |at: usize| {
            let weights = products.columns.iter().map(|column| column[at]);
            combined(&products.rows, weights, products.rows[0].len())
        };
        (0..rows).map(row).collect()
    }

    fn distance(one: &Vectors, other: &Vectors) -> f64 {
        let pairs = one.iter().flatten().zip(other.iter().flatten());
        pairs.map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn all_singular_values_together_are_the_matrix_and_their_vectors_are_orthonormal() {
        for (rank, rows, columns) in [(1, 3, 4), (5, 9, 7), (6, 4, 11), (8, 8, 8)] {
            let products = OuterProducts { columns: vectors(rank, rows, 1), rows: vectors(rank, columns, 2) };
            let expected = matrix(&products);
            let found = products.decompose();
            assert!(found.values.is_sorted_by(|one, other| one >= other));
            for (i, j) in (0..rank).flat_map(|i| (0..i).map(move |j| (i, j))) {
                assert!(dot(&found.columns[i], &found.columns[j]).abs() < 1e-12);
                assert!(found.values[i] < 1e-9 || dot(&found.rows[i], &found.rows[j]).abs() < 1e-9);
            }
            let (whole, error) = found.truncated(rank);
            assert!(error == 0.0 && distance(&matrix(&whole), &expected) < 1e-9);
        }
    }

    #[test]
    fn the_reported_error_is_that_of_the_truncated_matrix() {
        let products = OuterProducts { columns: vectors(7, 20, 3), rows: vectors(7, 15, 4) };
        let (expected, mut last) = (matrix(&products), 1.0);
        let nothing = vec![vec![0.0; 15]; 20];
        let size = distance(&expected, &nothing);
        for rank in 1..7 {
            let (cut, error) = products.clone().decompose().truncated(rank);
            assert_eq!((cut.columns.len(), cut.rows.len()), (rank, rank));
            assert!((distance(&matrix(&cut), &expected) / size - error).abs() < 1e-12 && error < last);
            last = error;
        }
    }

    #[test]
    fn dependent_and_empty_products_have_no_error() {
        let mut products = OuterProducts { columns: vectors(3, 6, 5), rows: vectors(3, 6, 6) };
        products.columns.extend(products.columns.clone());
        products.rows.extend(products.rows.clone());
        let expected = matrix(&products);
        let (cut, error) = products.decompose().truncated(3);
        assert!(error < 1e-7 && distance(&matrix(&cut), &expected) < 1e-9);
        let zeros = OuterProducts { columns: vec![vec![0.0; 4]; 2], rows: vec![vec![0.0; 5]; 2] };
        assert_eq!(zeros.decompose().truncated(1).1, 0.0);
    }
}
