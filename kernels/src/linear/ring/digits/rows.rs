//! Rows of words, cut into tiles of digits.

use std::ops::Range;

use crate::{
    isa::Isa,
    linear::ring::bytes::{transposed, with_signs},
    pool::Pool,
    simd::{
        Kernel, Simd,
        amx::squares::{DEPTH, DIGITS, TILE_BYTES},
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
pub(super) struct Rows {
    depths: usize,
    /// `[rows / 16, depths, DIGITS]`.
    tiles: Vec<Tile>,
}

impl Rows {
    /// Those of some columns of `rows` rows, which have `stride` words each.
    pub(super) fn of(
        pool: &mut Pool,
        isa: Isa,
        side: Side,
        words: &[u64],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
    ) -> Self {
        let depths = columns.len().div_ceil(DEPTH);
        let mut tiles = vec![Tile([0; TILE_BYTES]); rows.div_ceil(SIDE) * depths * DIGITS];
        let to = To(tiles.as_mut_ptr());
        pool.run(rows, |row| {
            let words = &words[row * stride..][columns.clone()];
            let tiles = to.at(row / SIDE * depths * DIGITS);
            isa.dispatch(Cut { words, side, tiles, row: row % SIDE });
        });
        Self { depths, tiles }
    }

    /// The digits of rows `16 * side` to `16 * side + 15`, from element `64 * depth` on.
    #[inline(always)]
    pub(super) fn tiles(&self, side: usize, depth: usize) -> *const u8 {
        self.tiles.as_ptr().wrapping_add((side * self.depths + depth) * DIGITS).cast()
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
struct Cut<'a> {
    words: &'a [u64],
    side: Side,
    tiles: *mut Tile,
    row: usize,
}

impl Kernel for Cut<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (eight, words) in self.words.chunks(8).enumerate() {
            let mut padded = [0; 8];
            padded[..words.len()].copy_from_slice(words);
            let (depth, at) = (eight / (DEPTH / 8), eight % (DEPTH / 8));
            for (digit, bytes) in transposed(padded.map(with_signs)).into_iter().enumerate() {
                let tile = self.tiles.wrapping_add(depth * DIGITS + digit).cast::<u8>();
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
