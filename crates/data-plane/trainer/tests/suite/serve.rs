//! The trainer service as a service manager sees it.

use std::{os::unix::net::UnixDatagram, process::Command, time::Duration};

#[test]
fn a_service_that_is_to_have_no_trainers_says_so_and_ends_well() {
    let directory = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(directory.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_holobiont-trainer"));
    command.args(["serve", "--socket"]).arg(directory.path().join("trainers"));
    command.env("HOLOBIONT_MAX_TRAINERS", "0").env("NOTIFY_SOCKET", directory.path().join("notify"));
    let ended = command.output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains("HOLOBIONT_MAX_TRAINERS") && said.contains("training is off"), "{said}");
    // The last notification must arrive before the end, or a service manager would report a failure.
    let mut heard = [0; 1024];
    let length = manager.recv(&mut heard).unwrap();
    let heard = String::from_utf8_lossy(&heard[..length]);
    assert!(heard.contains("READY=1") && heard.contains("STATUS=training is off"), "{heard}");
    assert!(!directory.path().join("trainers").exists(), "nobody can ask it");
}
