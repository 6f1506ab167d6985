//! Linear layers modulo 2^64 or 2^48: `out = x · Wᵀ` and `out = g · W` in integers, exact in any order.
//!
//! A value added to a row before the product can be removed from the result bit for bit, as masks and shares
//! require. Weights are integers times one power of two, `2^exponent` ([`ModularForm`]):
//!
//! ```text
//! integers   codes times 16-bit scales, and minima: exact, unless the range is so wide that the smallest are
//! rounded
//! floats     round(w * 2^24): weights of f16 exact, of 32 bits and bf16 to 2^-25
//! ```
//!
//! All rounding is to nearest, ties to even.
//!
//! A row holds integers of eight or six bytes ([`Modulus`]), without alignment; the caller decides whether
//! they are signed. During computation an integer is a 64-bit word, whose excess bits are dropped.
//!
//! # Layout
//!
//! - this file: both products.
//! - `modulus`: layout of integers in rows. `form`: the exponent, and rows of integers.
//! - `integer_weights`: integer weights decoded in registers. `word_sums`: sums over them, for any weights.
//! - `byte_planes`: sums over codes, where the instruction set multiplies bytes faster than words.
//! - `digit_tiles`: sums over digits of many rows, on a matrix unit.
//! - `partition`: distribution of the work to threads. `bytes`: conversion between words and bytes.

mod byte_planes;
mod bytes;
mod digit_tiles;
mod form;
mod integer_weights;
mod modulus;
mod partition;
mod word_sums;

pub use form::ModularForm;
pub use modulus::Modulus;

use super::part::{LinearPart, check_parts};
use crate::{SumFrom, isa::Isa, pool::ThreadPool};

macro_rules! with_bytes {
    ($modulus:expr, $function:ident($($argument:expr),*)) => {
        match $modulus {
            Modulus::Bits48 => $function::<6>($($argument),*),
            Modulus::Bits64 => $function::<8>($($argument),*),
        }
    };
}

/// Computes `parts`, which have no bias, for `rows` rows of `x` into rows of `out` of `stride` integers, on
/// all threads of `pool`. Outputs are in units of `2^exponent`. The exponent must be at least the
/// [smallest](ModularForm::smallest) of each matrix, or the outputs are wrong.
///
/// # Panics
/// Panics if the shapes do not match, or a part has a bias.
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub fn linear_ring(
    pool: &mut ThreadPool,
    isa: Isa,
    modulus: Modulus,
    x: &[u8],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [u8],
    stride: usize,
) {
    with_bytes!(modulus, forward(pool, isa, numbers(x), rows, parts, exponent, numbers_mut(out), stride));
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
fn forward<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[[u8; B]],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
    stride: usize,
) {
    let Some(width) = parts.first().map(|part| part.matrix.columns()) else { return };
    check_forward(x, rows, parts, width, out, stride);
    if digit_tiles::are_worth_it(isa, rows) {
        digit_tiles::forward(pool, isa, x, rows, parts, exponent, out, stride);
        return;
    }
    let (codes, others): (Vec<_>, Vec<_>) =
        parts.iter().partition(|part| has_byte_products(isa) && part.matrix.forms().bytes);
    if !codes.is_empty() {
        byte_planes::forward(pool, isa, x, rows, &codes, exponent, out, stride);
    }
    if !others.is_empty() {
        word_sums::forward(pool, isa, x, rows, &others, exponent, out, stride);
    }
}

/// Computes [`linear_ring`] with 64-bit words and 32-bit integer weights for any packing, as a baseline.
///
/// # Panics
/// Panics under the conditions of [`linear_ring`].
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub fn linear_ring_by_words(
    pool: &mut ThreadPool,
    isa: Isa,
    modulus: Modulus,
    x: &[u8],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [u8],
    stride: usize,
) {
    with_bytes!(modulus, by_words(pool, isa, numbers(x), rows, parts, exponent, numbers_mut(out), stride));
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
fn by_words<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[[u8; B]],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
    stride: usize,
) {
    let Some(width) = parts.first().map(|part| part.matrix.columns()) else { return };
    check_forward(x, rows, parts, width, out, stride);
    word_sums::forward(pool, isa, x, rows, parts, exponent, out, stride);
}

/// True if the set multiplies 64 bytes per instruction; with fewer, word products are faster.
fn has_byte_products(isa: Isa) -> bool {
    isa <= Isa::Avx512
}

/// Computes the sums over the outputs of `parts`, which have no bias, for `rows` rows of `g` of `stride`
/// integers. `out` is `[rows, columns]` in units of `2^exponent`, as for [`linear_ring`]. Without parts it is
/// the initial value.
///
/// # Panics
/// Panics if the shapes do not match, or a part has a bias.
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub fn linear_ring_transposed(
    pool: &mut ThreadPool,
    isa: Isa,
    modulus: Modulus,
    g: &[u8],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    from: SumFrom,
    out: &mut [u8],
) {
    if from == SumFrom::Zero {
        out.fill(0);
    }
    with_bytes!(modulus, backward(pool, isa, numbers(g), rows, stride, parts, exponent, numbers_mut(out)));
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
fn backward<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[[u8; B]],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
) {
    assert_eq!(g.len(), rows * stride, "g is {rows} rows of {stride}");
    let Some(columns) = parts.first().map(|part| part.matrix.columns()) else { return };
    check(parts, columns, stride);
    assert_eq!(out.len(), rows * columns, "out is {rows} rows of {columns}");
    if digit_tiles::are_worth_it(isa, rows) {
        digit_tiles::backward(pool, isa, g, rows, stride, parts, exponent, out);
    } else {
        word_sums::backward(pool, isa, g, rows, stride, parts, exponent, out);
    }
}

/// Splits a word into signed halves, `low + 2^32 high`.
#[inline(always)]
fn halves(word: u64) -> (i32, i32) {
    (word as i32, (word.wrapping_add(1 << 31) >> 32) as i32)
}

fn numbers<const B: usize>(bytes: &[u8]) -> &[[u8; B]] {
    let (numbers, rest) = bytes.as_chunks();
    assert!(rest.is_empty(), "rows are of whole numbers");
    numbers
}

fn numbers_mut<const B: usize>(bytes: &mut [u8]) -> &mut [[u8; B]] {
    let (numbers, rest) = bytes.as_chunks_mut();
    assert!(rest.is_empty(), "rows are of whole numbers");
    numbers
}

fn check_forward<N>(x: &[N], rows: usize, parts: &[LinearPart<'_>], width: usize, out: &[N], stride: usize) {
    check(parts, width, stride);
    assert_eq!(x.len(), rows * width, "x is {rows} rows of {width}");
    assert!(out.len() >= rows * stride, "out holds {rows} rows of {stride}");
}

fn check(parts: &[LinearPart<'_>], width: usize, stride: usize) {
    check_parts(parts, width, stride);
    assert!(parts.iter().all(|part| part.bias.is_none()), "a bias is no whole number");
}
