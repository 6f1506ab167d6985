//! Downloads of models by name, from a server that answers like a hub.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use testkit::servers::hub::{COMMIT, FakeHub};

const CONFIG: &[u8] = br#"{"model_type": "llama"}"#;

fn weights() -> Vec<u8> {
    b"weights ".repeat(20_000)
}

fn hub() -> FakeHub {
    FakeHub::start(&[
        ("README.md", b"not needed"),
        ("config.json", CONFIG),
        ("model.safetensors", &weights()),
        ("onnx/model.onnx", b"another format"),
    ])
}

fn pull_command(hub: &FakeHub, home: &Path, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holobiont"));
    command.args(["pull", name, "--json"]).env("HF_ENDPOINT", &hub.url).env("HF_HOME", home);
    command.env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN");
    command
}

fn pull(hub: &FakeHub, home: &Path, name: &str, offline: &str) -> Output {
    pull_command(hub, home, name).env("HF_HUB_OFFLINE", offline).output().unwrap()
}

fn snapshot(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    PathBuf::from(shown["paths"][0].as_str().unwrap())
}

#[test]
fn a_name_of_a_hub_is_downloaded_once_with_what_the_model_needs() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let snapshot_path = snapshot(&pull(&hub, home.path(), "org/name", "0"));
    assert_eq!(snapshot_path, home.path().join("hub/models--org--name/snapshots").join(COMMIT));
    assert_eq!(hub.take_downloads(), ["config.json", "model.safetensors"]);
    assert_eq!(fs::read(snapshot_path.join("config.json")).unwrap(), CONFIG);
    assert_eq!(fs::read(snapshot_path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(
        snapshot(&pull(&hub, home.path(), "org/name", "1")),
        snapshot_path,
        "the cache suffices offline"
    );
    assert!(hub.take_downloads().is_empty());
}

#[test]
fn an_interrupted_download_is_no_model_and_the_next_one_completes_it() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    hub.set_broken(Some("model.safetensors"));
    let failed = pull(&hub, home.path(), "org/name", "0");
    assert_eq!(failed.status.code(), Some(5), "{}", String::from_utf8_lossy(&failed.stderr));
    assert_eq!(hub.take_downloads()[0], "config.json");
    let offline = pull(&hub, home.path(), "org/name", "1");
    assert_eq!(offline.status.code(), Some(3), "{}", String::from_utf8_lossy(&offline.stderr));

    hub.set_broken(None);
    let snapshot_path = snapshot(&pull(&hub, home.path(), "org/name", "0"));
    assert_eq!(hub.take_downloads(), ["model.safetensors"], "a complete file is not requested again");
    assert_eq!(fs::read(snapshot_path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn a_name_that_the_hub_does_not_know_is_refused_with_what_to_do() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let unknown = pull(&hub, home.path(), "org/other", "0");
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert_eq!(unknown.status.code(), Some(5), "{said}");
    assert!(said.contains("org/other@main") && said.contains("404") && said.contains("HF_TOKEN"), "{said}");
}

#[test]
fn the_token_of_the_environment_is_sent_to_the_hub() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let output = pull_command(&hub, home.path(), "org/name").env("HF_TOKEN", "hf_own").output().unwrap();
    snapshot(&output);
    let sent = |request: &testkit::servers::hub::HubRequest| request.authorization.clone();
    assert!(hub.requests().iter().all(|request| sent(request).as_deref() == Some("Bearer hf_own")));
}
