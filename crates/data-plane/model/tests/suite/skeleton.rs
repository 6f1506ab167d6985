//! Sparse copies: the client weights of a model, what they leave out, and their use.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use testkit::paths::real_model as smollm2;

use crate::files_support::{assert_says, tiny_entries, tiny_gguf, tiny_json, write_model};
use kernels::quant::dequantize_row;
use model::{
    client_weights::{
        ClientWeightsFile, ClientWeightsPlan, ClientWeightsReadError, SparseCopy, SparseCopyError,
        client_base::ClientBase,
    },
    resident::LoadedWeights,
    shape::{
        layout::block_weights,
        source::{Target, Tensor, WeightSource},
    },
    sources::{open::open, safetensors::SafetensorsSource},
    weights::load_norms,
};
use model_files::{
    gguf::GgufFile,
    model_files::{ModelFiles, SPARSE_COPY},
};
use serde_json::json;
use text::{
    chat_template::{ChatTemplate, Limits},
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

const BUDGET: u64 = 1 << 30;

/// Copies the ranges of `plan` to `directory`, `step` bytes at a time.
fn copied(plan: &ClientWeightsPlan, directory: &Path, step: u32) -> PathBuf {
    let mut copy = SparseCopy::create(directory, plan.files(), BUDGET).unwrap();
    while let Some(wanted) = copy.wanted() {
        copy.write(&plan.read(wanted.file, wanted.offset, step).unwrap()).unwrap();
    }
    copy.finish().unwrap()
}

fn sparse_copy(model: &Path, into: &Path) -> PathBuf {
    copied(&ClientWeightsPlan::of(model).unwrap(), &into.join("copy"), 40_000)
}

/// A directory with the tiny model in both formats, and the path of the second.
fn tiny_models() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &tiny_json(), &tiny_entries(&[]));
    let gguf = directory.path().join("tiny.gguf");
    std::fs::write(&gguf, tiny_gguf("llama", &[]).bytes()).unwrap();
    (directory, gguf)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Compares a client's part of a model with the resident engine's.
fn agrees(client: &ClientBase, model: &Path) {
    let source = open(model).unwrap();
    let weights = LoadedWeights::load(&*source, 2).unwrap();
    assert_eq!(client.config(), source.config());
    assert_eq!(client.frame.rope, model::shape::rope::RopeTable::new(source.config()));
    let (ours, theirs) = (&client.frame.norms, load_norms(&*source).unwrap());
    assert_eq!(bits(&ours.output), bits(&theirs.output));
    for (ours, theirs) in [
        (&ours.attention, &theirs.attention),
        (&ours.feed_forward, &theirs.feed_forward),
        (&ours.query, &theirs.query),
        (&ours.key, &theirs.key),
    ] {
        assert_eq!(
            ours.iter().map(|v| bits(v)).collect::<Vec<_>>(),
            theirs.iter().map(|v| bits(v)).collect::<Vec<_>>()
        );
    }
    let vocab = source.config().vocab_size as u32;
    let mut out = [vec![0.0; source.config().hidden_size], vec![1.0; source.config().hidden_size]];
    for token in (0..vocab).step_by((vocab as usize / 100).max(1)).chain([vocab - 1]) {
        client.embedding.embed(&mut [token].into_iter(), &mut out[0]);
        weights.embedding().embed(&mut [token].into_iter(), &mut out[1]);
        assert_eq!(bits(&out[0]), bits(&out[1]), "token {token}");
    }
}

#[test]
fn a_sparse_copy_of_the_real_model_has_its_tokenizer_norms_and_embeddings_and_nothing_else() {
    let (path, directory) = (smollm2(), tempfile::tempdir().unwrap());
    let plan = ClientWeightsPlan::of(&path).unwrap();
    let copy = copied(&plan, &directory.path().join("copy"), 48 << 10);
    let client = ClientBase::open(&copy).unwrap();
    agrees(&client, &path);

    let ModelFiles::Gguf(file) = &client.files else { panic!("the copy is of a GGUF file") };
    let (ours, theirs) = (GgufFile::open(file).unwrap(), GgufFile::open(&path).unwrap());
    let text = "<|im_start|>user\nWhere does the sea end?<|im_end|>\n";
    let [tokenizer, other] = [&ours, &theirs].map(|file| Tokenizer::from_gguf(file).unwrap());
    let encode = |with: &Tokenizer| with.encode(text, AddSpecial::Yes, ParseSpecial::Yes).unwrap();
    assert_eq!(encode(&tokenizer), encode(&other));
    assert_eq!(tokenizer.chat_template(), other.chat_template());
    let template = tokenizer.chat_template().unwrap();
    ChatTemplate::new(template, tokenizer.template_tokens(), Limits::default()).unwrap();
    let defaults = ModelFiles::at(&path).unwrap().generation_defaults().unwrap();
    assert_eq!(client.files.generation_defaults().unwrap(), defaults);

    let mut hidden = 0;
    for ((name, ours), (_, theirs)) in ours.tensors().zip(theirs.tensors()) {
        if name.contains("norm") || name == "token_embd.weight" {
            assert_eq!(ours.data, theirs.data, "{name}");
        } else {
            assert!(ours.data.iter().all(|&byte| byte == 0), "{name} is given out");
            hidden += theirs.data.len() as u64;
        }
    }
    assert!(hidden > plan.files()[0].bytes / 2);
    let blocks = std::fs::metadata(file).unwrap().blocks() * 512;
    assert!(blocks <= plan.planned_bytes() + (1 << 20), "{blocks} bytes are on the disk");
    assert_eq!(std::fs::metadata(file).unwrap().len(), std::fs::metadata(&path).unwrap().len());
}

