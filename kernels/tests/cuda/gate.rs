//! The gate of a feed-forward block.

use kernels::{cuda::gate::gate_mul, elementwise::Gate, lora::ElementKind, reference};

use crate::support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream, unwritten};

type PlainGate = fn(f32, f32) -> f32;

#[test]
fn the_gate_is_that_of_the_reference_for_every_kind_and_width() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    let gates: [(Gate, PlainGate); 2] =
        [(Gate::Silu, reference::silu_mul), (Gate::GeluTanh, reference::gelu_mul)];
    for (kind, (gate, plain)) in KINDS.into_iter().flat_map(|kind| gates.map(|gate| (kind, gate))) {
        for (rows, width) in [(1, 1536), (3, 1536), (5, 11), (1, 1), (2, 4), (33, 264)] {
            let values: Vec<f32> = random.normals(2 * rows * width).iter().map(|value| 5.0 * value).collect();
            let gate_up = rounded(kind, &values);
            let gated =
                |row: &[f32]| -> Vec<f32> { (0..width).map(|c| plain(row[c], row[width + c])).collect() };
            let want: Vec<f32> = gate_up.chunks(2 * width).flat_map(gated).collect();
            let mut out = unwritten(&stream, kind, rows, width);
            gate_mul(&stream, gate, &matrix(&stream, kind, 2 * width, &gate_up), &mut out).unwrap();
            let what = format!("{gate:?} {kind:?} {rows}x{width}");
            // A polynomial is rounded before its exponential.
            let rounded = if gate == Gate::Silu { 1e-6 } else { 1e-5 };
            assert_close(&what, &out.to_vec(&stream).unwrap(), &want, rounded + epsilon(kind));
        }
    }
}

#[test]
fn gates_far_from_zero_are_closed_or_open() {
    let Some(stream) = stream() else { return };
    for gate in [Gate::Silu, Gate::GeluTanh] {
        let mut out = unwritten(&stream, ElementKind::F32, 1, 4);
        let gate_up = [-1e30, -200.0, 200.0, 1e30, 3.0, 3.0, 3.0, 1.0];
        gate_mul(&stream, gate, &matrix(&stream, ElementKind::F32, 8, &gate_up), &mut out).unwrap();
        assert_eq!(out.to_vec(&stream).unwrap(), [0.0, 0.0, 600.0, 1e30], "{gate:?}");
    }
}
