//! Summarizes a model's files for listings of models only. Facts missing in the files are left empty.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::{
    bounded_json,
    gguf::GgufFile,
    model_files::CONFIG_FILE,
    parameters::{self, LayerStorage},
    whole_file,
};

/// Maximum bytes of `config.json`.
const MAX_BYTES: u64 = 1 << 20;

/// Facts about a model, for listings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelSummary {
    /// Architecture, such as `llama` or `qwen2`.
    pub architecture: String,
    /// Storage format of the weights, such as `Q4_K_M`, `GPTQ` or `BF16`.
    pub weights: String,
    /// Number of parameters: a tied head counts once, a quantized layer as its unquantized weights.
    pub parameters: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawModelConfig {
    model_type: Value,
    torch_dtype: Value,
    dtype: Value,
    quantization_config: Value,
}

impl ModelSummary {
    /// Summarizes the metadata of a GGUF file.
    #[must_use]
    pub fn from_gguf(file: &GgufFile) -> Self {
        let architecture = file.str("general.architecture").ok().flatten().unwrap_or_default();
        let kind = file.u32("general.file_type").ok().flatten();
        Self {
            architecture: architecture.to_owned(),
            weights: kind.map_or("", file_type).to_owned(),
            parameters: parameters::of_gguf(file),
        }
    }

    /// Summarizes `config.json` in `directory` and the weights beside it.
    #[must_use]
    pub fn from_directory(directory: &Path) -> Self {
        let json = whole_file::read_if_there(&directory.join(CONFIG_FILE), MAX_BYTES).ok().flatten();
        let raw: RawModelConfig = json.and_then(|json| bounded_json::parse(&json).ok()).unwrap_or_default();
        let kinds = [&raw.quantization_config["quant_method"], &raw.torch_dtype, &raw.dtype];
        let weights = kinds.into_iter().find_map(Value::as_str).unwrap_or_default();
        let short = weights.replace("bfloat", "bf").replace("float", "f");
        Self {
            architecture: raw.model_type.as_str().unwrap_or_default().to_owned(),
            weights: short.to_uppercase(),
            parameters: stored(&raw.quantization_config)
                .and_then(|stored| parameters::of_directory(directory, stored)),
        }
    }
}

/// Returns the storage of quantized layers; `None` for an unknown method.
fn stored(quantization: &Value) -> Option<LayerStorage> {
    match quantization["quant_method"].as_str() {
        None if quantization.is_null() => Some(LayerStorage::Plain),
        Some("gptq" | "awq") => {
            let bits = quantization["bits"].as_u64().filter(|bits| matches!(bits, 1..=8));
            bits.map(|bits| LayerStorage::Codes { bits })
        }
        _ => None,
    }
}

/// Returns llama.cpp's name of a mixture of tensor types.
fn file_type(number: u32) -> &'static str {
    match number {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        38 => "MXFP4",
        32 => "BF16",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(config: &str) -> (String, String) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(CONFIG_FILE), config).unwrap();
        let ModelSummary { architecture, weights, parameters } =
            ModelSummary::from_directory(directory.path());
        assert_eq!(parameters, None, "no weights are beside it");
        (architecture, weights)
    }

    #[test]
    fn a_configuration_says_architecture_and_weights() {
        let own = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(described(r#"{"model_type":"qwen2","torch_dtype":"bfloat16"}"#), own("qwen2", "BF16"));
        assert_eq!(described(r#"{"model_type":"llama","dtype":"float16"}"#), own("llama", "F16"));
        let gptq =
            r#"{"model_type":"llama","torch_dtype":"float16","quantization_config":{"quant_method":"gptq"}}"#;
        assert_eq!(described(gptq), own("llama", "GPTQ"));
        for nothing in ["{}", "[", r#"{"model_type":7}"#] {
            assert_eq!(described(nothing), own("", ""));
        }
    }

    #[test]
    fn parameters_are_counted_unless_nobody_knows_how_they_are_stored() {
        let golden = testkit::paths::golden("models");
        let parameters = |name| ModelSummary::from_directory(&golden.join(name)).parameters;
        assert_eq!(parameters("llama-tied"), Some(113_088));
        assert_eq!(parameters("llama-gptq"), Some(102_720));
        for (about, known) in [
            ("null", Some(LayerStorage::Plain)),
            (r#"{"quant_method":"awq","bits":4}"#, Some(LayerStorage::Codes { bits: 4 })),
            (r#"{"quant_method":"awq","bits":0}"#, None),
            (r#"{"quant_method":"fp8"}"#, None),
            ("{}", None),
        ] {
            assert_eq!(stored(&serde_json::from_str(about).unwrap()), known, "{about}");
        }
    }
}
