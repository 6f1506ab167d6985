//! Counts a model's parameters from the shapes of its tensors, for listings of models only.

use std::{fs::File, io::Read, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value};
use shmproto::file::open_regular;

use crate::{bounded_json, gguf::GgufFile, weight_files::weight_files};

/// Bytes of a weight file's header.
const MAX_HEADER_BYTES: u64 = 1 << 24;

/// Header entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// Suffixes of the tensors that GPTQ and AWQ store beside the codes of a linear layer.
const BESIDE_CODES: [&str; 3] = [".qzeros", ".scales", ".g_idx"];

/// How the linear layers of a directory are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerStorage {
    Plain,
    /// GPTQ or AWQ codes of `bits` bits, several in each word of 32 bits.
    Codes {
        bits: u64,
    },
}

/// A tensor in the header of a weight file.
#[derive(Deserialize)]
struct TensorHeader {
    dtype: String,
    shape: Vec<u64>,
}

/// Counts the parameters of a GGUF file.
pub(crate) fn of_gguf(file: &GgufFile) -> Option<u64> {
    let count: u64 = file.tensors().map(|(_, tensor)| (tensor.rows() * tensor.cols()) as u64).sum();
    (count > 0).then_some(count)
}

/// Counts the parameters of a safetensors directory; `None` if weights are missing or cannot be counted.
pub(crate) fn of_directory(directory: &Path, stored: LayerStorage) -> Option<u64> {
    let names = weight_files(directory).ok()?;
    names.iter().try_fold(0u64, |count, name| {
        let header = header(&mut open_regular(&directory.join(name)).ok()?)?;
        count.checked_add(of_header(&header, stored)?)
    })
}

/// Reads the JSON header of a weight file, which follows its length.
fn header(file: &mut File) -> Option<Vec<u8>> {
    let mut length = [0; size_of::<u64>()];
    file.read_exact(&mut length).ok()?;
    let length = Some(u64::from_le_bytes(length)).filter(|length| *length <= MAX_HEADER_BYTES)?;
    let mut header = Vec::new();
    let read = file.take(length).read_to_end(&mut header).ok()?;
    (read as u64 == length).then_some(header)
}

fn of_header(header: &[u8], stored: LayerStorage) -> Option<u64> {
    let mut entries: Map<String, Value> = bounded_json::parse(header).ok()?;
    entries.remove(METADATA);
    entries.into_iter().try_fold(0u64, |count, (name, entry)| {
        count.checked_add(of_tensor(&name, &serde_json::from_value(entry).ok()?, stored)?)
    })
}

/// Numbers that are no floats are masks and places, unless they are words of codes.
fn of_tensor(name: &str, tensor: &TensorHeader, stored: LayerStorage) -> Option<u64> {
    let elements = tensor.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
    let is_float = tensor.dtype.starts_with('F') || tensor.dtype == "BF16";
    match stored {
        LayerStorage::Codes { bits } if name.ends_with(".qweight") => Some(elements.checked_mul(32)? / bits),
        LayerStorage::Codes { .. } if BESIDE_CODES.iter().any(|part| name.ends_with(part)) => Some(0),
        _ => Some(if is_float { elements } else { 0 }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model_files::{INDEX_FILE, SINGLE_FILE};

    fn write(directory: &Path, name: &str, tensors: &Value) {
        let header = tensors.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 64]].concat();
        std::fs::write(directory.join(name), bytes).unwrap();
    }

    #[test]
    fn floats_of_all_weight_files_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let tensor =
            |kind: &str, shape: &[u64]| json!({ "dtype": kind, "shape": shape, "data_offsets": [0, 0] });
        let plain = || of_directory(directory.path(), LayerStorage::Plain);
        assert_eq!(plain(), None, "no weights are there");
        let first = json!({ "a": tensor("BF16", &[3, 5]), "mask": tensor("BOOL", &[9, 9]), METADATA: { "format": "pt" } });
        write(directory.path(), SINGLE_FILE, &first);
        assert_eq!(plain(), Some(15));
        write(
            directory.path(),
            "b.safetensors",
            &json!({ "b": tensor("F32", &[7]), "one": tensor("F16", &[]) }),
        );
        let index = json!({ "weight_map": { "a": SINGLE_FILE, "b": "b.safetensors" } });
        std::fs::write(directory.path().join(INDEX_FILE), index.to_string()).unwrap();
        assert_eq!(plain(), Some(15 + 7 + 1));
        for broken in [json!({ "a": 1 }), json!({ "a": tensor("F32", &[u64::MAX, 2]) }), json!([])] {
            write(directory.path(), SINGLE_FILE, &broken);
            assert_eq!(plain(), None, "{broken}");
        }
        std::fs::write(directory.path().join(SINGLE_FILE), u64::MAX.to_le_bytes()).unwrap();
        assert_eq!(plain(), None, "a header longer than any");
    }

    #[test]
    fn a_quantized_layer_has_as_many_parameters_as_codes() {
        let golden = testkit::paths::golden("models");
        // Embedding and head, and of each layer attention, feed-forward and norms; of 64 features, 96 of the feed-forward.
        let layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64;
        let expected = 2 * 320 * 64 + 2 * layer + 64;
        for (name, bits) in [("llama-gptq", 4), ("llama-awq", 4), ("llama-gptq8", 8)] {
            assert_eq!(
                of_directory(&golden.join(name), LayerStorage::Codes { bits }),
                Some(expected),
                "{name}"
            );
        }
    }
}
