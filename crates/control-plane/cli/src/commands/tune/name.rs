//! Name of a run and of its adapter.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::terminal::quoted;

/// Longest name in bytes. The encoded name and a suffix must fit into a file name.
const MAX_NAME_BYTES: usize = 128;

/// An adapter name that the gateway accepts and that cannot lead out of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct RunName(String);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "use 1 to {MAX_NAME_BYTES} bytes without ':' and control characters, and no empty part, '.' or '..' between slashes"
)]
pub(crate) struct BadName;

impl RunName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the command that resumes the run.
    pub(super) fn resume(&self) -> String {
        format!("holobiont tune --name {} --resume", quoted(&self.0))
    }

    /// Returns a file name that is unique for each run name.
    pub(super) fn file_name(&self) -> String {
        let mut encoded = String::with_capacity(self.0.len());
        for (at, c) in self.0.char_indices() {
            match c {
                '/' => encoded.push_str("%2F"),
                '%' => encoded.push_str("%25"),
                // A leading dot would hide the directory.
                '.' if at == 0 => encoded.push_str("%2E"),
                c => encoded.push(c),
            }
        }
        encoded
    }
}

impl FromStr for RunName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let leads_out = text.split('/').any(|part| matches!(part, "" | "." | ".."));
        let is_bad =
            leads_out || text.len() > MAX_NAME_BYTES || text.chars().any(|c| c == ':' || c.is_control());
        if is_bad { Err(BadName) } else { Ok(Self(text.to_owned())) }
    }
}

impl TryFrom<String> for RunName {
    type Error = BadName;

    fn try_from(text: String) -> Result<Self, BadName> {
        text.parse()
    }
}

impl fmt::Display for RunName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for bad in ["", ".", "..", "a/../b", "/a", "a/", "a//b", "a:b", "a\nb", "a\0b", &long] {
            assert_eq!(bad.parse::<RunName>(), Err(BadName), "{bad:?}");
        }
    }

    #[test]
    fn every_name_is_one_file_name_and_no_two_are_the_same() {
        let names = ["pirate", "org/pirate", "org%2Fpirate", ".pirate", "%2Epirate", "...", "Käpt'n"];
        let mut files: Vec<String> =
            names.iter().map(|name| name.parse::<RunName>().unwrap().file_name()).collect();
        assert!(files.iter().all(|file| !file.contains('/') && !file.starts_with('.')), "{files:?}");
        files.sort();
        files.dedup();
        assert_eq!(files.len(), names.len());
    }
}
