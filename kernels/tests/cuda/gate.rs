//! The gate of a feed-forward block.

use kernels::{cuda::gate::silu_mul, lora::NumberKind, reference};

use crate::support::{KINDS, Random, assert_close, epsilon, matrix, rounded, stream, unwritten};

#[test]
fn the_gate_is_that_of_the_reference_for_every_kind_and_width() {
    let Some(stream) = stream() else { return };
    let mut random = Random::new(1);
    for kind in KINDS {
        for (rows, width) in [(1, 1536), (3, 1536), (5, 11), (1, 1), (2, 4), (33, 264)] {
            let values: Vec<f32> = random.normals(2 * rows * width).iter().map(|value| 5.0 * value).collect();
            let gate_up = rounded(kind, &values);
            let gated = |row: &[f32]| -> Vec<f32> {
                (0..width).map(|c| reference::silu_mul(row[c], row[width + c])).collect()
            };
            let want: Vec<f32> = gate_up.chunks(2 * width).flat_map(gated).collect();
            let mut out = unwritten(&stream, kind, rows, width);
            silu_mul(&stream, &matrix(&stream, kind, 2 * width, &gate_up), &mut out).unwrap();
            let what = format!("{kind:?} {rows}x{width}");
            assert_close(&what, &out.to_vec(&stream).unwrap(), &want, 1e-6 + epsilon(kind));
        }
    }
}

#[test]
fn gates_far_from_zero_are_closed_or_open() {
    let Some(stream) = stream() else { return };
    let mut out = unwritten(&stream, NumberKind::F32, 1, 4);
    let gate_up = [-1e30, -200.0, 200.0, 1e30, 3.0, 3.0, 3.0, 1.0];
    silu_mul(&stream, &matrix(&stream, NumberKind::F32, 8, &gate_up), &mut out).unwrap();
    assert_eq!(out.to_vec(&stream).unwrap(), [0.0, 0.0, 600.0, 1e30]);
}
