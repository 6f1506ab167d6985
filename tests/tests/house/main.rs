//! Rules of this repository that no compiler checks.
//!
//! - `builds`: one set of features for every build
//! - `commits`: subjects and bodies of commits
//! - `dependencies`: directions of dependencies between crates, and the crates that may contain unsafe code
//! - `modules`: maps name every module, and modules of a crate do not import each other in circles
//! - `records`: two structs do not share eight fields
//! - `sizes`: files and functions stay short
//! - `sync`: releases and acquires come in pairs, and atomics of shared memory have one module
//! - `sentences`: names and docs say something
//! - `pages`: links have targets, and the site contains every page
//! - `promises`: the specification names real tests
//!
//! Code older than a rule is an exception by name. Exceptions only become fewer: an unneeded one fails.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builds;
mod commits;
mod dependencies;
mod modules;
mod pages;
mod promises;
mod records;
mod sentences;
mod sizes;
mod sync;

use std::{fs, sync::LazyLock};

use testkit::paths::root;

fn members() -> &'static [String] {
    static MEMBERS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let list = manifest.split("members = [").nth(1).unwrap().split(']').next().unwrap();
        list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
    });
    &MEMBERS
}

struct SourceFile {
    /// Path from the root, for example `crates/data-plane/kv-cache/src/kv.rs`.
    path: String,
    text: String,
}

impl SourceFile {
    /// Folder of the file's crate; `tests/testkit` lies inside another crate's folder.
    fn member(&self) -> &str {
        let holds =
            |member: &&String| self.path.strip_prefix(*member).is_some_and(|rest| rest.starts_with('/'));
        members().iter().filter(holds).max_by_key(|member| member.len()).expect("a member's file")
    }

    /// Path from the crate's folder, for example `src/kv.rs`.
    fn path_in_member(&self) -> &str {
        &self.path[self.member().len() + 1..]
    }

    fn parsed(&self) -> syn::File {
        syn::parse_file(&self.text).unwrap_or_else(|error| panic!("{}: {error}", self.path))
    }

    /// True for all code except tests.
    fn is_shipped(&self) -> bool {
        let mut folders = self.path_in_member().split('/');
        folders.next() == Some("src") && !folders.any(|part| matches!(part, "tests" | "tests.rs"))
    }
}

/// Every Rust file of the workspace's crates, sorted by path.
fn sources() -> &'static [SourceFile] {
    static SOURCES: LazyLock<Vec<SourceFile>> = LazyLock::new(|| {
        let mut found = Vec::new();
        for member in members() {
            collect(member, &mut found);
        }
        found.sort_by(|one, other| one.path.cmp(&other.path));
        found.dedup_by(|one, other| one.path == other.path);
        found
    });
    &SOURCES
}

fn collect(folder: &str, found: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(root().join(folder)).unwrap().map(Result::unwrap) {
        let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            collect(&path, found);
        } else if path.ends_with(".rs") {
            found.push(SourceFile { text: fs::read_to_string(entry.path()).unwrap(), path });
        }
    }
}

/// Compares the violations of a rule with its exceptions: no new ones, and no unneeded exception.
fn assert_only(rule: &str, exceptions: &[&str], found: &[String]) {
    let new: Vec<&String> = found.iter().filter(|what| !exceptions.contains(&what.as_str())).collect();
    assert!(new.is_empty(), "{rule}: {new:#?}");
    let old: Vec<&&str> =
        exceptions.iter().filter(|exception| !found.iter().any(|what| what == *exception)).collect();
    assert!(old.is_empty(), "{rule}: take these off the list of exceptions: {old:#?}");
}
