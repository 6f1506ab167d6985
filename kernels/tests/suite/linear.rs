//! Packed linear layers against the plain product, and rows of a batch against the same rows alone.

use half::bf16;
use kernels::{
    ActivationForms, Activations, Isa, LinearPart, PackedMatrix, Rounding, TensorType, ThreadPool, linear,
    reference,
};
use proptest::{collection, prelude::*, sample};

use crate::{
    rounding::with_outliers,
    support::{TYPES, activations, bits, dequantize, floats, is_float, norm, pool, random, rounded, stored},
};

/// Initial value of `out`, where no part writes.
pub(crate) const UNTOUCHED: f32 = 12345.0;

/// Roundings of activations, and the multiple of a row's mean from which a group is wide, as `activations.rs`
/// defines it.
pub(crate) const ROUNDINGS: [(Rounding, f32); 4] = [
    (Rounding::INT8, f32::INFINITY),
    (Rounding::wide_above(1.0), 1.0),
    (Rounding::wide_above(4.0), 4.0),
    (Rounding::INT15, 0.0),
];

/// Columns of `out` left free before each part.
pub(crate) const GAP: usize = 3;

pub(crate) struct PackedPart {
    pub(crate) kind: TensorType,
    pub(crate) matrix: PackedMatrix,
    pub(crate) weights: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) column: usize,
}

/// Linear layers with a common input, side by side in a row of the output.
pub(crate) struct SharedInputLayers {
    pub(crate) parts: Vec<PackedPart>,
    pub(crate) width: usize,
    pub(crate) stride: usize,
    rounding: usize,
}

impl SharedInputLayers {
    /// Random layers of `(type, output features)`; every second one has a bias.
    pub(crate) fn random(shapes: &[(TensorType, usize)], width: usize, seed: u64) -> Self {
        let random = &mut random(seed);
        let mut stride = 0;
        let parts = shapes.iter().enumerate().map(|(i, &(kind, rows))| {
            let data = stored(kind, rows, width, random);
            let column = stride + GAP;
            stride = column + rows;
            PackedPart {
                kind,
                matrix: PackedMatrix::pack(kind, &data, rows, width).expect("whole rows"),
                weights: dequantize(kind, &data, rows * width),
                bias: (i % 2 == 0).then(|| floats(random, rows)),
                column,
            }
        });
        Self { parts: parts.collect(), width, stride: stride + GAP, rounding: 1 }
    }

    pub(crate) fn forms(&self) -> ActivationForms {
        self.parts.iter().fold(ActivationForms::default(), |forms, part| forms.and(part.matrix.forms()))
    }

    pub(crate) fn rounding(self, rounding: usize) -> Self {
        Self { rounding, ..self }
    }

    pub(crate) fn run(&self, pool: &mut ThreadPool, isa: Isa, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.width;
        let x = rounded(pool, isa, x, rows, self.forms(), ROUNDINGS[self.rounding].0);
        let mut out = vec![UNTOUCHED; rows * self.stride];
        linear(pool, isa, &x, &self.parts(), &mut out, self.stride);
        out
    }

    pub(crate) fn parts(&self) -> Vec<LinearPart<'_>> {
        self.parts.iter().map(PackedPart::as_linear_part).collect()
    }

    /// Checks each element of `out`, and that the columns between the parts are unchanged.
    fn judge(&self, x: &[f32], out: &[f32], what: &str) {
        let mut written = vec![false; self.stride];
        for part in &self.parts {
            part.judge(x, out, (self.stride, ROUNDINGS[self.rounding].1), what);
            written[part.column..part.column + part.matrix.rows()].fill(true);
        }
        for (i, value) in out.iter().enumerate().filter(|(i, _)| !written[i % self.stride]) {
            assert_eq!(*value, UNTOUCHED, "{what}: element {i} lies in no part");
        }
    }
}

