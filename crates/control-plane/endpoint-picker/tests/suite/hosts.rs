//! Hostile, slow and silent hosts, and the port as a whole.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use endpoint_picker::{
    fleet::{PickRules, choice::PickRefusal},
    picker::Picker,
    scrape::{Scrape, run},
};
use scheduling::routing::{RoutingPolicy, Slo};
use testkit::eventually;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

fn report(adapters: &str) -> String {
    let work = r#"{"requests":0,"ranks":0,"max_rank":0,"tokens":0,"token_ranks":0}"#;
    format!(
        r#"{{"state":"ready","instance":1,"base":"base","answer_tokens":5.0,"queued":0,"executors":[{{"open":true,
        "places":4,"running":{work},"waiting":{work},"promised_tpot_us":null,"timings":null}}],
        "registered":{{"tag":1,"content":[{adapters}]}},"resident":{{"tag":2,"content":[[]]}}}}"#
    )
}

/// Host that answers every request with `answer` (a body), or is silent.
async fn host(answer: Option<String>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut request = [0; 4096];
                while stream.read(&mut request).await.is_ok_and(|read| read > 0) {
                    let Some(body) = &answer else { continue };
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                    if stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn picker(hosts: &[SocketAddr]) -> Arc<Picker> {
    let stale = Duration::from_millis(500);
    let rules = PickRules { policy: RoutingPolicy::RankAware, slo: Slo::default(), stale, fallbacks: 9 };
    let picker = Arc::new(Picker::new(rules, 1 << 20));
    assert!(!picker.is_ready(), "nobody has said anything yet");
    assert_eq!(asked(&picker), Err(PickRefusal::Nobody));
    let scrape = Scrape {
        endpoints: hosts.iter().map(ToString::to_string).collect(),
        every: Duration::from_millis(20),
        limit: stale,
        key: None,
    };
    tokio::spawn(run(Arc::clone(&picker), scrape));
    picker
}

fn asked(picker: &Picker) -> Result<Vec<String>, PickRefusal> {
    let head =
        endpoint_picker::request_parser::RequestHead { path: "/v1/completions".to_owned(), key: Vec::new() };
    picker.decide(&head, br#"{"model":"base","prompt":"Hello"}"#, &None).map(|pick| pick.endpoints)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_says_too_much_nonsense_or_nothing_holds_nobody_up() {
    let good = host(Some(report(""))).await;
    let adapter = format!(r#"{{"name":"{}","rank":1,"bytes":1}}"#, "x".repeat(17 << 20));
    let bad = [host(None).await, host(Some("[]".to_owned())).await, host(Some(report(&adapter))).await];
    let picker = picker(&[&[good], &bad[..]].concat());
    let known = Arc::clone(&picker);
    tokio::task::spawn_blocking(move || eventually("the good one is known", || known.is_ready()))
        .await
        .unwrap();
    for _ in 0..20 {
        assert_eq!(asked(&picker), Ok(vec![good.to_string()]));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_stands_for_all_its_addresses() {
    let good = host(Some(report(""))).await;
    let stale = Duration::from_millis(500);
    let rules = PickRules { policy: RoutingPolicy::MostIdle, slo: Slo::default(), stale, fallbacks: 0 };
    let picker = Arc::new(Picker::new(rules, 1 << 20));
    let endpoints = vec![format!("localhost:{}", good.port()), "nobody.invalid:1".to_owned()];
    let scrape = Scrape { endpoints, every: Duration::from_millis(20), limit: stale, key: None };
    tokio::spawn(run(Arc::clone(&picker), scrape));
    let known = Arc::clone(&picker);
    tokio::task::spawn_blocking(move || eventually("it is found", || known.is_ready())).await.unwrap();
    assert_eq!(asked(&picker), Ok(vec![good.to_string()]));
}
