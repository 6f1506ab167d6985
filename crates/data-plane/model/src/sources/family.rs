//! Model families, with the facts that hold for every file format.

use crate::shape::source::Target;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Granite,
    Olmo2,
    Phi3,
    Gemma2,
    Gemma3,
    Mixtral,
    Qwen3Moe,
    GptOss,
}

const NAMES: [(Family, &str, &str); 12] = [
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Granite, "granite", "GraniteForCausalLM"),
    (Family::Olmo2, "olmo2", "Olmo2ForCausalLM"),
    (Family::Phi3, "phi3", "Phi3ForCausalLM"),
    (Family::Gemma2, "gemma2", "Gemma2ForCausalLM"),
    (Family::Gemma3, "gemma3", "Gemma3ForCausalLM"),
    (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
    (Family::Qwen3Moe, "qwen3moe", "Qwen3MoeForCausalLM"),
    (Family::GptOss, "gpt-oss", "GptOssForCausalLM"),
];

impl Family {
    pub(super) fn of_class(class: &str) -> Option<Self> {
        NAMES.iter().find(|(_, _, of)| *of == class).map(|(family, ..)| *family)
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, of, _)| *of == name).map(|(family, ..)| *family)
    }

    pub(super) fn of_gguf(name: &str) -> Option<Self> {
        // GGUF files store Mistral and Mixtral models under the name `llama`.
        Self::named(name).filter(|family| !matches!(family, Self::Mistral | Self::Mixtral))
    }

    pub(super) fn name(self) -> &'static str {
        NAMES.iter().find(|(family, ..)| *family == self).map_or("", |(_, name, _)| name)
    }

    pub(super) fn norms_queries(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe | Self::Olmo2 | Self::Gemma3)
    }

    pub(super) fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen3Moe | Self::GptOss)
    }

    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Whether files store linear layers with a common input in one tensor.
    pub(super) fn is_fused(self) -> bool {
        self == Self::Phi3
    }

    pub(super) fn biased(self) -> &'static [Target] {
        match self {
            Self::Qwen2 => &[Target::Q, Target::K, Target::V],
            Self::GptOss => &[Target::Q, Target::K, Target::V, Target::O],
            _ => &[],
        }
    }

    /// Whether GGUF files store the rows of q and k for adjacent rotary pairs.
    pub(super) fn is_interleaved(self) -> bool {
        matches!(self, Self::Llama | Self::Mixtral | Self::Granite)
    }
}
