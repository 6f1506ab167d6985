//! Names of the adapter methods.

use std::fmt;

/// The adapter methods, with display names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterKind {
    /// Low-rank deltas of linear layers.
    Lora,
    /// LoRA with a magnitude for each output.
    Dora,
    /// LoRA that applies from its invocation on.
    Activated,
    /// LoRA that also adapts the token embedding.
    Embedding,
    /// LoRA that replaces the embedding or head.
    Saved,
    /// LoRA with a classification head.
    Classification,
    /// Vectors that scale inputs or outputs of linear layers.
    Ia3,
    /// Keys and values before the first token.
    Prefix,
    /// Embeddings before the first token.
    Prompt,
    /// LoRA with rows of some tokens in embedding or head, or such rows alone.
    Tokens,
    /// LoRA with biases, or biases alone.
    Biased,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lora => "LoRA",
            Self::Dora => "DoRA",
            Self::Activated => "activated LoRA",
            Self::Embedding => "LoRA of the embedding",
            Self::Saved => "LoRA with saved modules",
            Self::Classification => "LoRA with a classification head",
            Self::Ia3 => "IA3",
            Self::Prefix => "prefix tuning",
            Self::Prompt => "prompt tuning",
            Self::Tokens => "trained tokens",
            Self::Biased => "LoRA with biases",
        })
    }
}
