//! Warnings about contents of adapter files that have no effect but suggest a mistake.

use std::fmt;

/// A part of an adapter's files without effect.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

impl fmt::Display for AdapterWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BaseCopy { tensor } => write!(
                f,
                "tensor `{tensor}` is a copy of the base model's weights and is not used; \
                 if it was trained, name its layer in `modules_to_save`"
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
