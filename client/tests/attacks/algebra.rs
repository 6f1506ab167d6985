//! Small dense linear algebra in 64 bits, for the attacks: least squares, subspaces, ranks.

/// A matrix, column after column.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    rows: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// From its columns, each of `rows` elements.
    pub(crate) fn from_columns(rows: usize, columns: impl IntoIterator<Item = Vec<f64>>) -> Self {
        let values: Vec<f64> = columns.into_iter().flatten().collect();
        assert!(values.len().is_multiple_of(rows), "columns of one length");
        Self { rows, values }
    }

    /// From its rows, each of `columns` elements.
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

    /// Rows for columns.
    pub(crate) fn transposed(&self) -> Self {
        Self::from_rows(self.rows, self.columns().map(<[f64]>::to_vec))
    }

    /// The first `rows` rows.
    pub(crate) fn upper(&self, rows: usize) -> Self {
        Self::from_columns(rows, self.columns().map(|column| column[..rows].to_vec()))
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Four sums at once: these tests are not optimized, and this is their innermost loop.
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

/// `y += factor * x`.
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

/// `|found - truth| / |truth|`, of all elements together (Frobenius).
pub(crate) fn relative_error<'a>(pairs: impl Iterator<Item = (&'a [f64], &'a [f64])>) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (found, truth) in pairs {
        let difference: Vec<f64> = found.iter().zip(truth).map(|(a, b)| a - b).collect();
        error += dot(&difference, &difference);
        size += dot(truth, truth);
    }
    (error / size).sqrt()
}

/// The matrix X that makes |A X - B| least: Householder's reflections make A triangular, column by column.
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

/// An orthonormal basis of a subspace.
#[derive(Debug, Clone, Default)]
pub(crate) struct Basis(Vec<Vec<f64>>);

impl Basis {
    /// Of the span of `vectors`.
    pub(crate) fn of<'a>(vectors: impl IntoIterator<Item = &'a [f64]>) -> Self {
        let mut basis = Self::default();
        vectors.into_iter().for_each(|vector| basis.push(vector));
        basis
    }

    fn push(&mut self, vector: &[f64]) {
        // Twice is enough.
        let rest = self.complement(&self.complement(vector));
        let length = norm(&rest);
        assert!(length > 1e-9 * norm(vector), "the vectors are independent");
        self.0.push(rest.iter().map(|x| x / length).collect());
    }

    /// What of `vector` the subspace does not reach.
    pub(crate) fn complement(&self, vector: &[f64]) -> Vec<f64> {
        let mut rest = vector.to_vec();
        for direction in &self.0 {
            let factor = -dot(direction, &rest);
            add(&mut rest, factor, direction);
        }
        rest
    }

    /// What of `vector` lies in the subspace.
    pub(crate) fn projection(&self, vector: &[f64]) -> Vec<f64> {
        let mut inside = vec![0.0; vector.len()];
        for direction in &self.0 {
            add(&mut inside, dot(direction, vector), direction);
        }
        inside
    }
}

/// The step down to noise: what is left falls by more where the last of the subspace is taken out, and by less ever after.
const FALL: f64 = 2.0;

/// The subspace in which `vectors` lie but for noise, and its dimensions, fewer than `most`. The largest vector is
/// taken out of all, again and again; behind the last [`FALL`] there is noise only.
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
    // V Vᵀ turns the basis to where most of the vectors lies.
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
