//! Rotary embedding of queries and keys. See `rope.cu`.

use super::{
    CudaError, DeviceVec, Matrix, Norm, Stream,
    launch::{Arg, Shape, by_kind, count, launch},
};
use crate::attention::{MAX_HEAD_DIM, QkvLayout};

/// Warps, and heads, of a block: `WARPS` of `rope.cu`.
const WARPS: usize = 8;

/// Norms the heads of queries and keys where there is a norm, rotates them in place, and multiplies queries
/// with `query_scale`: `(a, b) -> (a cos - b sin, b cos + a sin)` for the halves `a`, `b` of a head, by the angles
/// `positions[row] * frequencies[i]`.
///
/// `positions` has one a row, in its sequence; `frequencies` has `head_dim / 2`, in radians a position.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the shapes do not fit together.
#[allow(clippy::too_many_arguments, reason = "one operation; its operands are what they are")]
pub fn rotate(
    stream: &Stream,
    qkv: &mut Matrix,
    layout: QkvLayout,
    positions: &DeviceVec<u32>,
    frequencies: &DeviceVec<f32>,
    query_norm: Option<Norm<'_>>,
    key_norm: Option<Norm<'_>>,
    query_scale: f32,
) -> Result<(), CudaError> {
    let QkvLayout { heads, kv_heads, head_dim } = layout;
    assert_eq!(qkv.width(), layout.stride(), "rows of queries, keys and values");
    assert!(head_dim.is_multiple_of(2) && head_dim <= MAX_HEAD_DIM, "even heads of at most {MAX_HEAD_DIM}");
    assert!(positions.len() >= qkv.rows(), "a position a row");
    assert_eq!(frequencies.len(), head_dim / 2, "a frequency for each two features of a head");
    for norm in [query_norm, key_norm].into_iter().flatten() {
        assert_eq!(norm.weight.len(), head_dim, "a weight a feature of a head");
    }
    let weight = |norm: Option<Norm<'_>>| Arg::Ptr(norm.map_or(0, |norm| norm.weight.address()));
    let eps = |norm: Option<Norm<'_>>| Arg::F32(norm.map_or(0.0, |norm| norm.eps));
    let arguments = [
        Arg::Ptr(qkv.address()),
        Arg::Ptr(positions.address()),
        Arg::Ptr(frequencies.address()),
        weight(query_norm),
        eps(query_norm),
        weight(key_norm),
        eps(key_norm),
        Arg::F32(query_scale),
        Arg::U32(count(heads)),
        Arg::U32(count(kv_heads)),
        Arg::U32(count(head_dim)),
    ];
    let shape = Shape::plane(qkv.rows(), (heads + kv_heads).div_ceil(WARPS), 32 * count(WARPS));
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sizes were checked: a block takes a row, which has a
    // position, and heads within it. 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, by_kind!("rotate", qkv.kind()), shape, &arguments) }
}
