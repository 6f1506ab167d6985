//! Writes keys and values of rows to KV blocks.

use std::marker::PhantomData;

use super::{
    kv_dtype::{KvElement, scale},
    layout::{BLOCK_TOKENS, KvRows, KvShape, QkvLayout},
};
use crate::simd::{Kernel, LANES, Simd};

/// Writes the keys and values of `rows` to their blocks.
pub(super) struct Append<'a> {
    pub(super) data: *mut u8,
    pub(super) shape: KvShape,
    pub(super) layer: usize,
    pub(super) qkv: &'a [f32],
    pub(super) layout: QkvLayout,
    pub(super) rows: KvRows<'a>,
}

impl Append<'_> {
    /// Calls `store` for each row and key head, with the head's memory in its block, the slot of the row, its
    /// key and its value.
    #[inline(always)]
    pub(super) fn for_each_head(&self, store: impl Fn(*mut u8, usize, &[f32], &[f32])) {
        let Append { data, shape, layer, qkv, layout, rows } = *self;
        for i in 0..rows.rows {
            let position = rows.position + i;
            let block = rows.blocks[position / BLOCK_TOKENS] as usize;
            let row = &qkv[(rows.first_row + i) * layout.stride()..][..layout.stride()];
            for head in 0..shape.kv_heads {
                let key = &row[layout.key_column() + head * shape.head_dim..][..shape.head_dim];
                let value = &row[layout.value_column() + head * shape.head_dim..][..shape.head_dim];
                let at = block * shape.block_bytes() + shape.head_offset(layer, head);
                store(data.wrapping_add(at), position % BLOCK_TOKENS, key, value);
            }
        }
    }
}

/// [`Append`] with elements of type `E`.
pub(super) struct AppendAs<'a, E>(pub(super) Append<'a>, pub(super) PhantomData<E>);

impl<E: KvElement> Kernel for AppendAs<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let shape = self.0.shape;
        self.0.for_each_head(|to, slot, key, value| {
            let (key, value) = (key.as_ptr(), value.as_ptr());
            // SAFETY: `check` has verified that the block exists; `append` borrows the pool exclusively.
            unsafe {
                let to = to.cast::<E>();
                let scales = to.add(shape.head_elements()).cast::<f32>().add(slot);
                let inverse = scaled::<S, E>(scales, key, shape.head_dim);
                store_key::<S, E>(to.add(slot), key, shape.head_dim, inverse);
                let to = to.add(shape.key_elements() + slot * shape.padded());
                let inverse = scaled::<S, E>(scales.add(BLOCK_TOKENS), value, shape.head_dim);
                store_value::<S, E>(to, value, shape.head_dim, inverse);
            }
        });
    }
}

/// Writes the scale of a head's features if `E` is scaled, and returns the factor to multiply them by.
#[inline(always)]
unsafe fn scaled<S: Simd, E: KvElement>(to: *mut f32, features: *const f32, head_dim: usize) -> f32 {
    if !E::SCALED {
        return 1.0;
    }
    let (mut largest, mut sum) = (S::splat(0.0), S::splat(0.0));
    for c in (0..head_dim).step_by(LANES) {
        // SAFETY: the caller guarantees `head_dim` features.
        let v = unsafe { S::load_head(features.add(c), LANES.min(head_dim - c)) };
        largest = S::max(largest, S::abs(v));
        sum = S::add(sum, v);
    }
    let (scale, inverse) = scale(S::max_lane(largest));
    // `max` may skip a NaN, a sum does not: a head with a non-finite feature gets a NaN scale.
    // SAFETY: the caller guarantees that `to` is valid for a scale.
    unsafe { to.write(scale + 0.0 * S::sum(sum)) };
    inverse
}

/// Loads and rounds `count` features, at most sixteen.
#[inline(always)]
unsafe fn rounded<S: Simd, E: KvElement>(features: *const f32, count: usize, inverse: f32) -> S::F {
    // SAFETY: the caller upholds this function's contract.
    let v = unsafe { S::load_head(features, count) };
    if E::SCALED { S::round(S::mul(v, S::splat(inverse))) } else { v }
}

/// Stores a key; its features are `BLOCK_TOKENS` elements apart.
#[inline(always)]
unsafe fn store_key<S: Simd, E: KvElement>(to: *mut E, key: *const f32, head_dim: usize, inverse: f32) {
    let mut c = 0;
    while c < head_dim {
        let n = LANES.min(head_dim - c);
        // SAFETY: the caller guarantees that the key has `head_dim` features and that the block has a column of as
        // many. `KvElement` types are plain numbers, so an all-zero array of them is valid.
        unsafe {
            let mut lanes: [E; LANES] = std::mem::zeroed();
            E::store::<S>(lanes.as_mut_ptr(), rounded::<S, E>(key.add(c), n, inverse));
            for (i, &lane) in lanes.iter().enumerate().take(n) {
                *to.add((c + i) * BLOCK_TOKENS) = lane;
            }
        }
        c += LANES;
    }
}

/// Stores a value and fills its padding with zeros.
#[inline(always)]
unsafe fn store_value<S: Simd, E: KvElement>(to: *mut E, value: *const f32, head_dim: usize, inverse: f32) {
    let mut c = 0;
    while c < head_dim {
        // SAFETY: the caller guarantees that the value has `head_dim` features and that its row in the block has as
        // many, padded to 16.
        unsafe {
            let n = LANES.min(head_dim - c);
            E::store::<S>(to.add(c), rounded::<S, E>(value.add(c), n, inverse));
        }
        c += LANES;
    }
}
