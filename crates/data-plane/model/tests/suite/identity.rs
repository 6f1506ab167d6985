//! Identity of a base: every byte that an answer depends on.

use std::{fs, path::Path};

use crate::files_support::{
    TinyTensor, safetensors, tiny_entries, tiny_gguf, tiny_json, tiny_metadata, tiny_tensors,
};
use model::{
    resident::LoadedWeights,
    shape::{
        identity::{HasIdentity as _, HashedWeights},
        source::Target,
    },
    site_model::SiteModel,
    sources::{
        identity::{of_model, of_model_once},
        open::weights,
    },
};
use model_files::{model_files::ModelFiles, text_hash::TextHash};
use serde_json::json;

const BIASED: [Target; 3] = [Target::Q, Target::K, Target::V];

/// The tiny model as a GGUF file, with another last value in tensor `changed`.
fn gguf(path: &Path, changed: Option<usize>) {
    let mut writer = tiny_metadata("qwen2");
    for (index, TinyTensor { gguf, shape, mut values, .. }) in tiny_tensors(&BIASED).into_iter().enumerate() {
        if changed == Some(index) {
            *values.last_mut().unwrap() += 1.0;
        }
        writer = writer.f32_tensor(&gguf, shape, &values);
    }
    fs::write(path, writer.bytes()).unwrap();
}

#[test]
fn every_tensor_counts_to_its_last_number() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    gguf(&path, None);
    let original = of_model(&path).unwrap();
    for (index, tensor) in tiny_tensors(&BIASED).iter().enumerate() {
        gguf(&path, Some(index));
        assert_ne!(of_model(&path).unwrap(), original, "{} is not part of the identity", tensor.gguf);
    }
    gguf(&path, None);
    assert_eq!(of_model(&path).unwrap(), original);
}

#[test]
fn every_tensor_of_an_unknown_architecture_counts_too() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = tiny_json();
    config["model_type"] = json!("unheard_of");
    config["architectures"] = json!(["UnheardOfForCausalLM"]);
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let identity = |entries: &[_]| {
        fs::write(directory.path().join("model.safetensors"), safetensors(entries)).unwrap();
        SiteModel::open(directory.path(), &[]).unwrap().info().identity
    };
    let entries = tiny_entries(&BIASED);
    let original = identity(&entries);
    for index in 0..entries.len() {
        let mut entries = entries.clone();
        *entries[index].3.last_mut().unwrap() ^= 1;
        assert_ne!(identity(&entries), original, "{} is not part of the identity", entries[index].0);
    }
}

#[test]
fn what_text_is_made_of_counts_in_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    crate::files_support::write_model(directory.path(), &tiny_json(), &tiny_entries(&[]));
    let files = ModelFiles::at(directory.path()).unwrap();
    let found = || (TextHash::of(&files).unwrap(), of_model(directory.path()).unwrap());
    let mut before = found();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        for text in ["", "{}", "{ }"] {
            fs::write(directory.path().join(name), text).unwrap();
            let now = found();
            assert!(now.0 != before.0 && now.1 != before.1, "{name} {text:?} changes nothing");
            before = now;
        }
    }
    fs::write(directory.path().join("README.md"), "what else is there does not count").unwrap();
    assert_eq!(found(), before);
}

#[test]
fn what_text_is_made_of_counts_in_a_gguf_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let found = |template: &str| {
        let writer = tiny_gguf("llama", &[]).text("tokenizer.chat_template", template);
        fs::write(&path, writer.bytes()).unwrap();
        (TextHash::of(&ModelFiles::at(&path).unwrap()).unwrap(), of_model(&path).unwrap())
    };
    let (one, other) = (found("one"), found("two"));
    assert!(one.0 != other.0 && one.1 != other.1);
    assert_eq!(found("one"), one);
}

#[test]
fn a_loader_and_who_only_asks_find_the_same_identity() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    fs::write(&path, tiny_gguf("llama", &[]).bytes()).unwrap();
    let files = ModelFiles::at(&path).unwrap();
    let source = HashedWeights::new(weights(&files).unwrap());
    drop(LoadedWeights::load(&source, 2).unwrap());
    assert_eq!(source.identity(TextHash::of(&files).unwrap()), of_model(&path).unwrap());
}

#[test]
fn an_identity_is_kept_until_the_file_is_another() {
    let directory = tempfile::tempdir().unwrap();
    let (path, kept) = (directory.path().join("tiny.gguf"), directory.path().join("kept"));
    gguf(&path, None);
    let original = of_model(&path).unwrap();
    assert_eq!(of_model_once(&path, Some(&kept)).unwrap(), original);
    // A false cached hash shows that it is looked up and not computed.
    let files: Vec<_> = fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1);
    fs::write(&files[0], [9; 32]).unwrap();
    assert_eq!(of_model_once(&path, Some(&kept)).unwrap(), [9; 32]);
    let other = directory.path().join("other.gguf");
    gguf(&other, Some(3));
    fs::rename(&other, &path).unwrap();
    assert_eq!(of_model_once(&path, Some(&kept)).unwrap(), of_model(&path).unwrap());
}

#[test]
fn where_nothing_can_be_kept_the_model_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    gguf(&path, None);
    let original = of_model(&path).unwrap();
    for kept in [None, Some(path.as_path())] {
        assert_eq!(of_model_once(&path, kept).unwrap(), original);
    }
}
