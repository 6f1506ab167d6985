//! Every route of the table, with no key, a wrong key and a user's key.

use axum::http::Method;
use gateway::{
    auth::{Access, Keys, Role},
    routes,
};
use serde_json::json;

use crate::{client::Client, fake_executor::say, harness::Harness};

const USER: &str = "user-key-0123456789";
const OTHER: &str = "other-key-0123456789";
const ADMIN: &str = "admin-key-0123456789";

async fn guarded() -> Harness {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), format!("user:{USER}\nuser:{OTHER}\nadmin:{ADMIN}\n")).unwrap();
    Harness::start_with(say("x"), |config| config.keys = Keys::read(keys.path()).unwrap()).await
}

async fn ask(client: &Client, route: &routes::Route) -> u16 {
    let path = route.path.replace("{*id}", "base");
    let body = if route.method == Method::POST { "{}" } else { "" };
    client.send(route.method.as_str(), &path, "application/json", body).await.status
}

#[tokio::test]
async fn no_route_answers_without_a_key_but_the_open_ones() {
    let harness = guarded().await;
    for route in routes::table() {
        let expected = if route.access == Access::Open { 200 } else { 401 };
        assert_eq!(ask(&harness.client, &route).await, expected, "{route:?}");
        assert_eq!(
            ask(&harness.client.with_key("wrong-key-0123456789"), &route).await,
            expected,
            "{route:?}"
        );
    }
}

#[tokio::test]
async fn a_user_reaches_what_is_for_users_and_nothing_else() {
    let harness = guarded().await;
    for route in routes::table() {
        let status = ask(&harness.client.with_key(USER), &route).await;
        assert_eq!(status == 403, route.access == Access::Role(Role::Admin), "{route:?} answered {status}");
        assert_ne!(status, 401, "{route:?}");
        let status = ask(&harness.client.with_key(ADMIN), &route).await;
        assert!(status != 401 && status != 403, "{route:?} answered {status} to an administrator");
    }
}

#[tokio::test]
async fn only_probes_are_open() {
    let open: Vec<&str> =
        routes::table().iter().filter(|route| route.access == Access::Open).map(|route| route.path).collect();
    assert_eq!(open, ["/health"]);
}

#[tokio::test]
async fn tenants_and_adapters_never_share_a_cache_namespace() {
    let harness = guarded().await;
    let path = harness.adapter("a", "weights");
    let load = json!({ "lora_name": "a", "lora_path": path });
    assert_eq!(harness.client.with_key(ADMIN).post("/v1/load_lora_adapter", &load).await.status, 200);
    for (key, model, user) in
        [(USER, "base", "x"), (USER, "base", "y"), (OTHER, "base", "x"), (USER, "a", "x")]
    {
        let body = json!({ "model": model, "prompt": "a", "user": user });
        assert_eq!(harness.client.with_key(key).post("/v1/completions", &body).await.status, 200);
    }
    let namespaces: Vec<[u8; 32]> =
        harness.executor().generates().iter().map(|sent| sent.namespace).collect();
    assert_eq!(namespaces[0], namespaces[1], "the body says nothing about the tenant");
    assert_ne!(namespaces[0], namespaces[2], "another key is another tenant");
    assert_ne!(namespaces[0], namespaces[3], "an adapter is not the base");
}
