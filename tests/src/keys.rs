//! API keys of the tests.

use std::{path::Path, process::Command};

use crate::fixtures;

/// Adds a key of `tenant` to the key file at `file`; returns the key.
#[must_use]
pub fn add_key(file: &Path, tenant: &str, role: &str) -> String {
    let mut key = Command::new(fixtures::program("holobiont"));
    key.args(["-q", "key", "add", tenant, "--role", role, "--file"]).arg(file);
    let made = key.output().expect("holobiont runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).expect("a key is text").trim().to_owned()
}
