//! Peak rates of this machine, for benchmarks: products from registers, and memory reads.
//!
//! No model reaches these rates; benchmarks report how near it comes.

use std::{hint::black_box, io, time::Instant};

use crate::{
    buffer::Arena,
    isa::{Isa, MatrixUnit},
    pool::ThreadPool,
    simd::{
        Kernel, LANES, Simd,
        amx::{self, Tiles},
    },
};

/// Independent sums per loop, so that no sum waits for the previous one.
const SUMS: usize = 16;

/// Iterations of the loop: some milliseconds.
const ROUNDS: usize = 1 << 20;

const READS: usize = 4;

const LINE: usize = 64;

/// Returns the byte operations per second (two per product) of all threads of `pool`, by vector instructions.
pub fn int8_ops_per_s(pool: &mut ThreadPool, isa: Isa) -> f64 {
    let each = ROUNDS * SUMS * LANES * 4 * 2;
    rate(pool, each, || isa.dispatch(ByteProducts))
}

/// Returns the byte operations per second of the matrix unit, or `None` without one.
pub fn matrix_unit_ops_per_s(pool: &mut ThreadPool, isa: Isa) -> Option<f64> {
    let each = ROUNDS * amx::PRODUCTS_OF_A_ROUND * 2;
    // SAFETY: the process may use the unit, and no other code of this thread uses it.
    let run = || unsafe { Tiles::lay_out().repeat(ROUNDS) };
    (isa.matrix_unit() == MatrixUnit::Amx).then(|| rate(pool, each, run))
}

/// Returns the bf16 operations per second of all threads of `pool`, by vector instructions.
pub fn bf16_flops_per_s(pool: &mut ThreadPool, isa: Isa) -> f64 {
    let each = ROUNDS * SUMS * LANES * 2 * 2;
    rate(pool, each, || isa.dispatch(Pairs))
}

/// Returns the bytes per second when all threads of `pool` read `bytes` of weight memory, each a part.
///
/// # Errors
/// Fails if the memory cannot be allocated.
pub fn read_bytes_per_s(pool: &mut ThreadPool, isa: Isa, bytes: usize) -> io::Result<f64> {
    let mut memory = Arena::new(bytes).zeroed::<u8>(bytes)?;
    memory.as_mut_slice().fill(1);
    let memory = memory.as_slice();
    let parts: Vec<&[u8]> = memory.chunks(bytes.div_ceil(4 * pool.threads()).max(LINE)).collect();
    let begin = Instant::now();
    for _ in 0..READS {
        pool.run(parts.len(), |part| {
            black_box(isa.dispatch(ByteReads(parts[part])));
        });
    }
    Ok((READS * bytes) as f64 / begin.elapsed().as_secs_f64())
}

/// Returns the operations per second of all threads, where each call of `work` does `each` operations.
fn rate<T>(pool: &mut ThreadPool, each: usize, work: impl Fn() -> T + Sync) -> f64 {
    let chunks = 4 * pool.threads();
    let begin = Instant::now();
    pool.run(chunks, |_| {
        black_box(work());
    });
    (each * chunks) as f64 / begin.elapsed().as_secs_f64()
}

struct ByteProducts;

impl Kernel for ByteProducts {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self) -> i32 {
        // SAFETY: the access covers whole vectors of an array.
        let codes = unsafe { S::load_bytes(black_box([3u8; LINE]).as_ptr()) };
        let x = black_box(0x0102_0304);
        let mut sums = [S::splat_i32(0); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = S::dot_bytes(*sum, codes, x);
            }
        }
        S::sum_i32(sums.into_iter().fold(S::splat_i32(0), S::add_i32))
    }
}

struct Pairs;

impl Kernel for Pairs {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        // SAFETY: the access covers whole vectors of an array.
        let w = unsafe { S::load_bytes(black_box([1u8; LINE]).as_ptr()) };
        let x = black_box(0x0101_0101);
        let mut sums = [S::splat(0.0); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = S::dot_bf16(*sum, w, x);
            }
        }
        S::sum(sums.into_iter().fold(S::splat(0.0), S::add))
    }
}

struct ByteReads<'a>(&'a [u8]);

impl Kernel for ByteReads<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self) -> i32 {
        let mut sums = [S::splat_i32(0); 4];
        for lines in self.0.chunks_exact(4 * LINE) {
            for (line, sum) in lines.chunks_exact(LINE).zip(&mut sums) {
                // SAFETY: the access covers a whole vector of the slice.
                *sum = S::add_i32(*sum, unsafe { S::load_i32(line.as_ptr().cast()) });
            }
        }
        S::sum_i32(sums.into_iter().fold(S::splat_i32(0), S::add_i32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_has_its_limits() {
        let mut pool = ThreadPool::new(&[]).unwrap();
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Portable) {
            let limits = [
                int8_ops_per_s(&mut pool, isa),
                bf16_flops_per_s(&mut pool, isa),
                read_bytes_per_s(&mut pool, isa, 1 << 20).unwrap(),
            ];
            assert!(limits.iter().all(|limit| limit.is_finite() && *limit > 0.0), "{isa:?}: {limits:?}");
            assert_eq!(matrix_unit_ops_per_s(&mut pool, isa).is_some(), isa == Isa::Amx);
        }
    }
}
