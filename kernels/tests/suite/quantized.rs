//! Stored tensors decoded and packed: against values decoded by the `gguf` package
//! (`golden/make_quant_golden.py`).

use kernels::{Arena, PackError, PackedMatrix, TensorType, quant};

use crate::support::{TYPES, bits, dequantize, is_float, random, stored};

struct GoldenRecord {
    name: String,
    data: Vec<u8>,
    values: Vec<f32>,
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn number(bytes: &mut &[u8]) -> usize {
    u32::from_le_bytes(take(bytes, 4).try_into().expect("four bytes")) as usize
}

fn golden() -> Vec<GoldenRecord> {
    let mut rest: &[u8] = include_bytes!("../golden/quant.bin");
    let mut records = Vec::new();
    while !rest.is_empty() {
        let name = String::from_utf8_lossy(take(&mut rest, 8)).trim_end_matches('\0').to_owned();
        let (elements, bytes) = (number(&mut rest), number(&mut rest));
        let data = take(&mut rest, bytes).to_vec();
        let float = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let values = take(&mut rest, 4 * elements).chunks_exact(4).map(float).collect();
        records.push(GoldenRecord { name, data, values });
    }
    records
}

fn type_named(name: &str) -> TensorType {
    match name {
        "F16" => TensorType::F16,
        "BF16" => TensorType::Bf16,
        "Q4_0" => TensorType::Q4_0,
        "Q4_1" => TensorType::Q4_1,
        "Q5_0" => TensorType::Q5_0,
        "Q5_1" => TensorType::Q5_1,
        "Q8_0" => TensorType::Q8_0,
        "Q4_K" => TensorType::Q4K,
        "Q5_K" => TensorType::Q5K,
        "Q6_K" => TensorType::Q6K,
        "MXFP4" => TensorType::Mxfp4,
        _ => panic!("the golden file holds {name}, which no test knows"),
    }
}

#[test]
fn every_type_decodes_to_the_bits_the_gguf_package_gives() {
    let records = golden();
    assert_eq!(records.len(), TYPES.len() - 1, "every type but F32, which is its own value");
    for GoldenRecord { name, data, values } in records {
        let got = dequantize(type_named(&name), &data, values.len());
        for (i, (got, wanted)) in got.iter().zip(&values).enumerate() {
            assert_eq!(got.to_bits(), wanted.to_bits(), "{name}: element {i} is {got}, not {wanted}");
        }
    }
}

#[test]
fn a_packed_row_reads_back_as_it_was_stored() {
    for kind in TYPES {
        let columns = if is_float(kind) { 33 } else { 512 };
        for rows in [1, 15, 16, 17, 40] {
            let data = stored(kind, rows, columns, &mut random(rows as u64));
            let matrix = PackedMatrix::pack(kind, &data, rows, columns).unwrap();
            let mut got = vec![0.0; columns];
            for (row, bytes) in data.chunks_exact(data.len() / rows).enumerate() {
                matrix.read_row(row, &mut got);
                let wanted = dequantize(kind, bytes, columns);
                match kind {
                    TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => assert_near(&got, &wanted),
                    _ => assert_eq!(bits(&got), bits(&wanted), "row {row} of {rows} of {kind:?}"),
                }
            }
        }
    }
}

/// K types multiply a 16-bit scale by a group's six or eight bits, and the packed form rounds the product to
/// 16 bits again: a relative error of 2^-12 of the scale and of the minimum, whose codes are at most 63 times
/// a scale.
#[track_caller]
fn assert_near(got: &[f32], wanted: &[f32]) {
    let largest = wanted.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    for (&got, &wanted) in got.iter().zip(wanted) {
        assert!(
            (got - wanted).abs() <= largest * 2.0f32.powi(-11),
            "{got} is not {wanted} within 2^-11 of {largest}"
        );
    }
}

#[test]
fn scales_far_below_the_largest_keep_their_bits() {
    // One block with the largest 16-bit scale, one with 2^-12 of it: both exact in 16 bits with a common
    // unit.
    let mut data = vec![0x77u8; 2 * TensorType::Q8_0.block_bytes()];
    data[..2].copy_from_slice(&half::f16::MAX.to_le_bytes());
    data[34..36].copy_from_slice(&half::f16::from_f32(13.37).to_le_bytes());
    let matrix = PackedMatrix::pack(TensorType::Q8_0, &data, 1, 64).unwrap();
    let mut got = vec![0.0; 64];
    matrix.read_row(0, &mut got);
    assert_eq!(bits(&got), bits(&dequantize(TensorType::Q8_0, &data, 64)));
}

#[test]
fn matrices_of_one_arena_share_no_byte_and_outlive_it() {
    let random = &mut random(9);
    // The third exceeds the first chunk, the fourth every chunk.
    let arena = Arena::new(4096);
    let shapes = [(5, 32), (17, 64), (16, 96), (40, 512), (1, 32)];
    let data = shapes.map(|(rows, columns)| stored(TensorType::Q8_0, rows, columns, random));
    let packed: Vec<PackedMatrix> = shapes
        .iter()
        .zip(&data)
        .map(|(&(rows, columns), data)| {
            PackedMatrix::pack_in(&arena, TensorType::Q8_0, data, rows, columns).unwrap()
        })
        .collect();
    drop(arena);
    for ((matrix, data), (rows, columns)) in packed.iter().zip(&data).zip(shapes) {
        let wanted = dequantize(TensorType::Q8_0, data, rows * columns);
        let mut got = vec![0.0; columns];
        for (row, wanted) in wanted.chunks(columns).enumerate() {
            matrix.read_row(row, &mut got);
            assert_eq!(bits(&got), bits(wanted), "row {row} of {rows} x {columns}");
        }
    }
}

#[test]
fn a_matrix_of_zero_scales_is_a_matrix_of_zeroes() {
    for kind in TYPES {
        let data = vec![0u8; kind.row_bytes(256).unwrap() * 3];
        let matrix = PackedMatrix::pack(kind, &data, 3, 256).unwrap();
        let mut got = vec![1.0; 256];
        matrix.read_row(2, &mut got);
        assert!(got.iter().all(|&x| x == 0.0), "{kind:?}");
    }
}

#[test]
fn a_tensor_whose_bytes_do_not_fit_its_shape_is_refused() {
    for kind in TYPES {
        let row = kind.row_bytes(256).unwrap();
        let refused = |bytes: usize, rows: usize, columns: usize| {
            let outcome = PackedMatrix::pack(kind, &vec![0; bytes], rows, columns);
            assert!(
                matches!(outcome, Err(PackError::Size { .. })),
                "{kind:?}: {bytes} bytes, {rows} x {columns}"
            );
        };
        refused(2 * row - 1, 2, 256);
        refused(2 * row + 1, 2, 256);
        refused(2 * row, 3, 256);
        refused(0, usize::MAX, 256);
        refused(0, 1, 0);
        refused(row, usize::MAX / row + 2, 256);
        if !is_float(kind) {
            refused(row, 1, 255);
        }
    }
}

#[test]
#[should_panic(expected = "a row of 64 elements")]
fn dequantizing_too_few_bytes_panics_before_reading_them() {
    quant::dequantize_row(TensorType::Q8_0, &[0; 34], &mut [0.0; 64]);
}
