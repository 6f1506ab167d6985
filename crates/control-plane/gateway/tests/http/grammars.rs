//! Grammars are compiled in processes with limits, so none of them stops other requests.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use gateway::keys::Keys;
use serde_json::{Value, json};
use text::{
    grammar::{TokenBytes, Tokens},
    sandbox::{GrammarSandbox, MEMORY_BYTES, SandboxError},
};
use tokio::task::JoinSet;

use crate::{
    client::{Response, TestClient},
    fake_executor::reply_with,
    harness::{Harness, eventually_async, key_file},
};

const CHAT: &str = "/v1/chat/completions";
const ALICE: &str = "sk-alice-0123456789abcdef";
const BOB: &str = "sk-bob-0123456789abcdef00";

fn sandbox() -> GrammarSandbox {
    let bytes: Vec<[u8; 1]> = (0..=255u8).map(|byte| [byte]).collect();
    let texts = bytes.iter().map(|byte| TokenBytes::Text(byte));
    let tokens = Tokens::new(texts.chain([TokenBytes::Special(b"<end>")]), &[256]);
    GrammarSandbox::new(env!("CARGO_BIN_EXE_gateway").into(), Arc::new(tokens))
}

/// Schema in its wire form, without the gateway's checks.
fn source(schema: &Value) -> String {
    json!({ "grammars": [{ "json_schema": schema }] }).to_string()
}

/// Content of `/proc` file `file` of all compiler processes of this process.
fn compilers(file: &str) -> Vec<String> {
    let own = fs::read_dir("/proc/self/task").unwrap();
    let children = own.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap());
    let children: String = children.collect();
    let paths = children.split_whitespace().map(|child| PathBuf::from("/proc").join(child));
    let is_compiler = |path: &PathBuf| {
        fs::read(path.join("cmdline")).is_ok_and(|line| line.ends_with(b"grammar-compiler\0"))
    };
    paths.filter(is_compiler).map(|path| fs::read_to_string(path.join(file)).unwrap()).collect()
}

#[test]
fn a_compilation_beyond_the_limits_ends_its_process_alone() {
    let mut sandbox = sandbox();
    let endless = source(&json!({ "type": "integer", "multipleOf": 999_983 }));
    let good = source(&json!({ "type": "integer", "minimum": 3 }));
    assert_eq!(sandbox.judge(&good), Ok(()));
    assert_eq!(sandbox.judge(&endless), Err(SandboxError::TooMuch));
    assert_eq!(sandbox.judge(&good), Ok(()));
    let refused = sandbox.judge(&source(&json!({ "type": "integer", "not": {} })));
    assert!(matches!(refused, Err(SandboxError::Refused(_))), "{refused:?}");
}

#[test]
fn the_process_that_compiles_has_a_limit_on_memory_the_lowest_priority_and_no_environment() {
    let mut sandbox = sandbox();
    assert_eq!(sandbox.judge(&source(&json!({}))), Ok(()));
    let limits = compilers("limits").pop().unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    let data: u64 = data.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert!((MEMORY_BYTES..3 * MEMORY_BYTES).contains(&data), "{data}");
    // The niceness is the 19th word; the second is the program's name in parentheses.
    let stat = compilers("stat").pop().unwrap();
    assert_eq!(stat.rsplit_once(") ").unwrap().1.split(' ').nth(16), Some("19"));
    assert_eq!(compilers("environ").pop().unwrap(), "");
}

#[test]
fn a_program_that_does_not_compile_is_no_verdict_on_a_grammar() {
    let tokens = Tokens::new([TokenBytes::Special(b"<end>")].into_iter(), &[0]);
    for program in ["/nonexistent", "/bin/true"] {
        let verdict = GrammarSandbox::new(program.into(), Arc::new(tokens.clone())).judge("{}");
        assert!(matches!(verdict, Err(SandboxError::Unavailable(_))), "{program}: {verdict:?}");
    }
}

const WORDS: usize = 15_000;

/// Words of a short enumeration, whose request is read at once; longer requests are read one after the other.
const FEW_WORDS: usize = 200;

