//! GGUF files are read exactly, and hostile ones are rejected before any allocation for them.

use std::path::Path;

use crate::files_support::{
    GgufWriter, assert_says, f32_bytes, kind, numbers, tensor, text_bytes, tiny_gguf,
};
use kernels::TensorType;
use model::{
    shape::source::{Target, TensorId, WeightSource},
    sources::gguf::GgufSource,
};
use model_files::gguf::{Array, GgufError, GgufFile, Value, limits};
use proptest::prelude::*;

fn parse(bytes: Vec<u8>) -> Result<GgufFile, GgufError> {
    GgufFile::from_bytes(Path::new("tiny.gguf"), bytes)
}

#[track_caller]
fn refused(writer: &GgufWriter, parts: &[&str]) {
    assert_says(parse(writer.bytes()), parts);
}

#[test]
fn every_kind_of_metadata_reads_as_it_was_written() {
    let nested = [&kind::U8.to_le_bytes()[..], &2u64.to_le_bytes(), &[5, 6]].concat();
    let file = parse(
        GgufWriter::default()
            .raw("u8", 0, 200u8.to_le_bytes())
            .raw("i8", 1, (-3i8).to_le_bytes())
            .raw("u16", 2, 60_000u16.to_le_bytes())
            .raw("i16", 3, (-300i16).to_le_bytes())
            .u32("u32", 4_000_000_000)
            .raw("i32", 5, (-70_000i32).to_le_bytes())
            .f32("f32", 0.5)
            .bool("bool", 1)
            .text("text", "größer")
            .raw("u64", 10, u64::MAX.to_le_bytes())
            .raw("i64", 11, i64::MIN.to_le_bytes())
            .raw("f64", 12, 0.25f64.to_le_bytes())
            .array("texts", kind::STRING, 2, [text_bytes("a"), text_bytes("")].concat())
            .array("nested", kind::ARRAY, 1, nested)
            .bytes(),
    )
    .unwrap();
    let texts = Array::String(vec!["a".into(), String::new()]);
    for (key, value) in [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-3)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-300)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-70_000)),
        ("f32", Value::F32(0.5)),
        ("bool", Value::Bool(true)),
        ("text", Value::String("größer".into())),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(0.25)),
        ("texts", Value::Array(texts)),
        ("nested", Value::Array(Array::Array(vec![Array::U8(vec![5, 6])]))),
    ] {
        assert_eq!(file.metadata(key), Some(&value), "{key}");
    }
    assert_eq!(file.entries().count(), 14);
}

#[test]
fn accessors_take_any_width_and_name_what_does_not_fit() {
    let file = parse(
        GgufWriter::default()
            .raw("small", 1, 7i8.to_le_bytes())
            .raw("negative", 5, (-1i32).to_le_bytes())
            .raw("wide", 12, 0.5f64.to_le_bytes())
            .text("text", "x")
            .array("floats", kind::F32, 2, f32_bytes(&[1.0, 2.0]))
            .bytes(),
    )
    .unwrap();
    assert_eq!(file.u32("small").unwrap(), Some(7));
    assert_eq!(file.usize("absent").unwrap(), None);
    assert_eq!(file.f32("wide").unwrap(), Some(0.5));
    assert_eq!(file.str("text").unwrap(), Some("x"));
    assert_eq!(file.f32s("floats").unwrap(), Some(vec![1.0, 2.0]));
    assert_says(file.u32("negative"), &["tiny.gguf", "`negative`", "I32(-1)", "unsigned"]);
    assert_says(file.strings("floats"), &["`floats`", "an array of 2 elements", "array of strings"]);
    assert_says(file.bool("text"), &["`text`", "the string \"x\""]);
}

#[test]
fn tensors_are_where_the_table_says_in_versions_2_and_3_and_at_any_alignment() {
    for version in [2, 3] {
        for alignment in [1, 32, 4096] {
            let (first, second) = (numbers(6, 1), numbers(4, 2));
            let mut writer = GgufWriter { version, alignment, ..GgufWriter::default() }
                .f32_tensor("first", [2, 3], &first)
                .f32_tensor("second", [1, 4], &second);
            if alignment != 32 {
                writer = writer.u32("general.alignment", alignment as u32);
            }
            let file = parse(writer.bytes()).unwrap();
            let view = file.tensor("first").unwrap();
            assert_eq!((view.kind, view.rows(), view.cols()), (TensorType::F32, 2, 3));
            assert_eq!(view.data, f32_bytes(&first));
            assert_eq!(file.tensor("second").unwrap().data, f32_bytes(&second));
            assert!(file.tensor("third").is_none());
            assert_eq!(file.tensors().map(|(name, _)| name).collect::<Vec<_>>(), ["first", "second"]);
        }
    }
}

