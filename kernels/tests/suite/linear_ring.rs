//! Linear layers modulo 2^64 and 2^48: against plain sums of 128 bits, forward and backward, and the integers
//! of the weights.

use half::f16;
use kernels::{
    Isa, LinearPart, ModularForm, Modulus, PackedMatrix, SumFrom, TensorType, ThreadPool, linear_ring,
    linear_ring_by_words, linear_ring_transposed, reference,
};
use proptest::{collection, prelude::*, sample};
use rand::Rng;

use crate::support::{TYPES, is_float, pool, random, stored};

/// Initial word of the output, where no part writes.
const UNTOUCHED: u64 = 0x1234_5678_9abc_def0;

/// Columns left free before each part.
const GAP: usize = 3;

/// Words with extreme carries and signs.
const EXTREMES: [u64; 8] = [
    0,
    u64::MAX,
    1 << 63,
    (1 << 63) - 1,
    0x8080_8080_8080_8080,
    0x7f7f_7f7f_7f7f_7f7f,
    0x8000_0000,
    0xffff_ffff_8000_0000,
];

/// Layers with a common input and exponent.
struct ExponentLayers {
    parts: Vec<IntegerPart>,
    width: usize,
    stride: usize,
    exponent: i32,
}

struct IntegerPart {
    matrix: PackedMatrix,
    /// Weights in units of the exponent.
    whole: Vec<i32>,
    column: usize,
}

impl ExponentLayers {
    fn random(shapes: &[(TensorType, usize)], width: usize, seed: u64) -> Self {
        let random = &mut random(seed);
        let matrix = |&(kind, rows): &(TensorType, usize)| {
            let data = stored(kind, rows, width, random);
            PackedMatrix::pack(kind, &data, rows, width).expect("whole rows")
        };
        let matrices: Vec<_> = shapes.iter().map(matrix).collect();
        let form = |matrix: &PackedMatrix| matrix.ring_form().expect("weights of a usual size");
        let forms: Vec<_> = matrices.iter().map(form).collect();
        let exponent = ModularForm::common(&forms).expect("there are matrices");
        let mut stride = 0;
        let parts = matrices.into_iter().map(|matrix| {
            let column = stride + GAP;
            stride = column + matrix.rows();
            IntegerPart { whole: whole(&matrix, exponent), matrix, column }
        });
        Self { parts: parts.collect(), width, stride: stride + GAP, exponent }
    }

    fn parts(&self) -> Vec<LinearPart<'_>> {
        self.parts
            .iter()
            .map(|part| LinearPart { matrix: &part.matrix, bias: None, column: part.column })
            .collect()
    }

    fn forward(&self, pool: &mut ThreadPool, isa: Isa, modulus: Modulus, x: &[u64]) -> Vec<u64> {
        self.forward_by(linear_ring, pool, isa, modulus, x)
    }

    fn by_words(&self, pool: &mut ThreadPool, isa: Isa, modulus: Modulus, x: &[u64]) -> Vec<u64> {
        self.forward_by(linear_ring_by_words, pool, isa, modulus, x)
    }

    fn forward_by(
        &self,
        product: ModularProductFn,
        pool: &mut ThreadPool,
        isa: Isa,
        modulus: Modulus,
        x: &[u64],
    ) -> Vec<u64> {
        let rows = x.len() / self.width;
        let (x, mut out) = (packed(modulus, x), packed(modulus, &vec![UNTOUCHED; rows * self.stride]));
        product(pool, isa, modulus, &x, rows, &self.parts(), self.exponent, &mut out, self.stride);
        unpacked(modulus, &out)
    }

    fn backward(&self, pool: &mut ThreadPool, isa: Isa, modulus: Modulus, g: &[u64]) -> Vec<u64> {
        let rows = g.len() / self.stride;
        let (g, mut out) = (packed(modulus, g), packed(modulus, &vec![UNTOUCHED; rows * self.width]));
        let (parts, e, from) = (self.parts(), self.exponent, SumFrom::Zero);
        linear_ring_transposed(pool, isa, modulus, &g, rows, self.stride, &parts, e, from, &mut out);
        unpacked(modulus, &out)
    }

    fn plain_forward(&self, x: &[u64]) -> Vec<u64> {
        let rows = x.len() / self.width;
        let mut out = vec![UNTOUCHED; rows * self.stride];
        for part in &self.parts {
            let outputs = part.matrix.rows();
            let plain = reference::linear_ring(x, &part.whole, rows, outputs, self.width);
            for (row, plain) in out.chunks_mut(self.stride).zip(plain.chunks(outputs)) {
                row[part.column..][..outputs].copy_from_slice(plain);
            }
        }
        out
    }

    fn plain_backward(&self, g: &[u64]) -> Vec<u64> {
        let rows = g.len() / self.stride;
        let mut out = vec![0u64; rows * self.width];
        for part in &self.parts {
            let outputs = part.matrix.rows();
            let g: Vec<u64> =
                g.chunks(self.stride).flat_map(|row| &row[part.column..][..outputs]).copied().collect();
            let plain = reference::linear_ring_transposed(&g, &part.whole, rows, outputs, self.width);
            out.iter_mut().zip(plain).for_each(|(out, plain)| *out = out.wrapping_add(plain));
        }
        out
    }
}

