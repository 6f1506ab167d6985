//! llama.cpp's format for adapters: one GGUF file.
//!
//! ```text
//! magic "GGUF" | version u32 | tensors u64 | entries u64
//! entries x    { key string | kind u32 | value }
//! tensors x    { name string | dimensions u32 | dimensions x u64, row length first | type u32 | offset u64 }
//! padding to 32 | tensor data, each padded to 32
//! ```

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{Matrix, RandomAdapter};

const VERSION: u32 = 3;
const ALIGNMENT: usize = 32;
const KIND_F32: u32 = 6;
const KIND_STRING: u32 = 8;
const TENSOR_F16: u32 = 1;

/// Writes `adapter` to the file `path`.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_gguf(adapter: &RandomAdapter, path: &Path) -> Result<()> {
    fs::write(path, encode(adapter)).with_context(|| format!("cannot write an adapter to {}", path.display()))
}

fn encode(adapter: &RandomAdapter) -> Vec<u8> {
    let tensors = named_tensors(adapter);
    let mut out = Vec::new();
    out.extend_from_slice(b"GGUF");
    out.extend_from_slice(&VERSION.to_le_bytes());
    put_count(&mut out, tensors.len());
    put_entries(&mut out, adapter);
    let mut offset = 0;
    for (name, matrix) in &tensors {
        put_string(&mut out, name);
        out.extend_from_slice(&2_u32.to_le_bytes());
        put_count(&mut out, matrix.cols);
        put_count(&mut out, matrix.rows);
        out.extend_from_slice(&TENSOR_F16.to_le_bytes());
        put_count(&mut out, offset);
        offset += (2 * matrix.values.len()).next_multiple_of(ALIGNMENT);
    }
    for (_, matrix) in &tensors {
        pad(&mut out);
        out.extend_from_slice(&matrix.bytes());
    }
    pad(&mut out);
    out
}

fn named_tensors(adapter: &RandomAdapter) -> Vec<(String, &Matrix)> {
    adapter
        .modules
        .iter()
        .flat_map(|module| {
            let stem = format!("blk.{}.{}.weight", module.layer, module.projection.gguf());
            [(format!("{stem}.lora_a"), &module.a), (format!("{stem}.lora_b"), &module.b)]
        })
        .collect()
}

fn put_entries(out: &mut Vec<u8>, adapter: &RandomAdapter) {
    let texts = [
        ("general.type", "adapter"),
        ("general.architecture", adapter.architecture.as_str()),
        ("adapter.type", "lora"),
    ];
    put_count(out, texts.len() + 1);
    for (key, text) in texts {
        put_string(out, key);
        out.extend_from_slice(&KIND_STRING.to_le_bytes());
        put_string(out, text);
    }
    put_string(out, "adapter.lora.alpha");
    out.extend_from_slice(&KIND_F32.to_le_bytes());
    out.extend_from_slice(&(adapter.rank as f32).to_le_bytes());
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&(count as u64).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    put_count(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
}

#[cfg(test)]
mod tests {
    use model_files::gguf::GgufFile;

    use super::{super::sample, *};

    #[test]
    fn a_written_adapter_reads_back_with_the_peers_names_and_shapes() {
        let adapter = sample();
        let file = GgufFile::from_bytes(Path::new("adapter.gguf"), encode(&adapter)).unwrap();
        assert_eq!(file.str("adapter.type").unwrap(), Some("lora"));
        assert_eq!(file.str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(file.f32("adapter.lora.alpha").unwrap(), Some(2.0));
        assert_eq!(file.tensors().count(), 24);
        let a = file.tensor("blk.2.attn_k.weight.lora_a").unwrap();
        assert_eq!((a.dims, a.data), (&[4, 2][..], adapter.modules[9].a.bytes().as_slice()));
        let b = file.tensor("blk.0.attn_output.weight.lora_b").unwrap();
        assert_eq!((b.dims, b.data), (&[2, 4][..], adapter.modules[3].b.bytes().as_slice()));
    }
}
