//! Linear layers modulo 2^64 and 2^48: the CPU's numbers for every weight type, forward and backward.

use half::f16;
use kernels::{
    Isa, LinearPart, ModularForm, Modulus, PackedLayout, PackedMatrix, SumFrom, TensorType, ThreadPool,
    cuda::{CudaStream, Matrix, ModularPart, ModularScratch, Weight, linear_ring, linear_ring_transposed},
    lora::ElementKind,
};

use crate::{
    support::{SeededNumbers, matrix, stream},
    weight::{TYPES, stored},
};

/// Initial word of the output, where no part writes.
const UNTOUCHED: u64 = 0x1234_5678_9abc_def0;

/// Numbers left free before each part, and after the last.
const GAP: usize = 3;

/// Words with extreme carries and signs.
const EXTREMES: [u64; 6] =
    [0, u64::MAX, 1 << 63, (1 << 63) - 1, 0x8080_8080_8080_8080, 0xffff_ffff_8000_0000];

struct ModularMatrix {
    packed: PackedMatrix,
    weight: Weight,
    unit: f32,
    column: usize,
}

/// Layers with a common input and exponent.
struct ModularLayers {
    parts: Vec<ModularMatrix>,
    width: usize,
    stride: usize,
    exponent: i32,
}

impl ModularLayers {
    fn new(stream: &CudaStream, stored: &[(TensorType, Vec<u8>, usize)], width: usize) -> Self {
        let mut stride = 0;
        let part = |(kind, bytes, rows): &(TensorType, Vec<u8>, usize)| {
            let column = stride + GAP;
            stride = column + rows;
            ModularMatrix {
                packed: PackedMatrix::pack(*kind, bytes, *rows, width).unwrap(),
                weight: Weight::upload(stream, *kind, bytes, *rows, width).unwrap(),
                unit: PackedLayout::of(*kind, bytes, *rows, width).unwrap().unit(),
                column,
            }
        };
        let parts: Vec<ModularMatrix> = stored.iter().map(part).collect();
        let forms: Vec<ModularForm> = parts.iter().map(|part| part.packed.ring_form().unwrap()).collect();
        Self {
            exponent: ModularForm::common(&forms).unwrap(),
            parts,
            width,
            stride: (stride + GAP).next_multiple_of(2),
        }
    }

    fn random(
        stream: &CudaStream,
        shapes: &[(TensorType, usize)],
        width: usize,
        random: &mut SeededNumbers,
    ) -> Self {
        let stored = |&(kind, rows): &(TensorType, usize)| (kind, stored(kind, rows, width, random), rows);
        Self::new(stream, &shapes.iter().map(stored).collect::<Vec<_>>(), width)
    }

    fn parts(&self) -> Vec<ModularPart<'_>> {
        self.parts
            .iter()
            .map(|part| ModularPart { weight: &part.weight, unit: part.unit, column: part.column })
            .collect()
    }

    fn packed(&self) -> Vec<LinearPart<'_>> {
        self.parts
            .iter()
            .map(|part| LinearPart { matrix: &part.packed, bias: None, column: part.column })
            .collect()
    }

    /// Compares both products of `rows` rows with the CPU's, for each modulus whose rows of this width fill
    /// whole words.
    fn check(&self, stream: &CudaStream, rows: usize, random: &mut SeededNumbers) {
        let (x, g) = (words(rows * self.width, random), words(rows * self.stride, random));
        for modulus in Modulus::ALL {
            if modulus == Modulus::Bits64 || self.width.is_multiple_of(2) {
                self.check_by(stream, modulus, rows, (&x, &g));
            }
        }
    }

    fn check_by(&self, stream: &CudaStream, modulus: Modulus, rows: usize, (x, g): (&[u64], &[u64])) {
        let what = || {
            let kinds: Vec<_> = self.parts.iter().map(|part| part.weight.kind()).collect();
            format!("{kinds:?} of width {}, {rows} rows, {modulus:?}", self.width)
        };
        let (isa, pool) = (Isa::best(), &mut ThreadPool::new(&[0]).unwrap());
        let (packed, from, e) = (self.packed(), SumFrom::Zero, self.exponent);
        let mut out = numbers(modulus, &vec![UNTOUCHED; rows * self.stride]);
        let (row, stride) = (numbers(modulus, x), self.stride);
        kernels::linear_ring(pool, isa, modulus, &row, rows, &packed, e, &mut out, stride);
        assert!(self.forward(stream, modulus, x) == out, "{}", what());
        let (row, mut out) = (numbers(modulus, g), vec![0; rows * self.width * modulus.bytes()]);
        kernels::linear_ring_transposed(pool, isa, modulus, &row, rows, stride, &packed, e, from, &mut out);
        assert!(self.backward(stream, modulus, g) == out, "{}, backward", what());
    }

    fn forward(&self, stream: &CudaStream, modulus: Modulus, x: &[u64]) -> Vec<u8> {
        let rows = x.len() / self.width;
        let (x, mut out) = (
            on_device(stream, modulus, x, self.width),
            on_device(stream, modulus, &vec![UNTOUCHED; rows * self.stride], self.stride),
        );
        let scratch = &mut ModularScratch::new(stream).unwrap();
        linear_ring(stream, scratch, modulus, &x, &self.parts(), self.exponent, &mut out).unwrap();
        from_device(stream, &out)
    }

    fn backward(&self, stream: &CudaStream, modulus: Modulus, g: &[u64]) -> Vec<u8> {
        let rows = g.len() / self.stride;
        let (g, mut out) = (
            on_device(stream, modulus, g, self.stride),
            on_device(stream, modulus, &vec![UNTOUCHED; rows * self.width], self.width),
        );
        let scratch = &mut ModularScratch::new(stream).unwrap();
        linear_ring_transposed(stream, scratch, modulus, &g, &self.parts(), self.exponent, &mut out).unwrap();
        from_device(stream, &out)
    }
}

