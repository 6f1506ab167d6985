//! Fetches a model's files from the hub into the cache.

use std::path::{Path, PathBuf};

use hf_hub::{
    Cache, Repo, RepoType,
    api::sync::{ApiBuilder, ApiError},
};

use super::{HubName, HubSettings, LocationError};

/// Fetches the model's files with its tokenizer, and returns the snapshot's directory.
pub(super) fn fetch(name: HubName, settings: &HubSettings) -> Result<PathBuf, LocationError> {
    match snapshot(&name, settings) {
        Ok(Some(snapshot)) => Ok(snapshot),
        Ok(None) => {
            Err(LocationError::Download { name, reason: "the repository has no model files".to_owned() })
        }
        Err(error) => Err(LocationError::Download { name, reason: error.to_string() }),
    }
}

fn snapshot(name: &HubName, settings: &HubSettings) -> Result<Option<PathBuf>, ApiError> {
    // The endpoint and the token are the hub library's own settings.
    let api = ApiBuilder::from_env()
        .with_cache_dir(settings.cache.clone())
        .with_token(Cache::from_env().token())
        .with_progress(false)
        .build()?;
    let id = format!("{}/{}", name.organization, name.name);
    let repository = api.repo(Repo::with_revision(id, RepoType::Model, name.revision.clone()));
    let files: Vec<String> = repository.info()?.siblings.into_iter().map(|file| file.rfilename).collect();
    let mut snapshot = None;
    for file in wanted(&files) {
        tracing::info!(model = %name, file, "fetching");
        snapshot = repository.get(file)?.parent().map(Path::to_path_buf);
    }
    Ok(snapshot)
}

/// Selects the files to fetch. Files in folders are other formats or variants, so they are skipped. Weights
/// come as safetensors, or else as GGUF if there is a single one.
fn wanted(files: &[String]) -> Vec<&str> {
    let top = || files.iter().map(String::as_str).filter(|file| !file.contains('/'));
    let with = |extension: &'static str| top().filter(move |file| file.ends_with(extension));
    let weights: Vec<&str> = match with(".safetensors").count() {
        0 if with(".gguf").count() == 1 => with(".gguf").collect(),
        0 => return Vec::new(),
        _ => with(".safetensors").collect(),
    };
    with(".json").chain(top().filter(|file| *file == "chat_template.jinja")).chain(weights).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted_of(files: &[&str]) -> Vec<String> {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        wanted(&files).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn safetensors_are_fetched_and_pickles_and_variants_are_not() {
        let files = ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md"];
        assert_eq!(wanted_of(&files), ["config.json", "model.safetensors"]);
    }

    #[test]
    fn a_single_gguf_is_fetched_and_one_of_several_is_not_guessed() {
        assert_eq!(wanted_of(&["README.md", "a.gguf"]), ["a.gguf"]);
        assert!(wanted_of(&["a.gguf", "b.gguf"]).is_empty());
    }
}
