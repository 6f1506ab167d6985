//! Modular path of sites: commitments to integer weights, and evaluation of integer rows.

use std::sync::{Mutex, PoisonError};

use kernels::{LinearPart, ModularForm, PackedMatrix, SumFrom, linear_ring, linear_ring_transposed};

use crate::{
    cpu::Compute,
    linear_sites::{ModularRange, ModularSite, Site, SiteCall, SiteOp},
};

/// Domain of the commitment hash.
const CONTEXT: &str = "holobiont 2026 ring weights v1";

/// Bytes per hash update; smaller updates do not reach the hash's full speed.
const HASHED_BYTES: usize = 1 << 17;

/// Computes the commitments of many sites with all threads; each site's matrices are stacked. The result is
/// `None` for a site without the modular path.
pub(crate) fn ring_sites(compute: &mut Compute, sites: &[Vec<&PackedMatrix>]) -> Vec<Option<ModularSite>> {
    let made = Mutex::new(vec![None; sites.len()]);
    compute.pool.run(sites.len(), |number| {
        let ring = ring_site(&sites[number]);
        made.lock().unwrap_or_else(PoisonError::into_inner)[number] = ring;
    });
    made.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Computes the commitment of a site whose matrices are stacked, or `None` if the site has no modular path.
pub(crate) fn ring_site(matrices: &[&PackedMatrix]) -> Option<ModularSite> {
    let forms: Vec<ModularForm> = matrices.iter().map(|matrix| matrix.ring_form()).collect::<Option<_>>()?;
    let exponent = ModularForm::common(&forms)?;
    let columns = matrices.first()?.columns();
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    let size = |size: usize| (size as u64).to_le_bytes();
    hasher.update(&size(columns));
    hasher.update(&size(matrices.len()));
    for matrix in matrices {
        hasher.update(&size(matrix.rows()));
    }
    hasher.update(&exponent.to_le_bytes());
    let mut sums = MagnitudeSums { row: 0, columns: vec![0; columns] };
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
    let ring = ModularSite { weight_exponent: exponent, l1, commitment: *hasher.finalize().as_bytes() };
    ring.is_usable().then_some(ring)
}

struct MagnitudeSums {
    /// Largest sum of one row.
    row: u64,
    /// Sum of each column, below 2^62: weights are below 2^30, and memory holds fewer than 2^32 rows.
    columns: Vec<u64>,
}

impl MagnitudeSums {
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

/// Evaluates integer rows with `parts` of a site.
///
/// # Panics
/// If the shapes do not fit together, the site has no modular path, or there is a bias.
pub(crate) fn evaluate(
    Compute { pool, isa }: &mut Compute,
    site: &Site,
    call: SiteCall,
    x: &[f32],
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    assert_ne!(call.op, SiteOp::Forward, "a bias is no whole number");
    let ring = site.ring.expect("whoever lets calls in knows which sites have a ring path");
    let ModularRange { modulus, .. } = site.modular_range(call.op).expect("it has room");
    let (inputs, outputs) = site.widths(call.part, call.op).expect("the site has the part");
    // The 32-bit words hold integers, and no float arithmetic touches them.
    let (x, out): (&[u8], &mut [u8]) = (bytemuck::cast_slice(x), bytemuck::cast_slice_mut(out));
    let (rows, exponent) = (x.len() / (inputs * modulus.bytes()).max(1), ring.weight_exponent);
    match call.op {
        SiteOp::Backward => {
            linear_ring_transposed(pool, *isa, modulus, x, rows, inputs, parts, exponent, from, out);
        }
        _ => linear_ring(pool, *isa, modulus, x, rows, parts, exponent, out, outputs),
    }
}
