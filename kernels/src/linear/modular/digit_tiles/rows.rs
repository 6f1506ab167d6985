//! Rows of numbers of `B` bytes, cut into tiles of as many digits.

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

/// Rows of a tile.
pub(super) const SIDE: usize = 16;

/// Sixteen rows of bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct ByteTile([u8; TILE_BYTES]);

/// On which side of a product rows are, and so how their tiles lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandSide {
    /// `[16, 64]`.
    Left,
    /// `[64 / 4, 16, 4]`.
    Right,
}

/// Rows as tiles, with zeroes where there is no row and no element.
pub(super) struct DigitRows<const B: usize> {
    depths: usize,
    /// `[rows / 16, depths, B]`.
    tiles: Vec<ByteTile>,
}

impl<const B: usize> DigitRows<B> {
    /// Those of some columns of `rows` rows, which have `stride` numbers each.
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

    /// The digits of rows `16 * side` to `16 * side + 15`, from element `64 * depth` on.
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

/// Cuts a row, the `row`th of those whose tiles begin at `tiles`.
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
    /// Writes the digits of a group to their tiles.
    #[inline(always)]
    fn put(&self, group: usize, digits: [[u8; GROUP]; B]) {
        let (depth, at) = (group / (DEPTH / GROUP), group % (DEPTH / GROUP));
        for (digit, bytes) in digits.iter().enumerate() {
            let tile = self.tiles.wrapping_add(depth * B + digit);
            // SAFETY: the tile exists, and this chunk alone writes what is of this row.
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
