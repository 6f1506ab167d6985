//! Rows of numbers of `B` bytes, cut into tiles of as many digits.

use std::ops::Range;

use crate::{
    isa::Isa,
    linear::ring::bytes::{transposed, with_signs, word},
    pool::Pool,
    simd::{
        Kernel, Simd,
        amx::squares::{DEPTH, TILE_BYTES},
    },
};

/// Rows of a tile.
pub(super) const SIDE: usize = 16;

/// Sixteen rows of bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([u8; TILE_BYTES]);

/// On which side of a product rows are, and so how their tiles lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// `[16, 64]`.
    Left,
    /// `[64 / 4, 16, 4]`.
    Right,
}

/// Rows as tiles, with zeroes where there is no row and no element.
pub(super) struct Rows<const B: usize> {
    depths: usize,
    /// `[rows / 16, depths, B]`.
    tiles: Vec<Tile>,
}

impl<const B: usize> Rows<B> {
    /// Those of some columns of `rows` rows, which have `stride` numbers each.
    pub(super) fn of(
        pool: &mut Pool,
        isa: Isa,
        side: Side,
        numbers: &[[u8; B]],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
    ) -> Self {
        let depths = columns.len().div_ceil(DEPTH);
        let mut tiles = vec![Tile([0; TILE_BYTES]); rows.div_ceil(SIDE) * depths * B];
        let to = To(tiles.as_mut_ptr());
        pool.run(rows, |row| {
            let numbers = &numbers[row * stride..][columns.clone()];
            let tiles = to.at(row / SIDE * depths * B);
            isa.dispatch(Cut { numbers, side, tiles, row: row % SIDE });
        });
        Self { depths, tiles }
    }

    /// The digits of rows `16 * side` to `16 * side + 15`, from element `64 * depth` on.
    #[inline(always)]
    pub(super) fn tiles(&self, side: usize, depth: usize) -> *const u8 {
        self.tiles.as_ptr().wrapping_add((side * self.depths + depth) * B).cast()
    }
}

struct To(*mut Tile);
// SAFETY: chunks write disjoint rows of a buffer that outlives the parallel region.
unsafe impl Sync for To {}

impl To {
    fn at(&self, tile: usize) -> *mut Tile {
        self.0.wrapping_add(tile)
    }
}

/// Cuts a row, the `row`th of those whose tiles begin at `tiles`.
struct Cut<'a, const B: usize> {
    numbers: &'a [[u8; B]],
    side: Side,
    tiles: *mut Tile,
    row: usize,
}

impl<const B: usize> Kernel for Cut<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (eight, numbers) in self.numbers.chunks(8).enumerate() {
            let mut words = [0; 8];
            for (word_of, number) in words.iter_mut().zip(numbers) {
                *word_of = word(number);
            }
            let (depth, at) = (eight / (DEPTH / 8), eight % (DEPTH / 8));
            for (digit, bytes) in transposed(words.map(with_signs)).into_iter().enumerate().take(B) {
                let tile = self.tiles.wrapping_add(depth * B + digit).cast::<u8>();
                // SAFETY: the tile exists, and this chunk alone writes what is of this row.
                unsafe {
                    match self.side {
                        Side::Left => {
                            let to = tile.add(self.row * DEPTH + 8 * at);
                            to.cast::<u64>().write_unaligned(bytes);
                        }
                        Side::Right => {
                            let to = tile.cast::<u32>().add(2 * at * SIDE + self.row);
                            to.write(bytes as u32);
                            to.add(SIDE).write((bytes >> 32) as u32);
                        }
                    }
                }
            }
        }
    }
}
