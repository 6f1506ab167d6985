//! Adapter files come from the bucket on demand, complete or not at all, and are evicted if the cache is
//! full.

use std::time::Duration;

use gateway::adapters::ResidencyError;

use crate::{
    servers::{self, s3::Bucket, wire::ResponseFault},
    support::{FILE_BYTES, FleetHost, eventually, long},
};

const WEIGHTS: &str = "adapter_model.safetensors";

fn gets(bucket: &Bucket) -> Vec<String> {
    let asked = bucket.wire.take_asked();
    asked.into_iter().filter(|head| head.starts_with("GET") && head.contains(WEIGHTS)).collect()
}

fn stats(host: &FleetHost) -> (u64, u64, u64) {
    let stats = host.registry.bucket_status().expect("there is a bucket");
    (stats.fetched, stats.failed, stats.damaged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_change_on_the_way_are_noticed_and_fetched_again() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    one.load("a", "first").await.unwrap();
    other.hears(&one, "a").await;
    bucket.wire.set(ResponseFault::Flip(1));
    other.ask("a").await.unwrap();
    assert_eq!((bucket.wire.harm(), stats(&other)), (ResponseFault::Flip(0), (1, 0, 1)));
    assert_eq!(other.loaded().as_deref(), Some("first"));
    // Adapter `a` was evicted from the executor only, so it needs no download.
    let _ = bucket.wire.take_asked();
    other.load("b", "second").await.unwrap();
    other.load("c", "third").await.unwrap();
    other.ask("a").await.unwrap();
    assert_eq!(gets(&bucket), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_template_beside_an_adapter_comes_to_every_host_with_the_name() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    let request = one.request("a", "first");
    std::fs::write(request.path.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let loaded = one.registry.load(request, "base".into()).await.unwrap();
    other.hears(&one, "a").await;
    let heard = other.registry.entries()["a"].record.clone();
    assert_eq!(
        (heard.template.clone(), heard.generation),
        (loaded.record.template.clone(), loaded.record.generation)
    );
    assert_eq!(&*heard.template.expect("the template came").source, "{{ messages }}");
    other.ask("a").await.expect("the executor knows the generation of the weights");
    // Equal weights without the template.
    std::fs::remove_file(one.directory.path().join("root/a/chat_template.jinja")).unwrap();
    let plain = one.load("a", "first").await.unwrap();
    other.hears(&one, "a").await;
    let heard = other.registry.entries()["a"].record.clone();
    assert_eq!((heard.template, heard.generation), (None, plain.record.generation));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_changed_in_the_bucket_are_refused_by_name_until_the_adapter_is_loaded_again() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    one.load("a", "first").await.unwrap();
    one.load("b", "second").await.unwrap();
    other.hears(&one, "b").await;
    let content = one.registry.entries()["a"].record.content.to_string();
    bucket.replace(&format!("adapters/{content}/{WEIGHTS}"), long("forged").as_bytes());
    let refused = other.ask("a").await.unwrap_err();
    assert!(matches!(&refused, ResidencyError::Unfetched(unfetched) if unfetched.name == "a"), "{refused}");
    assert!(refused.to_string().contains("were changed"), "{refused}");
    assert_eq!((stats(&other), other.loaded()), ((0, 1, 2), None));
    other.ask("b").await.expect("others are served");
    // Host `one` has the content, and uploads it again.
    let replaced = one.registry.load(one.request("again", "first"), "base".into()).await.unwrap();
    assert_eq!(replaced.record.content.to_string(), content);
    other.ask("a").await.unwrap();
    assert_eq!(other.loaded().as_deref(), Some("first"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_breaks_off_is_gone_on_with_from_there() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    let large = format!("large{}", "x".repeat(3 << 20));
    let path = one.files("a", large.as_bytes());
    one.registry
        .load(gateway::adapters::LoadRequest { path, ..one.request("b", "b") }, "base".into())
        .await
        .unwrap();
    other.hears(&one, "b").await;
    let _ = bucket.wire.take_asked();
    bucket.wire.set(ResponseFault::Break(2));
    other.ask("b").await.unwrap();
    let ranges: Vec<_> = gets(&bucket)
        .iter()
        .filter_map(|head| {
            head.to_ascii_lowercase().split_once("range: bytes=")?.1.split('-').next()?.parse::<u64>().ok()
        })
        .collect();
    assert!(ranges.len() == 3 && ranges.is_sorted() && ranges[2] > 0, "{ranges:?}");
    assert_eq!(stats(&other), (1, 0, 0));
    let whole = other.directory.path().join("state/adapters").join(&other.stored()[0]).join(WEIGHTS);
    assert!(std::fs::read(whole).unwrap() == large.as_bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_silent_or_gone_fails_the_adapter_that_lies_there_alone() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    one.load("here", "first").await.unwrap();
    one.load("there", "second").await.unwrap();
    other.hears(&one, "there").await;
    other.ask("here").await.unwrap();
    for harm in [ResponseFault::Silence, ResponseFault::Gone] {
        bucket.wire.set(harm);
        let (refused, served) = tokio::join!(other.ask("there"), async {
            // Gives the first request time to wait.
            tokio::time::sleep(Duration::from_millis(100)).await;
            other.ask("here").await
        });
        served.expect("what lies here is served");
        let refused = refused.unwrap_err();
        assert!(
            matches!(&refused, ResidencyError::Unfetched(unfetched) if unfetched.name == "there"),
            "{refused}"
        );
        bucket.wire.set(ResponseFault::Gone);
        let error = other.load("new", "third").await.unwrap_err();
        assert!(error.to_string().contains("s3://fleet/adapters"), "{error}");
        assert!(other.stands_for("new").is_none(), "nothing is registered that others could not have");
    }
    bucket.wire.set(ResponseFault::None);
    other.ask("there").await.expect("it heals by itself");
    assert_eq!(other.loaded().as_deref(), Some("second"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_files_go_there_in_parts_and_come_back_whole() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    let large: Vec<u8> = (0..20u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let path = one.files("a", &large);
    one.registry
        .load(gateway::adapters::LoadRequest { path, ..one.request("b", "b") }, "base".into())
        .await
        .unwrap();
    let parts = bucket.wire.take_asked().iter().filter(|head| head.contains("partNumber=")).count();
    assert_eq!(parts, 3);
    other.hears(&one, "b").await;
    other.ask("b").await.unwrap();
    assert_eq!(stats(&other), (1, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_holds_no_more_files_than_it_may_and_fetches_what_it_let_go() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let one = FleetHost::new(&postgres, &bucket).await;
    for name in ["a", "b", "c", "d"] {
        one.load(name, name).await.unwrap();
    }
    one.registry.pin("a", gateway::adapters::Pin::Keep).await.unwrap();
    // Cache for two adapters: a configuration has two bytes.
    let other = FleetHost::with_cache(&postgres, &bucket, 2 * (FILE_BYTES as u64 + 2)).await;
    eventually("what is pinned has come", || other.stored().len() == 1).await;
    for name in ["b", "c", "d", "b"] {
        other.ask(name).await.unwrap();
        assert_eq!(other.loaded().as_deref(), Some(name));
        other.ask("a").await.unwrap();
    }
    other.load("e", "e").await.unwrap();
    eventually("there is room for two", || other.stored().len() == 2).await;
    let pinned = other.registry.entries()["a"].record.content.to_string();
    assert!(other.stored().contains(&pinned), "what is pinned stays");
    let stats = other.registry.bucket_status().unwrap();
    assert_eq!((stats.fetched, stats.evicted), (5, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rots_on_a_host_is_fetched_again_also_after_a_restart() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let one = FleetHost::new(&postgres, &bucket).await;
    one.load("a", "first").await.unwrap();
    one.load("b", "second").await.unwrap();
    one.load("c", "third").await.unwrap();
    let content = one.registry.entries()["a"].record.content.to_string();
    let file = one.directory.path().join("state/adapters").join(&content).join(WEIGHTS);
    std::fs::write(&file, long("rotten")).unwrap();
    one.ask("a").await.unwrap();
    assert_eq!((one.loaded().as_deref(), stats(&one)), (Some("first"), (1, 0, 0)));
    assert_eq!(one.fake.held(), 2, "the stranger was freed");
}
