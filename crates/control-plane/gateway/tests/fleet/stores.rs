//! A store is a bucket or a directory, and content without a name is swept from it.

use gateway::adapters::LoadRequest;

use crate::{
    servers::{self, postgres::Postgres, s3::Bucket},
    support::{FleetHost, long},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_all_hosts_have_is_a_store_as_a_bucket_is() {
    let postgres = match Postgres::start() {
        Ok(postgres) => postgres,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let shared = tempfile::tempdir().unwrap();
    let (one, other) = (
        FleetHost::beside(&postgres, shared.path()).await,
        FleetHost::beside(&postgres, shared.path()).await,
    );
    one.load("a", "first").await.unwrap();
    // Longer than a part of a multipart upload.
    let path = one.files("long", &vec![b'x'; (8 << 20) + 5]);
    one.registry.load(LoadRequest { path, ..one.request("long", "") }, "base".into()).await.unwrap();
    other.hears(&one, "long").await;
    for name in ["a", "long"] {
        other.ask(name).await.unwrap();
    }
    assert_eq!(other.stored().len(), 2);
    let content = one.registry.entries()["a"].record.content.to_string();
    let file = shared.path().join(&content).join("adapter_model.safetensors");
    std::fs::write(&file, long("another")).unwrap();
    let late = FleetHost::beside(&postgres, shared.path()).await;
    late.ask("a").await.expect_err("it is not what it is called");
    std::fs::write(&file, long("first")).unwrap();
    late.ask("a").await.unwrap();
    assert_eq!(late.loaded().as_deref(), Some("first"));
}

fn swept(postgres: &Postgres, bucket: &Bucket, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_gateway"));
    command.args(["registry", "sweep", "--registry", &postgres.url(), "--store", &bucket.url()]);
    let output = command.args(arguments).envs(bucket.variables()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_name_stands_for_any_more_is_swept_from_the_bucket_and_may_come_again() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let one = FleetHost::new(&postgres, &bucket).await;
    for (name, weights) in [("kept", "first"), ("twin", "second"), ("gone", "third")] {
        one.load(name, weights).await.unwrap();
    }
    // A second name for content that loses its first.
    one.load("copy", "second").await.unwrap();
    for name in ["twin", "gone"] {
        one.registry.unload(name, None).await.unwrap();
    }
    let sweep = |arguments: &[&str]| tokio::task::block_in_place(|| swept(&postgres, &bucket, arguments));
    assert!(sweep(&[]).starts_with("0 adapters"), "what is young stays");
    assert!(sweep(&["--older-than-hours", "0", "--dry-run"]).contains("1 adapters"));
    let said = sweep(&["--older-than-hours", "0"]);
    assert!(said.starts_with("1 adapters") && said.contains("removed"), "{said}");
    assert!(sweep(&["--older-than-hours", "0"]).starts_with("0 adapters"));
    let other = FleetHost::new(&postgres, &bucket).await;
    for name in ["kept", "copy"] {
        other.ask(name).await.unwrap();
    }
    one.load("again", "third").await.unwrap();
    other.hears(&one, "again").await;
    other.ask("again").await.expect("it was brought there again");
    assert_eq!(other.loaded().as_deref(), Some("third"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_sweep_in_the_middle_of_a_registration_takes_nothing_from_anybody() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    for round in 0..4 {
        let weights = format!("round {round}");
        let loads = async {
            for _ in 0..3 {
                one.load("a", &weights).await.unwrap();
                one.registry.unload("a", None).await.unwrap();
            }
            one.load("a", &weights).await.unwrap();
        };
        let sweeps = async {
            for _ in 0..3 {
                tokio::task::block_in_place(|| swept(&postgres, &bucket, &["--older-than-hours", "0"]));
                tokio::task::yield_now().await;
            }
        };
        tokio::join!(loads, sweeps);
        other.hears(&one, "a").await;
        other.ask("a").await.expect("whoever registers something sees to it that it is there");
        assert_eq!(other.loaded().as_deref(), Some(weights.as_str()));
    }
}
