//! The rotary embedding.

use kernels::{
    attention::QkvLayout,
    cuda::{
        CudaStream, DeviceVec, Norm,
        rope::{Rotation, rotate},
    },
    lora::ElementKind,
    reference::rms_norm,
};

use crate::support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream};

const EPS: f32 = 1e-6;

/// Weights of the norms of query and key heads, if there are any.
type NormWeights<'a> = Option<(&'a [f32], &'a [f32])>;

fn frequencies(turned: usize) -> Vec<f32> {
    (0..turned / 2).map(|i| 1.0 / 10_000f32.powf(2.0 * i as f32 / turned as f32)).collect()
}

const MAGNITUDE: f32 = 1.25;

fn scale(layout: QkvLayout) -> f32 {
    1.0 / (layout.head_dim as f32).sqrt()
}

/// One head rotated in 64 bits; only the angle is rounded to 32 bits before its sine, as models do.
fn turned(head: &[f32], position: u32, frequencies: &[f32], weight: Option<&[f32]>, scale: f64) -> Vec<f32> {
    let normed = weight.map_or_else(|| head.to_vec(), |weight| rms_norm(head, weight, EPS));
    let (turned, rest) = normed.split_at(2 * frequencies.len());
    let (a, b) = turned.split_at(frequencies.len());
    let turn = |i: usize| {
        let (sin, cos) = f64::from(position as f32 * frequencies[i]).sin_cos();
        let (sin, cos) = (sin * f64::from(MAGNITUDE), cos * f64::from(MAGNITUDE));
        let (a, b) = (f64::from(a[i]), f64::from(b[i]));
        (((a * cos - b * sin) * scale) as f32, ((b * cos + a * sin) * scale) as f32)
    };
    let (first, second): (Vec<f32>, Vec<f32>) = (0..a.len()).map(turn).unzip();
    let rest = rest.iter().map(|&value| (f64::from(value) * scale) as f32).collect();
    [first, second, rest].concat()
}

fn wanted(
    qkv: &[f32],
    layout: QkvLayout,
    turned_features: usize,
    positions: &[u32],
    weights: NormWeights<'_>,
) -> Vec<f32> {
    let frequencies = frequencies(turned_features);
    let scale = 1.0 / (layout.head_dim as f64).sqrt();
    let head = |row: usize, index: usize, head: &[f32]| {
        let position = positions[row];
        if index < layout.heads {
            turned(head, position, &frequencies, weights.map(|(query, _)| query), scale)
        } else if index < layout.heads + layout.kv_heads {
            turned(head, position, &frequencies, weights.map(|(_, key)| key), 1.0)
        } else {
            head.to_vec()
        }
    };
    let row = |(row, values): (usize, &[f32])| {
        let heads = values.chunks(layout.head_dim).enumerate();
        heads.flat_map(|(index, values)| head(row, index, values)).collect::<Vec<_>>()
    };
    qkv.chunks(layout.stride()).enumerate().flat_map(row).collect()
}

fn check(
    stream: &CudaStream,
    kind: ElementKind,
    layout: QkvLayout,
    positions: &[u32],
    random: &mut SeededNumbers,
) {
    for turned in [layout.head_dim, layout.head_dim / 4 * 2] {
        check_turned(stream, kind, layout, turned, positions, random);
    }
}

fn check_turned(
    stream: &CudaStream,
    kind: ElementKind,
    layout: QkvLayout,
    turned: usize,
    positions: &[u32],
    random: &mut SeededNumbers,
) {
    let qkv = rounded(kind, &random.normals(positions.len() * layout.stride()));
    let (query, key) = (random.normals(layout.head_dim), random.normals(layout.head_dim));
    let on_device = |values: &[f32]| DeviceVec::from_slice(stream, values).unwrap();
    let (query_weight, key_weight) = (on_device(&query), on_device(&key));
    let frequencies = on_device(&frequencies(turned));
    let rows = DeviceVec::from_slice(stream, positions).unwrap();
    for weights in [None, Some((&query[..], &key[..]))] {
        let norm = |weight| weights.map(|_| Norm { weight, eps: EPS });
        let mut got = matrix(stream, kind, layout.stride(), &qkv);
        let by = Rotation { positions: &rows, frequencies: &frequencies, magnitude: MAGNITUDE };
        let (query, key) = (norm(&query_weight), norm(&key_weight));
        rotate(stream, &mut got, layout, by, query, key, scale(layout)).unwrap();
        let want = wanted(&qkv, layout, turned, positions, weights);
        assert_close(
            &format!("{kind:?} {layout:?} {turned}"),
            &got.to_vec(stream).unwrap(),
            &want,
            3e-6 + epsilon(kind),
        );
    }
}

#[test]
fn heads_are_turned_as_the_reference_turns_them() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    // SmolLM2's, Llama 3's, a single head, the widest, and halves that are no whole warps.
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (32, 8, 128), (1, 1, 16), (2, 1, 256), (6, 2, 80)] {
        let layout = QkvLayout { heads, kv_heads, head_dim };
        for kind in KINDS {
            check(&stream, kind, layout, &[0, 1, 77, 4095], &mut random);
            check(&stream, kind, layout, &[5], &mut random);
        }
    }
}

#[test]
fn angles_are_exact_at_the_longest_contexts() {
    let Some(stream) = stream() else { return };
    let layout = QkvLayout { heads: 2, kv_heads: 1, head_dim: 64 };
    // Beyond 105,615 a sine needs all bits of pi to reduce its argument.
    check(&stream, ElementKind::F32, layout, &[105_000, 131_071, 1_048_575], &mut SeededNumbers::new(2));
}

#[test]
fn values_are_left_alone() {
    let Some(stream) = stream() else { return };
    let layout = QkvLayout { heads: 1, kv_heads: 1, head_dim: 8 };
    let mut qkv = matrix(&stream, ElementKind::F32, 24, &[1.0; 24]);
    let positions = DeviceVec::from_slice(&stream, &[3]).unwrap();
    let frequencies = DeviceVec::from_slice(&stream, &frequencies(8)).unwrap();
    let by = Rotation { positions: &positions, frequencies: &frequencies, magnitude: 1.0 };
    rotate(&stream, &mut qkv, layout, by, None, None, scale(layout)).unwrap();
    let got = qkv.to_vec(&stream).unwrap();
    assert_eq!(got[16..], [1.0; 8]);
    assert!(got[..16].iter().all(|&value| value != 1.0), "queries and keys are turned");
}
