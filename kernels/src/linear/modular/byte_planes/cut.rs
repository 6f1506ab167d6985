//! Splits rows of `B`-byte integers into `B` planes of bytes.

use super::super::halves;
use crate::{
    activations::GROUP,
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, Simd},
};

/// Number of joined sums modulo 2^32: of the first pair of planes, the second pair, and the planes above.
pub(super) const JOINED: usize = 3;
pub(super) const STEPS: usize = GROUP / 4;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct GroupPlanes<const B: usize>([[u8; GROUP]; B]);

#[derive(Clone, Copy)]
pub(super) struct GroupTerms {
    /// -8 times the sums of the planes' bytes, joined.
    pub(super) zero8: [i32; JOINED],
    /// -128 times the sums of the planes' bytes, joined.
    pub(super) zero128: [i32; JOINED],
    /// -32 times the sums of each half group, joined.
    pub(super) zero32_halves: [[i32; JOINED]; 2],
    /// Sum of the words, as two signed halves.
    pub(super) sum: [i32; 2],
}

const NOTHING: GroupTerms =
    GroupTerms { zero8: [0; JOINED], zero128: [0; JOINED], zero32_halves: [[0; JOINED]; 2], sum: [0; 2] };

/// Rows of integers as planes of bytes.
pub(in super::super) struct BytePlanes<const B: usize> {
    groups: usize,
    /// `[rows, groups]`: the planes.
    bytes: Vec<GroupPlanes<B>>,
    /// `[rows, groups]`: the sums.
    numbers: Vec<GroupTerms>,
}

impl<const B: usize> BytePlanes<B> {
    /// Splits `rows` rows of `x`, whose length is a multiple of the group.
    pub(in super::super) fn of(pool: &mut ThreadPool, isa: Isa, x: &[[u8; B]], rows: usize) -> Self {
        let groups = x.len() / rows.max(1) / GROUP;
        let count = rows * groups;
        let (mut bytes, mut numbers) = (vec![GroupPlanes([[0; GROUP]; B]); count], vec![NOTHING; count]);
        let to = PlanesPtr(bytes.as_mut_ptr(), numbers.as_mut_ptr());
        // A few rows are not worth waking another thread.
        let chunk = rows.div_ceil(4 * pool.threads()).max(4);
        pool.run(rows.div_ceil(chunk), |i| {
            for row in i * chunk..rows.min((i + 1) * chunk) {
                let x = &x[row * groups * GROUP..][..groups * GROUP];
                isa.dispatch(PlaneCut { x, to: &to, at: row * groups });
            }
        });
        Self { groups, bytes, numbers }
    }

    #[inline(always)]
    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the planes of a group of a row.
    #[inline(always)]
    pub(super) fn bytes(&self, row: usize, group: usize) -> *const i32 {
        self.bytes.as_ptr().wrapping_add(row * self.groups + group).cast()
    }

    #[inline(always)]
    pub(super) fn numbers(&self, row: usize, group: usize) -> &GroupTerms {
        &self.numbers[row * self.groups + group]
    }
}

struct PlanesPtr<const B: usize>(*mut GroupPlanes<B>, *mut GroupTerms);
// SAFETY: chunks write disjoint groups of buffers that outlive the parallel region.
unsafe impl<const B: usize> Sync for PlanesPtr<B> {}

/// Splits one row; its first group is written to index `at`.
struct PlaneCut<'a, const B: usize> {
    x: &'a [[u8; B]],
    to: &'a PlanesPtr<B>,
    at: usize,
}

impl<const B: usize> Kernel for PlaneCut<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (group, x) in self.x.as_chunks().0.iter().enumerate() {
            let at = self.at + group;
            // SAFETY: both buffers have an element for each group, and no other chunk has this one.
            unsafe {
                let bytes = &mut *self.to.0.add(at);
                bytes.0 = S::digits(x);
                *self.to.1.add(at) = numbers(&bytes.0);
            }
        }
    }
}

#[inline(always)]
fn numbers<const B: usize>(planes: &[[u8; GROUP]; B]) -> GroupTerms {
    let mut sums = [[0i32; B]; 2];
    for (plane, bytes) in planes.iter().enumerate() {
        for (half, bytes) in bytes.as_chunks::<{ GROUP / 2 }>().0.iter().enumerate() {
            for eight in bytes.as_chunks().0 {
                sums[half][plane] += sum_of_bytes(u64::from_le_bytes(*eight));
            }
        }
    }
    let mut sum = 0u64;
    for (plane, (first, second)) in sums[0].iter().zip(&sums[1]).enumerate() {
        sum = sum.wrapping_add(i64::from(first + second).cast_unsigned() << (8 * plane));
    }
    let [first, second] = [joined(sums[0]), joined(sums[1])];
    let mut numbers = GroupTerms { sum: halves(sum).into(), ..NOTHING };
    for at in 0..JOINED {
        let both = first[at].wrapping_add(second[at]);
        numbers.zero8[at] = both.wrapping_mul(-8);
        numbers.zero128[at] = both.wrapping_mul(-128);
        numbers.zero32_halves[0][at] = first[at].wrapping_mul(-32);
        numbers.zero32_halves[1][at] = second[at].wrapping_mul(-32);
    }
    numbers
}

/// Joins the sums of planes like `sums::joined`.
#[inline(always)]
fn joined<const B: usize>(planes: [i32; B]) -> [i32; JOINED] {
    let pair = |first: usize| planes[first].wrapping_add(planes[first + 1].wrapping_mul(256));
    let upper = if B > 6 { pair(4).wrapping_add(pair(6).wrapping_mul(1 << 16)) } else { pair(4) };
    [pair(0), pair(2), upper]
}

/// Returns the sum of eight signed bytes.
#[inline(always)]
fn sum_of_bytes(bytes: u64) -> i32 {
    // With 128 added each byte is unsigned, and one multiplication adds the four 16-bit sums.
    const HALF: u64 = 0x8080_8080_8080_8080;
    const PAIRS_OF: u64 = 0x00ff_00ff_00ff_00ff;
    let bytes = bytes ^ HALF;
    let pairs = (bytes & PAIRS_OF) + (bytes >> 8 & PAIRS_OF);
    (pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32 - 8 * 128
}
