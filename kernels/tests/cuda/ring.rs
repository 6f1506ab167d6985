//! Linear layers modulo 2^64: the words of the CPU for every type of weight, forward and backward.

use half::f16;
use kernels::{
    Isa, LinearPart, PackedForm, PackedMatrix, Pool, RingForm, SumFrom, TensorType,
    cuda::{Matrix, RingPart, RingPlanes, Stream, Weight, linear_ring, linear_ring_transposed},
    lora::NumberKind,
};

use crate::{
    support::{Random, matrix, stream},
    weight::{TYPES, stored},
};

/// What a word holds where no part writes.
const UNTOUCHED: u64 = 0x1234_5678_9abc_def0;

/// Words left free before each part, and behind the last.
const GAP: usize = 3;

/// Words that make the most of carries and signs.
const EXTREMES: [u64; 6] =
    [0, u64::MAX, 1 << 63, (1 << 63) - 1, 0x8080_8080_8080_8080, 0xffff_ffff_8000_0000];

/// A matrix here and there.
struct Part {
    packed: PackedMatrix,
    weight: Weight,
    unit: f32,
    column: usize,
}

/// Layers that share an input and an exponent.
struct Layers {
    parts: Vec<Part>,
    width: usize,
    stride: usize,
    exponent: i32,
}

impl Layers {
    fn new(stream: &Stream, stored: &[(TensorType, Vec<u8>, usize)], width: usize) -> Self {
        let mut stride = 0;
        let part = |(kind, bytes, rows): &(TensorType, Vec<u8>, usize)| {
            let column = stride + GAP;
            stride = column + rows;
            Part {
                packed: PackedMatrix::pack(*kind, bytes, *rows, width).unwrap(),
                weight: Weight::upload(stream, *kind, bytes, *rows, width).unwrap(),
                unit: PackedForm::of(*kind, bytes, *rows, width).unwrap().unit(),
                column,
            }
        };
        let parts: Vec<Part> = stored.iter().map(part).collect();
        let forms: Vec<RingForm> = parts.iter().map(|part| part.packed.ring_form().unwrap()).collect();
        Self { exponent: RingForm::common(&forms).unwrap(), parts, width, stride: stride + GAP }
    }

    fn random(stream: &Stream, shapes: &[(TensorType, usize)], width: usize, random: &mut Random) -> Self {
        let stored = |&(kind, rows): &(TensorType, usize)| (kind, stored(kind, rows, width, random), rows);
        Self::new(stream, &shapes.iter().map(stored).collect::<Vec<_>>(), width)
    }

    fn parts(&self) -> Vec<RingPart<'_>> {
        self.parts
            .iter()
            .map(|part| RingPart { weight: &part.weight, unit: part.unit, column: part.column })
            .collect()
    }

    fn packed(&self) -> Vec<LinearPart<'_>> {
        self.parts
            .iter()
            .map(|part| LinearPart { matrix: &part.packed, bias: None, column: part.column })
            .collect()
    }

    /// Compares both products of `rows` rows with the CPU's.
    fn check(&self, stream: &Stream, rows: usize, random: &mut Random) {
        let what = || {
            let kinds: Vec<_> = self.parts.iter().map(|part| part.weight.kind()).collect();
            format!("{kinds:?} of width {}, {rows} rows", self.width)
        };
        let (isa, pool) = (Isa::best(), &mut Pool::new(&[0]).unwrap());
        let (x, g) = (words(rows * self.width, random), words(rows * self.stride, random));
        let mut wanted = vec![UNTOUCHED; rows * self.stride];
        kernels::linear_ring(pool, isa, &x, rows, &self.packed(), self.exponent, &mut wanted, self.stride);
        assert!(self.forward(stream, &x) == wanted, "{}", what());
        let mut wanted = vec![0; rows * self.width];
        let (packed, from) = (self.packed(), SumFrom::Zero);
        let (stride, exponent) = (self.stride, self.exponent);
        kernels::linear_ring_transposed(pool, isa, &g, rows, stride, &packed, exponent, from, &mut wanted);
        assert!(self.backward(stream, &g) == wanted, "{}, backward", what());
    }

    fn forward(&self, stream: &Stream, x: &[u64]) -> Vec<u64> {
        let rows = x.len() / self.width;
        let (x, mut out) = (
            on_device(stream, x, self.width),
            on_device(stream, &vec![UNTOUCHED; rows * self.stride], self.stride),
        );
        let planes = &mut RingPlanes::new(stream).unwrap();
        linear_ring(stream, planes, &x, &self.parts(), self.exponent, &mut out).unwrap();
        from_device(stream, &out)
    }

    fn backward(&self, stream: &Stream, g: &[u64]) -> Vec<u64> {
        let rows = g.len() / self.stride;
        let (g, mut out) = (
            on_device(stream, g, self.stride),
            on_device(stream, &vec![UNTOUCHED; rows * self.width], self.width),
        );
        linear_ring_transposed(stream, &g, &self.parts(), self.exponent, &mut out).unwrap();
        from_device(stream, &out)
    }
}

