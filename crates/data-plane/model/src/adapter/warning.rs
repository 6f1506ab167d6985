//! What an adapter's files hold that has no effect: no reason to refuse the adapter, and worth telling whoever made it.

use std::fmt;

/// Something in an adapter's files that changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterWarning {
    /// A copy of the base's token embedding or head that `modules_to_save` does not name. PEFT writes one beside factors of the
    /// embedding or the head.
    BaseCopy {
        /// The tensor, as the file calls it.
        tensor: String,
    },
    /// A key of `rank_pattern` or `alpha_pattern` that matches no layer that the adapter changes.
    UnusedPattern {
        /// The option.
        option: &'static str,
        /// The key.
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
