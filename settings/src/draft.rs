//! Who drafts tokens: a word, or the path of a model.

use std::{ffi::OsString, path::PathBuf, str::FromStr};

use crate::declaration::Value;

/// Who drafts tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Draft {
    /// Nobody.
    Off,
    /// Whatever helps on the device.
    Auto,
    /// The sequence itself: what followed the same words before.
    Ngram,
    /// The base itself: its first layers, with the draft adapter that was loaded last.
    Own,
    /// The model at this path, which has the base's tokens.
    Model(PathBuf),
}

impl FromStr for Draft {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "ngram" => Ok(Self::Ngram),
            "self" => Ok(Self::Own),
            // So that a word that is misspelled is no file that is missing.
            path if path.contains(['/', '.']) => Ok(Self::Model(path.into())),
            other => Err(format!(
                "`{other}` is no draft; write off, auto, ngram or self, or the path of a model, as ./{other}"
            )),
        }
    }
}

impl Value for Draft {
    fn text(&self) -> OsString {
        match self {
            Self::Off => "off".into(),
            Self::Auto => "auto".into(),
            Self::Ngram => "ngram".into(),
            Self::Own => "self".into(),
            Self::Model(path) => path.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_a_word_a_path_has_a_dot_or_a_slash_and_anything_else_is_refused() {
        assert_eq!(("self".parse(), "auto".parse()), (Ok(Draft::Own), Ok(Draft::Auto)));
        for path in ["./small", "small.gguf", "/models/small"] {
            assert_eq!(path.parse(), Ok(Draft::Model(path.into())));
            assert_eq!(Draft::Model(path.into()).text(), OsString::from(path));
        }
        let refused = "ngramm".parse::<Draft>().unwrap_err();
        assert!(refused.contains("is no draft") && refused.contains("./ngramm"), "{refused}");
    }
}
