//! Products in bf16 against the plain sums, bit for bit: every packing and set, any number of rows.

use half::bf16;
use kernels::{
    ActivationForms, Activations, Isa, LinearPart, PackedMatrix, Rounding, TensorType, ThreadPool,
    linear_bf16, reference,
};
use rand::{Rng, rngs::StdRng};

use crate::{
    linear::{SharedInputLayers, UNTOUCHED, one_of_each, width_for},
    support::{TYPES, floats, is_float, pool, random, rounded, stored},
};

const MANY_ROWS: usize = 130;

/// The numbers of rows: each way to fill tiles of sixteen.
fn row_counts() -> impl Iterator<Item = usize> {
    (1..=40).chain([64, 65, MANY_ROWS])
}

fn run(
    parts: &[LinearPart<'_>],
    stride: usize,
    pool: &mut ThreadPool,
    isa: Isa,
    x: &Activations,
) -> Vec<f32> {
    let mut out = vec![UNTOUCHED; x.rows() * stride];
    linear_bf16(pool, isa, x, parts, &mut out, stride);
    out
}

fn tiles(pool: &mut ThreadPool, isa: Isa, x: &[f32], width: usize) -> Activations {
    rounded(pool, isa, x, x.len() / width, ActivationForms::BF16_TILES, Rounding::INT8)
}

/// The outputs by the words of `linear/bf16.rs`, of parts of these types.
fn expected(parts: &[(TensorType, LinearPart<'_>)], stride: usize, x: &[f32], width: usize) -> Vec<f32> {
    let padded = |row: &mut Vec<f32>| row.resize(width.next_multiple_of(32), 0.0);
    let mut out = vec![UNTOUCHED; x.len() / width * stride];
    let rows: Vec<Vec<f32>> = x
        .chunks(width)
        .map(|row| {
            let mut row: Vec<f32> = row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            padded(&mut row);
            row
        })
        .collect();
    for (kind, part) in parts {
        for o in 0..part.matrix.rows() {
            let mut w = vec![0.0; width];
            part.matrix.read_row(o, &mut w);
            if *kind != TensorType::Bf16 {
                w.iter_mut().for_each(|w| *w = half_up(*w));
            }
            padded(&mut w);
            for (r, row) in rows.iter().enumerate() {
                let sum = reference::linear_bf16(row, &w);
                out[r * stride + part.column + o] = part.bias.map_or(sum, |bias| sum + bias[o]);
            }
        }
    }
    out
}

fn half_up(w: f32) -> f32 {
    if w.is_nan() { w } else { f32::from_bits((w.to_bits() + 0x8000) & 0xffff_0000) }
}

/// Asserts equal bits; a NaN equals a NaN.
#[track_caller]
fn assert_same(got: &[f32], wanted: &[f32], stride: usize, what: &str) {
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(
            got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan(),
            "{what}: row {}, column {}: {got:e} ({:#x}), not {wanted:e} ({:#x})",
            i / stride,
            i % stride,
            got.to_bits(),
            wanted.to_bits()
        );
    }
}

fn parts_of(layers: &SharedInputLayers) -> Vec<(TensorType, LinearPart<'_>)> {
    layers.parts.iter().map(|part| (part.kind, part.as_linear_part())).collect()
}

#[test]
fn every_packing_gives_the_plain_sums_for_any_number_of_rows_and_width() {
    let pool = &mut pool(1);
    for kind in TYPES {
        let steps: &[usize] = if is_float(kind) { &[1, 31, 32, 33, 70, 353] } else { &[1, 2, 3, 11] };
        for &step in steps {
            let shapes = [(kind, 53)];
            let width = width_for(&shapes, step);
            let layers = SharedInputLayers::random(&shapes, width, step as u64);
            let x = floats(&mut random(step as u64 + 7), MANY_ROWS * width);
            let wanted = expected(&parts_of(&layers), layers.stride, &x, width);
            for isa in Isa::available() {
                for rows in row_counts() {
                    let x = tiles(pool, isa, &x[..rows * width], width);
                    let got = run(&layers.parts(), layers.stride, pool, isa, &x);
                    let what = format!("{kind:?} on {isa:?}, {rows} rows of {width}");
                    assert_same(&got, &wanted[..rows * layers.stride], layers.stride, &what);
                }
            }
        }
    }
}

#[test]
fn rows_that_do_not_fit_the_cache_at_once_have_the_same_bits() {
    let layers = SharedInputLayers::random(&[(TensorType::Q4_0, 21), (TensorType::Bf16, 50)], 288, 23);
    let x = floats(&mut random(24), 545 * layers.width);
    let wanted = expected(&parts_of(&layers), layers.stride, &x, layers.width);
    let pool = &mut pool(2);
    for isa in Isa::available() {
        for rows in [512, 513, 545] {
            let x = tiles(pool, isa, &x[..rows * layers.width], layers.width);
            let got = run(&layers.parts(), layers.stride, pool, isa, &x);
            let what = format!("{isa:?}, {rows} rows");
            assert_same(&got, &wanted[..rows * layers.stride], layers.stride, &what);
        }
    }
}

#[test]
fn parts_side_by_side_have_the_same_bits_on_any_number_of_threads() {
    let layers = one_of_each();
    let x = floats(&mut random(21), MANY_ROWS * layers.width);
    let wanted = expected(&parts_of(&layers), layers.stride, &x, layers.width);
    for threads in [1, 2, 3] {
        let pool = &mut pool(threads);
        for isa in Isa::available() {
            for rows in [1, 5, 16, 33, MANY_ROWS] {
                let x = tiles(pool, isa, &x[..rows * layers.width], layers.width);
                let got = run(&layers.parts(), layers.stride, pool, isa, &x);
                let what = format!("{isa:?}, {rows} rows on {threads} threads");
                assert_same(&got, &wanted[..rows * layers.stride], layers.stride, &what);
            }
        }
    }
}

/// Distributions of values at the ends of the range, where denormals and infinities come about.
type Distribution = (&'static str, fn(&mut StdRng) -> f32);

const EXTREMES: [Distribution; 6] = [
    ("random bits", |random| f32::from_bits(random.random())),
    ("finite bits", |random| f32::from_bits(random.random::<u32>() & 0xbfff_ffff)),
    ("tiny products", |random| {
        random.random_range(-1.0f32..1.0) * 2.0f32.powi(random.random_range(-66..-60))
    }),
    ("products of a denormal", |random| {
        2.0f32.powi(random.random_range(-64..-62)) * [1.0, -1.0, 1.5, 1.9921875][random.random_range(0..4)]
    }),
    ("denormals", |random| f32::from_bits(random.random::<u32>() & 0x80ff_ffff)),
    ("huge and infinite", |random| {
        let power = 2.0f32.powi(random.random_range(55..75));
        if random.random_range(0..200) == 0 {
            f32::INFINITY
        } else {
            power * random.random_range(-1.0f32..1.0)
        }
    }),
];

#[test]
fn denormals_and_infinities_come_out_as_the_unit_gives_them() {
    let (width, outputs, rows, stride) = (96, 48, 33, 48);
    let pool = &mut pool(1);
    for seed in 0..12 {
        for (of_x, draw_x) in EXTREMES {
            for (of_w, draw_w) in EXTREMES {
                let random = &mut random(seed);
                let x: Vec<f32> = (0..rows * width).map(|_| draw_x(random)).collect();
                let w: Vec<f32> = (0..outputs * width).map(|_| draw_w(random)).collect();
                let kind = if seed % 2 == 0 { TensorType::F32 } else { TensorType::Bf16 };
                let data: Vec<u8> = if kind == TensorType::F32 {
                    w.iter().flat_map(|w| w.to_le_bytes()).collect()
                } else {
                    w.iter().flat_map(|w| bf16::from_f32(*w).to_le_bytes()).collect()
                };
                let matrix = PackedMatrix::pack(kind, &data, outputs, width).unwrap();
                let part = LinearPart { matrix: &matrix, bias: None, column: 0 };
                let wanted = expected(&[(kind, part)], stride, &x, width);
                for isa in Isa::available() {
                    let x = tiles(pool, isa, &x, width);
                    let got = run(&[part], stride, pool, isa, &x);
                    assert_same(&got, &wanted, stride, &format!("{kind:?}, {isa:?}: {of_x} times {of_w}"));
                }
            }
        }
    }
}

#[test]
fn a_sum_that_rounds_to_the_smallest_normal_number_is_given_as_the_unit_gives_it() {
    // The first product is 2^-126. The second takes some 2^-151 from it: 24 bits resolve that, a denormal does not.
    let parts = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, -0.5, -1.0, -2.0, -4.0];
    let power = |n: i32| 2.0f32.powi(n);
    let mut x = [0.0; 32];
    (x[0], x[2]) = (power(-63), power(-75));
    let mut data = Vec::new();
    for part in parts {
        let mut w = [0.0f32; 32];
        (w[0], w[2]) = (power(-63), -part * power(-76));
        data.extend(w.iter().flat_map(|w| w.to_le_bytes()));
    }
    let matrix = PackedMatrix::pack(TensorType::F32, &data, 16, 32).unwrap();
    let part = LinearPart { matrix: &matrix, bias: None, column: 0 };
    let wanted = expected(&[(TensorType::F32, part)], 16, &x, 32);
    assert!(wanted.contains(&0.0) && wanted.contains(&f32::MIN_POSITIVE), "{wanted:?}");
    for isa in Isa::available() {
        let x = tiles(&mut pool(1), isa, &x, 32);
        let got = run(&[part], 16, &mut pool(1), isa, &x);
        assert_same(&got, &wanted, 16, &format!("{isa:?}"));
    }
}

#[test]
fn minima_of_any_size_beside_their_scales_give_the_rounded_values() {
    let (width, outputs, rows) = (128, 48, 17);
    let pool = &mut pool(1);
    for kind in [TensorType::Q4_1, TensorType::Q5_1] {
        for seed in 0..40 {
            let random = &mut random(seed);
            let mut data = stored(kind, outputs, width, random);
            for block in data.chunks_exact_mut(kind.block_bytes()) {
                // Any half, sometimes without infinities and NaN so that sums stay numbers.
                let mask: u16 = if seed % 4 == 0 { 0xffff } else { 0xbfff };
                for at in [0, 2] {
                    let half = if random.random_range(0..4) == 0 { 0 } else { random.random::<u16>() & mask };
                    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
            let matrix = PackedMatrix::pack(kind, &data, outputs, width).unwrap();
            let part = LinearPart { matrix: &matrix, bias: None, column: 0 };
            let x = floats(random, rows * width);
            let wanted = expected(&[(kind, part)], outputs, &x, width);
            for isa in Isa::available() {
                let x = tiles(pool, isa, &x, width);
                let got = run(&[part], outputs, pool, isa, &x);
                assert_same(&got, &wanted, outputs, &format!("{kind:?} on {isa:?}, seed {seed}"));
            }
        }
    }
}

#[test]
fn tiles_that_another_process_takes_over_give_the_bits_of_their_rows() {
    let layers = one_of_each();
    let (width, stride) = (layers.width, layers.stride);
    let x = floats(&mut random(25), MANY_ROWS * width);
    let wanted = expected(&parts_of(&layers), stride, &x, width);
    let pool = &mut pool(1);
    let mut taken = Activations::default();
    for rows in [1, 5, 16, 33, MANY_ROWS] {
        for isa in Isa::available() {
            let x = tiles(pool, isa, &x[..rows * width], width);
            for first in (0..rows).step_by(32) {
                let block = first..rows.min(first + 32);
                let (tile_rows, words) = x.tile_words(block.clone());
                taken.reshape_tiled(block.len(), width, tile_rows).copy_from_slice(words);
                // Current tiles are not computed again: there are no values to compute them from.
                taken.prepare(pool, isa, ActivationForms::BF16_TILES, Rounding::INT8);
                let got = run(&layers.parts(), stride, pool, isa, &taken);
                let what = format!("{isa:?}, rows {block:?} of {rows}");
                assert_same(&got, &wanted[block.start * stride..block.end * stride], stride, &what);
            }
        }
    }
}

#[test]
fn values_that_are_written_make_tiles_stale() {
    let pool = &mut pool(1);
    let isa = Isa::best();
    let mut x = tiles(pool, isa, &[1.0; 64], 32);
    x.values_mut().fill(2.0);
    x.prepare(pool, isa, ActivationForms::BF16_TILES, Rounding::INT8);
    assert_eq!(x.tile_words(0..2).1, tiles(pool, isa, &[2.0; 64], 32).tile_words(0..2).1);
}

#[test]
#[should_panic(expected = "rows are whole tiles")]
fn rows_within_a_tile_are_not_handed_over() {
    let x = tiles(&mut pool(1), Isa::best(), &[1.0; 40 * 32], 32);
    let _ = x.tile_words(0..20);
}

#[test]
#[should_panic(expected = "20 rows are no tiles of 15")]
fn tiles_of_another_size_are_not_taken_over() {
    Activations::default().reshape_tiled(20, 32, 15);
}

#[test]
fn rows_that_are_left_of_a_batch_keep_their_bits() {
    let layers = one_of_each();
    let x = floats(&mut random(22), 40 * layers.width);
    let wanted = expected(&parts_of(&layers), layers.stride, &x, layers.width);
    let pool = &mut pool(1);
    for isa in Isa::available() {
        for rows in [40, 33, 20, 16, 9, 1, 0] {
            let mut x = tiles(pool, isa, &x, layers.width);
            x.truncate(rows);
            let got = run(&layers.parts(), layers.stride, pool, isa, &x);
            assert_same(
                &got,
                &wanted[..rows * layers.stride],
                layers.stride,
                &format!("{isa:?}, {rows} left"),
            );
        }
    }
}

#[test]
#[should_panic(expected = "prepared")]
fn tiles_that_were_never_prepared_are_not_read() {
    let layers = one_of_each();
    let mut x = Activations::default();
    x.reshape(3, layers.width);
    run(&layers.parts(), layers.stride, &mut pool(1), Isa::best(), &x);
}
