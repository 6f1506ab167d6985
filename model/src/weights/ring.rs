//! Sites in whole numbers: what is promised of them, and rows of words through them.

use std::{
    borrow::Cow,
    sync::{Mutex, PoisonError},
};

use kernels::{LinearPart, PackedMatrix, RingForm, SumFrom, linear_ring, linear_ring_transposed};

use crate::{
    cpu::Compute,
    sites::{RingSite, SiteOp},
};

/// What commitments are made of.
const CONTEXT: &str = "holobiont 2026 ring weights v1";

/// Bytes that are hashed at once: less, and the hash does not come to its speed.
const HASHED_BYTES: usize = 1 << 17;

/// Promises of many sites, each of which has these matrices one below the other, made by all threads: `None` for one that has no
/// ring path.
pub(crate) fn ring_sites(compute: &mut Compute, sites: &[Vec<&PackedMatrix>]) -> Vec<Option<RingSite>> {
    let made = Mutex::new(vec![None; sites.len()]);
    compute.pool.run(sites.len(), |number| {
        let ring = ring_site(&sites[number]);
        made.lock().unwrap_or_else(PoisonError::into_inner)[number] = ring;
    });
    made.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The promise of a site that has these matrices one below the other; `None` if it has no ring path.
pub(crate) fn ring_site(matrices: &[&PackedMatrix]) -> Option<RingSite> {
    let forms: Vec<RingForm> = matrices.iter().map(|matrix| matrix.ring_form()).collect::<Option<_>>()?;
    let exponent = RingForm::common(&forms)?;
    let columns = matrices.first()?.columns();
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    let size = |size: usize| (size as u64).to_le_bytes();
    hasher.update(&size(columns));
    hasher.update(&size(matrices.len()));
    for matrix in matrices {
        hasher.update(&size(matrix.rows()));
    }
    hasher.update(&exponent.to_le_bytes());
    let mut sums = Sums { row: 0, columns: vec![0; columns] };
    let mut bytes = Vec::with_capacity(HASHED_BYTES + 4 * columns);
    let mut weights = vec![0; columns];
    for matrix in matrices {
        for row in 0..matrix.rows() {
            matrix.read_ring_row(row, exponent, &mut weights);
            sums.add(&weights);
            bytes.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            if bytes.len() >= HASHED_BYTES {
                hasher.update(&bytes);
                bytes.clear();
            }
        }
    }
    hasher.update(&bytes);
    let l1 = [sums.row, sums.columns.into_iter().max().unwrap_or(0)];
    let ring = RingSite { weight_exponent: exponent, l1, commitment: *hasher.finalize().as_bytes() };
    ring.is_usable().then_some(ring)
}

/// Sums of magnitudes.
struct Sums {
    /// The largest of a row.
    row: u64,
    /// Of each column. Below 2^62: weights are below 2^30, and memory holds fewer than 2^32 rows.
    columns: Vec<u64>,
}

impl Sums {
    fn add(&mut self, weights: &[i32]) {
        let mut sum = 0;
        for (column, weight) in self.columns.iter_mut().zip(weights) {
            let magnitude = u64::from(weight.unsigned_abs());
            *column += magnitude;
            sum += magnitude;
        }
        self.row = self.row.max(sum);
    }
}

/// Takes `rows` rows of words of `stride` pairs of halves through `parts` of a site.
///
/// # Panics
/// If the shapes do not fit together, or there is a bias.
pub(crate) fn evaluate(
    Compute { pool, isa }: &mut Compute,
    (ring, op): (&RingSite, SiteOp),
    (x, inputs): (&[f32], usize),
    parts: &[LinearPart<'_>],
    from: SumFrom,
    (out, outputs): (&mut [f32], usize),
) {
    assert_ne!(op, SiteOp::Forward, "a bias is no whole number");
    let exponent = ring.weight_exponent;
    let mut product = |x: &[u64], sums: &mut [u64]| {
        let rows = x.len() / inputs.max(1);
        match op {
            SiteOp::Backward => {
                linear_ring_transposed(pool, *isa, x, rows, inputs, parts, exponent, from, sums);
            }
            _ => linear_ring(pool, *isa, x, rows, parts, exponent, sums, outputs),
        }
    };
    // Halves lie in memory as words do; where they do not begin as words do, they are copied.
    let x = bytemuck::try_cast_slice(x).map_or_else(|_| Cow::from(words(x)), Cow::from);
    match bytemuck::try_cast_slice_mut(out) {
        Ok(sums) => product(&x, sums),
        Err(_) => {
            // Outputs of other parts, and sums so far, stay what they are.
            let mut sums = words(out);
            product(&x, &mut sums);
            for (halves, word) in out.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
                *halves = [word as u32, (word >> 32) as u32].map(f32::from_bits);
            }
        }
    }
}

/// Words from their halves, the low one first, which are no floats and are not computed with as such.
fn words(halves: &[f32]) -> Vec<u64> {
    let word = |[low, high]: &[f32; 2]| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    halves.as_chunks().0.iter().map(word).collect()
}
