//! The change of a layer as a product of two factors.

use super::svd::OuterProducts;

/// The matrix `scale * B A`, of any rank.
#[derive(Debug, Clone)]
pub(super) struct LowRankProduct {
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// Matrix of shape `[rank, in]`.
    pub(super) a: Vec<f32>,
    /// Matrix of shape `[out, rank]`.
    pub(super) b: Vec<f32>,
    /// Norm of what the product lacks of the layer's change, as a share of the change's norm.
    pub(super) error: f64,
}

impl LowRankProduct {
    /// Returns the product of exact factors.
    pub(super) fn exact(rank: usize, scale: f32, a: Vec<f32>, b: Vec<f32>) -> Self {
        Self { rank, scale, a, b, error: 0.0 }
    }

    /// Returns any matrix, `[out, in]`, as its product with a unit matrix on the shorter side.
    pub(super) fn of_matrix(matrix: Vec<f32>, scale: f32, [outputs, inputs]: [usize; 2]) -> Self {
        if inputs <= outputs {
            Self::exact(inputs, scale, unit_matrix(inputs), matrix)
        } else {
            Self::exact(outputs, scale, matrix, unit_matrix(outputs))
        }
    }

    /// Returns the sum with `other`, whose scale becomes part of its factors.
    pub(super) fn plus(self, other: &Self, [outputs, inputs]: [usize; 2]) -> Self {
        let rank = self.rank + other.rank;
        let mut a = Vec::with_capacity(rank * inputs);
        for part in [&self, other] {
            a.extend(part.a.iter().map(|value| value * part.scale));
        }
        let mut b = Vec::with_capacity(outputs * rank);
        for row in 0..outputs {
            for part in [&self, other] {
                b.extend(&part.b[row * part.rank..][..part.rank]);
            }
        }
        Self { rank, scale: 1.0, a, b, error: self.error.max(other.error) }
    }

    /// Returns the same matrix with the rank of its shorter side.
    pub(super) fn multiplied_out(&self, shape @ [_, inputs]: [usize; 2]) -> Self {
        let row = |b: &[f32]| {
            let mut sums = vec![0.0f64; inputs];
            for (&b, a) in b.iter().zip(self.a.chunks_exact(inputs)) {
                sums.iter_mut().zip(a).for_each(|(sum, &a)| *sum += f64::from(b) * f64::from(a));
            }
            sums.into_iter().map(rounded)
        };
        let matrix = self.b.chunks_exact(self.rank).flat_map(row).collect();
        Self { error: self.error, ..Self::of_matrix(matrix, self.scale, shape) }
    }

    /// Returns the nearest matrix of at most `rank` ranks.
    pub(super) fn truncated(&self, rank: usize) -> Self {
        let values = OuterProducts::of(self.rank, &self.a, &self.b).decompose();
        let (products, error) = values.truncated(rank);
        Self { error: self.error.hypot(error), ..Self::of_products(&products, self.scale) }
    }

    pub(super) fn of_products(products: &OuterProducts, scale: f32) -> Self {
        let outputs = products.columns.first().map_or(0, Vec::len);
        let a = products.rows.iter().flatten().copied().map(rounded).collect();
        let row = |row: usize| products.columns.iter().map(move |column| rounded(column[row]));
        let b = (0..outputs).flat_map(row).collect();
        Self::exact(products.columns.len(), scale, a, b)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "factors have 32 bits")]
pub(super) fn rounded(value: f64) -> f32 {
    value as f32
}

pub(super) fn unit_matrix(size: usize) -> Vec<f32> {
    (0..size * size).map(|at| if at % (size + 1) == 0 { 1.0 } else { 0.0 }).collect()
}
