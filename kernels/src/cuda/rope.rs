//! Rotary embedding of queries and keys; the kernel is in `rope.cu`.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix, Norm,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};
use crate::attention::{MAX_HEAD_DIM, QkvLayout};

/// Warps per block, one per head: `WARPS` of `rope.cu`.
const WARPS: usize = 8;

/// Positions and frequencies of the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Position of each row in its sequence.
    pub positions: &'a DeviceVec<u32>,
    /// Radians per position, one for each pair of rotated features; a head's first features are rotated.
    pub frequencies: &'a DeviceVec<f32>,
    /// Factor of cosines and sines.
    pub magnitude: f32,
}

/// Normalizes the heads of queries and keys where a norm is given, rotates them in place, and multiplies
/// queries by `query_scale`. The rotation of the halves `a`, `b` of a head's rotated features is `(a, b) ->
/// (a cos - b sin, b cos + a sin)` by the angles `positions[row] * frequencies[i]`.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn rotate(
    stream: &CudaStream,
    qkv: &mut Matrix,
    layout: QkvLayout,
    by: Rotation<'_>,
    query_norm: Option<Norm<'_>>,
    key_norm: Option<Norm<'_>>,
    query_scale: f32,
) -> Result<(), CudaError> {
    let QkvLayout { heads, kv_heads, head_dim } = layout;
    assert_eq!(qkv.width(), layout.stride(), "rows of queries, keys and values");
    assert!(head_dim.is_multiple_of(2) && head_dim <= MAX_HEAD_DIM, "even heads of at most {MAX_HEAD_DIM}");
    assert!(by.positions.len() >= qkv.rows(), "a position a row");
    let rotated = 2 * by.frequencies.len();
    assert!(rotated <= head_dim, "a frequency for each two features of a head at most");
    for norm in [query_norm, key_norm].into_iter().flatten() {
        assert_eq!(norm.weight.len(), head_dim, "a weight a feature of a head");
    }
    let weight = |norm: Option<Norm<'_>>| Arg::Ptr(norm.map_or(0, |norm| norm.weight.address()));
    let eps = |norm: Option<Norm<'_>>| Arg::F32(norm.map_or(0.0, |norm| norm.eps));
    let arguments = [
        Arg::Ptr(qkv.address()),
        Arg::Ptr(by.positions.address()),
        Arg::Ptr(by.frequencies.address()),
        Arg::F32(by.magnitude),
        weight(query_norm),
        eps(query_norm),
        weight(key_norm),
        eps(key_norm),
        Arg::F32(query_scale),
        Arg::U32(count(heads)),
        Arg::U32(count(kv_heads)),
        Arg::U32(count(head_dim)),
        Arg::U32(count(rotated)),
    ];
    let shape = LaunchShape::plane(qkv.rows(), (heads + kv_heads).div_ceil(WARPS), 32 * count(WARPS));
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sizes were checked: a block takes a row, which has a
    // position, and heads within it. 3. The output is borrowed exclusively.
    unsafe { launch(stream, by_kind!("rotate", qkv.kind()), shape, &arguments) }
}