fn numbers(modulus: Modulus, words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes().into_iter().take(modulus.bytes())).collect()
}

fn on_device(stream: &CudaStream, modulus: Modulus, words: &[u64], width: usize) -> Matrix {
    let floats: Vec<f32> =
        numbers(modulus, words).as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    matrix(stream, ElementKind::F32, width * modulus.bytes() / 4, &floats)
}

fn from_device(stream: &CudaStream, rows: &Matrix) -> Vec<u8> {
    rows.to_vec(stream).unwrap().into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Words, one in four of them extreme.
fn words(count: usize, random: &mut SeededNumbers) -> Vec<u64> {
    let word = |random: &mut SeededNumbers| {
        let any = (0..4).fold(0, |word, _| word << 16 | random.below(1 << 16) as u64);
        if any % 4 == 0 { EXTREMES[random.below(EXTREMES.len())] } else { any }
    };
    (0..count).map(|_| word(random)).collect()
}

#[test]
fn every_type_of_weight_gives_the_words_of_the_cpu_for_any_number_of_rows() {
    let Some(stream) = stream() else { return };
    let random = &mut SeededNumbers::new(1);
    for kind in TYPES {
        // Several chunks of 128 per warp if a type allows it, with remainders.
        let widths: &[usize] = match kind.block_elements() {
            1 => &[1, 36, 200, 1160],
            32 => &[32, 288, 1184],
            _ => &[256, 1280],
        };
        for &width in widths {
            let layers = ModularLayers::random(&stream, &[(kind, 37)], width, random);
            for rows in [1, 2, 8, 13] {
                layers.check(&stream, rows, random);
            }
        }
    }
}

#[test]
fn parts_share_an_exponent_whatever_their_types_and_gradients_are_summed_over_all_of_them() {
    let Some(stream) = stream() else { return };
    let random = &mut SeededNumbers::new(2);
    ModularLayers::random(&stream, &TYPES.map(|kind| (kind, 5)), 256, random).check(&stream, 3, random);
    let shapes = [(TensorType::Q4K, 530), (TensorType::Q6K, 17), (TensorType::Q4K, 1)];
    ModularLayers::random(&stream, &shapes, 512, random).check(&stream, 2, random);
}

#[test]
fn scales_that_are_too_far_apart_are_rounded_as_on_the_cpu() {
    let Some(stream) = stream() else { return };
    let random = &mut SeededNumbers::new(3);
    let scales = [1024.0, 2.0f32.powi(-24), 0.03, 2.0f32.powi(-11) * 1.37, 0.0];
    let block = |scale: &f32| [&f16::from_f32(*scale).to_le_bytes()[..], &[0xf1; 16]].concat();
    let bytes: Vec<u8> = scales.iter().flat_map(block).collect();
    let layers = ModularLayers::new(&stream, &[(TensorType::Q4_0, bytes, 1)], 160);
    let exact = layers.parts[0].packed.ring_form().unwrap().exact();
    assert!(layers.exponent > exact, "the smallest scales are rounded");
    layers.check(&stream, 2, random);
    // A float beside weights of a larger exponent is rounded twice.
    let floats: Vec<u8> = random.normals(160 * 3).into_iter().flat_map(f32::to_le_bytes).collect();
    let coarse: Vec<u8> = [1024.0; 5].iter().flat_map(block).collect();
    let mut layers =
        ModularLayers::new(&stream, &[(TensorType::Q4_0, coarse, 1), (TensorType::F32, floats, 3)], 160);
    layers.exponent = layers.exponent.max(-24 + 7);
    layers.check(&stream, 2, random);
}

#[test]
fn what_is_added_to_a_row_comes_off_again() {
    let Some(stream) = stream() else { return };
    let random = &mut SeededNumbers::new(4);
    let layers =
        ModularLayers::random(&stream, &[(TensorType::Q5K, 40), (TensorType::Bf16, 20)], 512, random);
    let (x, pad) = (words(512, random), words(512, random));
    let masked: Vec<u64> = x.iter().zip(&pad).map(|(x, pad)| x.wrapping_add(*pad)).collect();
    let modulus = Modulus::Bits64;
    let [plain, pad, masked] = [x, pad, masked].map(|x| layers.forward(&stream, modulus, &x));
    let words = |numbers: &Vec<u8>| -> Vec<u64> {
        numbers.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number)).collect()
    };
    let (plain, pad, masked) = (words(&plain), words(&pad), words(&masked));
    for part in &layers.parts {
        for at in part.column..part.column + part.packed.rows() {
            assert_eq!(masked[at].wrapping_sub(pad[at]), plain[at]);
        }
    }
}

#[test]
fn no_rows_and_no_parts_are_nothing() {
    let Some(stream) = stream() else { return };
    let layers = ModularLayers::random(&stream, &[(TensorType::Q4_0, 5)], 64, &mut SeededNumbers::new(5));
    for modulus in Modulus::ALL {
        assert!(layers.forward(&stream, modulus, &[]).is_empty());
        assert!(layers.backward(&stream, modulus, &[]).is_empty());
        let g = on_device(&stream, modulus, &[1, 2, 3, 4], 2);
        let mut out = on_device(&stream, modulus, &[UNTOUCHED; 8], 4);
        let scratch = &mut ModularScratch::new(&stream).unwrap();
        linear_ring_transposed(&stream, scratch, modulus, &g, &[], 0, &mut out).unwrap();
        assert!(from_device(&stream, &out).iter().all(|&byte| byte == 0), "{modulus:?}");
    }
}
