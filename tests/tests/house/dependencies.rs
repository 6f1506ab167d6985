//! Directions of dependencies between crates, and the crates that may contain unsafe code.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{members, root, sources};

/// Name of the package in a folder: the folder's name, except for the command line.
fn package(folder: &str) -> &str {
    match folder {
        "crates/control-plane/cli" => "holobiont",
        _ => folder.rsplit('/').next().unwrap(),
    }
}

/// Folders of the member crates, and the member packages that each manifest depends on.
fn dependencies() -> BTreeMap<&'static str, BTreeSet<String>> {
    let packages: BTreeSet<&str> = members().iter().map(|folder| package(folder)).collect();
    let of = |folder: &str| {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let normal = normal.split("\n[").next().unwrap();
        let names = normal.lines().filter_map(|line| Some(line.split(['.', ' ', '=']).next()?.to_owned()));
        names.filter(|name| packages.contains(name.as_str())).collect()
    };
    members().iter().map(|folder| (folder.as_str(), of(folder))).collect()
}

fn allowed(package: &str) -> &'static str {
    match package {
        "failpoint" | "receipts" | "security" | "settings" | "scheduling" | "shmproto" | "testkit"
        | "types" => "",
        "kernels" => "types",
        "process" => "settings",
        "control-protocol" => "scheduling",
        "model-files" => "shmproto types",
        "text" => "model-files types",
        "model" => "failpoint kernels model-files scheduling shmproto types",
        "kv-cache" => "failpoint scheduling types",
        // Speculation knows no model: callers report acceptance probabilities and accepted tokens.
        "speculation" => "scheduling",
        "draft-model" => "kernels model model-files scheduling speculation types",
        "layer-service" => "failpoint kernels kv-cache model scheduling security settings shmproto",
        "base-executor" => {
            "draft-model failpoint kernels kv-cache layer-service model model-files process scheduling settings shmproto speculation text types"
        }
        // A worker has no model: it computes with adapter images in shared memory.
        "lora-worker" => "failpoint kernels process settings shmproto",
        // A split client has no executor: its layer calls cross a channel.
        "client" => {
            "draft-model failpoint kernels kv-cache model model-files scheduling security settings shmproto speculation text types"
        }
        // The trainer is a split client that learns.
        "trainer" => {
            "client control-protocol kernels model model-files process scheduling settings shmproto text types"
        }
        // The gateway has no model: it turns text into token ids and back.
        "gateway" => {
            "control-protocol failpoint model-files process receipts scheduling security settings shmproto text types"
        }
        // The picker has neither model nor text: it forwards requests unchanged.
        "endpoint-picker" => "control-protocol process scheduling settings",
        // `adapters merge`, `show` and `check` read weights.
        "holobiont" => "control-protocol model model-files receipts security settings text",
        // The simulator decides as the executor does, and computes nothing.
        "simulator" => "kv-cache scheduling types",
        // Hostile input goes through the parsers of every process.
        "fuzz" => {
            "endpoint-picker gateway holobiont kv-cache model model-files scheduling shmproto text trainer types"
        }
        // Benches measure single parts beside their peers.
        "benches" => {
            "base-executor client control-protocol endpoint-picker gateway kernels kv-cache model model-files scheduling shmproto simulator speculation testkit text trainer types"
        }
        // End-to-end tests start programs, and read their tables of failpoints.
        "tests" => {
            "base-executor client endpoint-picker gateway holobiont lora-worker model receipts settings shmproto speculation testkit text types"
        }
        _ => panic!("{package}: say here what it may depend on"),
    }
}

#[test]
fn dependencies_point_down() {
    let members = dependencies();
    for (folder, dependencies) in &members {
        for dependency in dependencies {
            assert!(
                allowed(package(folder)).split(' ').any(|name| name == dependency),
                "{folder} must not depend on {dependency}"
            );
        }
    }
    assert!(members["crates/data-plane/model"].contains("kernels"), "the manifests were read");
}

/// The planes that crates of a plane may depend on, or the packages of other planes. The folders at the root
/// are the programs and libraries that the design names. The control plane uses only the messages of
/// `shmproto` and the pure decisions of `scheduling`.
fn allowed_of_plane(plane: &str) -> &'static [&'static str] {
    match plane {
        "crates/shared" => &["crates/shared", "shmproto", "crates/data-plane/scheduling"],
        "crates/control-plane" => {
            &["crates/shared", "shmproto", "crates/data-plane/scheduling", "crates/data-plane/model"]
        }
        "lab" => &["crates"],
        "crates/data-plane" => &["crates/shared", "crates/data-plane", "kernels", "shmproto", "client"],
        _ => &["crates/shared", "crates/data-plane", "kernels", "shmproto", "client"],
    }
}

#[test]
fn a_plane_depends_on_planes_below_it() {
    let folder_of = |name: &str| members().iter().find(|folder| package(folder) == name).unwrap();
    let is_test = |folder: &str| ["tests", "benches", "fuzz"].contains(&folder);
    for (folder, dependencies) in dependencies().iter().filter(|(folder, _)| !is_test(folder)) {
        let plane = folder.rsplit_once('/').map_or("", |(plane, _)| plane);
        for target in dependencies.iter().map(|name| folder_of(name)) {
            let is_allowed = allowed_of_plane(plane).iter().any(|allowed| target.starts_with(allowed));
            assert!(is_allowed, "{folder} is in a plane that must not depend on {target}");
        }
        let links_model = dependencies.contains("model") || dependencies.contains("kernels");
        let is_control = plane == "crates/control-plane" && package(folder) != "holobiont";
        assert!(!(is_control && links_model), "{folder} must link neither model nor kernels");
    }
}

#[test]
fn unsafe_code_lives_in_kernels_and_shared_memory_alone() {
    for member in members().iter().filter(|member| !["kernels", "shmproto"].contains(&member.as_str())) {
        let root = |name: &str| sources().iter().find(|source| source.path == format!("{member}/src/{name}"));
        let root = root("lib.rs").or_else(|| root("main.rs")).expect("a library or a program");
        assert!(root.text.contains("#![forbid(unsafe_code)]"), "{} forbids unsafe code", root.path);
    }
}
