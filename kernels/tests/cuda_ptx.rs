//! The committed PTX belongs to the kernel sources; the check needs neither a GPU nor a compiler.
//!
//! `scripts/cuda-compile --check` compiles and compares; this test notices in every `cargo test` that it was
//! forgotten.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Newest PTX version that drivers from 570 on accept.
const NEWEST_PTX: (u32, u32) = (8, 7);

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda").join(name)
}

fn files(folder: &Path, ending: &str) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeMap::new() };
    let paths =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension() == Some(ending.as_ref()));
    let named = |path: PathBuf| {
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap())
    };
    paths.map(named).collect()
}

/// Folder in which `build.rs` unpacked the archive.
fn unpacked() -> PathBuf {
    Path::new(env!("OUT_DIR")).join("ptx")
}

fn pairs() -> Vec<(String, String, String)> {
    let mut ptx = files(&unpacked(), "ptx");
    let pair = |(name, source)| ptx.remove(&name).map(|ptx| (name, source, ptx));
    let pairs: Vec<_> = files(&folder(""), "cu").into_iter().filter_map(pair).collect();
    assert!(!pairs.is_empty(), "there are kernels");
    pairs
}

/// Headers of ours that a text includes.
fn included(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
    quoted.filter(|name| name.ends_with(".cuh"))
}

/// FNV-1a hash, 64 bits, of a source and its headers, in the order of their first inclusion.
fn source_hash(source: &str) -> String {
    let mut texts = vec![source.to_owned()];
    let mut seen = BTreeSet::new();
    let mut next = 0;
    while next < texts.len() {
        let names: Vec<String> = included(&texts[next]).map(str::to_owned).collect();
        for name in names {
            if seen.insert(name.clone()) {
                texts.push(fs::read_to_string(folder(&name)).unwrap());
            }
        }
        next += 1;
    }
    let bytes = texts.iter().flat_map(|text| text.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn entries(ptx: &str) -> BTreeSet<&str> {
    ptx.split(".entry ").skip(1).filter_map(|rest| rest.split(['(', '\n', ' ']).next()).collect()
}

/// Names of the kernels that a source registers for the CPU: `ON_CPU_KERNEL(name)`.
fn registered(source: &str) -> BTreeSet<&str> {
    source.split("ON_CPU_KERNEL(").skip(1).filter_map(|rest| rest.split(')').next()).map(str::trim).collect()
}

/// Text after a directive of a PTX file, on its line.
fn directive<'a>(ptx: &'a str, name: &str) -> &'a str {
    let value = ptx.lines().find_map(|line| line.strip_prefix(name));
    value.unwrap_or_else(|| panic!("the PTX has no {name}")).trim()
}

#[test]
fn every_source_has_a_ptx_and_the_other_way_round() {
    let names = |folder: &Path, ending: &str| files(folder, ending).into_keys().collect::<Vec<_>>();
    let (sources, compiled) = (names(&folder(""), "cu"), names(&unpacked(), "ptx"));
    assert_eq!(
        sources, compiled,
        "kernels/cuda (left) and kernels/cuda/kernels.ptx.gz (right); run scripts/cuda-compile"
    );
}

#[test]
fn every_ptx_was_made_of_the_source_beside_it() {
    for (name, source, ptx) in pairs() {
        let stands = ptx.strip_prefix("// source ").and_then(|rest| rest.split(' ').next());
        assert_eq!(
            stands,
            Some(source_hash(&source).as_str()),
            "{name}.ptx is not of this {name}.cu or of the headers it includes; run scripts/cuda-compile"
        );
    }
}

#[test]
fn every_ptx_is_one_that_the_oldest_served_driver_and_gpu_take() {
    for (name, _, ptx) in pairs() {
        let (major, minor) = directive(&ptx, ".version").split_once('.').unwrap();
        let version = (major.parse::<u32>().unwrap(), minor.parse::<u32>().unwrap());
        assert!(version <= NEWEST_PTX, "{name}.ptx is PTX {version:?}");
        assert_eq!(directive(&ptx, ".target"), "sm_80", "{name}.ptx");
        assert_eq!(directive(&ptx, ".address_size"), "64", "{name}.ptx");
    }
}

#[test]
fn the_kernels_that_run_on_a_cpu_are_those_that_run_on_a_gpu() {
    for (name, source, ptx) in pairs() {
        assert_eq!(registered(&source), entries(&ptx), "{name}: ON_CPU_KERNEL (left) and the PTX (right)");
    }
}

#[test]
fn no_two_kernels_have_a_name_in_common() {
    let mut owners = BTreeMap::new();
    for (name, _, ptx) in pairs() {
        for entry in entries(&ptx) {
            if let Some(other) = owners.insert(entry.to_owned(), name.clone()) {
                panic!("{entry} is in {other}.cu and in {name}.cu");
            }
        }
    }
}

#[test]
fn the_program_carries_every_ptx_once() {
    let table = fs::read_to_string(unpacked().join("modules.rs")).unwrap();
    assert_eq!(table.matches("include_str!").count(), pairs().len());
    for (name, ..) in pairs() {
        assert_eq!(table.matches(&format!("(\"{name}\", include_str!")).count(), 1, "{name}");
    }
}

#[test]
fn no_ptx_holds_a_path_of_the_machine_it_was_made_on() {
    for (name, _, ptx) in pairs() {
        assert!(!ptx.contains("/home/") && !ptx.contains("/root/") && !ptx.contains("/tmp/"), "{name}.ptx");
        assert!(!ptx.contains(".file"), "{name}.ptx holds line information");
    }
}