#[test]
fn a_mapped_file_reads_like_the_same_bytes_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let bytes = tiny_gguf("llama", &[]).bytes();
    std::fs::write(&path, &bytes).unwrap();
    let (mapped, owned) = (GgufFile::open(&path).unwrap(), parse(bytes).unwrap());
    assert!(mapped.tensors().eq(owned.tensors()));
    mapped.release("token_embd.weight");
    assert!(mapped.tensors().eq(owned.tensors()));
    assert!(mapped.unchanged());
    std::fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert!(!mapped.unchanged());
}

#[test]
fn a_file_that_is_not_there_or_no_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    assert_says(GgufFile::open(&directory.path().join("none.gguf")), &["none.gguf", "cannot open"]);
    assert_says(GgufFile::open(directory.path()), &["not a regular file"]);
}

#[test]
fn other_formats_and_versions_are_refused_by_name() {
    let with = |magic, version| GgufWriter { magic, version, ..GgufWriter::default() };
    refused(&with(*b"GGML", 3), &["bytes `GGUF`"]);
    refused(&with(*b"GGUF", 1), &["version 1"]);
    refused(&with(*b"GGUF", 4), &["version 4"]);
    refused(&with(*b"GGUF", 3u32.swap_bytes()), &["big-endian"]);
    assert_says(parse(Vec::new()), &["bytes `GGUF`"]);
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let bytes = GgufWriter::default()
        .text("text", "some text")
        .array("texts", kind::STRING, 2, [text_bytes("a"), text_bytes("bc")].concat())
        .f32_tensor("weights", [2, 3], &numbers(6, 0))
        .bytes();
    for length in 0..bytes.len() {
        assert!(parse(bytes[..length].to_vec()).is_err(), "{length} of {} bytes were accepted", bytes.len());
    }
    assert!(parse(bytes).is_ok());
}

#[test]
fn counts_beyond_the_file_or_the_limits_are_refused() {
    let base = GgufWriter::default;
    for count in [1 << 63, u64::MAX, limits::MAX_TENSORS + 1] {
        refused(&GgufWriter { tensor_count: Some(count), ..base() }, &["tensors", "limit"]);
        refused(&GgufWriter { entry_count: Some(count), ..base() }, &["metadata entries", "limit"]);
    }
    refused(&GgufWriter { tensor_count: Some(1), ..base() }, &["ends in the middle"]);
    refused(&GgufWriter { entry_count: Some(1), ..base() }, &["ends in the middle"]);
    for count in [1, u64::MAX, 1 << 61, (1 << 60) + 1] {
        for element in [kind::U8, kind::STRING, kind::ARRAY, kind::U64] {
            refused(&base().array("list", element, count, []), &["ends in the middle"]);
        }
    }
    let values = limits::MAX_VALUES + 1;
    let many = base().array("list", kind::U8, values, vec![0; values as usize]);
    refused(&many, &["metadata values", "limit"]);
    refused(&base().raw("text", kind::STRING, u64::MAX.to_le_bytes()), &["ends in the middle"]);
    let long = "k".repeat(limits::MAX_KEY_BYTES as usize + 1);
    refused(&base().u32(&long, 1), &["bytes of a string", "limit"]);
}

