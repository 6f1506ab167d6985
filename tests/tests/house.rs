//! The rules of the house that no compiler checks: which way dependencies point, and that promises name real tests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Member crates and the members they depend on, read from their manifests.
fn members() -> BTreeMap<String, BTreeSet<String>> {
    let folders = [
        "failpoint",
        "fuzz",
        "keys",
        "shmproto",
        "kernels",
        "model",
        "cache",
        "base-executor",
        "lora-worker",
        "client",
        "gateway",
        "holobiont",
        "benches",
    ];
    let dependencies = |folder: &str| {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dependencies]").nth(1).unwrap();
        let normal = normal.split("\n[").next().unwrap();
        let names = normal.lines().filter_map(|line| Some(line.split(['.', ' ', '=']).next()?.to_owned()));
        names.filter(|name| folders.contains(&name.as_str())).collect()
    };
    folders.iter().map(|&folder| (folder.to_owned(), dependencies(folder))).collect()
}

#[test]
fn dependencies_point_down() {
    let members = members();
    let allowed = |folder: &str| -> &[&str] {
        match folder {
            "failpoint" | "keys" | "shmproto" | "kernels" => &[],
            "model" => &["failpoint", "kernels"],
            "cache" => &["failpoint", "model"],
            "base-executor" => &["cache", "failpoint", "kernels", "keys", "model", "shmproto"],
            // No model: what it computes is in its memory.
            "lora-worker" => &["failpoint", "kernels", "shmproto"],
            // No executor: what it rents comes over a channel.
            "client" => &["cache", "failpoint", "kernels", "model", "shmproto"],
            "gateway" => &["failpoint", "keys", "model", "shmproto"],
            // Hostile input goes through the parsers of every process.
            "fuzz" => &["gateway", "holobiont", "model", "shmproto"],
            // Parts are measured alone, beside their peers.
            "benches" => &["client", "kernels", "model", "shmproto"],
            _ => &["model"],
        }
    };
    for (folder, dependencies) in &members {
        for dependency in dependencies {
            assert!(
                allowed(folder).contains(&dependency.as_str()),
                "{folder} must not depend on {dependency}"
            );
        }
    }
    assert!(members["model"].contains("kernels"), "the manifests were read");
}

#[test]
fn unsafe_code_lives_in_kernels_and_shared_memory_alone() {
    let forbids = |file: &str| {
        let source = fs::read_to_string(root().join(file)).unwrap();
        assert!(source.contains("#![forbid(unsafe_code)]"), "{file} forbids unsafe code");
    };
    let libraries = [
        "failpoint",
        "fuzz",
        "keys",
        "model",
        "cache",
        "base-executor",
        "lora-worker",
        "client",
        "gateway",
        "holobiont",
    ];
    libraries.iter().for_each(|folder| forbids(&format!("{folder}/src/lib.rs")));
    ["holobiont", "benches"].iter().for_each(|folder| forbids(&format!("{folder}/src/main.rs")));
    let known = ["kernels".to_owned(), "shmproto".to_owned(), "benches".to_owned()];
    let known = libraries.iter().map(|&name| name.to_owned()).chain(known).collect::<BTreeSet<_>>();
    assert_eq!(known, members().into_keys().collect(), "every member has a side");
}

/// Every `fn name(` in the tree's Rust files, every `def name(` in its Python files, and every script.
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
            // Tests that a macro makes: `name: "what it tests",` on a line of its own.
            let made = source.lines().filter_map(|line| line.trim().strip_suffix("\",")?.split_once(": \""));
            found.extend(made.map(|(name, _)| name.to_owned()));
        }
    }
}

/// What stands before a function's name.
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
