//! Training data in each format and place that people keep them in; `make_datasets.py` made the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{AGENTS, CHATML, TemplateTokenizer};
use trainer::data::{self, DataError, DataItems, DataLimits, Dataset, Encoder, FilePrompts};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/golden/datasets").join(name)
}

fn read_with(model: &TemplateTokenizer, paths: &[PathBuf]) -> Result<Dataset, DataError> {
    let encoder = Encoder::new(&model.tokenizer, model.template.as_ref(), TemplateTokenizer::now());
    data::read_files(&data::find_files(paths)?, &encoder, &DataLimits::default())
}

fn read(paths: &[PathBuf]) -> Result<Dataset, DataError> {
    read_with(&TemplateTokenizer::new(AGENTS), paths)
}

#[test]
fn every_format_reads_as_the_same_examples() {
    let model = TemplateTokenizer::new(AGENTS);
    let expected = read(&[golden("conversations.jsonl")]).unwrap();
    assert!(expected.items.len() >= 72, "{}", expected.items.len());
    assert!(expected.unread.is_empty(), "{:?}", expected.unread);
    let places = [
        "conversations.jsonl.gz",
        "snappy.parquet",
        "zstd.parquet",
        "gzip.parquet",
        "lz4.parquet",
        "file.arrow",
        "saved",
        "hub",
        "saved/data-*.arrow",
        "hub/data/train-*-of-*.parquet",
    ];
    for place in places {
        let found = read(&[golden(place)]).unwrap_or_else(|error| panic!("{place}: {error}"));
        let (DataItems::Examples(found), DataItems::Examples(all)) = (&found.items, &expected.items) else {
            panic!("examples")
        };
        for (found, wanted) in found.iter().zip(all) {
            assert_eq!((found.line, model.shown(found)), (wanted.line, model.shown(wanted)), "{place}");
            assert_eq!(found.weights, wanted.weights, "{place}");
        }
        assert_eq!(found.len(), all.len(), "{place}");
    }
    let several =
        read(&[golden("hub/data/train-00000-of-00002.parquet"), golden("saved/data-00001-of-00002.arrow")]);
    assert!(several.unwrap().items == expected.items);
    assert_eq!(read(&[golden("conversations.jsonl.gz")]).unwrap().hash, expected.hash);
    let array = read(&[golden("conversations.json")]).unwrap();
    let DataItems::Examples(all) = &expected.items else { panic!("examples") };
    let of_array: Vec<_> = all.iter().filter(|example| example.line <= 4).cloned().collect();
    assert!(array.items == DataItems::Examples(of_array));
}

#[test]
fn a_parquet_file_that_a_tenant_uploads_is_not_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file-abc");
    fs::copy(golden("zstd.parquet"), &path).unwrap();
    let error = read(&[path]).unwrap_err().to_string();
    assert!(error.contains("jobs take lines of JSON"), "{error}");
}

#[test]
fn a_fault_names_its_file_and_the_line_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"abd\"}\n");
    write("b.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let error = read(&[folder.path().to_owned()]).unwrap_err().to_string();
    assert!(error.contains("b.jsonl, line 2: 'text' is empty"), "{error}");
    assert!(error.contains("b.jsonl, line 3: the previous lines have 'text'"), "{error}");
    write("b.jsonl", "{\"text\": \"ab\"}\n");
    let DataItems::Examples(examples) = read(&[folder.path().to_owned()]).unwrap().items else {
        panic!("examples")
    };
    assert_eq!(examples.iter().map(|example| example.line).collect::<Vec<_>>(), [1, 2, 3]);
    let pattern = folder.path().join("[b].jsonl");
    assert_eq!(read(&[pattern]).unwrap().items.len(), 1);
}

#[test]
fn paths_that_name_no_data_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let told = |path: PathBuf| read(&[path]).unwrap_err().to_string();
    assert!(told(folder.path().join("none.jsonl")).contains("cannot read"));
    assert!(told(folder.path().join("*.jsonl")).contains("names no data file"));
    assert!(told(folder.path().to_owned()).contains("names no data file"));
    fs::write(folder.path().join("validation.jsonl"), "{\"text\": \"abc\"}\n").unwrap();
    assert!(told(folder.path().to_owned()).contains("names no data file for training"));
    fs::write(folder.path().join("x.parquet"), "{\"text\": \"abc\"}\n").unwrap();
    assert!(told(folder.path().join("x.parquet")).contains("cannot read"));
    fs::write(folder.path().join("x.jsonl.gz"), "{\"text\": \"abc\"}\n").unwrap();
    assert!(told(folder.path().join("x.jsonl.gz")).contains("cannot read"));
    let plain = TemplateTokenizer::new(CHATML);
    let error = read_with(&plain, &[golden("saved")]).unwrap_err().to_string();
    assert!(
        error.contains("data-00000-of-00002.arrow, line 2: this model's chat template does not show"),
        "{error}"
    );
}

#[test]
fn prompts_are_those_of_all_files() {
    let files = data::find_files(&[
        golden("hub/data/test-00000-of-00001.parquet"),
        golden("hub/data/test-*.parquet"),
    ]);
    let FilePrompts::Prompts(prompts) =
        data::prompts_of_files(&files.unwrap(), &DataLimits::default()).unwrap()
    else {
        panic!("prompts")
    };
    assert_eq!(prompts.len(), 2);
    assert_eq!(prompts[0].messages(), [("user", "Hi 日本".to_owned())]);
    let error =
        data::prompts_of_files(&[golden("zstd.parquet")], &DataLimits::default()).unwrap_err().to_string();
    assert!(error.contains("line 2: 'messages[1].tool_calls' is not supported"), "{error}");
}

#[test]
fn a_table_that_ends_too_early_is_an_error_and_nothing_worse() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| fs::read(golden(name)).unwrap();
    let files = [
        ("x.parquet", of("snappy.parquet")),
        ("y.parquet", of("zstd.parquet")),
        ("x.arrow", of("file.arrow")),
        ("y.arrow", of("saved/data-00000-of-00002.arrow")),
        ("x.jsonl.gz", of("conversations.jsonl.gz")),
    ];
    for (name, bytes) in &files {
        let path = folder.path().join(name);
        for at in (0..bytes.len()).step_by(37) {
            fs::write(&path, &bytes[..at]).unwrap();
            // A stream of Arrow may end behind any of its batches.
            assert!(read(std::slice::from_ref(&path)).is_err() || *name == "y.arrow", "{name} cut at {at}");
        }
    }
}