#[test]
fn arrays_nested_without_end_are_refused() {
    let levels = 100_000;
    let one = [&kind::ARRAY.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
    refused(
        &GgufWriter::default().raw("deep", kind::ARRAY, one.repeat(levels)),
        &["arrays inside each other"],
    );
}

#[test]
fn broken_values_are_refused() {
    let base = GgufWriter::default;
    refused(&base().raw("odd", 13, []), &["`odd`", "unknown type 13"]);
    refused(&base().bool("flag", 2), &["`flag`", "2"]);
    refused(&base().raw("text", kind::STRING, text_bytes([0xff])), &["UTF-8"]);
    refused(&base().u32("twice", 1).u32("twice", 1), &["`twice` appears twice"]);
    let data = numbers(1, 0);
    let two = base().f32_tensor("t", [1, 1], &data).f32_tensor("t", [1, 1], &data);
    refused(&two, &["tensor `t` appears twice"]);
    refused(&base().tensor([0xff], &[1], tensor::F32, vec![0; 4]), &["UTF-8"]);
    let long = "n".repeat(limits::MAX_NAME_BYTES as usize + 1);
    refused(&base().f32_tensor(&long, [1, 1], &data), &["bytes of a string"]);
}

#[test]
fn an_alignment_that_is_no_sane_power_of_two_is_refused() {
    for alignment in [0, 3, 48, 1 << 17, 1 << 31, u32::MAX] {
        refused(&GgufWriter::default().u32("general.alignment", alignment), &["general.alignment"]);
    }
    refused(&GgufWriter::default().text("general.alignment", "32"), &["general.alignment"]);
}

#[test]
fn shapes_that_no_tensor_can_have_are_refused() {
    let shaped = |dims: &[u64], kind| GgufWriter::default().tensor("t", dims, kind, vec![0; 64]);
    for dims in [
        &[][..],
        &[0],
        &[4, 0],
        &[0, 4],
        &[u64::MAX, 2],
        &[1 << 32, 1 << 32],
        &[1 << 62, 4],
        &[1, u64::MAX, 2],
    ] {
        refused(&shaped(dims, tensor::F32), &["`t`", "dimension"]);
    }
    refused(&shaped(&[33], tensor::Q8_0), &["`t`", "incomplete blocks"]);
    refused(&shaped(&[1; 5], tensor::F32), &["5 dimensions", "limit"]);
    refused(&shaped(&[17], tensor::F32), &["`t`", "end of the file"]);
}

#[test]
fn offsets_outside_of_the_file_are_refused() {
    let placed = |offset| {
        GgufWriter::default()
            .f32_tensor("t", [1, 8], &numbers(8, 0))
            .bend("t", |tensor| tensor.offset = Some(offset))
    };
    for offset in [32, 1 << 40, u64::MAX - 31, u64::MAX - 63, 1 << 63] {
        refused(&placed(offset), &["`t`", "end of the file"]);
    }
    refused(&placed(16), &["`t`", "alignment 32"]);
    assert!(parse(placed(0).bytes()).is_ok());
}

#[test]
fn tensor_types_that_are_not_computed_with_are_refused_by_name() {
    for (code, name) in
        [(10, "Q2_K"), (11, "Q3_K"), (20, "IQ4_NL"), (28, "F64"), (4, "number 4"), (999, "number 999")]
    {
        let writer = GgufWriter::default().tensor("w", &[256], code, vec![0; 4096]);
        refused(&writer, &["`w`", name, "not supported"]);
    }
}

#[test]
fn every_supported_tensor_type_takes_the_bytes_it_should() {
    let kinds = [
        (0, TensorType::F32),
        (1, TensorType::F16),
        (2, TensorType::Q4_0),
        (3, TensorType::Q4_1),
        (6, TensorType::Q5_0),
        (7, TensorType::Q5_1),
        (8, TensorType::Q8_0),
        (12, TensorType::Q4K),
        (13, TensorType::Q5K),
        (14, TensorType::Q6K),
        (30, TensorType::Bf16),
        (39, TensorType::Mxfp4),
    ];
    for (code, expected) in kinds {
        let bytes = 3 * expected.row_bytes(512).unwrap();
        let file = parse(GgufWriter::default().tensor("w", &[512, 3], code, vec![7; bytes]).bytes()).unwrap();
        let view = file.tensor("w").unwrap();
        assert_eq!((view.kind, view.data.len()), (expected, bytes));
    }
}

/// Calls every accessor of a file.
fn walk(bytes: Vec<u8>) {
    let Ok(file) = parse(bytes) else { return };
    for (name, view) in file.tensors() {
        assert_eq!(
            Some(view.data.len()),
            view.kind.row_bytes(view.cols()).map(|row| row * view.rows()),
            "{name}"
        );
    }
    let Ok(source) = GgufSource::new(file) else { return };
    for layer in 0..source.config().layers {
        let _ = source.tensor(TensorId::Weight(layer, Target::Q));
        let _ = source.tensor(TensorId::Bias(layer, Target::K));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_file_with_any_bytes_changed_never_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = tiny_gguf("llama", &[]).bytes();
        // Most of the file is weights, where no error is possible.
        let header = 3_000;
        for (index, byte) in changes {
            let at = index.index(header);
            bytes[at] = byte;
        }
        walk(bytes);
    }

    #[test]
    fn a_file_with_any_number_replaced_by_an_extreme_one_never_panics(
        at in any::<prop::sample::Index>(),
        number in prop_oneof![Just(u64::MAX), Just(1 << 63), Just(1 << 62), Just(1 << 32), Just(0), Just(u64::MAX - 31), any::<u64>()],
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = tiny_gguf("qwen2", &[Target::Q, Target::K, Target::V]).bytes();
        let at = at.index(3_000);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        walk(bytes.clone());
        bytes.truncate(cut.index(bytes.len()));
        walk(bytes);
    }

    #[test]
    fn arbitrary_bytes_behind_the_magic_never_panic(rest in prop::collection::vec(any::<u8>(), 0..400)) {
        walk([b"GGUF\x03\0\0\0", &rest[..]].concat());
    }
}
