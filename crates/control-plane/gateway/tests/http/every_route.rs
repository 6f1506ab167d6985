//! Rules for every route, checked over the table of routes.

use std::time::Duration;

use axum::http::Method;
use gateway::{
    routes::{HttpRoute, table},
    tenant_memory::MemoryLimits,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{
    client::TestClient,
    fake_executor::reply_with,
    harness::{Harness, WATCHDOG},
};

/// Routes whose method may have a body, but which read none.
const WITHOUT_BODY: &[&str] = &[
    "/v1/executors/{name}/drain",
    "/v1/executors/{name}/undrain",
    "/v1/bases/{name}/sleep",
    "/v1/bases/{name}/wake",
    "/v1/batches/{id}/cancel",
    "/v1/fine_tuning/jobs/{id}/cancel",
    "/v1/fine_tuning/jobs/{id}/pause",
    "/v1/fine_tuning/jobs/{id}/resume",
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
    FINISH,
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/v1/responses/compact",
    PUBLISH,
];

/// Route that answers that nothing is published here, for any id.
const PUBLISH: &str = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish";

/// Route with the same answer for existing and missing ids.
const FINISH: &str = "/api/v1/sessions/{id}/finish";

const KINDS: [&str; 4] = [
    "application/json",
    "application/x-protobuf",
    "multipart/form-data; boundary=x",
    "application/octet-stream",
];

fn reads_a_body(route: &HttpRoute) -> bool {
    route.method == Method::POST && !WITHOUT_BODY.contains(&route.path)
}

fn path(route: &HttpRoute, value: &str) -> String {
    let parts = route.path.split('/').map(|part| if part.starts_with('{') { value } else { part });
    parts.collect::<Vec<_>>().join("/")
}

/// Sends a head that announces a body, and a byte per `pause`, if one is given; returns the answer.
async fn promise(client: &TestClient, route: &HttpRoute, kind: &str, pause: Option<Duration>) -> String {
    let (mut read, mut write) = tokio::io::split(client.connect().await.into_inner());
    let head = format!(
        "{} {} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\nx-adapter-config: {{}}\r\n\
         content-length: 4096\r\n\r\n",
        route.method,
        path(route, "a")
    );
    write.write_all(head.as_bytes()).await.unwrap();
    let drip = async {
        if let Some(pause) = pause {
            while write.write_all(b" ").await.is_ok() {
                tokio::time::sleep(pause).await;
            }
        }
        std::future::pending::<()>().await;
    };
    let mut answer = Vec::new();
    tokio::select! {
        () = drip => {}
        read = timeout(WATCHDOG, read.read_to_end(&mut answer)) => {
            assert!(read.is_ok(), "{route:?} is still open");
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// Answer of a route to a body of its content type.
async fn promise_its_kind(client: &TestClient, route: &HttpRoute, pause: Option<Duration>) -> String {
    let mut answer = String::new();
    for kind in KINDS {
        answer = promise(client, route, kind, pause).await;
        if !answer.starts_with("HTTP/1.1 415") {
            break;
        }
    }
    answer
}

#[tokio::test]
async fn every_route_answers_an_id_with_nul_as_one_that_is_not_there() {
    let harness = Harness::start(reply_with("x")).await;
    let mut wrong = Vec::new();
    for route in table().iter().filter(|route| route.path.contains('{')) {
        let method = route.method.as_str();
        for id in ["%00", "a%00b"] {
            let answer = harness.client.send(method, &path(route, id), KINDS[0], "").await;
            let is_expected = match route.path {
                FINISH => answer.status == 200,
                PUBLISH => answer.status == 501,
                _ => matches!(answer.status, 400 | 404),
            };
            if !is_expected {
                wrong.push(format!("{route:?}: {} {}", answer.status, answer.body));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for list in ["/v1/files", "/v1/fine_tuning/jobs"] {
        let answer = harness.client.get(&format!("{list}?after=%00")).await;
        assert_eq!(answer.status, 200, "{list}: {}", answer.body);
    }
    let metrics = harness.client.get("/metrics").await.body;
    assert!(!metrics.contains("registry_unavailable"), "{metrics}");
}

#[tokio::test]
async fn every_route_refuses_a_body_beyond_its_tenants_memory_before_it_comes() {
    let limits = MemoryLimits { tenant_bytes: 1024, total_bytes: 1 << 30 };
    let harness = Harness::start_with(reply_with("x"), |config| config.connections.memory = limits).await;
    let routes = table();
    let routes = routes.iter().filter(|route| route.method == Method::POST);
    let promised = routes.map(async |route| (route, promise_its_kind(&harness.client, route, None).await));
    let answers = futures::future::join_all(promised).await;
    // Errors in Ollama's format have no code.
    let is_refused =
        |answer: &str| answer.starts_with("HTTP/1.1 429") && answer.contains("--tenant-memory-bytes");
    let is_right = |(route, answer): &&(&HttpRoute, String)| is_refused(answer) == reads_a_body(route);
    let wrong: Vec<_> = answers.iter().filter(|asked| !is_right(asked)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn every_route_cuts_off_a_body_that_drips() {
    let limit = Duration::from_millis(200);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.connections.body_timeout = limit).await;
    let routes = table();
    let routes = routes.iter().filter(|route| reads_a_body(route));
    let dripped =
        routes.map(async |route| (route, promise_its_kind(&harness.client, route, Some(limit / 8)).await));
    let is_cut_off =
        |answer: &str| answer.starts_with("HTTP/1.1 408") && answer.contains("--body-timeout-ms");
    let answers = futures::future::join_all(dripped).await;
    let wrong: Vec<_> = answers.iter().filter(|(_, answer)| !is_cut_off(answer)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
