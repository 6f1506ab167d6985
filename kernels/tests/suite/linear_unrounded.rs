//! Linear layers with unrounded activations: against the plain product of the packed values, against `linear`
//! where that does not round either, in other batches, and for linearity.

use kernels::{
    ActivationForms, Activations, Isa, LinearPart, PackedMatrix, TensorType, ThreadPool, linear_unrounded,
    reference,
};
use proptest::{collection, prelude::*, sample};

use crate::{
    linear::{SharedInputLayers, UNTOUCHED, one_of_each, width_for},
    support::{TYPES, activations, bits, floats, is_float, norm, pool, random},
};

/// Error of 32-bit sums of a few thousand products, relative to the norms of row and weights.
const TOLERANCE: f64 = 1e-6;

fn run(layers: &SharedInputLayers, pool: &mut ThreadPool, isa: Isa, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / layers.width;
    let x = activations(pool, isa, x, rows, ActivationForms::default());
    let mut out = vec![UNTOUCHED; rows * layers.stride];
    linear_unrounded(pool, isa, &x, &layers.parts(), &mut out, layers.stride);
    out
}

pub(crate) fn packed_values(matrix: &PackedMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    for (row, values) in values.chunks_exact_mut(matrix.columns()).enumerate() {
        matrix.read_row(row, values);
    }
    values
}