/// Request for a grammar that compiles for long and then exceeds the library's limits; unique to `number`.
fn endless(number: usize) -> Value {
    endless_after(WORDS, number)
}

fn endless_after(words: usize, number: usize) -> Value {
    let words: Vec<String> = (0..words).map(|word| format!("{word}-{number}")).collect();
    let words = json!({ "enum": words });
    let nothing = "/(a|b)*a(a|b){18}/ & ~/(a|b)*a(a|b){18}/";
    let grammar = format!("start: words | NOTHING\nNOTHING: {nothing}\nwords: %json {words}");
    asked("structured_outputs", json!({ "grammar": grammar }))
}

fn formed(schema: &Value) -> Value {
    let schema = json!({ "name": "n", "schema": schema });
    asked("response_format", json!({ "type": "json_schema", "json_schema": schema }))
}

fn asked(field: &str, form: Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "hi" }] });
    body[field] = form;
    body
}

async fn ask(client: TestClient, body: Value) -> Response {
    client.post(CHAT, &body).await
}

async fn with_two_tenants() -> (Harness, TestClient, TestClient) {
    let file = key_file(&[("user", "alice", ALICE), ("user", "bob", BOB)]);
    let harness =
        Harness::start_with(reply_with("{}"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let (alice, bob) = (harness.client.with_key(ALICE), harness.client.with_key(BOB));
    (harness, alice, bob)
}

#[tokio::test]
async fn schemas_that_take_the_whole_budget_are_refused_while_others_are_answered() {
    const MANY: usize = 12;
    let (harness, alice, bob) = with_two_tenants().await;
    let ended = Arc::new(AtomicUsize::new(0));
    let mut endless_ones = JoinSet::new();
    for number in 0..MANY {
        // An escaped key must not bypass the limit.
        let body = endless(number).to_string().replace("structured_outputs", "structured_output\\u0073");
        let (alice, ended) = (alice.clone(), Arc::clone(&ended));
        endless_ones.spawn(async move {
            let answer = alice.send("POST", CHAT, "application/json", &body).await;
            ended.fetch_add(1, SeqCst);
            answer
        });
    }
    for number in 0..3 {
        assert_eq!(harness.client.get("/health").await.status, 200);
        let schema = json!({ "type": "object", "properties": { format!("k{number}"): {} } });
        assert_eq!(ask(bob.clone(), formed(&schema)).await.status, 200);
    }
    assert!(ended.load(SeqCst) < MANY, "others are answered first");
    while let Some(answer) = endless_ones.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_grammar"), "{}", answer.body);
    }
    assert_eq!(ask(alice, formed(&json!({ "type": "object" }))).await.status, 200);
}

#[tokio::test]
async fn a_tenant_with_too_many_grammars_that_wait_is_told_so_and_others_are_served() {
    let (_harness, alice, bob) = with_two_tenants().await;
    let mut many = JoinSet::new();
    (0..400).for_each(|number| _ = many.spawn(ask(alice.clone(), endless_after(FEW_WORDS, number))));
    let full = loop {
        let answer = many.join_next().await.unwrap().unwrap();
        if answer.status != 400 {
            break answer;
        }
    };
    assert_eq!((full.status, full.code().as_str()), (429, "grammar_queue_full"), "{}", full.body);
    assert_eq!(ask(bob, formed(&json!({ "type": "object", "properties": { "b": {} } }))).await.status, 200);
    // Disconnected clients' grammars are not compiled.
    drop(many);
    let body = formed(&json!({ "type": "object", "properties": { "a": {} } }));
    eventually_async("there is room again", async || ask(alice.clone(), body.clone()).await.status == 200)
        .await;
}

#[tokio::test]
async fn requests_for_one_grammar_wait_for_one_compilation() {
    let (_harness, alice, _) = with_two_tenants().await;
    let mut same = JoinSet::new();
    (0..100).for_each(|_| _ = same.spawn(ask(alice.clone(), endless(0))));
    while let Some(answer) = same.join_next().await {
        assert_eq!(answer.unwrap().code(), "invalid_grammar");
    }
}
