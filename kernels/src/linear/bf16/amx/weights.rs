//! Tiles of weights from panels of every packing.

use std::marker::PhantomData;

use crate::{
    activations::GROUP,
    element::Element,
    linear::pack::PackedMatrix,
    simd::{
        LANES, Simd,
        amx::bf16::TILE_BYTES,
        avx512::{Avx512, bf16},
    },
};

/// Prefetch distance in codes. The hardware prefetcher stops at 4 KB.
const AHEAD_BYTES: usize = 2048;

/// Panels of weights, in tiles of sixteen pairs of columns by sixteen outputs.
pub(in crate::linear::bf16) trait PanelTiles: Copy {
    /// Returns the tile of a group as the panel has it, or `None` if the group must be unpacked.
    fn tile(self, panel: usize, group: usize) -> Option<*const u8>;

    /// Writes the tiles of a group of `P` panels to `to`, those that [`PanelTiles::tile`] does not return,
    /// and prefetches later weights.
    ///
    /// # Safety
    /// The set is [`Avx512`], panels and group exist, and `to` has room for the tiles.
    unsafe fn unpack<const P: usize>(self, panel: usize, group: usize, to: *mut u8);
}

/// The panels of a packed matrix.
#[derive(Debug)]
pub(super) struct PackedTiles<'a, T>(pub(super) &'a PackedMatrix, pub(super) PhantomData<T>);

impl<T> Clone for PackedTiles<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PackedTiles<'_, T> {}

impl<T: TilePacking> PanelTiles for PackedTiles<'_, T> {
    #[inline(always)]
    fn tile(self, panel: usize, group: usize) -> Option<*const u8> {
        T::tile(self.0, panel, group)
    }

    #[inline(always)]
    unsafe fn unpack<const P: usize>(self, panel: usize, group: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            T::prefetch(self.0, panel, group, P);
            T::unpack(self.0, panel, group, to);
            if P == 2 {
                T::prefetch(self.0, panel + 1, group, P);
                T::unpack(self.0, panel + 1, group, to.wrapping_add(TILE_BYTES));
            }
        }
    }
}

/// A packing as the matrix unit reads it.
pub(super) trait TilePacking {
    /// Bytes of the codes of a group, and of its scales and minima, which follow all codes of a panel.
    const CODES: usize;
    const NUMBERS: usize;

    /// Returns the tile of a group as the panel has it, or `None` if the group must be unpacked.
    #[inline(always)]
    fn tile(_: &PackedMatrix, _panel: usize, _group: usize) -> Option<*const u8> {
        None
    }

    /// Writes the tile of a group to `to`, if [`TilePacking::tile`] is `None`.
    ///
    /// # Safety
    /// The set is [`Avx512`], panel and group exist, and `to` has room for a tile.
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, to: *mut u8);

    /// Prefetches groups that follow in the panel, and in the panel that is read next, `panels` later.
    #[inline(always)]
    fn prefetch(w: &PackedMatrix, panel: usize, group: usize, panels: usize) {
        let numbers = w.columns() / GROUP * Self::CODES;
        prefetch_ahead(w, panel, panels, (0, numbers), group * Self::CODES, Self::CODES, AHEAD_BYTES);
        let (at, len) = (group * Self::NUMBERS, w.columns() / GROUP * Self::NUMBERS);
        prefetch_ahead(w, panel, panels, (numbers, len), at, 1, AHEAD_BYTES / 8);
    }

    /// Prefetches a group of a panel, which need not exist.
    #[inline(always)]
    fn prefetch_group(w: &PackedMatrix, panel: usize, group: usize) {
        w.prefetch(panel, group * Self::CODES, Self::CODES);
        let numbers = w.columns() / GROUP * Self::CODES + group * Self::NUMBERS;
        w.prefetch(panel, numbers, Self::NUMBERS);
    }
}

pub(super) struct Four8;
pub(super) struct FourMinimum;
pub(super) struct FourE2m1;
pub(super) struct Five16;
pub(super) struct FiveMinimum;
pub(super) struct Six32Halves;
pub(super) struct Eight128;
pub(super) struct Bf16;
/// Weights of 32 or 16 bits.
pub(super) struct Floats<E>(PhantomData<E>);

/// Prefetches `bytes` that lie `ahead` after `at` in a part of a panel, `len` bytes from `start` on. The end
/// of the part is followed by that of the panel that is read next, `panels` later.
#[inline(always)]
fn prefetch_ahead(
    w: &PackedMatrix,
    panel: usize,
    panels: usize,
    (start, len): (usize, usize),
    at: usize,
    bytes: usize,
    ahead: usize,
) {
    let (mut at, mut panel) = (at + ahead, panel);
    if at >= len {
        at -= len;
        panel += panels;
    }
    w.prefetch(panel, start + at, bytes);
}

