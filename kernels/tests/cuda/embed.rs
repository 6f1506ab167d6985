//! The embeddings of tokens.

use kernels::{
    TensorType,
    cuda::{DeviceVec, Weight, embed::embed},
    lora::ElementKind,
    quant::dequantize_row,
};

use crate::support::{SeededNumbers, assert_close, stream, unwritten};

/// Every dtype of a table, with a width of whole blocks that is no multiple of the next larger unit.
const TABLES: [(TensorType, usize); 11] = [
    (TensorType::F32, 77),
    (TensorType::F16, 77),
    (TensorType::Bf16, 77),
    (TensorType::Q4_0, 576),
    (TensorType::Q4_1, 576),
    (TensorType::Q5_0, 576),
    (TensorType::Q5_1, 576),
    (TensorType::Q8_0, 576),
    (TensorType::Q4K, 768),
    (TensorType::Q5K, 768),
    (TensorType::Q6K, 768),
];
const ROWS: usize = 50;

/// Random bytes, with a random 16-bit scale of usual size at each scale of a block format.
fn table(kind: TensorType, columns: usize, random: &mut SeededNumbers) -> Vec<u8> {
    if kind == TensorType::F32 {
        return random.normals(ROWS * columns).into_iter().flat_map(f32::to_le_bytes).collect();
    }
    let bytes = ROWS * kind.row_bytes(columns).unwrap();
    let mut table: Vec<u8> = (0..bytes).map(|_| random.below(256) as u8).collect();
    let halves: &[usize] = match kind {
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => &[0],
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
        TensorType::Mxfp4 => unreachable!("MXFP4 is not uploaded to a GPU"),
    };
    for block in table.chunks_mut(kind.block_bytes()) {
        for &at in halves {
            // Between about 0.001 and 2, of either sign, in both f16 and bf16.
            block[at + 1] = [0x14, 0x2c, 0x30, 0x3c, 0xa0, 0xbc][random.below(6)];
        }
    }
    table
}

#[test]
fn embeddings_are_the_tables_rows_for_every_type() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    for (kind, columns) in TABLES {
        let bytes = table(kind, columns, &mut random);
        let weight = Weight::upload(&stream, kind, &bytes, ROWS, columns).unwrap();
        for count in [1, 9] {
            let tokens: Vec<u32> = (0..count).map(|_| random.below(ROWS) as u32).collect();
            let mut want = vec![0.0; count * columns];
            for (row, &token) in want.chunks_mut(columns).zip(&tokens) {
                let row_bytes = kind.row_bytes(columns).unwrap();
                dequantize_row(kind, &bytes[token as usize * row_bytes..][..row_bytes], row);
            }
            let on_device = DeviceVec::from_slice(&stream, &tokens).unwrap();
            let mut got = unwritten(&stream, ElementKind::F32, count, columns);
            embed(&stream, &weight, &on_device, &mut got).unwrap();
            assert_close(&format!("{kind:?}"), &got.to_vec(&stream).unwrap(), &want, 1e-5);
        }
    }
}

#[test]
fn a_token_that_the_table_lacks_is_nan_and_reads_nothing() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(2);
    for (kind, columns) in TABLES {
        let bytes = table(kind, columns, &mut random);
        let weight = Weight::upload(&stream, kind, &bytes, ROWS, columns).unwrap();
        let tokens = DeviceVec::from_slice(&stream, &[ROWS as u32, u32::MAX, 0]).unwrap();
        let mut got = unwritten(&stream, ElementKind::F32, 3, columns);
        embed(&stream, &weight, &tokens, &mut got).unwrap();
        let got = got.to_vec(&stream).unwrap();
        assert!(got[..2 * columns].iter().all(|value| value.is_nan()), "{kind:?}");
        assert!(got[2 * columns..].iter().all(|value| !value.is_nan()), "{kind:?}");
    }
}
