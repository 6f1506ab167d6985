//! Models are found by path or hub name and opened in any format.

use std::path::{Path, PathBuf};

use crate::files_support::{
    GgufWriter, assert_says, f32_bytes, tiny, tiny_entries, tiny_gguf, tiny_json, write_model,
};
use model::sources::open::open;
use model_files::{
    generation_defaults::GenerationDefaults,
    location::{LocationError, resolve},
    model_files::ModelFiles,
};
use tempfile::TempDir;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache with one snapshot of `org/name`, for `main` and the tag `v1`.
fn cache() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let repository = directory.path().join("models--org--name");
    let snapshot = repository.join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), COMMIT).unwrap();
    std::fs::write(repository.join("refs/v1"), format!("{COMMIT}\n")).unwrap();
    (directory, snapshot)
}

#[test]
fn a_path_that_exists_is_taken_as_it_is() {
    let (directory, _) = cache();
    let path = directory.path().to_str().unwrap();
    assert_eq!(resolve(path, directory.path()).unwrap(), directory.path());
    assert_eq!(resolve("Cargo.toml", directory.path()).unwrap(), Path::new("Cargo.toml"));
}

#[test]
fn a_hub_name_leads_to_the_snapshot_of_its_branch_tag_or_commit() {
    let (directory, snapshot) = cache();
    for name in ["org/name", "org/name@main", "org/name@v1", &format!("org/name@{COMMIT}")] {
        assert_eq!(resolve(name, directory.path()).unwrap(), snapshot, "{name}");
    }
}

#[test]
fn a_name_that_leads_nowhere_is_refused_with_what_to_do() {
    let (directory, _) = cache();
    for name in ["org/other", "org/name@v2", "org/name@snapshots"] {
        assert_says(
            resolve(name, directory.path()),
            &[name, "is not in", directory.path().to_str().unwrap()],
        );
    }
    for name in ["missing.gguf", "./missing", "/missing/dir", "../../etc", "org/../name", ""] {
        assert!(matches!(resolve(name, directory.path()), Err(LocationError::Unknown { .. })), "{name}");
    }
}

#[test]
fn a_reference_that_is_no_commit_is_refused() {
    let (directory, _) = cache();
    let reference = directory.path().join("models--org--name/refs/bad");
    for text in ["../../../etc", "", "a/b", "a\nb"] {
        std::fs::write(&reference, text).unwrap();
        assert_says(resolve("org/name@bad", directory.path()), &["refs/bad", "commit"]);
    }
    std::fs::write(&reference, "a".repeat(1000)).unwrap();
    assert_says(resolve("org/name@bad", directory.path()), &["refs/bad", "limit"]);
}

#[test]
fn a_gguf_file_is_opened_alone_or_as_the_only_one_of_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tiny.gguf");
    std::fs::write(&file, tiny_gguf("llama", &[]).bytes()).unwrap();
    std::fs::write(directory.path().join("README.md"), "tiny").unwrap();
    for path in [file.as_path(), directory.path()] {
        assert_eq!(ModelFiles::at(path).unwrap(), ModelFiles::Gguf(file.clone()));
        assert_eq!(open(path).unwrap().config(), &tiny());
    }
    std::fs::copy(&file, directory.path().join("other.gguf")).unwrap();
    assert_says(ModelFiles::at(directory.path()), &["several models", "other.gguf, tiny.gguf"]);
}

#[test]
fn a_snapshot_of_links_to_blobs_is_opened() {
    let (directory, snapshot) = cache();
    let blob = directory.path().join("models--org--name/blob");
    std::fs::write(&blob, tiny_gguf("llama", &[]).bytes()).unwrap();
    std::os::unix::fs::symlink("../../blob", snapshot.join("tiny.gguf")).unwrap();
    assert_eq!(open(&resolve("org/name", directory.path()).unwrap()).unwrap().config(), &tiny());
}

#[test]
fn a_directory_with_safetensors_is_opened_as_such_even_beside_a_gguf() {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &tiny_json(), &tiny_entries(&[]));
    std::fs::write(directory.path().join("tiny.gguf"), "not looked at").unwrap();
    assert_eq!(
        ModelFiles::at(directory.path()).unwrap(),
        ModelFiles::Directory(directory.path().to_path_buf())
    );
    assert_eq!(open(directory.path()).unwrap().config(), &tiny());
}

#[test]
fn what_is_no_model_is_refused_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    assert_says(ModelFiles::at(directory.path()), &["no model in", "config.json", ".gguf"]);
    std::fs::write(path("config.json"), "{}").unwrap();
    assert_says(ModelFiles::at(directory.path()), &["no model in"]);
    std::fs::write(path("model.safetensors"), "").unwrap();
    assert_says(ModelFiles::at(&path("model.safetensors")), &["not a GGUF file", "directory"]);
    assert_says(ModelFiles::at(&path("missing")), &["missing", "cannot read"]);
    std::fs::write(path("broken.gguf"), "GG").unwrap();
    assert_says(open(&path("broken.gguf")).map(|_| ()), &["broken.gguf", "bytes `GGUF`"]);
}

#[test]
fn the_defaults_of_sampling_come_from_the_generation_config() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, json: &str| std::fs::write(directory.path().join(name), json).unwrap();
    let read = || GenerationDefaults::from_directory(directory.path());
    assert_eq!(read().unwrap(), GenerationDefaults::default());
    write("config.json", r#"{"eos_token_id": 7}"#);
    assert_eq!(read().unwrap().eos_token_ids, [7]);
    write(
        "generation_config.json",
        r#"{"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "eos_token_id": [9, 2, 9], "do_sample": true}"#,
    );
    let expected = GenerationDefaults {
        temperature: Some(0.5),
        top_k: Some(20),
        top_p: Some(0.75),
        repetition_penalty: Some(1.25),
        eos_token_ids: vec![2, 9],
    };
    assert_eq!(read().unwrap(), expected);
    write("generation_config.json", r#"{"temperature": 0.5}"#);
    assert_eq!(read().unwrap().eos_token_ids, [7], "the ids fall back to config.json");
    write("generation_config.json", r#"{"temperature": "warm"}"#);
    assert_says(read(), &["generation_config.json", "invalid type"]);
}

#[test]
fn the_defaults_of_sampling_come_from_a_gguf_files_metadata() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let defaults = |writer: GgufWriter| {
        std::fs::write(&path, writer.bytes()).unwrap();
        ModelFiles::at(&path).unwrap().generation_defaults()
    };
    assert_eq!(defaults(GgufWriter::default()).unwrap(), GenerationDefaults::default());
    let full = GgufWriter::default()
        .u32("tokenizer.ggml.eos_token_id", 9)
        .u32("tokenizer.ggml.eot_token_id", 2)
        .u32("tokenizer.ggml.eom_token_id", 9)
        .f32("general.sampling.temp", 0.5)
        .raw("general.sampling.top_k", 5, 20i32.to_le_bytes())
        .array("ignored", 6, 1, f32_bytes(&[1.0]));
    let full = defaults(full).unwrap();
    assert_eq!((full.temperature, full.top_k, full.top_p), (Some(0.5), Some(20), None));
    assert_eq!(full.eos_token_ids, [2, 9]);
    assert_says(
        defaults(GgufWriter::default().text("general.sampling.temp", "warm")),
        &["general.sampling.temp"],
    );
}
