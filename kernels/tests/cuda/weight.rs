//! Weights on the device, and helpers for other tests.

use half::{bf16, f16};
use kernels::{
    TensorType,
    cuda::{CudaStream, LinearPart, Weight, WeightUploader, Workspace, linear},
    lora::ElementKind,
    quant,
};

use crate::support::{SeededNumbers, assert_close, matrix, stream, unwritten};

pub(crate) const TYPES: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::Bf16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

/// A tensor as in a weight file: random codes, and scales and minima of the size in trained weights.
pub(crate) fn stored(kind: TensorType, rows: usize, columns: usize, random: &mut SeededNumbers) -> Vec<u8> {
    let elements = rows * columns;
    match kind {
        TensorType::F32 => random.normals(elements).into_iter().flat_map(f32::to_le_bytes).collect(),
        TensorType::F16 => {
            random.normals(elements).into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()
        }
        TensorType::Bf16 => {
            random.normals(elements).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
        }
        _ => blocks(kind, elements, random),
    }
}

fn blocks(kind: TensorType, elements: usize, random: &mut SeededNumbers) -> Vec<u8> {
    let halves: &[usize] = match kind {
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
        _ => &[0],
    };
    let bytes = kind.row_bytes(elements).unwrap();
    let mut bytes: Vec<u8> = (0..bytes).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        for &at in halves {
            let half = f16::from_f32(0.02 * random.normals(1)[0]);
            block[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    bytes
}

pub(crate) fn values(kind: TensorType, stored: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    quant::dequantize_row(kind, stored, &mut values);
    values
}

/// Values of a weight as the device uses them: its products with unit rows, in 32 bits.
fn seen(stream: &CudaStream, weight: &Weight) -> Vec<f32> {
    let (rows, columns) = (weight.rows(), weight.columns());
    let identity: Vec<f32> =
        (0..columns * columns).map(|at| if at % (columns + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let x = matrix(stream, ElementKind::F32, columns, &identity);
    let mut out = unwritten(stream, ElementKind::F32, columns, rows);
    let mut workspace = Workspace::new(stream.cuda(), None);
    let part = LinearPart { weight, bias: None, column: 0 };
    linear(stream, &mut workspace, &x, &[part], &mut out).unwrap();
    let transposed = out.to_vec(stream).unwrap();
    (0..rows * columns).map(|at| transposed[at % columns * rows + at / columns]).collect()
}

/// Widths of whole blocks, with and without a remainder after the chunks of 128 elements.
fn widths(kind: TensorType) -> &'static [usize] {
    match kind.block_elements() {
        1 => &[1, 7, 64, 129],
        32 => &[32, 64, 96, 128, 160, 288],
        _ => &[256, 512],
    }
}

#[test]
fn every_type_of_weight_has_the_values_of_its_file() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    for kind in TYPES {
        for &columns in widths(kind) {
            let rows = 5;
            let stored = stored(kind, rows, columns, &mut random);
            let weight = Weight::upload(&stream, kind, &stored, rows, columns).unwrap();
            let want = values(kind, &stored, rows * columns);
            assert_close(&format!("{kind:?} of {columns}"), &seen(&stream, &weight), &want, 1e-6);
        }
    }
}

#[test]
fn block_formats_take_as_many_bytes_on_the_device_as_in_their_file() {
    for kind in TYPES {
        let stored = kind.row_bytes(4096).unwrap() * 64;
        assert_eq!(kernels::cuda::weight::device_bytes(kind, 64, 4096), stored, "{kind:?}");
    }
}

#[test]
fn weights_that_travel_in_pieces_arrive_whole() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(2);
    // Above the 16 MiB of an upload slot and no multiple of it, so that slots are reused.
    let shapes =
        [(TensorType::Bf16, 9001, 2048), (TensorType::Q8_0, 20_011, 1024), (TensorType::Q6K, 3, 256)];
    let mut uploader = WeightUploader::new(stream.cuda()).unwrap();
    let mut uploaded = Vec::new();
    for (kind, rows, columns) in shapes {
        let row = stored(kind, 1, columns, &mut random);
        let mut bytes = row.repeat(rows);
        // One row that differs from all others, in the last piece.
        let other = stored(kind, 1, columns, &mut random);
        bytes[(rows - 2) * row.len()..(rows - 1) * row.len()].copy_from_slice(&other);
        uploaded.push((uploader.upload(kind, &bytes, rows, columns).unwrap(), bytes));
    }
    uploader.finish().unwrap();
    for (weight, bytes) in &uploaded {
        check_rows(&stream, weight, bytes);
    }
}

/// Compares the products of one row with a weight of many rows.
fn check_rows(stream: &CudaStream, weight: &Weight, bytes: &[u8]) {
    let (kind, rows, columns) = (weight.kind(), weight.rows(), weight.columns());
    let ones = matrix(stream, ElementKind::Bf16, columns, &vec![1.0; columns]);
    let mut out = unwritten(stream, ElementKind::F32, 1, rows);
    let mut workspace = Workspace::new(stream.cuda(), None);
    linear(stream, &mut workspace, &ones, &[LinearPart { weight, bias: None, column: 0 }], &mut out).unwrap();
    let sums = bytes.chunks_exact(bytes.len() / rows).map(|row| values(kind, row, columns).iter().sum());
    let want: Vec<f32> = sums.collect();
    assert_close(&format!("{kind:?}"), &out.to_vec(stream).unwrap(), &want, 1e-3);
}
