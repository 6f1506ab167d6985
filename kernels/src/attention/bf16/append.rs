//! Writes keys and values of rows to blocks of bf16.

use crate::{
    attention::{
        append::Append,
        bf16_rounding::to_bf16,
        layout::{BLOCK_TOKENS, MAX_HEAD_DIM},
    },
    simd::{Kernel, Simd},
};

/// [`Append`] to blocks of bf16.
pub(in crate::attention) struct AppendBf16<'a>(pub(in crate::attention) Append<'a>);

impl Kernel for AppendBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let shape = self.0.shape;
        self.0.for_each_head(|to, slot, key, value| {
            // SAFETY: `check` has verified that the block exists; `append` borrows the pool exclusively.
            unsafe {
                let to = to.cast::<u16>();
                store_key(to.cast(), slot, key, shape.padded_key());
                store_value(to.add(shape.key_elements()).cast(), slot, value, shape.padded());
            }
        });
    }
}

/// Rounds a key or a value of a head; the columns beyond its end are zeros.
#[inline(always)]
fn rounded(head: &[f32]) -> [u16; MAX_HEAD_DIM] {
    let mut rounded = [0; MAX_HEAD_DIM];
    for (to, &x) in rounded.iter_mut().zip(head) {
        *to = to_bf16(x);
    }
    rounded
}

/// Stores a key in its slot of `[padded / 2][16]` pairs of columns.
#[inline(always)]
unsafe fn store_key(to: *mut u32, slot: usize, key: &[f32], padded: usize) {
    let key = rounded(key);
    for (i, pair) in key[..padded].chunks_exact(2).enumerate() {
        let pair = u32::from(pair[0]) | u32::from(pair[1]) << 16;
        // SAFETY: the caller guarantees the keys of a block.
        unsafe { to.add(i * BLOCK_TOKENS + slot).write(pair) };
    }
}

/// Stores a value in its half of the pairs of positions, `[8][padded]`.
#[inline(always)]
unsafe fn store_value(to: *mut u32, slot: usize, value: &[f32], padded: usize) {
    let value = rounded(value);
    let (shift, other) = if slot.is_multiple_of(2) { (0, 0xffff_0000) } else { (16, 0xffff) };
    for (column, &x) in value[..padded].iter().enumerate() {
        // SAFETY: the caller guarantees the values of a block.
        let pair = unsafe { &mut *to.add(slot / 2 * padded + column) };
        *pair = *pair & other | u32::from(x) << shift;
    }
}
