//! What methods are called.

use std::fmt;

/// The methods by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterKind {
    /// Low-rank deltas of linear layers.
    Lora,
    /// The same with a magnitude for each output.
    Dora,
    /// The same from where it is invoked.
    Activated,
    /// The same, and of the token embedding.
    Embedding,
    /// The same, with an embedding or a head of its own.
    Saved,
    /// Vectors that scale inputs or outputs of linear layers.
    Ia3,
    /// Keys and values before the first token.
    Prefix,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lora => "LoRA",
            Self::Dora => "DoRA",
            Self::Activated => "activated LoRA",
            Self::Embedding => "LoRA of the embedding",
            Self::Saved => "LoRA with saved modules",
            Self::Ia3 => "IA3",
            Self::Prefix => "prefix tuning",
        })
    }
}