/// Rows of `width` words on the device.
fn on_device(stream: &Stream, words: &[u64], width: usize) -> Matrix {
    let halves: Vec<f32> =
        words.iter().flat_map(|&word| [word as u32, (word >> 32) as u32].map(f32::from_bits)).collect();
    matrix(stream, NumberKind::F32, 2 * width, &halves)
}

fn from_device(stream: &Stream, rows: &Matrix) -> Vec<u64> {
    let halves = rows.to_vec(stream).unwrap();
    let word = |half: &[f32]| u64::from(half[0].to_bits()) | u64::from(half[1].to_bits()) << 32;
    halves.chunks_exact(2).map(word).collect()
}

/// Words of which one in four is extreme.
fn words(count: usize, random: &mut Random) -> Vec<u64> {
    let word = |random: &mut Random| {
        let any = (0..4).fold(0, |word, _| word << 16 | random.below(1 << 16) as u64);
        if any % 4 == 0 { EXTREMES[random.below(EXTREMES.len())] } else { any }
    };
    (0..count).map(|_| word(random)).collect()
}

#[test]
fn every_type_of_weight_gives_the_words_of_the_cpu_for_any_number_of_rows() {
    let Some(stream) = stream() else { return };
    let random = &mut Random::new(1);
    for kind in TYPES {
        // Several stretches of 128 for each warp where a type allows it, and rests behind them.
        let widths: &[usize] = match kind.block_elements() {
            1 => &[1, 36, 200, 1160],
            32 => &[32, 288, 1184],
            _ => &[256, 1280],
        };
        for &width in widths {
            let layers = Layers::random(&stream, &[(kind, 37)], width, random);
            for rows in [1, 2, 8, 13] {
                layers.check(&stream, rows, random);
            }
        }
    }
}

#[test]
fn parts_share_an_exponent_whatever_their_types_and_gradients_are_summed_over_all_of_them() {
    let Some(stream) = stream() else { return };
    let random = &mut Random::new(2);
    Layers::random(&stream, &TYPES.map(|kind| (kind, 5)), 256, random).check(&stream, 3, random);
    let shapes = [(TensorType::Q4K, 530), (TensorType::Q6K, 17), (TensorType::Q4K, 1)];
    Layers::random(&stream, &shapes, 512, random).check(&stream, 2, random);
}

#[test]
fn scales_that_are_too_far_apart_are_rounded_as_on_the_cpu() {
    let Some(stream) = stream() else { return };
    let random = &mut Random::new(3);
    let scales = [1024.0, 2.0f32.powi(-24), 0.03, 2.0f32.powi(-11) * 1.37, 0.0];
    let block = |scale: &f32| [&f16::from_f32(*scale).to_le_bytes()[..], &[0xf1; 16]].concat();
    let bytes: Vec<u8> = scales.iter().flat_map(block).collect();
    let layers = Layers::new(&stream, &[(TensorType::Q4_0, bytes, 1)], 160);
    let exact = layers.parts[0].packed.ring_form().unwrap().exact();
    assert!(layers.exponent > exact, "the smallest scales are rounded");
    layers.check(&stream, 2, random);
    // A float beside weights of a larger exponent is rounded twice.
    let floats: Vec<u8> = random.normals(160 * 3).into_iter().flat_map(f32::to_le_bytes).collect();
    let coarse: Vec<u8> = [1024.0; 5].iter().flat_map(block).collect();
    let mut layers =
        Layers::new(&stream, &[(TensorType::Q4_0, coarse, 1), (TensorType::F32, floats, 3)], 160);
    layers.exponent = layers.exponent.max(-24 + 7);
    layers.check(&stream, 2, random);
}

#[test]
fn what_is_added_to_a_row_comes_off_again() {
    let Some(stream) = stream() else { return };
    let random = &mut Random::new(4);
    let layers = Layers::random(&stream, &[(TensorType::Q5K, 40), (TensorType::Bf16, 20)], 512, random);
    let (x, pad) = (words(512, random), words(512, random));
    let masked: Vec<u64> = x.iter().zip(&pad).map(|(x, pad)| x.wrapping_add(*pad)).collect();
    let [plain, pad, masked] = [x, pad, masked].map(|x| layers.forward(&stream, &x));
    for part in &layers.parts {
        for at in part.column..part.column + part.packed.rows() {
            assert_eq!(masked[at].wrapping_sub(pad[at]), plain[at]);
        }
    }
}

#[test]
fn no_rows_and_no_parts_are_nothing() {
    let Some(stream) = stream() else { return };
    let layers = Layers::random(&stream, &[(TensorType::Q4_0, 5)], 64, &mut Random::new(5));
    assert!(layers.forward(&stream, &[]).is_empty());
    assert!(layers.backward(&stream, &[]).is_empty());
    let g = on_device(&stream, &[1, 2, 3, 4], 2);
    let mut out = on_device(&stream, &[UNTOUCHED; 6], 3);
    linear_ring_transposed(&stream, &g, &[], 0, &mut out).unwrap();
    assert_eq!(from_device(&stream, &out), [0; 6]);
}
