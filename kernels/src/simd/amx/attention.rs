//! Products of bf16 for attention, on tiles of rows by sixteen positions or columns.

use super::{
    ROW_BYTES, Registers, TileConfig,
    bf16::{add, zero},
    load, store,
};

/// The registers:
///
/// ```text
/// 0 to 3   sums, [rows, 16] floats
/// 4        queries, [rows, 32] bf16       5   weights, [rows, 16] bf16
/// 6        keys, [16, 16 x 2] bf16        7   values, [8, 16 x 2] bf16
/// ```
///
/// The tile registers belong to this thread until `drop` releases them. The unit renames registers, so one
/// register for each factor suffices: loads overlap products.
pub(crate) struct AmxAttention(Registers);

impl AmxAttention {
    /// Configures this thread's registers for tiles of `rows` rows, 1 to 16.
    ///
    /// # Safety
    /// The unit multiplies bf16, and the conditions of [`Tiles::lay_out`](super::Tiles::lay_out) hold.
    #[inline(always)]
    pub(crate) unsafe fn lay_out(rows: usize) -> Self {
        let rows = rows as u8;
        let layout =
            TileConfig::of([64, 64, 64, 64, 64, 32, 64, 64], [rows, rows, rows, rows, rows, rows, 16, 8]);
        // SAFETY: the caller upholds this function's contract.
        Self(unsafe { Registers::lay_out(&layout) })
    }

    /// Sets sums 0 to 3 to zero.
    #[inline(always)]
    pub(crate) fn clear(&self, sum: usize) {
        match sum {
            0 => zero::<0>(),
            1 => zero::<1>(),
            2 => zero::<2>(),
            _ => zero::<3>(),
        }
    }

    /// Loads sums 0 to 3; rows are `stride` bytes apart.
    ///
    /// # Safety
    /// `from` is valid for 16 floats of each row.
    #[inline(always)]
    pub(crate) unsafe fn load_sum(&self, sum: usize, from: *const f32, stride: usize) {
        let from = from.cast();
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            match sum {
                0 => load::<0>(from, stride),
                1 => load::<1>(from, stride),
                2 => load::<2>(from, stride),
                _ => load::<3>(from, stride),
            }
        }
    }

    /// Stores sums 0 to 3 as [`AmxAttention::load_sum`] loads them.
    ///
    /// # Safety
    /// `to` is valid for 16 floats of each row.
    #[inline(always)]
    pub(crate) unsafe fn store_sum(&self, sum: usize, to: *mut f32, stride: usize) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            match sum {
                0 => store::<0>(to, stride),
                1 => store::<1>(to, stride),
                2 => store::<2>(to, stride),
                _ => store::<3>(to, stride),
            }
        }
    }

    /// Loads queries; rows are 64 bytes apart.
    ///
    /// # Safety
    /// `from` is valid for 32 columns of each row.
    #[inline(always)]
    pub(crate) unsafe fn load_queries(&self, from: *const u16) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { load::<4>(from.cast(), ROW_BYTES) };
    }

    /// Loads weights; rows are `stride` bytes apart.
    ///
    /// # Safety
    /// `from` is valid for 16 positions of each row.
    #[inline(always)]
    pub(crate) unsafe fn load_weights(&self, from: *const u16, stride: usize) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { load::<5>(from.cast(), stride) };
    }

    /// Loads keys: 16 pairs of columns by 16 positions.
    ///
    /// # Safety
    /// `from` is valid for 1 KB.
    #[inline(always)]
    pub(crate) unsafe fn load_keys(&self, from: *const u8) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { load::<6>(from, ROW_BYTES) };
    }

    /// Loads values: 8 pairs of positions by 16 columns; pairs are `stride` bytes apart.
    ///
    /// # Safety
    /// `from` is valid for 16 columns of each pair.
    #[inline(always)]
    pub(crate) unsafe fn load_values(&self, from: *const u8, stride: usize) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { load::<7>(from, stride) };
    }

    /// Adds the products of queries and keys to one of the sums 0 to 3, as
    /// [`AmxBf16::add_products`](super::bf16::AmxBf16::add_products) does.
    #[inline(always)]
    pub(crate) fn add_scores(&self, sum: usize) {
        match sum {
            0 => add::<0, 4, 6>(),
            1 => add::<1, 4, 6>(),
            2 => add::<2, 4, 6>(),
            _ => add::<3, 4, 6>(),
        }
    }

    /// Adds the products of weights and values to one of the sums 0 to 3; chains have 8 products.
    #[inline(always)]
    pub(crate) fn add_values(&self, sum: usize) {
        match sum {
            0 => add::<0, 5, 7>(),
            1 => add::<1, 5, 7>(),
            2 => add::<2, 5, 7>(),
            _ => add::<3, 5, 7>(),
        }
    }
}
