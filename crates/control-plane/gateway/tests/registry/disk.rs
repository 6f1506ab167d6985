//! A disk that is really full.

use std::{path::Path, time::Duration};

use crate::{
    child::RegistryChild,
    fake_executor::FakeExecutor,
    support::{files, hex, stored},
};

/// Runs a child under `wrapper` with an adapter that is too large for its disk.
async fn fill(directory: &Path, wrapper: Vec<String>) {
    std::fs::create_dir_all(directory.join("root")).unwrap();
    std::fs::create_dir_all(directory.join("state")).unwrap();
    let large = files(directory, "large", "");
    std::fs::write(large.join("adapter_model.safetensors"), vec![1; 3 << 20]).unwrap();
    for name in ["a", "b"] {
        files(directory, name, name);
    }
    let fake = FakeExecutor::start(&directory.join("socket"), 3, Duration::ZERO).await;
    let directory = directory.to_owned();
    let orders = move || {
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        let mut child = RegistryChild::start(&directory, &wrapper);
        assert_eq!(child.heard().as_deref(), Some("ok open"));
        fake.look_from(child.pid());
        assert_eq!(child.order("load-file a"), Some(format!("ok {}", hex("a"))));
        for _ in 0..3 {
            assert_eq!(child.order("load-file large").as_deref(), Some("error insufficient_storage"));
        }
        assert_eq!(child.order("bring a"), Some(format!("ok {}", hex("a"))), "serving goes on");
        assert_eq!(child.order("load-file b"), Some(format!("ok {}", hex("b"))), "nothing was left behind");
        assert_eq!(child.order("reopen").as_deref(), Some("ok"));
        assert_eq!(child.order("names").as_deref(), Some("ok a,b"));
        child.end();
    };
    tokio::task::spawn_blocking(orders).await.unwrap();
}

fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script, "sh"].map(str::to_owned).to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_that_takes_no_more_is_a_typed_error_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    // In units of 512 or 1024 bytes, depending on the shell: above a database, below the adapter.
    fill(directory.path(), shell("trap '' XFSZ; ulimit -f 2000; exec \"$@\"")).await;
    assert_eq!(stored(directory.path()).len(), 2);
}

fn may_mount(directory: &Path) -> bool {
    let tried = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none"])
        .arg(directory)
        .stderr(std::process::Stdio::null())
        .status();
    tried.is_ok_and(|status| status.success())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_a_typed_error_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    std::fs::create_dir(&state).unwrap();
    if !may_mount(&state) {
        // If mounting is forbidden, a limit on file sizes replaces it.
        eprintln!("this user may not mount a tmpfs; a limit on the size of files stands for a full disk");
        return fill(directory.path(), shell("trap '' XFSZ; ulimit -f 2000; exec \"$@\"")).await;
    }
    let script = format!("mount -t tmpfs -o size=1m none '{}' && exec \"$@\"", state.display());
    let mut wrapper = ["unshare", "--user", "--map-root-user", "--mount"].map(str::to_owned).to_vec();
    wrapper.extend(shell(&script));
    fill(directory.path(), wrapper).await;
}
