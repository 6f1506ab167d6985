//! PEFT's format: `adapter_model.safetensors` beside `adapter_config.json`.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use safetensors::{
    Dtype,
    tensor::{TensorView, serialize_to_file},
};
use serde_json::json;

use super::{Matrix, Projection, RandomAdapter};

/// Writes `adapter` into `folder`, which it creates.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn write_peft(adapter: &RandomAdapter, folder: &Path) -> Result<()> {
    let context = || format!("cannot write an adapter into {}", folder.display());
    fs::create_dir_all(folder).with_context(context)?;
    write_peft_config(adapter, adapter.rank as f64, folder)?;
    let tensors = named_tensors(adapter);
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, matrix, bytes)| {
            Ok((name.as_str(), TensorView::new(Dtype::F16, vec![matrix.rows, matrix.cols], bytes)?))
        })
        .collect::<Result<_>>()?;
    serialize_to_file(views, None, &folder.join("adapter_model.safetensors")).with_context(context)
}

/// Writes only `adapter_config.json`, with `alpha` for the scale.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn write_peft_config(adapter: &RandomAdapter, alpha: f64, folder: &Path) -> Result<()> {
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": adapter.adapted().map(Projection::peft).collect::<Vec<_>>(),
    });
    fs::write(folder.join("adapter_config.json"), format!("{config:#}\n"))
        .with_context(|| format!("cannot write an adapter into {}", folder.display()))
}

fn named_tensors(adapter: &RandomAdapter) -> Vec<(String, &Matrix, Vec<u8>)> {
    adapter
        .modules
        .iter()
        .flat_map(|module| {
            let stem = format!(
                "base_model.model.model.layers.{}.self_attn.{}",
                module.layer,
                module.projection.peft()
            );
            [("A", &module.a), ("B", &module.b)]
                .map(|(side, matrix)| (format!("{stem}.lora_{side}.weight"), matrix, matrix.bytes()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::{super::sample, *};

    #[test]
    fn a_written_adapter_reads_back_with_peft_names_and_shapes() {
        let folder = tempfile::tempdir().unwrap();
        let adapter = sample();
        write_peft(&adapter, folder.path()).unwrap();
        let bytes = fs::read(folder.path().join("adapter_model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 24);
        let q = file.tensor("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight").unwrap();
        assert_eq!((q.dtype(), q.shape()), (Dtype::F16, &[2, 4][..]));
        let o = file.tensor("base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight").unwrap();
        assert_eq!((o.shape(), o.data()), (&[4, 2][..], adapter.modules[3].b.bytes().as_slice()));
        let config = fs::read_to_string(folder.path().join("adapter_config.json")).unwrap();
        assert!(config.contains("\"r\": 2") && config.contains("o_proj"), "{config}");
    }
}
