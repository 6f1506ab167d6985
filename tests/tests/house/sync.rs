//! Releases and acquires come in pairs, and atomics of shared memory have one module.

use std::collections::{BTreeMap, BTreeSet};

use super::{SourceFile, assert_only, sources};

/// Module that replaces real atomics by loom's.
const DOOR: &str = "shmproto/src/atomic.rs";

/// File that uses atomics directly, for a test of its own.
const PAST_THE_DOOR: [&str; 1] = ["shmproto/src/memory/copy.rs"];

/// Sides of every synchronization that comments name: `SYNC POINT name: releases what was written`.
fn points() -> BTreeMap<String, BTreeSet<String>> {
    let mut points: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let comments = |source: &'static SourceFile| {
        let lines = source.text.lines().filter(|line| line.trim_start().starts_with("// "));
        lines.flat_map(|line| line.split("SYNC POINT ").skip(1)).map(move |point| (source, point))
    };
    for (source, point) in sources().iter().filter(|source| source.is_shipped()).flat_map(comments) {
        let Some((name, what)) = point.split_once(": ") else {
            panic!("{}: a point is `SYNC POINT name: releases ...` or `acquires ...`: {point}", source.path);
        };
        let side = what.split([' ', ',']).next().unwrap();
        assert!(
            ["releases", "acquires"].contains(&side),
            "{}: `{name}` is neither side: {what}",
            source.path
        );
        points.entry(name.to_owned()).or_default().insert(side.to_owned());
    }
    points
}

#[test]
fn every_release_with_a_name_has_its_acquire_and_every_acquire_its_release() {
    let points = points();
    assert!(points.len() > 8, "the comments were read");
    for (name, sides) in points {
        assert!(sides.len() == 2, "SYNC POINT {name} has only one side: {sides:?}");
    }
}

#[test]
fn atomics_of_shared_memory_come_by_one_door() {
    let shared = sources().iter().filter(|source| source.member() == "shmproto" && source.is_shipped());
    let around = shared.filter(|source| {
        source.path != DOOR
            && ["std::sync::atomic", "core::sync::atomic", "sync::atomic::"]
                .iter()
                .any(|path| source.text.contains(path))
    });
    let around: Vec<String> = around.map(|source| source.path.clone()).collect();
    assert_only(&format!("atomics come from {DOOR}"), &PAST_THE_DOOR, &around);
}
