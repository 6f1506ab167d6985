//! Access to a hub as the variables of the Hugging Face libraries describe it: address, token, offline mode.

use std::{
    env, fmt,
    path::{Path, PathBuf},
};

use crate::{location::hub_home_of, whole_file};

/// Address of the hub if `HF_ENDPOINT` names none.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Maximum bytes of a file that holds a token.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Address of a hub, and the token that proves the user's access.
#[derive(Clone, PartialEq, Eq)]
pub struct HubAccess {
    /// Address without a final slash, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Token for private repositories, which is never shown.
    pub token: Option<String>,
    /// True if `HF_HUB_OFFLINE` forbids downloads.
    pub is_offline: bool,
}

impl HubAccess {
    /// Reads `HF_ENDPOINT`, `HF_HUB_OFFLINE`, and the token of `HF_TOKEN` or of the file that
    /// `huggingface-cli login` writes.
    #[must_use]
    pub fn from_env() -> Self {
        Self::of(|name| env::var(name).ok())
    }

    /// Like [`HubAccess::from_env`], with another lookup of variables.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let value = |name: &str| variable(name).map(|value| value.trim().to_owned());
        let set = |name: &str| value(name).filter(|value| !value.is_empty());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let file =
            || set("HF_TOKEN_PATH").map_or_else(|| hub_home_of(&variable).join("token"), PathBuf::from);
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: set("HF_TOKEN").or_else(|| token_in(&file())),
            is_offline: is_yes(value("HF_HUB_OFFLINE").as_deref()),
        }
    }
}

impl fmt::Debug for HubAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("HubAccess");
        shown.field("endpoint", &self.endpoint).field("is_offline", &self.is_offline);
        shown.finish_non_exhaustive()
    }
}

/// Returns the token in a file; a missing or unreadable file means that the user has none.
fn token_in(path: &Path) -> Option<String> {
    let bytes = whole_file::read_if_there(path, MAX_TOKEN_BYTES).ok()??;
    let token = std::str::from_utf8(&bytes).ok()?.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

/// True if the value of a variable means yes, as in the Hugging Face libraries.
fn is_yes(value: Option<&str>) -> bool {
    value.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(variables: &[(&str, &str)]) -> HubAccess {
        let value = |name: &str| variables.iter().find(|(variable, _)| *variable == name);
        HubAccess::of(|name| value(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_hub_is_that_of_the_variables() {
        let public = access(&[("HOME", "/nowhere")]);
        assert_eq!((&*public.endpoint, public.token, public.is_offline), (DEFAULT_ENDPOINT, None, false));
        let own = access(&[("HF_ENDPOINT", "https://hub.example/"), ("HF_TOKEN", " hf_a\n")]);
        assert_eq!((&*own.endpoint, own.token.as_deref()), ("https://hub.example", Some("hf_a")));
    }

    #[test]
    fn a_token_comes_from_the_variable_before_the_file() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(access(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(access(&[("HF_HOME", home), ("HF_TOKEN", "hf_own")]).token.as_deref(), Some("hf_own"));
        let path = format!("{home}/token");
        assert_eq!(access(&[("HF_TOKEN_PATH", &path)]).token.as_deref(), Some("hf_file"));
    }

    #[test]
    fn a_token_is_never_shown() {
        assert!(!format!("{:?}", access(&[("HF_TOKEN", "hf_secret")])).contains("hf_secret"));
    }

    #[test]
    fn only_the_words_for_yes_mean_offline() {
        for yes in ["1", "on", "Yes", "TRUE"] {
            assert!(access(&[("HF_HUB_OFFLINE", yes)]).is_offline, "{yes}");
        }
        for no in ["0", "", "off", "no"] {
            assert!(!access(&[("HF_HUB_OFFLINE", no)]).is_offline, "{no}");
        }
        assert!(!access(&[]).is_offline);
    }
}
