//! A copy of a layer on the device, which is computed with while it is filled.
//!
//! Rank blocks arrive from the last to the first, so what is here is always `first_rank..rank`.

use std::{
    io,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    layout::{MatrixLayout, RANK_BLOCK},
    matrix::{Factors, LoraMatrix},
};
use crate::buffer::{Arena, Buffer};

/// The device's copy of a [`LoraMatrix`].
#[derive(Debug)]
pub struct StagedMatrix {
    layout: MatrixLayout,
    a: Buffer<u8>,
    b: Buffer<u8>,
    /// Ranks from here on are in `a` and `b` and are never written again. Written by [`Self::copy_next`] alone.
    first_rank: AtomicUsize,
    /// Held by who copies.
    copying: Mutex<()>,
}

impl StagedMatrix {
    /// Room in `arena` for `host`, with no rank in it yet.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(arena: &Arena, host: &LoraMatrix) -> io::Result<Self> {
        let layout = *host.layout();
        Ok(Self {
            layout,
            a: arena.zeroed(layout.a_bytes())?,
            b: arena.zeroed(layout.b_bytes())?,
            first_rank: AtomicUsize::new(layout.rank),
            copying: Mutex::new(()),
        })
    }

    /// Bytes that the next [`Self::copy_next`] copies; `None` once all ranks are here.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        let end = self.first_rank();
        let first = end.checked_sub(1)? / RANK_BLOCK * RANK_BLOCK;
        let [a, b] = self.ranges(first, end);
        Some(a.len() + b.len())
    }

    /// Copies the last rank block that is not here yet, A's and B's part of it, and returns their bytes: 0 if all
    /// ranks are here. A rank that is not a multiple of [`RANK_BLOCK`] makes the first block to arrive a short one.
    ///
    /// # Panics
    ///
    /// If `host` is not the matrix this is the copy of.
    pub fn copy_next(&self, host: &LoraMatrix) -> usize {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        let _alone = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.first_rank.load(Ordering::Relaxed);
        let Some(last) = end.checked_sub(1) else {
            return 0;
        };
        let first = last / RANK_BLOCK * RANK_BLOCK;
        let ranges = self.ranges(first, end);
        let [a, b] = host.factors();
        let mut copied = 0;
        for ((from, to), range) in [(a, &self.a), (b, &self.b)].into_iter().zip(ranges) {
            let from = &from[range.clone()];
            // SAFETY: 1. The range lies within the buffer: it was made for this layout. 2. Nobody reads it: readers keep
            // to ranks from `first_rank` on, which are other bytes. 3. Nobody else writes: we hold `copying`.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr().add(range.start), from.len()) };
            copied += from.len();
        }
        // SYNC POINT staged-ranks: releases the block's bytes with its ranks.
        self.first_rank.store(first, Ordering::Release);
        copied
    }

    /// Ranks from this one on are here.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT staged-ranks: acquires the bytes of the ranks that are seen.
        self.first_rank.load(Ordering::Acquire)
    }

    /// Bytes of memory, whether or not they are filled.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.a.bytes() + self.b.bytes()
    }

    /// True if `host` has this copy's shape, scale and kinds.
    pub(super) fn is_of(&self, host: &LoraMatrix) -> bool {
        self.layout == *host.layout()
    }

    /// The factors as kernels read them, from [`Self::first_rank`] on.
    pub(super) fn factors(&self) -> Factors<'_> {
        Factors::new([self.a.as_ptr(), self.b.as_ptr()].map(<*mut u8>::cast_const))
    }

    /// The bytes of ranks `first..end`, where a block starts and ends.
    fn ranges(&self, first: usize, end: usize) -> [Range<usize>; 2] {
        [
            self.layout.a_bytes_before(first)..self.layout.a_bytes_before(end),
            self.layout.b_bytes_before(first)..self.layout.b_bytes_before(end),
        ]
    }
}

impl<'a> Factors<'a> {
    /// The factors of ranks `from..` of `host` as kernels read them: from `staged` if it is given.
    ///
    /// # Panics
    ///
    /// If `staged` is another matrix's, or lacks one of these ranks.
    pub(super) fn of(host: &'a LoraMatrix, staged: Option<&'a StagedMatrix>, from: usize) -> Self {
        match staged {
            None => Self::new(host.factors().map(<[u8]>::as_ptr)),
            Some(staged) => {
                assert!(staged.is_of(host), "the staged copy is of this matrix");
                assert!(staged.first_rank() <= from, "the staged copy has the ranks that no head covers");
                staged.factors()
            }
        }
    }
}