impl PackedPart {
    pub(crate) fn as_linear_part(&self) -> LinearPart<'_> {
        LinearPart { matrix: &self.matrix, bias: self.bias.as_deref(), column: self.column }
    }

    /// Compares twice. Against the stored weights and the given activations, the error is that of rounding
    /// the activations; against the packed weights and the rounded activations, only that of summing.
    fn judge(&self, x: &[f32], out: &[f32], (stride, wide_above): (usize, f32), what: &str) {
        let (outputs, width) = (self.matrix.rows(), self.matrix.columns());
        let rows = x.len() / width;
        let plain = reference::linear(x, &self.weights, rows, outputs, width);
        let mut packed = vec![0.0; width];
        for o in 0..outputs {
            self.matrix.read_row(o, &mut packed);
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[o]);
            for (r, x) in x.chunks_exact(width).enumerate() {
                let got = f64::from(out[r * stride + self.column + o]) - f64::from(bias);
                let length = norm(x) * norm(&packed) + f64::from(bias.abs());
                let entering: f64 = entering(self.kind, x, wide_above)
                    .iter()
                    .zip(&packed)
                    .map(|(x, &w)| x * f64::from(w))
                    .sum();
                let what = || format!("{what}: {:?}, row {r} of {rows}, output {o} of {outputs}", self.kind);
                // Products, not quotients: a row of few weights can be all zeros, and then only zero is
                // right.
                let off = (got - entering).abs();
                assert!(
                    off <= 1e-5 * length,
                    "{}: {got}, not {entering} as summed from what enters: {off:e} off, of {length:e}",
                    what()
                );
                let plain = f64::from(plain[r * outputs + o]);
                let off = (got - plain).abs();
                assert!(
                    off <= tolerance(self.kind, wide_above) * length,
                    "{}: {got}, not {plain}: {off:e} off, of {length:e}",
                    what()
                );
            }
        }
    }
}

/// Largest error from rounding the activations, relative to the norms of the row and the weights.
fn tolerance(kind: TensorType, wide_above: f32) -> f64 {
    match kind {
        TensorType::F32 | TensorType::F16 => 1e-5,
        // bf16 keeps 8 bits: half a unit of the last is at most 2^-8 of an activation.
        TensorType::Bf16 => 2.0f64.powi(-8) + 1e-5,
        // 15 bits have a hundredth of the error of 8 bits: scales of weights have 11.
        _ if wide_above == 0.0 => 5e-4,
        // A byte is off by at most 1/254 of its group's largest magnitude.
        _ => 1e-2,
    }
}

/// A row of activations after the rounding for weights of `kind`, as `activations.rs` defines it.
fn entering(kind: TensorType, x: &[f32], wide_above: f32) -> Vec<f64> {
    match kind {
        TensorType::F32 | TensorType::F16 => x.iter().map(|&x| f64::from(x)).collect(),
        TensorType::Bf16 => x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect(),
        _ => {
            let largest = |group: &[f32]| group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let squares: f32 = x.chunks(32).map(|group| largest(group).powi(2)).sum();
            let bound = squares * (wide_above / (x.len() / 32) as f32);
            let entering = |group: &[f32]| {
                let largest = largest(group);
                let limit = if largest.powi(2) > bound { 127.0 * 128.0 + 63.0 } else { 127.0 };
                let inverse = if largest > 0.0 { limit / largest } else { 0.0 };
                let number = |&x: &f32| f64::from((x * inverse).round_ties_even());
                group.iter().map(|x| number(x) * f64::from(largest / limit)).collect::<Vec<_>>()
            };
            x.chunks(32).flat_map(entering).collect()
        }
    }
}

/// Width of whole blocks of the coarsest type in `kinds`.
pub(crate) fn width_for(kinds: &[(TensorType, usize)], step: usize) -> usize {
    kinds.iter().map(|(kind, _)| if is_float(*kind) { 1 } else { kind.block_elements() }).max().unwrap_or(1)
        * step
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_packed_product_is_the_plain_product_within_the_rounding_of_its_activations(
        shapes in collection::vec((sample::select(TYPES.to_vec()), 1usize..=70), 1..=3),
        step in 1usize..=3,
        rows in 1usize..=70,
        rounding in 0..ROUNDINGS.len(),
        seed: u64,
    ) {
        let width = width_for(&shapes, step);
        let layers = SharedInputLayers::random(&shapes, width, seed).rounding(rounding);
        let x = floats(&mut random(!seed), rows * width);
        for isa in Isa::available() {
            let out = layers.run(&mut pool(1), isa, &x);
            layers.judge(&x, &out, &format!("{isa:?}"));
        }
    }
}

