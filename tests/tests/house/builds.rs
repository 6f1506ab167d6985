//! Every build uses one set of features, so that each crate compiles once.

use std::{fs, path::PathBuf};

use super::{root, sources};

/// Texts with build commands: scripts, guides, and advice that the programs print.
fn texts() -> Vec<(String, String)> {
    let files = |folder: &str| fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let pages = ["scripts", "docs", "docs/guides", "docs/performance"].into_iter().flat_map(files);
    let pages = pages.chain([root().join("README.md"), root().join(".ci/run")]).filter(|path| path.is_file());
    let read = |path: PathBuf| Some((path.display().to_string(), fs::read_to_string(&path).ok()?));
    pages
        .filter_map(read)
        .chain(sources().iter().map(|source| (source.path.clone(), source.text.clone())))
        .collect()
}

/// Whether a line builds a single package, for which cargo chooses other features. A line that names a
/// feature is allowed.
fn builds_a_package(line: &str) -> bool {
    let Some((_, build)) = line.split_once(concat!("cargo ", "build")) else { return false };
    !build.contains("--features")
        && build.split([' ', '`', '"']).any(|word| matches!(word, "-p" | "--package"))
}

#[test]
fn programs_are_built_by_their_names_so_that_all_builds_share_their_features() {
    assert!(builds_a_package("cargo build --release -p tune"));
    let by_package: Vec<String> = texts()
        .iter()
        .flat_map(|(path, text)| text.lines().map(move |line| (path, line)))
        .filter(|(path, line)| builds_a_package(line) && !path.ends_with("house/builds.rs"))
        .map(|(path, line)| format!("{path}: {}", line.trim()))
        .collect();
    assert!(by_package.is_empty(), "--bin NAME instead of --package:\n{}", by_package.join("\n"));
}
