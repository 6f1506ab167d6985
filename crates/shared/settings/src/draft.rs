//! The drafter of speculative decoding: a word, or the path of a model.

use std::{ffi::OsString, path::PathBuf, str::FromStr};

use crate::declaration::Value;

/// The name of [`DraftChoice::EarlyExit`] in older versions.
pub(crate) const OLD_EARLY_EXIT: &str = "self";

/// The drafter of speculative decoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftChoice {
    /// Speculative decoding is switched off.
    Off,
    /// The drafters that help on the device.
    Auto,
    /// Prompt lookup: the tokens that followed the same n-gram before.
    Ngram,
    /// The first layers of the base, with the draft adapter that was loaded last.
    EarlyExit,
    /// The model at this path, which has the base's tokens.
    Model(PathBuf),
}

impl FromStr for DraftChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "ngram" => Ok(Self::Ngram),
            // Older versions call it `self`.
            "early-exit" | OLD_EARLY_EXIT => Ok(Self::EarlyExit),
            // A `/` or `.` is required, so that a misspelled word is not reported as a missing file.
            path if path.contains(['/', '.']) => Ok(Self::Model(path.into())),
            other => Err(format!(
                "`{other}` is not a drafter; write off, auto, ngram, early-exit, or the path of a model, \
                 as ./{other}"
            )),
        }
    }
}

impl Value for DraftChoice {
    fn text(&self) -> OsString {
        match self {
            Self::Off => "off".into(),
            Self::Auto => "auto".into(),
            Self::Ngram => "ngram".into(),
            Self::EarlyExit => "early-exit".into(),
            Self::Model(path) => path.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_a_word_a_path_has_a_dot_or_a_slash_and_anything_else_is_refused() {
        assert_eq!(
            ("early-exit".parse(), "auto".parse()),
            (Ok(DraftChoice::EarlyExit), Ok(DraftChoice::Auto))
        );
        assert_eq!("self".parse(), Ok(DraftChoice::EarlyExit), "its older name");
        for path in ["./small", "small.gguf", "/models/small"] {
            assert_eq!(path.parse(), Ok(DraftChoice::Model(path.into())));
            assert_eq!(DraftChoice::Model(path.into()).text(), OsString::from(path));
        }
        let refused = "ngramm".parse::<DraftChoice>().unwrap_err();
        assert!(refused.contains("is not a drafter") && refused.contains("./ngramm"), "{refused}");
    }
}
