//! Cuts rows of `B`-byte integers into tiles of `B` digits.

use std::ops::Range;

use crate::{
    activations::GROUP,
    isa::Isa,
    pool::ThreadPool,
    simd::{
        Kernel, Simd,
        amx::gemm::{DEPTH, TILE_BYTES},
    },
};

pub(super) const SIDE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct ByteTile([u8; TILE_BYTES]);

/// Side of a product that rows are on, which determines the layout of their tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandSide {
    /// Left side, `[16, 64]` bytes.
    Left,
    /// Right side, `[64 / 4, 16, 4]` bytes.
    Right,
}

/// Rows as tiles, padded with zeros.
pub(super) struct DigitRows<const B: usize> {
    depths: usize,
    /// `[rows / 16, depths, B]`.
    tiles: Vec<ByteTile>,
}

impl<const B: usize> DigitRows<B> {
    /// Cuts some columns of `rows` rows, which have `stride` integers each.
    pub(super) fn of(
        pool: &mut ThreadPool,
        isa: Isa,
        side: OperandSide,
        numbers: &[[u8; B]],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
    ) -> Self {
        let depths = columns.len().div_ceil(DEPTH);
        let mut tiles = vec![ByteTile([0; TILE_BYTES]); rows.div_ceil(SIDE) * depths * B];
        let to = TilePtr(tiles.as_mut_ptr());
        pool.run(rows, |row| {
            let numbers = &numbers[row * stride..][columns.clone()];
            let tiles = to.at(row / SIDE * depths * B);
            isa.dispatch(RowCut { numbers, side, tiles, row: row % SIDE });
        });
        Self { depths, tiles }
    }

    /// Returns the digits of rows `16 * side` to `16 * side + 15`, from element `64 * depth` on.
    #[inline(always)]
    pub(super) fn tiles(&self, side: usize, depth: usize) -> *const u8 {
        self.tiles.as_ptr().wrapping_add((side * self.depths + depth) * B).cast()
    }
}

struct TilePtr(*mut ByteTile);
// SAFETY: chunks write disjoint rows of a buffer that outlives the parallel region.
unsafe impl Sync for TilePtr {}

impl TilePtr {
    fn at(&self, tile: usize) -> *mut ByteTile {
        self.0.wrapping_add(tile)
    }
}

/// Cuts row number `row` of those whose tiles begin at `tiles`.
struct RowCut<'a, const B: usize> {
    numbers: &'a [[u8; B]],
    side: OperandSide,
    tiles: *mut ByteTile,
    row: usize,
}

impl<const B: usize> Kernel for RowCut<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (groups, rest) = self.numbers.as_chunks();
        for (at, group) in groups.iter().enumerate() {
            self.put(at, S::digits(group));
        }
        if !rest.is_empty() {
            let mut group = [[0; B]; GROUP];
            group[..rest.len()].copy_from_slice(rest);
            self.put(groups.len(), S::digits(&group));
        }
    }
}

impl<const B: usize> RowCut<'_, B> {
    #[inline(always)]
    fn put(&self, group: usize, digits: [[u8; GROUP]; B]) {
        let (depth, at) = (group / (DEPTH / GROUP), group % (DEPTH / GROUP));
        for (digit, bytes) in digits.iter().enumerate() {
            let tile = self.tiles.wrapping_add(depth * B + digit);
            // SAFETY: the tile exists, and only this chunk writes the bytes of this row.
            unsafe {
                match self.side {
                    OperandSide::Left => {
                        tile.cast::<u8>()
                            .add(self.row * DEPTH + at * GROUP)
                            .cast::<[u8; GROUP]>()
                            .write(*bytes);
                    }
                    OperandSide::Right => {
                        for (four, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
                            let to = tile.cast::<[u8; 4]>().add((at * GROUP / 4 + four) * SIDE + self.row);
                            to.write(*bytes);
                        }
                    }
                }
            }
        }
    }
}
