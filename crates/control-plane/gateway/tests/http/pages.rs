//! Web pages for browsers, and the truth of the API description.

use std::{collections::BTreeSet, fs, path::Path};

use gateway::{
    caller::Access,
    pages::{OPENAPI, PARTS},
    routes,
};
use serde_json::{Value, json};

use crate::{fake_executor::reply_with, harness::Harness};

fn document() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

fn resolve<'a>(document: &'a Value, node: &'a Value) -> &'a Value {
    match node["$ref"].as_str() {
        Some(path) => document.pointer(&path[1..]).unwrap_or_else(|| panic!("{path} is not there")),
        None => node,
    }
}

#[test]
fn the_description_names_every_route_with_its_role_and_no_other() {
    let document = document();
    let mut described = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            described.insert((
                method.to_uppercase(),
                path.clone(),
                operation["x-role"].as_str().unwrap().to_owned(),
            ));
            let is_open = operation["security"].as_array().unwrap().is_empty();
            assert_eq!(is_open, operation["x-role"] == "open", "{path}");
        }
    }
    let role = |access| match access {
        Access::Open => "open",
        Access::Metrics => "metrics",
        Access::User => "user",
        Access::Admin => "admin",
    };
    let served: BTreeSet<_> = routes::table()
        .iter()
        .map(|route| {
            (route.method.to_string(), route.path.replace("{*id}", "{id}"), role(route.access).to_owned())
        })
        .collect();
    assert_eq!(described, served);
}

#[test]
fn every_reference_of_the_description_leads_somewhere() {
    fn walk(document: &Value, node: &Value) {
        resolve(document, node);
        match node {
            Value::Object(map) => map.values().for_each(|value| walk(document, value)),
            Value::Array(items) => items.iter().for_each(|value| walk(document, value)),
            _ => {}
        }
    }
    walk(&document(), &document());
}

fn example(document: &Value, field: &Value) -> Value {
    let field = resolve(document, field);
    if let Some(example) = field.get("example").or_else(|| field.get("default")) {
        return example.clone();
    }
    if let Some(one) = field["oneOf"].as_array() {
        return example(document, &one[0]);
    }
    let kind = field["type"].as_str().or_else(|| field["type"][0].as_str()).unwrap();
    match kind {
        "string" => json!("x"),
        "integer" => json!(1),
        "number" => json!(1.0),
        "boolean" => json!(false),
        "array" => json!([example(document, &field["items"])]),
        _ => json!({}),
    }
}

#[tokio::test]
async fn no_field_that_is_documented_is_refused_as_unsupported() {
    let harness = Harness::start(reply_with("x")).await;
    let document = document();
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(body) = methods.pointer("/post/requestBody/content/application~1json/schema") else {
            continue;
        };
        let schema = resolve(&document, body);
        if schema["additionalProperties"] == true {
            // Unrecognised fields are ignored.
            continue;
        }
        let fields = schema["properties"].as_object().unwrap();
        for (name, field) in fields {
            let needed = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let mut body: serde_json::Map<String, Value> =
                needed.map(|name| (name.to_owned(), example(&document, &fields[name]))).collect();
            body.insert(name.clone(), example(&document, field));
            let answer = harness.client.post(path, &Value::Object(body)).await;
            assert_ne!(answer.status, 500, "{path} {name}: {}", answer.body);
            assert!(!answer.body.contains("unsupported_parameter"), "{path} {name}: {}", answer.body);
            tried += 1;
        }
        let mut body = serde_json::Map::new();
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            body.insert(name.to_owned(), example(&document, &fields[name]));
        }
        body.insert("no_such_field".to_owned(), json!(1));
        let answer = harness.client.post(path, &Value::Object(body)).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.body);
    }
    assert!(tried > 60, "{tried} fields");
}

#[tokio::test]
async fn pages_are_held_to_themselves() {
    let harness = Harness::start(reply_with("x")).await;
    let parts = PARTS.iter().map(|(name, kind, _)| (format!("/page/{name}"), *kind));
    let pages = [("/", "text/html"), ("/docs", "text/html"), ("/openapi.json", "application/json")];
    for (path, kind) in pages.map(|(path, kind)| (path.to_owned(), kind)).into_iter().chain(parts) {
        let page = harness.client.get(&path).await;
        assert_eq!(page.status, 200);
        assert!(page.header("content-type").unwrap().starts_with(kind), "{path}");
        let policy = page.header("content-security-policy").unwrap();
        let own = if path.starts_with("/docs") || path.starts_with("/openapi") { "'self'" } else { "'none'" };
        assert!(policy.contains(&format!("default-src {own}")), "{path}: {policy}");
        assert!(policy.contains("frame-ancestors 'none'"), "{path}: {policy}");
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
        for elsewhere in ["src=\"http", "href=\"http", "@import", "url(http"] {
            assert!(!page.body.contains(elsewhere), "{path} loads something: {elsewhere}");
        }
    }
}

#[tokio::test]
async fn the_page_runs_no_script_and_no_style_that_is_not_a_file_of_its_own() {
    let harness = Harness::start(reply_with("x")).await;
    let page = harness.client.get("/").await;
    assert!(!page.header("content-security-policy").unwrap().contains("unsafe"));
    for inline in ["<style", " style=", "<script>", " onclick="] {
        assert!(!page.body.contains(inline), "the policy refuses what the page brings: {inline}");
    }
}

#[tokio::test]
async fn every_part_of_the_page_is_served_and_known_again() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/page");
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut served: BTreeSet<String> = PARTS.iter().map(|(name, ..)| (*name).to_owned()).collect();
    served.insert("index.html".to_owned());
    assert_eq!(files.collect::<BTreeSet<_>>(), served);
    let harness = Harness::start(reply_with("x")).await;
    let first = harness.client.get("/page/main.js").await;
    let tag = first.header("etag").unwrap();
    let again = harness.client.with_header("if-none-match", tag).get("/page/main.js").await;
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    let other = harness.client.with_header("if-none-match", tag).get("/page/dom.js").await;
    assert_eq!(other.status, 200, "another file has another tag");
    let missing = harness.client.get("/page/../openapi.json").await;
    assert_eq!(missing.status, 404, "{}", missing.body);
}
