//! Downloads the files of a hub repository into the cache.

use std::{
    fs,
    io::{IsTerminal as _, stderr},
    path::{Path, PathBuf},
};

use hf_hub::{
    Repo, RepoType,
    api::sync::{ApiBuilder, ApiError},
};
use model_files::{hub_access::HubAccess, location::HubName};

/// Number of times that a broken connection is opened again for a file.
const RETRIES: usize = 3;

/// Downloads the files with the tokenizer, and returns the snapshot's directory, or the reason of a failure.
/// Files that an interrupted download completed are not downloaded again.
pub(super) fn fetch(name: &HubName, cache: &Path) -> Result<PathBuf, String> {
    let marker = marker(name, cache);
    let mark = || {
        fs::create_dir_all(marker.parent().unwrap_or(cache))?;
        fs::write(&marker, "")
    };
    mark().map_err(|error| format!("cannot write {}: {error}", marker.display()))?;
    let snapshot = snapshot(name, cache).map_err(|error| error.to_string())?;
    fs::remove_file(&marker).map_err(|error| format!("cannot remove {}: {error}", marker.display()))?;
    snapshot
        .ok_or_else(|| "the repository has no model files (safetensors, or a single GGUF file)".to_owned())
}

/// Whether a download of this revision was interrupted, so that its snapshot may lack files.
pub(super) fn is_unfinished(name: &HubName, cache: &Path) -> bool {
    marker(name, cache).exists()
}

/// Returns the path of the file that exists while the download is not complete.
fn marker(name: &HubName, cache: &Path) -> PathBuf {
    let revision = name.revision().replace('/', "--");
    cache.join(name.folder()).join(format!(".holobiont-unfinished-{revision}"))
}

fn snapshot(name: &HubName, cache: &Path) -> Result<Option<PathBuf>, ApiError> {
    let HubAccess { endpoint, token, .. } = HubAccess::from_env();
    let api = ApiBuilder::from_env()
        .with_cache_dir(cache.to_owned())
        .with_endpoint(endpoint)
        .with_token(token)
        .with_progress(stderr().is_terminal())
        .with_retries(RETRIES)
        .build()?;
    let revision = name.revision().to_owned();
    let repository = api.repo(Repo::with_revision(name.repository(), RepoType::Model, revision));
    let files: Vec<String> = repository.info()?.siblings.into_iter().map(|file| file.rfilename).collect();
    let mut snapshot = None;
    for file in wanted(&files) {
        snapshot = repository.get(file)?.parent().map(Path::to_path_buf);
    }
    Ok(snapshot)
}

/// Selects the files to download. Files in folders are other formats or variants, so they are skipped.
/// Weights come as safetensors, or else as GGUF if there is a single one.
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
    fn safetensors_are_downloaded_and_pickles_and_variants_are_not() {
        let files = ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md"];
        assert_eq!(wanted_of(&files), ["config.json", "model.safetensors"]);
    }

    #[test]
    fn a_single_gguf_is_downloaded_and_one_of_several_is_not_guessed() {
        assert_eq!(wanted_of(&["README.md", "a.gguf"]), ["a.gguf"]);
        assert!(wanted_of(&["a.gguf", "b.gguf"]).is_empty());
    }
}