/// Returns codes and numbers of a group.
#[inline(always)]
fn group_of<T: TilePacking>(w: &PackedMatrix, panel: usize, group: usize) -> (*const u8, *const u16) {
    let codes = w.panel(panel);
    let numbers = codes.wrapping_add(w.columns() / GROUP * T::CODES + group * T::NUMBERS);
    (codes.wrapping_add(group * T::CODES), numbers.cast())
}

macro_rules! integer_packings {
    ($($packing:ident, $codes:literal, $numbers:literal, $unpack:expr;)*) => {$(
        impl TilePacking for $packing {
            const CODES: usize = $codes;
            const NUMBERS: usize = $numbers;

            #[inline(always)]
            unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, to: *mut u8) {
                let (codes, numbers) = group_of::<Self>(w, panel, group);
                // SAFETY: the caller guarantees the group and the room.
                unsafe { $unpack(codes, numbers, w.unit(), to) };
            }
        }
    )*};
}

integer_packings! {
    Four8, 256, 32, bf16::four_zero;
    FourMinimum, 256, 64, bf16::four_minimum;
    FourE2m1, 256, 32, bf16::four_e2m1;
    Five16, 320, 32, bf16::five_zero;
    FiveMinimum, 320, 64, bf16::five_minimum;
    Six32Halves, 384, 64, bf16::six_halves;
    Eight128, 512, 32, bf16::eight_zero;
}

impl TilePacking for Bf16 {
    const CODES: usize = TILE_BYTES;
    const NUMBERS: usize = 0;

    #[inline(always)]
    fn tile(w: &PackedMatrix, panel: usize, group: usize) -> Option<*const u8> {
        let is_whole = (group + 1) * GROUP <= w.columns();
        is_whole.then(|| w.panel(panel).wrapping_add(group * TILE_BYTES))
    }

    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, to: *mut u8) {
        if (group + 1) * GROUP > w.columns() {
            let at = group * TILE_BYTES;
            // SAFETY: the caller guarantees the group and the room.
            unsafe {
                to.write_bytes(0, TILE_BYTES);
                to.copy_from_nonoverlapping(w.panel(panel).add(at), w.panel_bytes() - at);
            }
        }
    }

    #[inline(always)]
    fn prefetch(w: &PackedMatrix, panel: usize, group: usize, panels: usize) {
        let len = w.panel_bytes();
        prefetch_ahead(w, panel, panels, (0, len), group * TILE_BYTES, TILE_BYTES, AHEAD_BYTES);
    }
}

impl<E: Element> TilePacking for Floats<E> {
    const CODES: usize = GROUP * LANES * size_of::<E>();
    const NUMBERS: usize = 0;

    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, to: *mut u8) {
        let columns = w.columns();
        let from = w.panel(panel).cast::<E>();
        let mut pair = 0;
        while pair < GROUP / 2 {
            let k = group * GROUP + 2 * pair;
            // SAFETY: the caller guarantees the group and the room; columns beyond the end are zeros.
            unsafe {
                let zero = Avx512::splat(0.0);
                let even = if k < columns { E::load::<Avx512>(from.add(k * LANES)) } else { zero };
                let odd = if k + 1 < columns { E::load::<Avx512>(from.add((k + 1) * LANES)) } else { zero };
                bf16::floats(even, odd, to.add(pair * 64));
            }
            pair += 1;
        }
    }

    #[inline(always)]
    fn prefetch(w: &PackedMatrix, panel: usize, group: usize, panels: usize) {
        let len = w.panel_bytes();
        prefetch_ahead(w, panel, panels, (0, len), group * Self::CODES, Self::CODES, AHEAD_BYTES);
    }
}

/// Evaluates an expression with the alias `T` for the [`TilePacking`] of a packing.
macro_rules! with_packing {
    ($packing:expr, $alias:ident => $run:expr) => {{
        use crate::linear::form::Packing;
        macro_rules! with {
            ($type:ty) => {{
                type $alias = $type;
                $run
            }};
        }
        match $packing {
            Packing::F32 => with!(crate::linear::bf16::amx::weights::Floats<f32>),
            Packing::F16 => with!(crate::linear::bf16::amx::weights::Floats<u16>),
            Packing::Bf16 => with!(crate::linear::bf16::amx::weights::Bf16),
            Packing::Four8 => with!(crate::linear::bf16::amx::weights::Four8),
            Packing::FourMinimum => with!(crate::linear::bf16::amx::weights::FourMinimum),
            Packing::FourE2m1 => with!(crate::linear::bf16::amx::weights::FourE2m1),
            Packing::Five16 => with!(crate::linear::bf16::amx::weights::Five16),
            Packing::FiveMinimum => with!(crate::linear::bf16::amx::weights::FiveMinimum),
            Packing::Six32Halves => with!(crate::linear::bf16::amx::weights::Six32Halves),
            Packing::Eight128 => with!(crate::linear::bf16::amx::weights::Eight128),
        }
    }};
}
pub(super) use with_packing;
