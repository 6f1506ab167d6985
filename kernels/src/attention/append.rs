//! Rows of keys and values, written to their blocks.

use super::layout::{BLOCK_TOKENS, KvRows, KvShape, QkvLayout};
use crate::{
    element::Element,
    simd::{Kernel, LANES, Simd},
};

/// Writes the keys and values of rows to their blocks.
pub(super) struct Append<'a, E> {
    pub(super) data: *mut E,
    pub(super) shape: KvShape,
    pub(super) layer: usize,
    pub(super) qkv: &'a [f32],
    pub(super) layout: QkvLayout,
    pub(super) rows: KvRows<'a>,
}

impl<E: Element> Kernel for Append<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { shape, layout, rows, .. } = self;
        for i in 0..rows.rows {
            let position = rows.position + i;
            let block = rows.blocks[position / BLOCK_TOKENS] as usize;
            let slot = position % BLOCK_TOKENS;
            let row = &self.qkv[(rows.first_row + i) * layout.stride()..][..layout.stride()];
            for head in 0..shape.kv_heads {
                let at = block * shape.block_elements()
                    + (self.layer * shape.kv_heads + head) * shape.head_elements();
                let keys = row[layout.key_column() + head * shape.head_dim..].as_ptr();
                let values = row[layout.value_column() + head * shape.head_dim..].as_ptr();
                // SAFETY: `check` has seen that the block exists and the row has all heads; `append` borrows the pool
                // exclusively.
                unsafe {
                    let to = self.data.add(at);
                    store_key::<S, E>(to.add(slot), keys, shape.head_dim);
                    let to = to.add(shape.key_elements() + slot * shape.padded());
                    store_value::<S, E>(to, values, shape.head_dim);
                }
            }
        }
    }
}

/// Features go a block's width apart.
#[inline(always)]
unsafe fn store_key<S: Simd, E: Element>(to: *mut E, key: *const f32, head_dim: usize) {
    let mut c = 0;
    while c < head_dim {
        let n = LANES.min(head_dim - c);
        // SAFETY: the caller's: the key has `head_dim` features, the block a column of as many. `Element` types are
        // plain numbers, so a zeroed array of them is one.
        unsafe {
            let mut lanes: [E; LANES] = std::mem::zeroed();
            E::store::<S>(lanes.as_mut_ptr(), S::load_head(key.add(c), n));
            for (i, &lane) in lanes.iter().enumerate().take(n) {
                *to.add((c + i) * BLOCK_TOKENS) = lane;
            }
        }
        c += LANES;
    }
}

/// The padding of a value is written too: as zeroes.
#[inline(always)]
unsafe fn store_value<S: Simd, E: Element>(to: *mut E, value: *const f32, head_dim: usize) {
    let mut c = 0;
    while c < head_dim {
        // SAFETY: the caller's: the value has `head_dim` features, its row in the block as many, padded to 16.
        unsafe { E::store::<S>(to.add(c), S::load_head(value.add(c), LANES.min(head_dim - c))) };
        c += LANES;
    }
}
