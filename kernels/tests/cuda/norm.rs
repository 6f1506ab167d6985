//! The norm of the residual stream.

use kernels::{
    cuda::{
        CudaStream, DeviceVec, Graph, Norm, Replay,
        norm::{add_copy, add_norm, norm_in_place},
    },
    lora::ElementKind,
    reference::rms_norm,
};

use crate::support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream, unwritten};

const EPS: f32 = 1e-5;
/// Whole packs in registers and less than one per thread; the models' widths; ragged; wider than the
/// registers.
const WIDTHS: [usize; 9] = [8, 64, 576, 2048, 4096, 8192, 100, 577, 9000];

/// Reference on the CPU: the new residual, and its norm.
fn wanted(residual: &[f32], update: Option<&[f32]>, weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let sum = |(at, &value): (usize, &f32)| value + update.map_or(0.0, |update| update[at]);
    let residual: Vec<f32> = residual.iter().enumerate().map(sum).collect();
    let normed = residual.chunks(weight.len()).flat_map(|row| rms_norm(row, weight, EPS)).collect();
    (residual, normed)
}

fn check(stream: &CudaStream, kind: ElementKind, rows: usize, width: usize, random: &mut SeededNumbers) {
    let (residual, weight) = (random.normals(rows * width), random.normals(width));
    let update = rounded(kind, &random.normals(rows * width));
    let on_device = DeviceVec::from_slice(stream, &weight).unwrap();
    let norm = Norm { weight: &on_device, eps: EPS };
    for update in [None, Some(&update[..])] {
        let mut got_residual = matrix(stream, ElementKind::F32, width, &residual);
        let mut out = unwritten(stream, kind, rows, width);
        let added = update.map(|update| matrix(stream, kind, width, update));
        add_norm(stream, &mut got_residual, added.as_ref(), norm, &mut out).unwrap();
        let (want_residual, want) = wanted(&residual, update, &weight);
        assert_eq!(got_residual.to_vec(stream).unwrap(), want_residual, "{kind:?} {rows}x{width}");
        let what = format!("{kind:?} {rows}x{width}");
        assert_close(&what, &out.to_vec(stream).unwrap(), &want, 1e-6 + epsilon(kind));
    }
    let mut here = matrix(stream, kind, width, &update);
    norm_in_place(stream, &mut here, 0, norm).unwrap();
    let (_, want) = wanted(&update, None, &weight);
    let what = format!("{kind:?} {rows}x{width} in place");
    assert_close(&what, &here.to_vec(stream).unwrap(), &want, 1e-6 + epsilon(kind));
}

#[test]
fn the_norm_is_that_of_the_reference_for_every_kind_and_width() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    for kind in KINDS {
        for width in WIDTHS {
            check(&stream, kind, 3, width, &mut random);
        }
        check(&stream, kind, 1, 576, &mut random);
        check(&stream, kind, 70, 576, &mut random);
    }
}

#[test]
fn only_the_named_columns_are_normed() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(4);
    let (rows, width, column, normed) = (5, 700, 37, 577);
    for kind in KINDS {
        let (values, weight) = (rounded(kind, &random.normals(rows * width)), random.normals(normed));
        let on_device = DeviceVec::from_slice(&stream, &weight).unwrap();
        let mut got = matrix(&stream, kind, width, &values);
        norm_in_place(&stream, &mut got, column, Norm { weight: &on_device, eps: EPS }).unwrap();
        let mut want = values;
        for row in want.chunks_mut(width) {
            let of_row = rms_norm(&row[column..column + normed], &weight, EPS);
            row[column..column + normed].copy_from_slice(&of_row);
        }
        assert_close(&format!("{kind:?}"), &got.to_vec(&stream).unwrap(), &want, 1e-6 + epsilon(kind));
    }
}

#[test]
fn without_a_norm_the_residual_goes_on_as_it_is() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    for (kind, width) in KINDS.into_iter().flat_map(|kind| [8, 300].map(|width| (kind, width))) {
        let (residual, update) = (random.normals(3 * width), rounded(kind, &random.normals(3 * width)));
        for update in [None, Some(&update[..])] {
            let mut got = matrix(&stream, ElementKind::F32, width, &residual);
            let mut out = unwritten(&stream, kind, 3, width);
            let added = update.map(|update| matrix(&stream, kind, width, update));
            add_copy(&stream, &mut got, added.as_ref(), &mut out).unwrap();
            let sums = residual.iter().enumerate();
            let sums = sums.map(|(at, &value)| value + update.map_or(0.0, |update| update[at]));
            let sums: Vec<f32> = sums.collect();
            assert_eq!(got.to_vec(&stream).unwrap(), sums);
            assert_eq!(out.to_vec(&stream).unwrap(), rounded(kind, &sums), "{kind:?} {width}");
        }
    }
}

#[test]
fn a_rows_norm_has_the_same_bits_in_any_batch() {
    let Some(stream) = stream() else { return };
    let (rows, width) = (17, 2048);
    let (values, weight) = {
        let mut random = SeededNumbers::new(2);
        (random.normals(rows * width), random.normals(width))
    };
    let weight = DeviceVec::from_slice(&stream, &weight).unwrap();
    let normed = |values: &[f32]| {
        let mut residual = matrix(&stream, ElementKind::F32, width, values);
        let mut out = unwritten(&stream, ElementKind::F32, values.len() / width, width);
        let norm = Norm { weight: &weight, eps: EPS };
        add_norm(&stream, &mut residual, None, norm, &mut out).unwrap();
        out.to_vec(&stream).unwrap()
    };
    let alone: Vec<f32> = values.chunks(width).flat_map(normed).collect();
    assert_eq!(normed(&values), alone);
}

#[test]
fn a_recorded_norm_is_taken_anew_of_what_the_residual_then_is() {
    let Some(stream) = stream() else { return };
    let (rows, width) = (2, 64);
    let mut random = SeededNumbers::new(3);
    let (first, second) = (random.normals(rows * width), random.normals(rows * width));
    let weight = vec![1.0; width];
    let on_device = DeviceVec::from_slice(&stream, &weight).unwrap();
    let mut residual = matrix(&stream, ElementKind::F32, width, &first);
    let mut out = unwritten(&stream, ElementKind::F32, rows, width);
    let norm = Norm { weight: &on_device, eps: EPS };
    // Concurrent tests free memory, which invalidates a graph.
    let mut replay = Replay::Stale;
    while replay == Replay::Stale {
        residual.upload(&stream, 0, &first).unwrap();
        let mut graph =
            Graph::capture(&stream, || add_norm(&stream, &mut residual, None, norm, &mut out)).unwrap();
        residual.upload(&stream, 0, &second).unwrap();
        replay = graph.launch(&stream).unwrap();
        stream.synchronize().unwrap();
    }
    assert_close("replayed", &out.to_vec(&stream).unwrap(), &wanted(&second, None, &weight).1, 1e-6);
}
