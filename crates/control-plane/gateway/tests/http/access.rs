//! Access rights: every route of the table with every role, and the limits for web pages without a key.

use axum::http::Method;
use gateway::{
    caller::{Access, KeyRole},
    config::AllowedHosts,
    keys::{Keys, line_of},
    routes,
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{
    client::TestClient,
    fake_executor::reply_with,
    harness::{Harness, WATCHDOG, eventually_async, key_file},
};

const USER: &str = "hb-user";
const SAME_TENANT: &str = "hb-user-2";
const OTHER: &str = "hb-other";
const METRICS: &str = "hb-metrics";
const ADMIN: &str = "hb-admin";
/// Route that requires a signed address instead of a key.
const SIGNED: &str = "/api/v1/downloads/{file}";
/// Role name, tenant, key and role of every kind of key.
const ALL: &[(&str, &str, &str, KeyRole)] = &[
    ("user", "alice", USER, KeyRole::User),
    ("user", "alice", SAME_TENANT, KeyRole::User),
    ("user", "bob", OTHER, KeyRole::User),
    ("metrics", "prometheus", METRICS, KeyRole::Metrics),
    ("admin", "ops", ADMIN, KeyRole::Admin),
];

async fn guarded() -> Harness {
    let file = key_file(&ALL.iter().map(|(role, name, key, _)| (*role, *name, *key)).collect::<Vec<_>>());
    Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap()).await
}

async fn ask(client: &TestClient, route: &routes::HttpRoute) -> u16 {
    let path = route.path.replace("{*id}", "base").replace("{part}", "main.js");
    let body = if route.method == Method::POST { "{}" } else { "" };
    client.send(route.method.as_str(), &path, "application/json", body).await.status
}

#[tokio::test]
async fn no_route_answers_without_a_known_key_but_the_open_ones() {
    let harness = guarded().await;
    for route in routes::table() {
        let expected = match route.access {
            // The route requires a signature, which is missing here.
            Access::Open if route.path == SIGNED => 400,
            Access::Open => 200,
            _ => 401,
        };
        assert_eq!(ask(&harness.client, &route).await, expected, "{route:?}");
        assert_eq!(ask(&harness.client.with_key("hb-wrong"), &route).await, expected, "{route:?}");
    }
}

#[tokio::test]
async fn every_key_reaches_what_its_role_may_and_nothing_else() {
    let harness = guarded().await;
    for route in routes::table() {
        for (_, name, key, role) in ALL {
            let status = ask(&harness.client.with_key(key), &route).await;
            let allowed = route.access.allows(*role);
            assert_eq!(status == 403, !allowed, "{route:?} answered {status} to {name}");
            assert_ne!(status, 401, "{route:?} does not know {name}");
        }
    }
}

#[tokio::test]
async fn every_route_takes_a_key_as_clients_of_anthropic_send_it() {
    let harness = guarded().await;
    for route in routes::table() {
        let status = ask(&harness.client.with_header("x-api-key", ADMIN), &route).await;
        assert!(![401, 403].contains(&status), "{route:?} answered {status}");
    }
}

#[tokio::test]
async fn what_is_not_in_the_table_is_not_there_for_anybody() {
    let harness = guarded().await;
    for client in [harness.client.clone(), harness.client.with_key(ADMIN)] {
        for path in ["/v1/files", "/docs/", "/v1", "/metrics/x", "//health", "/v1/models"] {
            let answer = client.send("DELETE", path, "application/json", "").await;
            assert!([404, 405].contains(&answer.status), "{path} answered {}", answer.status);
        }
    }
}

#[tokio::test]
async fn a_tenant_takes_their_own_adapter_away_and_nobody_elses() {
    let harness = guarded().await;
    let admin = harness.client.with_key(ADMIN);
    for (name, tenant) in [("all", None), ("mine", Some("alice")), ("theirs", Some("bob"))] {
        let load = json!({ "lora_name": name, "lora_path": harness.adapter(name, name), "tenant": tenant });
        assert_eq!(admin.post("/v1/load_lora_adapter", &load).await.status, 200);
    }
    let delete = async |key: &str, name: &str| {
        let client = harness.client.with_key(key);
        client.send("DELETE", &format!("/v1/models/{name}"), "application/json", "").await.status
    };
    assert_eq!(delete(USER, "theirs").await, 404);
    assert_eq!(delete(USER, "all").await, 403);
    assert_eq!(delete(USER, "base").await, 400);
    assert_eq!(delete(USER, "mine").await, 200);
    assert_eq!(delete(USER, "mine").await, 404);
    assert_eq!(delete(ADMIN, "theirs").await, 200);
}

#[tokio::test]
async fn only_probes_pages_and_signed_addresses_are_open() {
    let open: Vec<&str> =
        routes::table().iter().filter(|route| route.access == Access::Open).map(|route| route.path).collect();
    assert_eq!(open, ["/", "/page/{part}", "/docs", "/openapi.json", "/health", "/ready", SIGNED]);
}

