//! Directories of models and state. Only this module reads `HOLOBIONT_HOME`.

use std::{ffi::OsString, path::PathBuf};

/// Directory that holds `models/`, `state/` and `runs/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HomeDirectory(PathBuf);

impl HomeDirectory {
    /// Returns `$HOLOBIONT_HOME`, else `$XDG_DATA_HOME/holobiont`, else `~/.local/share/holobiont`.
    pub(crate) fn from_environment() -> Self {
        Self::choose(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn choose(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let under = |base: OsString, rest: &str| PathBuf::from(base).join(rest);
        let directory = variable("HOLOBIONT_HOME")
            .map(PathBuf::from)
            .or_else(|| variable("XDG_DATA_HOME").map(|base| under(base, "holobiont")))
            .or_else(|| variable("HOME").map(|base| under(base, ".local/share/holobiont")))
            .unwrap_or_else(|| PathBuf::from(".holobiont"));
        Self(directory)
    }

    #[cfg(test)]
    pub(crate) fn at(directory: &std::path::Path) -> Self {
        Self(directory.to_owned())
    }

    /// Returns the directory of models, which `pull` fills and `up` searches.
    pub(crate) fn models(&self) -> PathBuf {
        self.0.join("models")
    }

    /// Returns the directory in which `tune` keeps one directory per run.
    pub(crate) fn runs(&self) -> PathBuf {
        self.0.join("runs")
    }

    /// Returns the file with the input history of `chat`.
    pub(crate) fn chat_history(&self) -> PathBuf {
        self.0.join("chat_history")
    }

    /// Returns the directory of the registry of running deployments.
    pub(crate) fn running(&self) -> PathBuf {
        self.0.join("running")
    }

    /// Returns the default state directory of `up`.
    pub(crate) fn state(&self) -> PathBuf {
        self.0.join("state")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(variables: &[(&str, &str)]) -> HomeDirectory {
        HomeDirectory::choose(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn holobiont_home_wins_over_the_users_data_directory() {
        let variables = [("HOME", "/h"), ("XDG_DATA_HOME", "/x"), ("HOLOBIONT_HOME", "/o")];
        assert_eq!(home(&variables).models(), PathBuf::from("/o/models"));
        assert_eq!(home(&variables[..2]).models(), PathBuf::from("/x/holobiont/models"));
        assert_eq!(home(&variables[..1]).state(), PathBuf::from("/h/.local/share/holobiont/state"));
    }
}
