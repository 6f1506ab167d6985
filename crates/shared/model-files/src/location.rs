//! Finds a named model: a path, or a name on a hub whose files lie in the Hugging Face cache.
//!
//! ```text
//! <cache>/models--ORG--NAME/refs/REVISION          the commit that a branch or tag stands for
//! <cache>/models--ORG--NAME/snapshots/COMMIT/...   the files of a commit, links to blobs
//! ```

use std::{
    env, fmt, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::whole_file;

/// Maximum bytes of a file in `refs/`: a commit and a line break.
const MAX_REF_BYTES: u64 = 256;
/// Maximum bytes of an organization, a name or a revision.
const MAX_NAME_BYTES: usize = 96;
/// Revision of a hub name without one.
const DEFAULT_REVISION: &str = "main";

/// Returns the directory that holds the folders `models--ORG--NAME`, from the variables of the Hugging Face
/// libraries: `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`.
#[must_use]
pub fn hub_cache() -> PathBuf {
    hub_cache_of(|name| env::var(name).ok())
}

/// Like [`hub_cache`], with another lookup of variables.
fn hub_cache_of(variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    directory("HF_HUB_CACHE", &variable).unwrap_or_else(|| hub_home_of(&variable).join("hub"))
}

/// Returns the directory of the Hugging Face libraries, which holds the cache and the token.
pub(crate) fn hub_home_of(variable: &impl Fn(&str) -> Option<String>) -> PathBuf {
    let home = || directory("HOME", variable).unwrap_or_default();
    let user_cache = || directory("XDG_CACHE_HOME", variable).unwrap_or_else(|| home().join(".cache"));
    directory("HF_HOME", variable).unwrap_or_else(|| user_cache().join("huggingface"))
}

/// Returns the directory that a variable names, unless the variable is empty.
fn directory(name: &str, variable: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    variable(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Name of a model on a hub: `org/name` or `org/name@revision`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    organization: String,
    name: String,
    revision: String,
}

impl HubName {
    /// Returns the name of the repository's folder in the cache.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.organization, self.name)
    }

    /// Returns the repository on the hub, `org/name`.
    #[must_use]
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// Returns the branch, tag or commit.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.organization, self.name, self.revision)
    }
}

/// Error for a text that is not a hub name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("write a hub name as org/name or org/name@revision, of letters, digits, '.', '_' and '-'")]
pub struct HubNameError;

impl FromStr for HubName {
    type Err = HubNameError;

    fn from_str(text: &str) -> Result<Self, HubNameError> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let (organization, name) = repository.split_once('/').ok_or(HubNameError)?;
        // A revision may contain slashes (`refs/pr/1`), so each of its parts is checked as a part of a path.
        let parts = [organization, name].into_iter().chain(revision.split('/'));
        if revision.len() > MAX_NAME_BYTES || !parts.into_iter().all(is_path_part) {
            return Err(HubNameError);
        }
        Ok(Self {
            organization: organization.to_owned(),
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

/// True if `part` is a valid single component of a path.
fn is_path_part(part: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_NAME_BYTES).contains(&part.len()) && part.bytes().all(allowed) && !part.starts_with('.')
}

/// Error while finding a named model.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The name is neither a path nor a hub name.
    #[error("{name:?} is neither an existing file or directory nor a hub name: {source}")]
    Unknown {
        /// Name that the caller requested.
        name: String,
        /// Reason why the text is not a hub name.
        source: HubNameError,
    },
    /// The model is not in the cache.
    #[error("{name} is not in {}; fetch it with holobiont pull {name}, or give a path", cache.display())]
    NotCached {
        /// Hub name that the caller requested.
        name: HubName,
        /// Cache directory that was searched.
        cache: PathBuf,
    },
    /// The cache exists but cannot be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Cache {
        /// Path of the unreadable file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file in `refs/` does not hold a commit.
    #[error("{} does not contain the name of a commit; remove it and fetch the model again", path.display())]
    Reference {
        /// Path of the file in `refs/`.
        path: PathBuf,
    },
}

/// Finds the model called `name`: the path itself if it exists, else the snapshot of a hub name.
///
/// # Errors
/// If no such path exists, and `name` is not a hub name or is not in `cache`.
pub fn resolve(name: &str, cache: &Path) -> Result<PathBuf, LocationError> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    let hub_name: HubName =
        name.parse().map_err(|source| LocationError::Unknown { name: name.to_owned(), source })?;
    match cached_snapshot(&hub_name, cache)? {
        Some(snapshot) => Ok(snapshot),
        None => Err(LocationError::NotCached { name: hub_name, cache: cache.to_owned() }),
    }
}

/// Returns the snapshot directory of a hub name, if the cache holds it.
fn cached_snapshot(name: &HubName, cache: &Path) -> Result<Option<PathBuf>, LocationError> {
    let repository = cache.join(name.folder());
    let reference = repository.join("refs").join(&name.revision);
    let text = whole_file::read_if_there(&reference, MAX_REF_BYTES)
        .map_err(|source| LocationError::Cache { path: reference.clone(), source })?;
    let commit = match text {
        None => name.revision.clone(),
        Some(text) => match std::str::from_utf8(&text).map(str::trim) {
            Ok(commit) if is_path_part(commit) => commit.to_owned(),
            _ => return Err(LocationError::Reference { path: reference }),
        },
    };
    let snapshot = repository.join("snapshots").join(commit);
    Ok(snapshot.is_dir().then_some(snapshot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_hugging_face_libraries_keep_it() {
        let home = ("HOME", "/home/ada");
        let cache = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(variable, _)| *variable == name);
            hub_cache_of(|name| value(name).map(|(_, value)| (*value).to_owned())).display().to_string()
        };
        assert_eq!(cache(&[home]), "/home/ada/.cache/huggingface/hub");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/c")]), "/c/huggingface/hub");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/c"), ("HF_HOME", "/hf")]), "/hf/hub");
        assert_eq!(cache(&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/hub")]), "/hub");
        assert_eq!(cache(&[home, ("HF_HUB_CACHE", "")]), "/home/ada/.cache/huggingface/hub");
    }

    #[test]
    fn a_hub_name_has_an_organization_a_name_and_perhaps_a_revision() {
        let name: HubName = "org/Model-1.5_b".parse().unwrap();
        assert_eq!(name.to_string(), "org/Model-1.5_b@main");
        assert_eq!(name.folder(), "models--org--Model-1.5_b");
        assert_eq!("org/name@refs/pr/1".parse::<HubName>().unwrap().revision, "refs/pr/1");
    }

    #[test]
    fn a_name_that_could_leave_the_cache_is_no_hub_name() {
        let long = format!("org/{}", "n".repeat(MAX_NAME_BYTES + 1));
        for text in [
            "",
            "name",
            "/name",
            "org/",
            "../name",
            "org/..",
            "org/.git",
            "org/name@",
            "org/name@../../etc",
            "org/name@a//b",
            "org/name/more",
            "org\\name/x",
            "org/na me",
            "org/n\0",
            "./model.gguf",
            &long,
        ] {
            assert_eq!(text.parse::<HubName>(), Err(HubNameError), "{text:?}");
        }
    }
}
