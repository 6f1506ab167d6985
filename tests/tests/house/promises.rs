//! The tests that the specification names exist.

use std::{collections::BTreeSet, fs, path::Path};

use super::root;

/// Collects every `fn name(` in Rust files, every `def name(` in Python files, and every script.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && !name.to_string_lossy().starts_with('.') && name != "target" {
            functions(&path, found);
        } else if folder.ends_with("scripts") {
            found.insert(format!("scripts/{}", name.to_string_lossy()));
        } else if let Some(keyword) = keyword(&path) {
            let source = fs::read_to_string(&path).unwrap();
            let names = source.split(keyword).skip(1).filter_map(|rest| rest.split(['(', '<']).next());
            found.extend(names.map(str::to_owned));
            // Tests that a macro generates have a line `name: "what it tests",`.
            let made = source.lines().filter_map(|line| line.trim().strip_suffix("\",")?.split_once(": \""));
            found.extend(made.map(|(name, _)| name.to_owned()));
        }
    }
}

fn keyword(path: &Path) -> Option<&'static str> {
    match path.extension()?.to_str()? {
        "rs" => Some("fn "),
        "py" => Some("def "),
        _ => None,
    }
}

#[test]
fn every_promise_names_tests_that_exist() {
    let mut known = BTreeSet::new();
    functions(&root(), &mut known);
    let specification = fs::read_to_string(root().join("docs/SPECIFICATION.md")).unwrap();
    let mut promises = 0;
    for line in specification.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let is_promise = cells.get(1).is_some_and(|id| {
            id.len() >= 2
                && id.starts_with(|c: char| c.is_ascii_uppercase())
                && id[1..].parse::<u32>().is_ok()
        });
        if !is_promise {
            continue;
        }
        promises += 1;
        let held_by = cells[3];
        let tests: Vec<&str> = held_by.split('`').skip(1).step_by(2).collect();
        assert!(held_by == "pending" || !tests.is_empty(), "{line} names no test and is not pending");
        for test in tests {
            assert!(known.contains(test), "{test} does not exist, but {} is said to be held by it", cells[1]);
        }
    }
    assert!(promises > 20, "the document was read");
}
