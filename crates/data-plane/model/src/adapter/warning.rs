//! Warnings about contents of adapter files: parts without effect, and parts that are served approximately.

use std::fmt;

/// A part of an adapter's files without effect, or with an approximate one.
#[derive(Debug, Clone, PartialEq)]
pub enum AdapterWarning {
    /// The file has a copy of the base's token embedding or head that `modules_to_save` does not name. PEFT
    /// writes such copies beside factors of embedding or head.
    BaseCopy {
        /// Name of the tensor in the file.
        tensor: String,
    },
    /// A key of `rank_pattern` or `alpha_pattern` matches no adapted layer.
    UnusedPattern {
        /// Name of the pattern option.
        option: &'static str,
        /// The key without a match.
        pattern: String,
    },
    /// The LoRA that an adapter was converted to lacks a part of the change of some layers.
    Approximation {
        /// Layer with the largest missing part.
        module: String,
        /// Rank of the LoRA in that layer.
        rank: usize,
        /// Norm of the missing part, as a share of the norm of the layer's change.
        error: f64,
    },
}

impl fmt::Display for AdapterWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BaseCopy { tensor } => write!(
                f,
                "tensor `{tensor}` is a copy of the base model's weights and is not used; \
                 if it was trained, name its layer in `modules_to_save`"
            ),
            Self::Approximation { module, rank, error } => write!(
                f,
                "the adapter is served as a LoRA; the LoRA of rank {rank} lacks {:.2} % of the change of \
                 `{module}`, and less of other layers",
                100.0 * error
            ),
            Self::UnusedPattern { option, pattern } => {
                write!(
                    f,
                    "`{option}` has a key `{}` that matches no layer of the adapter",
                    pattern.escape_debug()
                )
            }
        }
    }
}
