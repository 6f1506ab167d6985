//! Quantization of a Hugging Face model's linear layers by GPTQ or AWQ, from `quantization_config`.

use serde_json::Value;

#[derive(Debug)]
pub(super) struct UnsupportedOption {
    pub(super) option: &'static str,
    pub(super) value: String,
}

fn unsupported(option: &'static str, value: impl std::fmt::Debug) -> UnsupportedOption {
    UnsupportedOption { option, value: format!("{value:?}") }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantization {
    pub(super) method: QuantMethod,
    /// Bits per code: 4 or 8.
    pub(super) bits: usize,
    /// Number of inputs with a common scale; `None` for all inputs.
    pub(super) group: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuantMethod {
    /// GPTQ, whose stored zero points are this much smaller.
    Gptq(u32),
    Awq,
}

impl Quantization {
    /// Reads `quantization_config`.
    ///
    /// # Errors
    /// The method or its variant is unsupported.
    pub(super) fn parse(json: &Value) -> Result<Self, UnsupportedOption> {
        let text = |name: &str| json.get(name).and_then(Value::as_str);
        let method = match (text("quant_method"), text("checkpoint_format"), text("version")) {
            (Some("gptq"), None | Some("gptq"), _) => QuantMethod::Gptq(1),
            (Some("gptq"), Some("gptq_v2"), _) => QuantMethod::Gptq(0),
            (Some("gptq"), other, _) => {
                return Err(unsupported("quantization_config.checkpoint_format", other));
            }
            (Some("awq"), _, None | Some("gemm" | "GEMM")) => QuantMethod::Awq,
            (Some("awq"), _, other) => return Err(unsupported("quantization_config.version", other)),
            _ => {
                let method = json.get("quant_method").unwrap_or(json);
                return Err(unsupported("quantization_config", method.to_string()));
            }
        };
        if let Some(dynamic) = json.get("dynamic").filter(|dynamic| !dynamic.is_null()) {
            return Err(unsupported("quantization_config.dynamic", dynamic.to_string()));
        }
        let bits = match (method, json.get("bits").and_then(Value::as_u64)) {
            (_, Some(4)) => 4,
            (QuantMethod::Gptq(_), Some(8)) => 8,
            (_, other) => return Err(unsupported("quantization_config.bits", other)),
        };
        let group = match json.get("group_size").and_then(Value::as_i64) {
            Some(-1) => None,
            Some(size @ 1..=0x1_0000) => usize::try_from(size).ok(),
            other => return Err(unsupported("quantization_config.group_size", other)),
        };
        Ok(Self { method, bits, group })
    }

    /// Whether `quantization_config` names MXFP4.
    pub(super) fn is_mxfp4(json: &Value) -> bool {
        json.get("quant_method").and_then(Value::as_str) == Some("mxfp4")
    }

    pub(super) fn per_word(self) -> usize {
        32 / self.bits
    }

    pub(super) fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Returns the zero point of symmetric codes, which need no minimum.
    pub(super) fn middle(self) -> u32 {
        1 << (self.bits - 1)
    }
}