#[test]
fn each_type_multiplies_rows_of_any_width_its_blocks_allow() {
    for kind in TYPES {
        for step in [1, 2, 3, 5, 7] {
            let shapes = [(kind, 37)];
            let width = width_for(&shapes, step);
            let layers = SharedInputLayers::random(&shapes, width, step as u64);
            let x = floats(&mut random(7), 15 * width);
            for isa in Isa::available() {
                layers.judge(&x, &layers.run(&mut pool(1), isa, &x), &format!("{isa:?}, width {width}"));
            }
        }
    }
}

/// One layer of each type in one call, of the width of two super-blocks.
pub(crate) fn one_of_each() -> SharedInputLayers {
    let shapes: Vec<_> = TYPES.iter().enumerate().map(|(i, &kind)| (kind, 16 + 5 * i)).collect();
    SharedInputLayers::random(&shapes, 512, 11)
}

#[test]
fn a_row_of_a_batch_has_the_bits_it_has_alone_on_any_number_of_threads() {
    for rounding in [0, 1, 3] {
        check_batches(&one_of_each().rounding(rounding));
    }
}

fn check_batches(layers: &SharedInputLayers) {
    let x = with_outliers(floats(&mut random(12), 131 * layers.width));
    let pools = &mut [pool(1), pool(2), pool(3)];
    for isa in Isa::available() {
        let alone: Vec<Vec<u32>> =
            x.chunks(layers.width).map(|row| bits(&layers.run(&mut pools[0], isa, row))).collect();
        for rows in [2, 3, 4, 7, 8, 9, 15, 63, 64, 65, 131] {
            for pool in &mut *pools {
                let batch = bits(&layers.run(pool, isa, &x[..rows * layers.width]));
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
        let together = layers.run(pool, isa, &x);
        for part in &layers.parts {
            let prepared = activations(pool, isa, &x, 9, part.matrix.forms());
            let outputs = part.matrix.rows();
            let mut alone = vec![UNTOUCHED; 9 * outputs];
            let only = LinearPart { column: 0, ..part.as_linear_part() };
            linear(pool, isa, &prepared, &[only], &mut alone, outputs);
            for (row, alone) in alone.chunks(outputs).enumerate() {
                let beside = &together[row * layers.stride + part.column..][..outputs];
                assert_eq!(bits(beside), bits(alone), "{isa:?}, {:?}, row {row}", part.kind);
            }
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_spoils_no_other_row() {
    let layers = one_of_each();
    let width = layers.width;
    let pool = &mut pool(2);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 4.0] {
        let clean = floats(&mut random(14), 5 * width);
        let mut spoilt = clean.clone();
        spoilt[2 * width..3 * width].fill(poison);
        spoilt[3 * width - 1] = 0.0;
        for isa in Isa::available() {
            let (clean, spoilt) = (layers.run(pool, isa, &clean), layers.run(pool, isa, &spoilt));
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
fn one_element_that_is_not_a_number_spoils_every_output_of_its_row_visibly() {
    let layers = one_of_each();
    let mut x = floats(&mut random(17), layers.width);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 20, layers.width - 1] {
            let before = std::mem::replace(&mut x[at], poison);
            for isa in Isa::available() {
                let out = layers.run(&mut pool(1), isa, &x);
                for part in &layers.parts {
                    let got = &out[part.column..part.column + part.matrix.rows()];
                    let visible = got.iter().all(|value| !value.is_finite());
                    assert!(visible, "{isa:?}, {:?}: {poison} at {at} gives {got:?}", part.kind);
                }
            }
            x[at] = before;
        }
    }
}

#[test]
fn a_row_of_zeroes_gives_the_bias() {
    let layers = one_of_each();
    for isa in Isa::available() {
        let out = layers.run(&mut pool(1), isa, &vec![0.0; layers.width]);
        for part in &layers.parts {
            let got = &out[part.column..part.column + part.matrix.rows()];
            let wanted = part.bias.clone().unwrap_or_else(|| vec![0.0; got.len()]);
            assert_eq!(got, wanted, "{isa:?}, {:?}", part.kind);
        }
    }
}

#[test]
fn rows_too_small_for_their_scale_come_out_small_and_not_as_nan() {
    let layers = one_of_each();
    let x: Vec<f32> = floats(&mut random(15), layers.width).iter().map(|x| x * 1e-41).collect();
    for isa in Isa::available() {
        for part in &layers.parts {
            let out = &layers.run(&mut pool(1), isa, &x)[part.column..part.column + part.matrix.rows()];
            for (o, &got) in out.iter().enumerate() {
                let off = got - part.bias.as_ref().map_or(0.0, |bias| bias[o]);
                assert!(off.abs() < 1e-30, "{isa:?}, {:?}: {got}", part.kind);
            }
        }
    }
}

#[test]
fn the_largest_bytes_sum_exactly() {
    // Every product of a group has the largest magnitude of bytes; the true sum is a small multiple of a
    // power of two.
    for (byte, weight) in [(127u8, 127.0f64), (128, -128.0)] {
        let mut data = vec![byte; 4 * TensorType::Q8_0.block_bytes()];
        for block in data.chunks_exact_mut(34) {
            block[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
        }
        let matrix = PackedMatrix::pack(TensorType::Q8_0, &data, 1, 128).unwrap();
        for x in [127.0f32, -127.0] {
            for isa in Isa::available() {
                let pool = &mut pool(1);
                let prepared = activations(pool, isa, &[x; 128], 1, matrix.forms());
                let mut out = [0.0];
                linear(
                    pool,
                    isa,
                    &prepared,
                    &[LinearPart { matrix: &matrix, bias: None, column: 0 }],
                    &mut out,
                    1,
                );
                assert_eq!(f64::from(out[0]), 128.0 * weight * f64::from(x), "{isa:?}: {weight} times {x}");
            }
        }
    }
}

#[test]
fn only_floats_enter_without_rounding_the_activations() {
    for part in one_of_each().parts {
        assert_eq!(
            part.matrix.is_exact(),
            matches!(part.kind, TensorType::F32 | TensorType::F16),
            "{:?}",
            part.kind
        );
    }
}

#[test]
fn no_rows_and_no_parts_are_nothing_to_do() {
    let layers = one_of_each();
    let pool = &mut pool(2);
    let mut x = Activations::default();
    x.reshape(0, layers.width);
    x.prepare(pool, Isa::best(), layers.forms(), Rounding::INT8);
    linear(pool, Isa::best(), &x, &layers.parts(), &mut [], layers.stride);
    x.reshape(1, layers.width);
    linear(pool, Isa::best(), &x, &[], &mut [], 0);
}

fn multiply(kind: TensorType, x: &Activations) {
    let layers = SharedInputLayers::random(&[(kind, 16)], 256, 16);
    let parts = [layers.parts[0].as_linear_part()];
    linear(&mut pool(1), Isa::best(), x, &parts, &mut vec![0.0; x.rows() * layers.stride], layers.stride);
}

#[test]
#[should_panic(expected = "prepared")]
fn bytes_that_were_never_prepared_are_not_read() {
    let mut x = Activations::default();
    x.reshape(64, 256);
    multiply(TensorType::Q8_0, &x);
}

#[test]
#[should_panic(expected = "prepared")]
fn rows_added_after_bf16_was_prepared_are_not_read() {
    let mut x = activations(
        &mut pool(1),
        Isa::best(),
        &[1.0; 256],
        1,
        SharedInputLayers::random(&[(TensorType::Bf16, 1)], 256, 1).forms(),
    );
    x.reshape(64, 256);
    multiply(TensorType::Bf16, &x);
}

#[test]
#[should_panic(expected = "same inner width")]
fn activations_of_another_width_are_refused() {
    multiply(
        TensorType::F32,
        &activations(&mut pool(1), Isa::best(), &[1.0; 255], 1, ActivationForms::default()),
    );
}
