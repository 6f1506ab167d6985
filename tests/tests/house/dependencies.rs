//! Which way crates depend on each other, and where unsafe code lives.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{members, root, sources};

/// Member crates and the members they depend on, read from their manifests.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let folders = members();
    let of = |folder: &str| {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let normal = normal.split("\n[").next().unwrap();
        let names = normal.lines().filter_map(|line| Some(line.split(['.', ' ', '=']).next()?.to_owned()));
        names.filter(|name| folders.contains(name)).collect()
    };
    folders.iter().map(|folder| (folder.clone(), of(folder))).collect()
}

/// What a folder may depend on.
fn allowed(folder: &str) -> &'static str {
    match folder {
        "failpoint" | "ids" | "patience" | "keys" | "policy" | "settings" | "shmproto" | "tls"
        | "training-protocol" => "",
        "fleet-protocol" => "policy",
        // No model, no text: it sends requests on as they are.
        "endpoint-picker" => "fleet-protocol policy settings",
        "kernels" => "ids",
        "files" => "ids shmproto",
        "text" => "files ids",
        "model" => "failpoint files ids kernels policy shmproto",
        "cache" => "failpoint ids policy",
        // Knows no model: it is told what is likely, and what came true.
        "speculation" => "policy",
        "model-draft" => "files ids kernels model policy speculation",
        // Decisions alone: what it runs computes nothing.
        "simulator" => "cache ids policy",
        "layer-service" => "cache failpoint kernels keys model policy settings shmproto tls",
        "base-executor" => {
            "cache failpoint files ids kernels layer-service model model-draft policy settings shmproto speculation text"
        }
        // No model: what it computes is in its memory.
        "lora-worker" => "failpoint kernels settings shmproto",
        // No executor: what it rents comes over a channel.
        "client" => {
            "cache failpoint files ids kernels model model-draft policy shmproto speculation text tls"
        }
        // A client that learns.
        "tune" => "client files ids kernels model policy settings shmproto text training-protocol",
        // No model: it turns text into ids and back.
        "gateway" => {
            "failpoint files fleet-protocol ids keys policy settings shmproto text tls training-protocol"
        }
        // Hostile input goes through the parsers of every process.
        "fuzz" => "cache endpoint-picker files gateway holobiont ids model policy shmproto text tune",
        // Parts are measured alone, beside their peers.
        "benches" => {
            "base-executor cache client endpoint-picker files fleet-protocol ids kernels model patience policy shmproto simulator speculation text training-protocol tune"
        }
        // The processes are programs to them; the tests read their tables of failpoints.
        "tests" => {
            "base-executor client endpoint-picker gateway holobiont ids lora-worker model patience settings shmproto speculation text"
        }
        _ => "files keys model settings text tls training-protocol",
    }
}

#[test]
fn dependencies_point_down() {
    let members = dependencies();
    for (folder, dependencies) in &members {
        for dependency in dependencies {
            assert!(
                allowed(folder).split(' ').any(|name| name == dependency),
                "{folder} must not depend on {dependency}"
            );
        }
    }
    assert!(members["model"].contains("kernels"), "the manifests were read");
}

#[test]
fn unsafe_code_lives_in_kernels_and_shared_memory_alone() {
    for member in members().iter().filter(|member| !["kernels", "shmproto"].contains(&member.as_str())) {
        let root = |name: &str| sources().iter().find(|source| source.path == format!("{member}/src/{name}"));
        let root = root("lib.rs").or_else(|| root("main.rs")).expect("a library or a program");
        assert!(root.text.contains("#![forbid(unsafe_code)]"), "{} forbids unsafe code", root.path);
    }
}
