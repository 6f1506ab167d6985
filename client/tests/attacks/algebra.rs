//! Small dense linear algebra in 64 bits for the attacks: least squares, subspaces, ranks.

/// Dense matrix in column-major order.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    rows: usize,
    values: Vec<f64>,
}

impl Matrix {
    pub(crate) fn from_columns(rows: usize, columns: impl IntoIterator<Item = Vec<f64>>) -> Self {
        let values: Vec<f64> = columns.into_iter().flatten().collect();
        assert!(values.len().is_multiple_of(rows), "columns of one length");
        Self { rows, values }
    }

    pub(crate) fn from_rows(columns: usize, rows: impl IntoIterator<Item = Vec<f64>>) -> Self {
        let by_row: Vec<f64> = rows.into_iter().flatten().collect();
        let rows = by_row.len() / columns;
        let mut values = vec![0.0; by_row.len()];
        for (row, elements) in by_row.chunks_exact(columns).enumerate() {
            for (column, &element) in elements.iter().enumerate() {
                values[column * rows + row] = element;
            }
        }
        Self { rows, values }
    }

    pub(crate) fn columns(&self) -> std::slice::ChunksExact<'_, f64> {
        self.values.chunks_exact(self.rows)
    }

    pub(crate) fn column(&self, index: usize) -> &[f64] {
        &self.values[index * self.rows..][..self.rows]
    }

    pub(crate) fn transposed(&self) -> Self {
        Self::from_rows(self.rows, self.columns().map(<[f64]>::to_vec))
    }

    pub(crate) fn upper(&self, rows: usize) -> Self {
        Self::from_columns(rows, self.columns().map(|column| column[..rows].to_vec()))
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Four sums at once, since tests are not optimized and this is their innermost loop.
    let (quads, rest) = a.as_chunks::<4>();
    let (others, last) = b.as_chunks::<4>();
    let mut sums = [0.0; 4];
    for (a, b) in quads.iter().zip(others) {
        sums[0] += a[0] * b[0];
        sums[1] += a[1] * b[1];
        sums[2] += a[2] * b[2];
        sums[3] += a[3] * b[3];
    }
    let mut sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (a, b) in rest.iter().zip(last) {
        sum += a * b;
    }
    sum
}

/// Computes `y += factor * x`.
fn add(y: &mut [f64], factor: f64, x: &[f64]) {
    let (quads, rest) = y.as_chunks_mut::<4>();
    let (others, last) = x.as_chunks::<4>();
    for (y, x) in quads.iter_mut().zip(others) {
        y[0] += factor * x[0];
        y[1] += factor * x[1];
        y[2] += factor * x[2];
        y[3] += factor * x[3];
    }
    for (y, x) in rest.iter_mut().zip(last) {
        *y += factor * x;
    }
}

pub(crate) fn norm(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

pub(crate) fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

/// Relative Frobenius error `|found - truth| / |truth|`.
pub(crate) fn relative_error<'a>(pairs: impl Iterator<Item = (&'a [f64], &'a [f64])>) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (found, truth) in pairs {
        let difference: Vec<f64> = found.iter().zip(truth).map(|(a, b)| a - b).collect();
        error += dot(&difference, &difference);
        size += dot(truth, truth);
    }
    (error / size).sqrt()
}

/// X with minimal |A X - B|, by Householder reflections of A, column by column.
pub(crate) fn least_squares(mut a: Matrix, mut b: Matrix) -> Matrix {
    let (rows, unknowns) = (a.rows, a.values.len() / a.rows);
    assert!(rows >= unknowns && b.rows == rows, "at least as many equations as unknowns");
    let mut diagonal = Vec::with_capacity(unknowns);
    for k in 0..unknowns {
        let (done, to_do) = a.values.split_at_mut((k + 1) * rows);
        let mirror = &mut done[k * rows + k..];
        let length = norm(mirror).copysign(-mirror[0]);
        diagonal.push(length);
        mirror[0] -= length;
        let square = dot(mirror, mirror);
        for column in to_do.chunks_exact_mut(rows).chain(b.values.chunks_exact_mut(rows)) {
            let factor = -2.0 * dot(mirror, &column[k..]) / square;
            add(&mut column[k..], factor, mirror);
        }
    }
    for x in b.values.chunks_exact_mut(rows) {
        for k in (0..unknowns).rev() {
            x[k] /= diagonal[k];
            let factor = -x[k];
            add(&mut x[..k], factor, &a.values[k * rows..][..k]);
        }
    }
    b.upper(unknowns)
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Basis(Vec<Vec<f64>>);

impl Basis {
    pub(crate) fn of<'a>(vectors: impl IntoIterator<Item = &'a [f64]>) -> Self {
        let mut basis = Self::default();
        vectors.into_iter().for_each(|vector| basis.push(vector));
        basis
    }

    fn push(&mut self, vector: &[f64]) {
        // Two orthogonalizations suffice numerically.
        let rest = self.complement(&self.complement(vector));
        let length = norm(&rest);
        assert!(length > 1e-9 * norm(vector), "the vectors are independent");
        self.0.push(rest.iter().map(|x| x / length).collect());
    }

    /// Component of `vector` orthogonal to the subspace.
    pub(crate) fn complement(&self, vector: &[f64]) -> Vec<f64> {
        let mut rest = vector.to_vec();
        for direction in &self.0 {
            let factor = -dot(direction, &rest);
            add(&mut rest, factor, direction);
        }
        rest
    }

    /// Component of `vector` in the subspace.
    pub(crate) fn projection(&self, vector: &[f64]) -> Vec<f64> {
        let mut inside = vec![0.0; vector.len()];
        for direction in &self.0 {
            add(&mut inside, dot(direction, vector), direction);
        }
        inside
    }
}

/// Minimum drop of the remaining norm at the subspace's last direction; later drops are smaller.
const FALL: f64 = 2.0;

/// Subspace of `vectors` without noise, and its dimension, below `most`. The largest vector is projected out
/// repeatedly; after the last drop by [`FALL`] only noise remains.
pub(crate) fn subspace(vectors: &Matrix, most: usize) -> (usize, Basis) {
    let mut left: Vec<Vec<f64>> = vectors.columns().map(<[f64]>::to_vec).collect();
    let (mut basis, mut sizes) = (Basis::default(), Vec::new());
    for _ in 0..most {
        let largest = left.iter().max_by(|a, b| dot(a, a).total_cmp(&dot(b, b))).unwrap().clone();
        sizes.push(norm(&largest));
        let direction = Basis::of([&largest[..]]);
        left.iter_mut().for_each(|vector| *vector = direction.complement(vector));
        basis.0.extend(direction.0);
    }
    let rank = (1..most).rfind(|&rank| sizes[rank - 1] > FALL * sizes[rank]).unwrap_or(0);
    basis.0.truncate(rank);
    // Power iterations with V Vᵀ rotate the basis to the dominant directions.
    for _ in 0..4 {
        let turned = |direction: &Vec<f64>| {
            let mut sum = vec![0.0; vectors.rows];
            vectors.columns().for_each(|vector| add(&mut sum, dot(vector, direction), vector));
            sum
        };
        let turned: Vec<Vec<f64>> = basis.0.iter().map(turned).collect();
        basis = Basis::of(turned.iter().map(Vec::as_slice));
    }
    (rank, basis)
}