#[tokio::test]
async fn tenants_and_adapters_never_share_a_cache_namespace() {
    let harness = guarded().await;
    let path = harness.adapter("a", "weights");
    let load = json!({ "lora_name": "a", "lora_path": path });
    let loaded = harness.client.with_key(ADMIN).post("/v1/load_lora_adapter", &load).await;
    assert_eq!(loaded.status, 200, "{}", loaded.body);
    for (key, model, user) in
        [(USER, "base", "x"), (SAME_TENANT, "base", "y"), (OTHER, "base", "x"), (USER, "a", "x")]
    {
        let body = json!({ "model": model, "prompt": "a", "user": user });
        assert_eq!(harness.client.with_key(key).post("/v1/completions", &body).await.status, 200);
    }
    let namespaces: Vec<[u8; 32]> =
        harness.executor().generates().iter().map(|sent| sent.namespace).collect();
    assert_eq!(namespaces[0], namespaces[1], "two keys of one name are one tenant");
    assert_ne!(namespaces[0], namespaces[2], "another name is another tenant");
    assert_ne!(namespaces[0], namespaces[3], "an adapter is not the base");
}

#[tokio::test]
async fn a_key_that_is_taken_out_opens_nothing_a_moment_later() {
    let file = key_file(&[("user", "alice", USER), ("admin", "ops", ADMIN)]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    assert_eq!(harness.client.with_key(USER).get("/v1/models").await.status, 200);
    // The command replaces the file in the same way.
    let next = file.path().with_extension("next");
    std::fs::write(&next, line_of("admin", "ops", ADMIN)).unwrap();
    std::fs::rename(&next, file.path()).unwrap();
    eventually_async("the key is forgotten", async || {
        harness.client.with_key(USER).get("/v1/models").await.status == 401
    })
    .await;
    std::fs::write(file.path(), "admin:plain-text").unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(
        harness.client.with_key(ADMIN).get("/v1/models").await.status,
        200,
        "a bad file changes nothing"
    );
}

#[tokio::test]
async fn without_keys_only_names_of_this_machine_are_answered_to() {
    let harness = Harness::start(reply_with("x")).await;
    for host in ["evil.example", "evil.example:8080"] {
        let refused = harness.client.with_host(host).get("/v1/models").await;
        assert_eq!((refused.status, refused.code().as_str()), (403, "origin_not_allowed"));
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains("evil.example"));
    }
    let page = harness.client.with_header("origin", "http://evil.example");
    assert_eq!(page.get("/v1/models").await.status, 403);
    assert_eq!(harness.client.with_host("localhost").get("/v1/models").await.status, 200);
    let any = Harness::start_with(reply_with("x"), |config| config.hosts = AllowedHosts::Any).await;
    assert_eq!(any.client.with_host("evil.example").get("/v1/models").await.status, 200);
}

#[tokio::test]
async fn a_health_check_of_a_time_before_hosts_is_answered() {
    let harness = Harness::start(reply_with("x")).await;
    let ask = async |head: &str| {
        let mut connection = harness.client.connect().await;
        connection.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(WATCHDOG, connection.read_to_string(&mut answer)).await.expect("it is answered").unwrap();
        answer
    };
    assert!(ask("GET /health HTTP/1.0\r\n\r\n").await.contains(" 200 "));
    let refused = ask("GET /health HTTP/1.0\r\norigin: http://evil.example\r\n\r\n").await;
    assert!(refused.contains(" 403 "), "no page is let in by leaving its host out: {refused}");
}

#[tokio::test]
async fn browsers_are_let_in_from_the_origins_that_were_named_and_no_others() {
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.cors_origins = vec!["https://a.example".to_owned()];
    })
    .await;
    let asked = |origin: &str| {
        let client = harness.client.with_header("origin", origin);
        let client = client.with_header("access-control-request-method", "POST");
        client.with_header("access-control-request-headers", "authorization,content-type")
    };
    let preflight =
        asked("https://a.example").send("OPTIONS", "/v1/chat/completions", "text/plain", "").await;
    assert_eq!(preflight.status, 200);
    assert_eq!(preflight.header("access-control-allow-origin"), Some("https://a.example"));
    assert!(preflight.header("access-control-allow-headers").unwrap().contains("authorization"));
    let methods = preflight.header("access-control-allow-methods").unwrap();
    for route in routes::table() {
        assert!(methods.contains(route.method.as_str()), "{route:?} cannot be used from a page: {methods}");
    }
    let other = asked("https://b.example").send("OPTIONS", "/v1/chat/completions", "text/plain", "").await;
    assert_eq!(other.header("access-control-allow-origin"), None);
    let answer = harness.client.with_header("origin", "https://a.example").get("/v1/models").await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://a.example"))
    );
    let closed = Harness::start(reply_with("x")).await;
    let preflight = closed.client.with_header("origin", "https://a.example");
    assert_eq!(preflight.send("OPTIONS", "/v1/models", "text/plain", "").await.status, 403);
}
