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

pub(super) trait TileWeights {
    /// Returns the tile of a group as the panel has it, or `None` if the group must be unpacked.
    #[inline(always)]
    fn tile(_: &PackedMatrix, _panel: usize, _group: usize) -> Option<*const u8> {
        None
    }

    /// Writes the tile of a group to `to`, if [`TileWeights::tile`] is `None`, and prefetches weights;
    /// `panels` are read side by side.
    ///
    /// # Safety
    /// The set is [`Avx512`], panel and group exist, and `to` has room for a tile.
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8);
}

pub(super) struct Four8;
pub(super) struct FourMinimum;
pub(super) struct FourE2m1;
pub(super) struct Eight128;
pub(super) struct EightMinimum;
pub(super) struct Eight128Halves;
pub(super) struct Bf16;
/// Weights of 32 or 16 bits.
pub(super) struct Floats<E>(PhantomData<E>);

/// Prefetches `BYTES` that lie `AHEAD` after `at` in a part of a panel, `len` bytes from `start` on. The end
/// of the part is followed by that of the panel that is read next, `panels` later.
#[inline(always)]
fn prefetch_ahead<const BYTES: usize, const AHEAD: usize>(
    w: &PackedMatrix,
    panel: usize,
    panels: usize,
    (start, len): (usize, usize),
    at: usize,
) {
    let mut ahead = at + AHEAD;
    let mut panel = panel;
    if ahead >= len {
        ahead -= len;
        panel += panels;
    }
    w.prefetch(panel, start + ahead, BYTES);
}

/// Returns codes and numbers of a group, and prefetches later ones.
#[inline(always)]
unsafe fn parts<const CODES: usize, const NUMBERS: usize>(
    w: &PackedMatrix,
    panel: usize,
    group: usize,
    panels: usize,
) -> (*const u8, *const u16) {
    let groups = w.columns() / GROUP;
    let behind = groups * CODES;
    let number_bytes = groups * NUMBERS;
    if CODES == 256 {
        prefetch_ahead::<256, AHEAD_BYTES>(w, panel, panels, (0, behind), group * CODES);
    } else {
        prefetch_ahead::<512, AHEAD_BYTES>(w, panel, panels, (0, behind), group * CODES);
    }
    prefetch_ahead::<1, { AHEAD_BYTES / 8 }>(w, panel, panels, (behind, number_bytes), group * NUMBERS);
    let codes = w.panel(panel);
    (codes.wrapping_add(group * CODES), codes.wrapping_add(behind + group * NUMBERS).cast())
}

impl TileWeights for Four8 {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, scales) = parts::<256, 32>(w, panel, group, panels);
            bf16::four_zero(codes, scales, w.unit(), to);
        }
    }
}

impl TileWeights for FourMinimum {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, numbers) = parts::<256, 64>(w, panel, group, panels);
            bf16::four_minimum(codes, numbers, w.unit(), to);
        }
    }
}

impl TileWeights for FourE2m1 {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, scales) = parts::<256, 32>(w, panel, group, panels);
            bf16::four_e2m1(codes, scales, w.unit(), to);
        }
    }
}

impl TileWeights for Eight128 {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, scales) = parts::<512, 32>(w, panel, group, panels);
            bf16::eight_zero::<8>(codes, scales, w.unit(), to);
        }
    }
}

impl TileWeights for EightMinimum {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, numbers) = parts::<512, 64>(w, panel, group, panels);
            bf16::eight_minimum(codes, numbers, w.unit(), to);
        }
    }
}

impl TileWeights for Eight128Halves {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            let (codes, scales) = parts::<512, 64>(w, panel, group, panels);
            bf16::eight_zero::<4>(codes, scales, w.unit(), to);
            let second = scales.add(LANES);
            bf16::eight_zero::<4>(codes.add(256), second, w.unit(), to.add(TILE_BYTES / 2));
        }
    }
}

impl TileWeights for Bf16 {
    #[inline(always)]
    fn tile(w: &PackedMatrix, panel: usize, group: usize) -> Option<*const u8> {
        let is_whole = (group + 1) * GROUP <= w.columns();
        is_whole.then(|| w.panel(panel).wrapping_add(group * TILE_BYTES))
    }

    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        let at = group * TILE_BYTES;
        prefetch_ahead::<TILE_BYTES, AHEAD_BYTES>(w, panel, panels, (0, w.panel_bytes()), at);
        if (group + 1) * GROUP > w.columns() {
            let bytes = w.panel_bytes() - at;
            // SAFETY: the caller guarantees the group and the room.
            unsafe {
                to.write_bytes(0, TILE_BYTES);
                to.copy_from_nonoverlapping(w.panel(panel).add(at), bytes);
            }
        }
    }
}

impl<E: Element> TileWeights for Floats<E> {
    #[inline(always)]
    unsafe fn unpack(w: &PackedMatrix, panel: usize, group: usize, panels: usize, to: *mut u8) {
        let bytes = w.columns() * LANES * size_of::<E>();
        let at = group * GROUP * LANES * size_of::<E>();
        if size_of::<E>() == 4 {
            prefetch_ahead::<2048, AHEAD_BYTES>(w, panel, panels, (0, bytes), at);
        } else {
            prefetch_ahead::<1024, AHEAD_BYTES>(w, panel, panels, (0, bytes), at);
        }
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
}

/// Evaluates an expression with the alias `W` for the [`TileWeights`] of a packing.
macro_rules! with_tile_weights {
    ($packing:expr, $weights:ident => $run:expr) => {{
        use crate::linear::form::Packing;
        macro_rules! with {
            ($type:ty) => {{
                type $weights = $type;
                $run
            }};
        }
        match $packing {
            Packing::F32 => with!(weights::Floats<f32>),
            Packing::F16 => with!(weights::Floats<u16>),
            Packing::Bf16 => with!(weights::Bf16),
            Packing::Four8 => with!(weights::Four8),
            Packing::FourMinimum => with!(weights::FourMinimum),
            Packing::FourE2m1 => with!(weights::FourE2m1),
            Packing::Eight128 => with!(weights::Eight128),
            Packing::EightMinimum => with!(weights::EightMinimum),
            Packing::Eight128Halves => with!(weights::Eight128Halves),
        }
    }};
}
pub(super) use with_tile_weights;