fn judge(layers: &SharedInputLayers, x: &[f32], out: &[f32], what: &str) {
    let (width, stride) = (layers.width, layers.stride);
    let rows = x.len() / width;
    let mut written = vec![false; stride];
    for part in &layers.parts {
        let (outputs, w) = (part.matrix.rows(), packed_values(&part.matrix));
        let plain = reference::linear(x, &w, rows, outputs, width);
        written[part.column..part.column + outputs].fill(true);
        for (i, &wanted) in plain.iter().enumerate() {
            let (r, o) = (i / outputs, i % outputs);
            let bias = part.bias.as_ref().map_or(0.0, |bias| bias[o]);
            let length =
                norm(&x[r * width..][..width]) * norm(&w[o * width..][..width]) + f64::from(bias.abs());
            let got = out[r * stride + part.column + o];
            let off = (f64::from(got) - f64::from(wanted) - f64::from(bias)).abs();
            assert!(
                off <= TOLERANCE * length,
                "{what}, {:?}, row {r}, output {o}: {got}, {off:e} off, of {length:e}",
                part.kind
            );
        }
    }
    for (i, value) in out.iter().enumerate().filter(|(i, _)| !written[i % stride]) {
        assert_eq!(*value, UNTOUCHED, "{what}: element {i} lies in no part");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_product_is_that_of_the_packed_values_and_the_activations_as_they_are(
        shapes in collection::vec((sample::select(TYPES.to_vec()), 1usize..=70), 1..=3),
        step in 1usize..=5,
        rows in 1usize..=40,
        seed: u64,
    ) {
        let layers = SharedInputLayers::random(&shapes, width_for(&shapes, step), seed);
        let x = floats(&mut random(!seed), rows * layers.width);
        for isa in Isa::available() {
            judge(&layers, &x, &run(&layers, &mut pool(1), isa, &x), &format!("{isa:?}"));
        }
    }
}

#[test]
fn each_type_takes_rows_of_any_width_its_blocks_allow_and_hundreds_of_them() {
    for kind in TYPES {
        let widths = if is_float(kind) { vec![1, 31, 33, 129, 300] } else { vec![1, 5] };
        for step in widths {
            let width = if is_float(kind) { step } else { step * kind.block_elements() };
            let layers = SharedInputLayers::random(&[(kind, 37), (kind, 90)], width, step as u64);
            let x = floats(&mut random(7), 300 * width);
            for isa in Isa::available() {
                for rows in [1, 2, 300] {
                    let x = &x[..rows * width];
                    judge(
                        &layers,
                        x,
                        &run(&layers, &mut pool(2), isa, x),
                        &format!("{isa:?}, width {width}"),
                    );
                }
            }
        }
    }
}

#[test]
fn a_single_one_reads_the_weights_bit_for_bit() {
    // All other terms are zero, so the output is the weight as used, equal to `read_row`.
    let layers = one_of_each();
    for isa in Isa::available() {
        for k in [0, 1, 15, 16, 31, 32, 255, layers.width - 1] {
            // Alone, and with another row, which selects the other decode path.
            let mut x = vec![0.0; 2 * layers.width];
            (x[k], x[layers.width + k]) = (1.0, 1.0);
            let unbiased = |part: &crate::linear::PackedPart, x: &[f32]| {
                let rows = x.len() / layers.width;
                let mut out = vec![0.0; rows * part.matrix.rows()];
                let x = activations(&mut pool(1), isa, x, rows, ActivationForms::default());
                let only = LinearPart { bias: None, column: 0, ..part.as_linear_part() };
                linear_unrounded(&mut pool(1), isa, &x, &[only], &mut out, part.matrix.rows());
                out
            };
            for part in &layers.parts {
                let wanted: Vec<f32> =
                    packed_values(&part.matrix).chunks(layers.width).map(|row| row[k]).collect();
                assert_eq!(unbiased(part, &x[..layers.width]), wanted, "{isa:?}, {:?}, {k}", part.kind);
                assert_eq!(
                    unbiased(part, &x),
                    [wanted.clone(), wanted].concat(),
                    "{isa:?}, {:?}, {k}",
                    part.kind
                );
            }
        }
    }
}

#[test]
fn weights_of_32_and_16_bit_floats_give_the_bits_that_linear_gives() {
    for width in [1, 33, 160, 700] {
        let layers = SharedInputLayers::random(&[(TensorType::F32, 53), (TensorType::F16, 100)], width, 31);
        let x = floats(&mut random(32), 70 * width);
        for isa in Isa::available() {
            for rows in [1, 2, 7, 8, 70] {
                let x = &x[..rows * width];
                let (plain, unrounded) =
                    (layers.run(&mut pool(2), isa, x), run(&layers, &mut pool(2), isa, x));
                assert_eq!(bits(&plain), bits(&unrounded), "{isa:?}, {rows} rows of {width}");
            }
        }
    }
}

#[test]
fn a_row_of_a_batch_has_the_bits_it_has_alone_on_any_number_of_threads() {
    let layers = one_of_each();
    let x = floats(&mut random(12), 300 * layers.width);
    let pools = &mut [pool(1), pool(2), pool(3)];
    for isa in Isa::available() {
        let alone: Vec<Vec<u32>> =
            x.chunks(layers.width).map(|row| bits(&run(&layers, &mut pools[0], isa, row))).collect();
        for rows in [2, 3, 4, 7, 8, 9, 15, 64, 257, 300] {
            for pool in &mut *pools {
                let batch = bits(&run(&layers, pool, isa, &x[..rows * layers.width]));
                for (row, (got, alone)) in batch.chunks(layers.stride).zip(&alone).enumerate() {
                    assert_eq!(got, alone, "{isa:?}, row {row} of {rows} on {} threads", pool.threads());
                }
            }
        }
    }
}

#[test]
fn a_layer_has_the_bits_alone_that_it_has_beside_others() {
    let layers = one_of_each();
    let x = floats(&mut random(13), 9 * layers.width);
    let pool = &mut pool(2);
    for isa in Isa::available() {
        let together = run(&layers, pool, isa, &x);
        let prepared = activations(pool, isa, &x, 9, ActivationForms::default());
        for part in &layers.parts {
            let outputs = part.matrix.rows();
            let mut alone = vec![UNTOUCHED; 9 * outputs];
            let only = LinearPart { column: 0, ..part.as_linear_part() };
            linear_unrounded(pool, isa, &prepared, &[only], &mut alone, outputs);
            for (row, alone) in alone.chunks(outputs).enumerate() {
                let beside = &together[row * layers.stride + part.column..][..outputs];
                assert_eq!(bits(beside), bits(alone), "{isa:?}, {:?}, row {row}", part.kind);
            }
        }
    }
}

#[test]
fn sets_that_fuse_multiply_and_add_give_the_same_bits() {
    let layers = one_of_each();
    let x = floats(&mut random(18), 11 * layers.width);
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect();
    let results: Vec<_> = fused.iter().map(|&isa| bits(&run(&layers, &mut pool(1), isa, &x))).collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{fused:?}");
}

#[test]
fn noise_that_is_added_can_be_taken_off_again() {
    // Masks need f(x + n) - f0(n) = f(x), where f0 has no bias. The noise is a hundred times the signal.
    let layers = one_of_each();
    let width = layers.width;
    let (x, noise) = (floats(&mut random(19), 6 * width), floats(&mut random(20), 6 * width));
    let noise: Vec<f32> = noise.iter().map(|n| 100.0 * n).collect();
    let masked: Vec<f32> = x.iter().zip(&noise).map(|(x, n)| x + n).collect();
    for isa in Isa::available() {
        let pool = &mut pool(2);
        let (plain, masked) = (run(&layers, pool, isa, &x), run(&layers, pool, isa, &masked));
        let effect = run(&layers, pool, isa, &noise);
        for part in &layers.parts {
            let w = packed_values(&part.matrix);
            for (r, o) in (0..6).flat_map(|r| (0..part.matrix.rows()).map(move |o| (r, o))) {
                let at = r * layers.stride + part.column + o;
                let bias = part.bias.as_ref().map_or(0.0, |bias| bias[o]);
                let off = f64::from(masked[at] - (effect[at] - bias) - plain[at]).abs();
                let length = norm(&noise[r * width..][..width]) * norm(&w[o * width..][..width]);
                assert!(off <= TOLERANCE * (length + 1.0), "{isa:?}, {:?}, row {r}, {o}: {off:e}", part.kind);
            }
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_spoils_no_other_row() {
    let layers = one_of_each();
    let width = layers.width;
    let pool = &mut pool(2);
    for poison in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE / 4.0] {
        let clean = floats(&mut random(14), 5 * width);
        let mut spoilt = clean.clone();
        spoilt[2 * width..3 * width].fill(poison);
        for isa in Isa::available() {
            let (clean, spoilt) = (run(&layers, pool, isa, &clean), run(&layers, pool, isa, &spoilt));
            for row in [0, 1, 3, 4] {
                let range = row * layers.stride..(row + 1) * layers.stride;
                assert_eq!(
                    bits(&clean[range.clone()]),
                    bits(&spoilt[range]),
                    "{isa:?}, row {row} beside {poison}"
                );
            }
        }
    }
}

#[test]
fn no_rows_and_no_parts_are_nothing_to_do() {
    let layers = one_of_each();
    let pool = &mut pool(2);
    let mut x = Activations::default();
    x.reshape(0, layers.width);
    linear_unrounded(pool, Isa::best(), &x, &layers.parts(), &mut [], layers.stride);
    x.reshape(1, layers.width);
    linear_unrounded(pool, Isa::best(), &x, &[], &mut [], 0);
}

#[test]
#[should_panic(expected = "same inner width")]
fn activations_of_another_width_are_refused() {
    let layers = SharedInputLayers::random(&[(TensorType::Q4_1, 16)], 64, 1);
    let mut x = Activations::default();
    x.reshape(1, 96);
    linear_unrounded(&mut pool(1), Isa::best(), &x, &layers.parts(), &mut [0.0; 32], layers.stride);
}