type ModularProductFn =
    fn(&mut ThreadPool, Isa, Modulus, &[u8], usize, &[LinearPart<'_>], i32, &mut [u8], usize);

fn packed(modulus: Modulus, words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes().into_iter().take(modulus.bytes())).collect()
}

fn unpacked(modulus: Modulus, numbers: &[u8]) -> Vec<u64> {
    let word = |number: &[u8]| number.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    numbers.chunks(modulus.bytes()).map(word).collect()
}

/// Words modulo another modulus than 2^64.
fn modulo(modulus: Modulus, words: &[u64]) -> Vec<u64> {
    words.iter().map(|word| word & u64::MAX >> (64 - modulus.bits())).collect()
}

fn whole(matrix: &PackedMatrix, exponent: i32) -> Vec<i32> {
    let mut whole = vec![0; matrix.rows() * matrix.columns()];
    for (row, whole) in whole.chunks_exact_mut(matrix.columns()).enumerate() {
        matrix.read_ring_row(row, exponent, whole);
    }
    whole
}

/// Words, one in eight of them extreme.
fn words(seed: u64, count: usize) -> Vec<u64> {
    let random = &mut random(seed);
    let word = |_| {
        let any: u64 = random.random();
        if random.random_range(0..8) == 0 { EXTREMES[any as usize % EXTREMES.len()] } else { any }
    };
    (0..count).map(word).collect()
}

fn everywhere() -> impl Iterator<Item = (Modulus, Isa)> {
    Modulus::ALL.into_iter().flat_map(|modulus| Isa::available().into_iter().map(move |isa| (modulus, isa)))
}

fn width_for(shapes: &[(TensorType, usize)], step: usize) -> usize {
    let block = |&(kind, _): &(TensorType, usize)| if is_float(kind) { 1 } else { kind.block_elements() };
    shapes.iter().map(block).max().unwrap_or(1) * step
}

fn shapes() -> impl Strategy<Value = Vec<(TensorType, usize)>> {
    collection::vec((sample::select(TYPES.to_vec()), 1usize..=70), 1..=3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn both_products_are_the_plain_ones_to_the_last_bit(
        shapes in shapes(),
        step in 1usize..=3,
        rows in 1usize..=20,
        seed: u64,
    ) {
        let layers = ExponentLayers::random(&shapes, width_for(&shapes, step), seed);
        let (x, g) = (words(!seed, rows * layers.width), words(seed ^ 1, rows * layers.stride));
        let (forward, backward) = (layers.plain_forward(&x), layers.plain_backward(&g));
        for modulus in Modulus::ALL {
            let [forward, backward] = [&forward, &backward].map(|words| modulo(modulus, words));
            for isa in Isa::available() {
                prop_assert_eq!(&layers.forward(&mut pool(1), isa, modulus, &x), &forward, "{:?}", isa);
                prop_assert_eq!(&layers.by_words(&mut pool(1), isa, modulus, &x), &forward, "{:?}", isa);
                prop_assert_eq!(&layers.backward(&mut pool(1), isa, modulus, &g), &backward, "{:?}", isa);
            }
        }
    }
}

#[test]
fn each_type_gives_exact_products_of_any_width_its_blocks_allow_on_any_number_of_threads() {
    for kind in TYPES {
        for step in if is_float(kind) { vec![1, 15, 33, 300] } else { vec![1, 5] } {
            let shapes = [(kind, 37), (kind, 130)];
            let layers = ExponentLayers::random(&shapes, width_for(&shapes, step), step as u64);
            let (x, g) = (words(3, 67 * layers.width), words(4, 67 * layers.stride));
            let (forward, backward) = (layers.plain_forward(&x), layers.plain_backward(&g));
            for (modulus, isa) in everywhere() {
                for (rows, threads) in [(1, 2), (2, 1), (3, 3), (67, 2)] {
                    let (out, back) = (rows * layers.stride, rows * layers.width);
                    let found = layers.forward(&mut pool(threads), isa, modulus, &x[..rows * layers.width]);
                    assert!(
                        found == modulo(modulus, &forward[..out]),
                        "{isa:?}, {modulus:?}, {kind:?}, {rows} rows, width {}",
                        layers.width
                    );
                    let found = layers.backward(&mut pool(threads), isa, modulus, &g[..rows * layers.stride]);
                    let wanted = modulo(modulus, &backward[..back]);
                    assert!(found == wanted, "{isa:?}, {modulus:?}, {kind:?}, {rows} rows back");
                }
            }
        }
    }
}

#[test]
fn sums_over_more_elements_and_outputs_than_are_cut_at_once_are_exact_too() {
    let shapes = [(TensorType::F16, 801), (TensorType::Q4_1, 20), (TensorType::Q6K, 790)];
    let layers = ExponentLayers::random(&shapes, 7 * 256, 5);
    let (x, g) = (words(6, 17 * layers.width), words(7, 17 * layers.stride));
    let (forward, backward) = (layers.plain_forward(&x), layers.plain_backward(&g));
    for (modulus, isa) in everywhere() {
        let [forward, backward] = [&forward, &backward].map(|words| modulo(modulus, words));
        assert!(layers.forward(&mut pool(2), isa, modulus, &x) == forward, "{isa:?}, {modulus:?}");
        assert!(layers.backward(&mut pool(2), isa, modulus, &g) == backward, "{isa:?}, {modulus:?}");
    }
}

#[test]
fn whole_numbers_are_the_values_that_other_products_take() {
    for kind in TYPES {
        let shapes = [(kind, 37)];
        let is_exact =
            |layers: &ExponentLayers| layers.parts[0].matrix.ring_form().unwrap().exact() == layers.exponent;
        let layers =
            (0..100).map(|seed| ExponentLayers::random(&shapes, width_for(&shapes, 3), seed)).find(is_exact);
        let ExponentLayers { parts, width, exponent, .. } =
            layers.expect("scales that are not too far apart");
        let mut values = vec![0.0; width];
        for (row, whole) in parts[0].whole.chunks(width).enumerate() {
            parts[0].matrix.read_row(row, &mut values);
            for (&value, &whole) in values.iter().zip(whole) {
                let exact = f64::from(whole) * 2.0f64.powi(exponent);
                match kind {
                    TensorType::F32 | TensorType::Bf16 => {
                        assert_eq!(exponent, -24);
                        assert!((exact - f64::from(value)).abs() <= 2.0f64.powi(-25), "{kind:?}: {value}");
                    }
                    // The value is the integer, rounded to a float.
                    _ => assert_eq!(exact as f32, value, "{kind:?}"),
                }
            }
        }
    }
}

#[test]
fn what_is_added_to_a_row_comes_off_again() {
    let shapes = TYPES.map(|kind| (kind, 21));
    let layers = ExponentLayers::random(&shapes, 256, 3);
    let (x, pad) = (words(1, 2 * 256), words(2, 2 * 256));
    let masked: Vec<u64> = x.iter().zip(&pad).map(|(x, pad)| x.wrapping_add(*pad)).collect();
    let pool = &mut pool(2);
    for (modulus, isa) in everywhere() {
        let [plain, pad, masked] = [&x, &pad, &masked].map(|x| layers.forward(pool, isa, modulus, x));
        for part in &layers.parts {
            for i in part.column..part.column + part.matrix.rows() {
                let found = modulo(modulus, &[masked[i].wrapping_sub(pad[i])]);
                assert_eq!(found, [plain[i]], "{isa:?}, {modulus:?}");
            }
        }
    }
}

#[test]
fn gradients_go_on_from_the_sums_over_the_outputs_before() {
    let shapes = [(TensorType::Q4_1, 64), (TensorType::Q4_1, 40)];
    let layers = ExponentLayers::random(&shapes, 96, 8);
    let g = words(9, 3 * layers.stride);
    let wanted = layers.plain_backward(&g);
    let (parts, e) = (layers.parts(), layers.exponent);
    for (modulus, isa) in everywhere() {
        let (g, mut out) = (packed(modulus, &g), packed(modulus, &[UNTOUCHED; 3 * 96]));
        for (part, from) in parts.chunks(1).zip([SumFrom::Zero, SumFrom::Out]) {
            let (pool, stride) = (&mut pool(1), layers.stride);
            linear_ring_transposed(pool, isa, modulus, &g, 3, stride, part, e, from, &mut out);
        }
        assert_eq!(unpacked(modulus, &out), modulo(modulus, &wanted), "{isa:?}, {modulus:?}");
    }
}

#[test]
fn weights_that_are_too_large_or_no_numbers_have_no_form() {
    let floats = |weights: &[f32]| {
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        PackedMatrix::pack(TensorType::F32, &bytes, 1, weights.len()).expect("a row").ring_form()
    };
    let form = floats(&[63.999_996, -63.0]).expect("weights below 64");
    assert_eq!((form.exact(), form.smallest()), (-24, -24));
    assert_eq!(floats(&[0.25; 3]).map(ModularForm::smallest), Some(-31));
    for refused in [64.0, -64.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        assert_eq!(floats(&[0.5, refused, 1.0]), None, "{refused}");
    }
    assert!(of_scales(&[1.0, f32::INFINITY]).ring_form().is_none());
    assert!(of_scales(&[f32::NAN]).ring_form().is_none());
}

fn of_scales(scales: &[f32]) -> PackedMatrix {
    let block = |scale: &f32| [&f16::from_f32(*scale).to_le_bytes()[..], &[0xf1; 16]].concat();
    let bytes: Vec<u8> = scales.iter().flat_map(block).collect();
    PackedMatrix::pack(TensorType::Q4_0, &bytes, 1, 32 * scales.len()).expect("a row")
}

#[test]
fn scales_that_are_too_far_apart_are_rounded_where_the_largest_has_thirty_bits() {
    for (small, is_exact) in [(2.0f32.powi(-10), true), (2.0f32.powi(-24), false)] {
        let matrix = of_scales(&[1024.0, small, 0.0]);
        let form = matrix.ring_form().expect("finite scales");
        let exponent = ModularForm::common(&[form]).expect("a matrix");
        assert_eq!(exponent == form.exact(), is_exact, "{form:?}");
        let (mut values, whole) = (vec![0.0; 96], whole(&matrix, exponent));
        matrix.read_row(0, &mut values);
        for (value, whole) in values.into_iter().zip(whole) {
            assert!(whole.unsigned_abs() < 1 << 30);
            let off = (f64::from(whole) * 2.0f64.powi(exponent) - f64::from(value)).abs();
            assert!(off <= if is_exact { 0.0 } else { 8192.0 * 2.0f64.powi(-29) }, "{value}: {off:e}");
        }
    }
    assert_eq!(ModularForm::common(&[]), None);
}