#[test]
fn every_golden_model_and_its_sparse_copy_give_a_client_the_same() {
    let models = testkit::paths::golden("models");
    for entry in std::fs::read_dir(models).unwrap() {
        let (model, directory) = (entry.unwrap().path(), tempfile::tempdir().unwrap());
        let copy = sparse_copy(&model, directory.path());
        agrees(&ClientBase::open(&copy).unwrap(), &model);
        agrees(&ClientBase::open(&model).unwrap(), &model);
        let source = SafetensorsSource::open(&copy).unwrap();
        for id in block_weights(source.config(), 0) {
            let Tensor { kind, rows, cols, data } = source.tensor(id).unwrap();
            let mut weights = vec![f32::NAN; rows * cols];
            dequantize_row(kind, &data, &mut weights);
            assert!(weights.iter().all(|&weight| weight == 0.0), "{}: {id:?}", model.display());
        }
    }
}

#[test]
fn a_sparse_copy_is_not_taken_for_a_model() {
    let (models, gguf) = tiny_models();
    for (number, model) in [models.path(), &gguf].into_iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        let copy = sparse_copy(model, directory.path());
        assert_says(open(&copy).map(|_| ()), &["sparse copy", "whole model"]);
        if number == 1 {
            assert_says(open(&copy.join("tiny.gguf")).map(|_| ()), &["sparse copy"]);
        }
        assert_says(model::site_model::SiteModel::open(&copy, &[]), &["sparse copy"]);
        ClientBase::open(&copy).unwrap();
    }
}

#[test]
fn small_files_of_a_directory_are_given_out_whole_and_others_not_at_all() {
    let (models, _) = tiny_models();
    let write = |name: &str, text: &str| std::fs::write(models.path().join(name), text).unwrap();
    write("generation_config.json", r#"{"temperature": 0.5, "eos_token_id": 3}"#);
    write("tokenizer_config.json", "{}");
    write("chat_template.jinja", "{{ messages }}");
    write("secrets.txt", "not for clients");
    let plan = ClientWeightsPlan::of(models.path()).unwrap();
    let names: Vec<&str> = plan.files().iter().map(|file| file.name.as_str()).collect();
    let expected = [
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ];
    assert_eq!(names, expected);
    let copy = sparse_copy(models.path(), &models.path().join("copies"));
    for name in &expected[..4] {
        let read = |directory: &Path| std::fs::read(directory.join(name)).unwrap();
        assert_eq!(read(&copy), read(models.path()), "{name}");
    }
    let defaults = ClientBase::open(&copy).unwrap().files.generation_defaults().unwrap();
    assert_eq!((defaults.temperature, defaults.eos_token_ids), (Some(0.5), vec![3]));
}

#[test]
fn of_an_unknown_architecture_everything_but_the_sites_is_given_out() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = tiny_json();
    config["architectures"] = json!(["PhantomForCausalLM"]);
    config["model_type"] = json!("phantom");
    let entries = tiny_entries(&[Target::Q]);
    write_model(directory.path(), &config, &entries);
    let copy = sparse_copy(directory.path(), &directory.path().join("copies"));
    let [ours, theirs] =
        [&copy, directory.path()].map(|at: &Path| std::fs::read(at.join("model.safetensors")).unwrap());
    assert_eq!(ours.len(), theirs.len());
    let mut at = theirs.len() - entries.iter().map(|entry| entry.3.len()).sum::<usize>();
    assert_eq!(ours[..at], theirs[..at], "the header");
    for (name, _, _, data) in &entries {
        let given = name.contains("norm") || name.contains("embed_tokens");
        let expected = if given { data.clone() } else { vec![0; data.len()] };
        assert_eq!(ours[at..at + data.len()], expected, "{name}");
        at += data.len();
    }
    assert_says(ClientBase::open(&copy), &["architectures"]);
}

