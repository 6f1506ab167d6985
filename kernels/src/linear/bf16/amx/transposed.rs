//! Tiles of transposed weights: pairs of outputs by sixteen inputs.
//!
//! A group of two packed panels is unpacked to tiles of the forward product, and these are transposed. The
//! transposition costs twice the unpacking, which all rows of a training step share.

use std::mem::MaybeUninit;

use super::{
    super::stacked::{GROUP_PANELS, StackedParts},
    weights::{PanelTiles, TilePacking, with_packing},
};
use crate::{
    linear::pack::PackedMatrix,
    simd::{
        Kernel, Simd,
        amx::bf16::TILE_BYTES,
        avx512::{Avx512, bf16},
    },
};

/// Bytes of the rows of a tile that one packed panel gives.
const PANEL_BYTES: usize = TILE_BYTES / GROUP_PANELS;

impl PanelTiles for StackedParts<'_> {
    #[inline(always)]
    fn tile(self, _panel: usize, _group: usize) -> Option<*const u8> {
        None
    }

    #[inline(always)]
    unsafe fn unpack<const P: usize>(self, panel: usize, group: usize, to: *mut u8) {
        debug_assert!(panel.is_multiple_of(2), "both panels are halves of a group of columns");
        let (w, first) = self.locate(group);
        Avx512::call(Transpose::<P> { w, first, columns: panel / 2, to });
    }
}

/// Two panels of `w` from `first` on, at the group `columns`.
struct Transpose<'a, const P: usize> {
    w: &'a PackedMatrix,
    first: usize,
    columns: usize,
    to: *mut u8,
}

#[repr(align(64))]
struct TileScratch(MaybeUninit<[u8; TILE_BYTES]>);

impl<const P: usize> Kernel for Transpose<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        with_packing!(self.w.packing(), T => self.panels::<T>());
    }
}

impl<const P: usize> Transpose<'_, P> {
    #[inline(always)]
    fn panels<T: TilePacking>(self) {
        let Self { w, first, columns, to } = self;
        let mut scratch = TileScratch(MaybeUninit::uninit());
        let unpacked = scratch.0.as_mut_ptr().cast::<u8>();
        for side in 0..GROUP_PANELS {
            let (panel, to) = (first + side, to.wrapping_add(side * PANEL_BYTES));
            T::prefetch_group(w, panel + GROUP_PANELS, columns);
            // SAFETY: the caller of `unpack` guarantees the group and the room; a panel that exists is unpacked.
            unsafe {
                if panel < w.panels() {
                    let tile = T::tile(w, panel, columns);
                    if tile.is_none() {
                        T::unpack(w, panel, columns, unpacked);
                    }
                    bf16::transpose::<P>(tile.unwrap_or(unpacked), to);
                } else {
                    for tile in 0..P {
                        to.add(tile * TILE_BYTES).write_bytes(0, PANEL_BYTES);
                    }
                }
            }
        }
    }
}
