//! The gradient at the inputs of linear layers: against the plain product with the transposed values, against
//! the forward product, and bitwise equal in other batches and on other threads.

use half::bf16;
use kernels::{
    ActivationForms, Activations, Isa, LinearPart, PackedMatrix, SumFrom, TensorType, ThreadPool,
    linear_transposed, linear_transposed_bf16, linear_transposed_rounded, linear_unrounded, reference,
};
use proptest::{collection, prelude::*, sample};

use crate::{
    linear::{SharedInputLayers, UNTOUCHED, one_of_each, width_for},
    linear_unrounded::packed_values,
    support::{TYPES, activations, bits, floats, is_float, norm, pool, random},
};

/// Error of 32-bit sums of a few thousand products, relative to the norms of gradient and weights.
const TOLERANCE: f64 = 1e-6;

/// Error of products of 14-bit and 13-bit numbers, each relative to the largest of its tile.
const ROUNDED_TOLERANCE: f64 = 4e-4;

/// Error of products of two numbers that are rounded to 8 bits.
const BF16_TOLERANCE: f64 = 8e-3;

/// Error of sums over a vocabulary, relative to the whole gradient. A single chain of additions is 4e-6 off.
const HEAD_TOLERANCE: f64 = 1.5e-6;

type TransposedProduct =
    fn(&mut ThreadPool, Isa, &[f32], usize, usize, &[LinearPart<'_>], SumFrom, &mut [f32]);

/// All products, and their maximum errors.
const ALL: [(TransposedProduct, f64); 3] = [
    (linear_transposed, TOLERANCE),
    (linear_transposed_rounded, ROUNDED_TOLERANCE),
    (transposed_bf16, BF16_TOLERANCE),
];

/// Calls [`linear_transposed_bf16`] with rows of gradients.
#[allow(clippy::too_many_arguments, reason = "the arguments of the other products")]
pub(crate) fn transposed_bf16(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[f32],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    let mut gradients = Activations::default();
    gradients.reshape(rows, stride);
    gradients.values_mut().copy_from_slice(&g[..rows * stride]);
    linear_transposed_bf16(pool, isa, &mut gradients, parts, from, out);
}

fn run(layers: &SharedInputLayers, pool: &mut ThreadPool, isa: Isa, g: &[f32]) -> Vec<f32> {
    run_by(linear_transposed, layers, pool, isa, g)
}

fn run_by(
    product: TransposedProduct,
    layers: &SharedInputLayers,
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[f32],
) -> Vec<f32> {
    let rows = g.len() / layers.stride;
    let mut out = vec![UNTOUCHED; rows * layers.width];
    product(pool, isa, g, rows, layers.stride, &layers.parts(), SumFrom::Zero, &mut out);
    out
}

fn judge(layers: &SharedInputLayers, g: &[f32], out: &[f32], tolerance: f64, what: &str) {
    let (width, stride) = (layers.width, layers.stride);
    let rows = g.len() / stride;
    let (mut wanted, mut lengths) = (vec![0.0; rows * width], vec![0.0; rows * width]);
    for part in &layers.parts {
        let (outputs, w) = (part.matrix.rows(), packed_values(&part.matrix));
        let of_part: Vec<f32> =
            g.chunks_exact(stride).flat_map(|row| row[part.column..][..outputs].to_vec()).collect();
        let plain = reference::linear_transposed(&of_part, &w, rows, outputs, width);
        let columns: Vec<f64> =
            (0..width).map(|k| norm(&w.iter().skip(k).step_by(width).copied().collect::<Vec<_>>())).collect();
        for (i, plain) in plain.into_iter().enumerate() {
            wanted[i] += f64::from(plain);
            lengths[i] += norm(&of_part[i / width * outputs..][..outputs]) * columns[i % width];
        }
    }
    for (i, (&got, wanted)) in out.iter().zip(wanted).enumerate() {
        // Not a quotient: a column of few weights can be all zeros, and then only zero is right.
        let (off, length) = ((f64::from(got) - wanted).abs(), lengths[i]);
        assert!(
            off <= tolerance * length,
            "{what}, row {}, input {}: {got}, not {wanted}: {off:e} off, of {length:e}",
            i / width,
            i % width
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_gradient_is_the_product_with_the_transposed_values(
        shapes in collection::vec((sample::select(TYPES.to_vec()), 1usize..=90), 1..=3),
        step in 1usize..=5,
        rows in 1usize..=40,
        seed: u64,
    ) {
        let layers = SharedInputLayers::random(&shapes, width_for(&shapes, step), seed);
        let g = floats(&mut random(!seed), rows * layers.stride);
        for isa in Isa::available() {
            for (product, tolerance) in ALL {
                let out = run_by(product, &layers, &mut pool(1), isa, &g);
                judge(&layers, &g, &out, tolerance, &format!("{isa:?}, within {tolerance}"));
            }
        }
    }
}

#[test]
fn each_type_gives_gradients_of_any_width_its_blocks_allow_for_hundreds_of_rows() {
    for kind in TYPES {
        let widths = if is_float(kind) { vec![1, 15, 33, 129, 300] } else { vec![1, 5] };
        for step in widths {
            let width = if is_float(kind) { step } else { step * kind.block_elements() };
            let layers = SharedInputLayers::random(&[(kind, 37), (kind, 130)], width, step as u64);
            let g = floats(&mut random(7), 300 * layers.stride);
            for isa in Isa::available() {
                // Without instructions for it a fused multiply-add takes a hundred times as long.
                let most = if isa == Isa::Portable { 40 } else { 300 };
                for rows in [1, 2, most] {
                    let g = &g[..rows * layers.stride];
                    for (product, tolerance) in ALL {
                        let out = run_by(product, &layers, &mut pool(2), isa, g);
                        judge(&layers, g, &out, tolerance, &format!("{isa:?}, width {width}"));
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_of_a_batch_has_the_bits_it_has_alone_on_any_number_of_threads() {
    let layers = one_of_each();
    let g = floats(&mut random(12), 300 * layers.stride);
    let pools = &mut [pool(1), pool(2), pool(3)];
    for (isa, (product, _)) in Isa::available().into_iter().flat_map(|isa| ALL.map(|all| (isa, all))) {
        let alone: Vec<Vec<u32>> = g
            .chunks(layers.stride)
            .map(|row| bits(&run_by(product, &layers, &mut pools[0], isa, row)))
            .collect();
        for rows in [2, 3, 4, 7, 8, 9, 15, 64, 257, 300] {
            for pool in &mut *pools {
                let batch = bits(&run_by(product, &layers, pool, isa, &g[..rows * layers.stride]));
                for (row, (got, alone)) in batch.chunks(layers.width).zip(&alone).enumerate() {
                    assert_eq!(got, alone, "{isa:?}, row {row} of {rows} on {} threads", pool.threads());
                }
            }
        }
    }
}

#[test]
fn rounding_has_the_same_bits_on_every_set() {
    let layers = one_of_each();
    let g = floats(&mut random(8), 40 * layers.stride);
    let sets = Isa::available();
    for product in [linear_transposed_rounded, transposed_bf16] {
        let run = |&isa: &Isa| bits(&run_by(product, &layers, &mut pool(2), isa, &g));
        let results: Vec<_> = sets.iter().map(run).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{sets:?}");
    }
}

/// The gradients by the words of `linear/bf16.rs`: groups of 32 outputs of each part, then the next part.
fn bf16_gradients(parts: &[(TensorType, LinearPart<'_>)], stride: usize, g: &[f32]) -> Vec<f32> {
    let width = parts[0].1.matrix.columns();
    let (mut rows, mut inputs) = (vec![Vec::new(); g.len() / stride], vec![Vec::new(); width]);
    for (kind, part) in parts {
        let outputs = part.matrix.rows();
        let end = inputs[0].len() + outputs.next_multiple_of(32);
        let mut weights = vec![0.0; width];
        for o in 0..outputs {
            part.matrix.read_row(o, &mut weights);
            let half_up = |w: f32| f32::from_bits((w.to_bits() + 0x8000) & 0xffff_0000);
            let value = |w| if *kind == TensorType::Bf16 { w } else { half_up(w) };
            inputs.iter_mut().zip(&weights).for_each(|(input, &w)| input.push(value(w)));
        }
        for (row, g) in rows.iter_mut().zip(g.chunks_exact(stride)) {
            row.extend(g[part.column..][..outputs].iter().map(|&g| bf16::from_f32(g).to_f32()));
        }
        inputs.iter_mut().chain(&mut rows).for_each(|column| column.resize(end, 0.0));
    }
    rows.iter().flat_map(|row| inputs.iter().map(|input| reference::linear_bf16(row, input))).collect()
}

#[test]
fn gradients_in_bf16_have_the_bits_of_the_plain_sums() {
    for kind in TYPES {
        for (step, outputs) in [(1, [64, 32]), (2, [37, 16]), (3, [160, 49])] {
            let shapes = outputs.map(|outputs| (kind, outputs));
            let layers = SharedInputLayers::random(&shapes, width_for(&shapes, step), step as u64);
            let g = floats(&mut random(41), 70 * layers.stride);
            let parts: Vec<_> = layers.parts.iter().map(|part| (part.kind, part.as_linear_part())).collect();
            let wanted = bits(&bf16_gradients(&parts, layers.stride, &g));
            for (isa, rows) in Isa::available().into_iter().flat_map(|isa| [1, 16, 33, 70].map(|r| (isa, r)))
            {
                let got = run_by(transposed_bf16, &layers, &mut pool(2), isa, &g[..rows * layers.stride]);
                let is_same = bits(&got) == wanted[..rows * layers.width];
                assert!(is_same, "{kind:?} on {isa:?}, {rows} rows, {outputs:?} outputs");
            }
        }
    }
}

/// Sixty-six tiles of rows, and more groups of outputs than one span has, without gaps between the parts.
#[test]
fn gradients_of_many_rows_and_outputs_have_the_bits_of_the_plain_sums() {
    let layers = SharedInputLayers::random(&[(TensorType::Q4_1, 608), (TensorType::Bf16, 637)], 96, 5);
    let (stride, rows) = (608 + 637, 1045);
    let mut column = 0;
    let mut parts = Vec::new();
    for part in &layers.parts {
        parts.push((part.kind, LinearPart { column, ..part.as_linear_part() }));
        column += part.matrix.rows();
    }
    let g = floats(&mut random(42), rows * stride);
    let wanted = bits(&bf16_gradients(&parts, stride, &g));
    let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
    for isa in Isa::available() {
        let mut out = vec![UNTOUCHED; rows * layers.width];
        transposed_bf16(&mut pool(2), isa, &g, rows, stride, &parts, SumFrom::Zero, &mut out);
        assert!(bits(&out) == wanted, "{isa:?}");
    }
}

#[test]
fn whole_numbers_up_to_the_largest_are_not_rounded() {
    // A tile's largest gradient is 8191, and an input's largest value 4095: both scales are one, and the sum
    // is the largest possible.
    let (outputs, width, rows) = (64, 33, 3);
    let weights: Vec<u8> = [4095.0f32; 64 * 33].iter().flat_map(|w| w.to_le_bytes()).collect();
    let matrix = PackedMatrix::pack(TensorType::F32, &weights, outputs, width).expect("whole rows");
    let parts = [LinearPart { matrix: &matrix, bias: None, column: 0 }];
    for isa in Isa::available() {
        let (g, mut out) = (vec![-8191.0; rows * outputs], vec![UNTOUCHED; rows * width]);
        linear_transposed_rounded(&mut pool(2), isa, &g, rows, outputs, &parts, SumFrom::Zero, &mut out);
        assert_eq!(out, vec![-8191.0 * 4095.0 * 64.0; rows * width], "{isa:?}");
    }
}

#[test]
fn a_gradient_of_nothing_or_as_good_as_nothing_gives_nothing() {
    let layers = one_of_each();
    for isa in Isa::available() {
        for tiny in [0.0, 1e-42, f32::MIN_POSITIVE] {
            let g = vec![tiny; 2 * layers.stride];
            let out = run_by(linear_transposed_rounded, &layers, &mut pool(1), isa, &g);
            assert!(out.iter().all(|x| x.abs() < 1e-25), "{isa:?}, {tiny}: {out:?}");
        }
    }
}

#[test]
fn a_single_one_reads_a_row_of_the_weights_bit_for_bit() {
    let layers = one_of_each();
    for isa in Isa::available() {
        for part in &layers.parts {
            for o in [0, 15, part.matrix.rows() - 1] {
                let mut g = vec![0.0; layers.stride];
                g[part.column + o] = 1.0;
                let mut wanted = vec![0.0; layers.width];
                part.matrix.read_row(o, &mut wanted);
                assert_eq!(run(&layers, &mut pool(1), isa, &g), wanted, "{isa:?}, {:?}, {o}", part.kind);
            }
        }
    }
}

/// Gradient of one token's loss at a head: the probabilities, less one at the target token.
fn softmax_gradient(outputs: usize) -> Vec<f32> {
    let mut g: Vec<f32> =
        floats(&mut random(31), outputs).into_iter().map(|logit| (8.0 * logit).exp()).collect();
    let total: f32 = g.iter().sum();
    g.iter_mut().for_each(|probability| *probability /= total);
    g[123] -= 1.0;
    g
}

#[test]
fn the_gradient_of_a_head_over_a_large_vocabulary_keeps_its_digits() {
    let (outputs, width) = (49_152, 64);
    let layers = SharedInputLayers::random(&[(TensorType::F32, outputs)], width, 30);
    let [part] = &layers.parts[..] else { unreachable!("one layer was made") };
    let softmax = softmax_gradient(outputs);
    let mut g = vec![0.0; layers.stride];
    g[part.column..part.column + outputs].copy_from_slice(&softmax);
    let mut wanted = vec![0.0; width];
    for (row, &g) in part.weights.chunks_exact(width).zip(&softmax) {
        wanted.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(g) * f64::from(w));
    }
    let length = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    for isa in Isa::available() {
        let out = run(&layers, &mut pool(2), isa, &g);
        let apart: Vec<f64> = out.iter().zip(&wanted).map(|(&got, wanted)| f64::from(got) - wanted).collect();
        let off = length(&apart) / length(&wanted);
        assert!(off <= HEAD_TOLERANCE, "{isa:?}: {off:e} off");
    }
}

#[test]
fn the_gradient_is_that_of_the_unrounded_product() {
    // <g, W x> = <g W, x> for all g and x, since both directions use the same values.
    let layers = one_of_each();
    let (x, mut g) = (floats(&mut random(22), layers.width), vec![0.0; layers.stride]);
    for part in &layers.parts {
        g[part.column..part.column + part.matrix.rows()]
            .copy_from_slice(&floats(&mut random(23), part.matrix.rows()));
    }
    for isa in Isa::available() {
        let pool = &mut pool(2);
        let prepared = activations(pool, isa, &x, 1, ActivationForms::default());
        let mut y = vec![0.0; layers.stride];
        let parts: Vec<_> =
            layers.parts().into_iter().map(|part| LinearPart { bias: None, ..part }).collect();
        linear_unrounded(pool, isa, &prepared, &parts, &mut y, layers.stride);
        let back = run(&layers, pool, isa, &g);
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        let (forward, backward) = (dot(&g, &y), dot(&back, &x));
        let off = (forward - backward).abs() / (norm(&g) * norm(&y) + norm(&back) * norm(&x));
        assert!(off <= TOLERANCE, "{isa:?}: {forward} forwards, {backward} backwards");
    }
}

#[test]
fn sets_that_fuse_multiply_and_add_give_the_same_bits() {
    let layers = one_of_each();
    let g = floats(&mut random(18), 11 * layers.stride);
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect();
    for (product, _) in ALL {
        let results: Vec<_> =
            fused.iter().map(|&isa| bits(&run_by(product, &layers, &mut pool(1), isa, &g))).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{fused:?}");
    }
}

#[test]
fn what_lies_between_the_parts_and_in_spoilt_rows_enters_no_other_gradient() {
    let layers = one_of_each();
    let stride = layers.stride;
    let mut is_gradient = vec![false; stride];
    for part in &layers.parts {
        is_gradient[part.column..part.column + part.matrix.rows()].fill(true);
    }
    let clean = floats(&mut random(14), 5 * stride);
    let mut spoilt = clean.clone();
    spoilt[2 * stride..3 * stride].fill(f32::NAN);
    for (i, g) in spoilt.iter_mut().enumerate().filter(|(i, _)| !is_gradient[i % stride]) {
        *g = if i % 2 == 0 { f32::NAN } else { f32::INFINITY };
    }
    for (isa, (product, _)) in Isa::available().into_iter().flat_map(|isa| ALL.map(|all| (isa, all))) {
        let pool = &mut pool(2);
        let [clean, spoilt] = [&clean, &spoilt].map(|g| run_by(product, &layers, pool, isa, g));
        for (row, (clean, spoilt)) in clean.chunks(layers.width).zip(spoilt.chunks(layers.width)).enumerate()
        {
            if row == 2 {
                assert!(spoilt.iter().all(|x| x.is_nan()), "{isa:?}: a lost row is seen to be lost");
            } else {
                assert_eq!(bits(clean), bits(spoilt), "{isa:?}, row {row}");
            }
        }
    }
}

#[test]
fn without_rows_nothing_is_done_and_without_parts_the_gradient_is_zero() {
    let layers = one_of_each();
    let pool = &mut pool(2);
    linear_transposed(pool, Isa::best(), &[], 0, layers.stride, &layers.parts(), SumFrom::Zero, &mut []);
    let mut out = [UNTOUCHED; 8];
    linear_transposed(pool, Isa::best(), &[], 2, 0, &[], SumFrom::Zero, &mut out);
    assert_eq!(out, [0.0; 8]);
}

#[test]
#[should_panic(expected = "out is 2 rows of 64")]
fn a_gradient_of_another_shape_is_refused() {
    let layers = SharedInputLayers::random(&[(TensorType::Q4_1, 16)], 64, 1);
    let g = vec![0.0; 2 * layers.stride];
    let (parts, mut out) = (layers.parts(), [0.0; 64]);
    linear_transposed(&mut pool(1), Isa::best(), &g, 2, layers.stride, &parts, SumFrom::Zero, &mut out);
}