#[test]
fn only_what_is_planned_is_read() {
    let (_models, gguf) = tiny_models();
    let plan = ClientWeightsPlan::of(&gguf).unwrap();
    let [file] = plan.files() else { panic!("a GGUF file is one file") };
    let whole = std::fs::read(&gguf).unwrap();
    let mut given = 0;
    for offset in 0..file.bytes {
        let planned = file.ranges.iter().find(|range| range.contains(&offset));
        match (plan.read(0, offset, 1), planned) {
            (Ok(bytes), Some(_)) => assert_eq!(bytes, [whole[offset as usize]]),
            (Err(ClientWeightsReadError::NotPlanned { .. }), None) => {}
            (other, planned) => panic!("byte {offset}, {planned:?}: {other:?}"),
        }
        given += u64::from(planned.is_some());
    }
    assert_eq!(given, plan.planned_bytes());
    let first = file.ranges[0].clone();
    assert_eq!(plan.read(0, 0, u32::MAX).unwrap(), whole[..first.end as usize], "a range's end is the end");
    for (file, offset) in [(0, file.bytes), (0, u64::MAX), (1, 0), (usize::MAX, 0)] {
        plan.read(file, offset, 1).unwrap_err();
    }
}

#[test]
fn a_file_that_was_written_to_is_not_given_out_and_a_replaced_one_is_as_it_was() {
    let (_models, gguf) = tiny_models();
    let plan = ClientWeightsPlan::of(&gguf).unwrap();
    let before = plan.read(0, 0, 64).unwrap();
    assert!(plan.is_current());
    let other = gguf.with_file_name("other");
    std::fs::write(&other, b"something else").unwrap();
    std::fs::rename(&other, &gguf).unwrap();
    assert_eq!(plan.read(0, 0, 64).unwrap(), before);
    assert!(!plan.is_current());

    std::fs::write(&gguf, tiny_gguf("llama", &[]).bytes()).unwrap();
    let plan = ClientWeightsPlan::of(&gguf).unwrap();
    // The file is truncated: a process with a mapping would get SIGBUS.
    std::fs::write(&gguf, b"GGUF").unwrap();
    assert_says(plan.read(0, 0, 64), &["tiny.gguf", "was written"]);
}

/// A file whose byte ranges `ranges` (start, end) are given out.
fn file(name: &str, bytes: u64, ranges: &[(u64, u64)]) -> ClientWeightsFile {
    let ranges = ranges.iter().map(|&(start, end)| start..end).collect();
    ClientWeightsFile { name: name.to_owned(), bytes, ranges }
}

#[test]
fn lists_that_make_no_sense_are_refused_before_anything_is_written() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("copy");
    let refused = |files: &[ClientWeightsFile], parts: &[&str]| {
        assert_says(SparseCopy::create(&directory, files, 100), parts);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    };
    refused(&[], &["0 files"]);
    for name in ["", ".", "..", "../a", "/etc/passwd", "a/b", ".hidden", SPARSE_COPY, "a\0b", "a\nb", "a\\b"]
    {
        refused(&[file(name, 10, &[(0, 1)])], &["not a plain file name"]);
    }
    refused(&[file(&"x".repeat(300), 10, &[(0, 1)])], &["not a plain file name"]);
    refused(&[file("a", 1, &[]), file("a", 1, &[])], &["appears twice"]);
    for ranges in [&[(0, 11)][..], &[(5, 5)], &[(3, 6), (5, 7)], &[(5, 6), (0, 1)], &[(7, 6)]] {
        refused(&[file("a", 10, ranges)], &["ranges of \"a\""]);
    }
    refused(&[file("a", u64::MAX, &[])], &["length"]);
    refused(&[file("a", 1 << 40, &[(0, 60)]), file("b", 60, &[(0, 60)])], &["120 bytes", "limit is 100"]);
}

#[test]
fn a_copy_takes_what_was_wanted_and_is_there_only_when_it_is_whole() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("copy");
    let files = [file("a", 1 << 30, &[(0, 4), ((1 << 30) - 3, 1 << 30)]), file("empty", 0, &[])];
    let create = || SparseCopy::create(&directory, &files, 100).unwrap();
    let mut copy = create();
    assert_eq!(copy.wanted().map(|wanted| (wanted.file, wanted.offset, wanted.bytes)), Some((0, 0, 4)));
    copy.write(b"ab").unwrap();
    assert_says(copy.write(b"cde"), &["sent 3 bytes", "at most 2"]);
    assert_says(copy.write(b""), &["sent 0 bytes"]);
    copy.write(b"cd").unwrap();
    assert!(matches!(copy.finish(), Err(SparseCopyError::Incomplete { missing: 3 })));
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing is left of it");

    let fill = |mut copy: SparseCopy| {
        copy.write(b"abcd").unwrap();
        copy.write(b"xyz").unwrap();
        assert_eq!(copy.wanted(), None);
        copy.write(b"!").unwrap_err();
        copy.finish().unwrap()
    };
    // Two copies at once: the second finds the first's.
    let (first, second) = (create(), create());
    assert!(!directory.exists());
    assert_eq!((fill(first), fill(second)), (directory.clone(), directory.clone()));
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);
    let metadata = std::fs::metadata(directory.join("a")).unwrap();
    assert_eq!(metadata.len(), 1 << 30);
    assert!(metadata.blocks() * 512 < 1 << 20, "holes take no blocks");
    assert_eq!(std::fs::metadata(directory.join("empty")).unwrap().len(), 0);
}
