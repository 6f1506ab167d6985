//! An answer that switches adapters equals separate requests in sequence, token by token.

use std::sync::{Arc, Mutex, Weak};

use e2e_tests::{BASE, Client, Deployment, DeploymentPlan, fixtures, watched};
use serde_json::{Value, json};

const ROUTE: &str = "/v1/completions";
const MOST: usize = 40;

static SHARED: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

fn shared() -> Arc<Deployment> {
    Deployment::shared(&SHARED, || DeploymentPlan::with_examples().start())
}

/// Token ids and log-probabilities of an answer, and its stages.
#[derive(Debug, PartialEq)]
struct Generated {
    tokens: Vec<u32>,
    logprobs: Vec<Value>,
}

fn tokenize(client: &Client, text: &str) -> Vec<u32> {
    let body = json!({ "prompt": text, "add_special_tokens": false });
    let answer = client.try_post("/tokenize", &body).expect("tokens");
    serde_json::from_value(answer["tokens"].clone()).expect("token ids")
}

/// Asks `model` for up to `most` tokens, with the options of `extra`; returns the first choice too.
fn ask(client: &Client, model: &str, (prompt, most): (&[u32], usize), extra: &Value) -> (Generated, Value) {
    let mut body = json!({ "model": model, "prompt": prompt, "max_tokens": most, "logprobs": 0,
        "return_token_ids": true, "ignore_eos": true });
    for (name, value) in extra.as_object().expect("options") {
        body[name] = value.clone();
    }
    let mut choice = client.try_post(ROUTE, &body).expect("an answer")["choices"][0].take();
    let tokens = serde_json::from_value(choice["token_ids"].take()).expect("token ids");
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().expect("log-probabilities").clone();
    (Generated { tokens, logprobs }, choice)
}

/// A stage of a chain of requests: its model, the tokens before it, and how it ends.
struct Stage<'a> {
    model: &'a str,
    appended: Vec<u32>,
    end: StageEnd,
}

enum StageEnd {
    Tokens(usize),
    Marker(u32),
}

/// Asks one request for each stage, whose prompt is all that precedes it.
fn ask_in_sequence(client: &Client, prompt: &[u32], stages: &[Stage<'_>], sampling: &Value) -> Generated {
    let (mut prompt, mut all) = (prompt.to_vec(), Generated { tokens: Vec::new(), logprobs: Vec::new() });
    for stage in stages {
        prompt.extend(&stage.appended);
        let mut extra = sampling.clone();
        let most = match stage.end {
            StageEnd::Tokens(count) => count - all.tokens.len(),
            StageEnd::Marker(token) => {
                extra["stop_token_ids"] = json!([token]);
                MOST - all.tokens.len()
            }
        };
        let (generated, _) = ask(client, stage.model, (&prompt, most), &extra);
        prompt.extend(&generated.tokens);
        all.tokens.extend(generated.tokens);
        all.logprobs.extend(generated.logprobs);
    }
    all
}

/// Returns a token of `generated` that can be a marker, with its text, and the position where it comes first.
fn marker(client: &Client, generated: &Generated, choice: &Value) -> (u32, String, usize) {
    let texts = choice["logprobs"]["tokens"].as_array().expect("texts of tokens");
    let mut found =
        generated.tokens.iter().zip(texts).enumerate().skip(2).filter_map(|(at, (&token, text))| {
            let text = text.as_str().filter(|text| tokenize(client, text) == [token])?;
            let is_first = !generated.tokens[..at].contains(&token);
            is_first.then(|| (token, text.to_owned(), at))
        });
    found.next().expect("a token that its text alone gives")
}

#[test]
fn an_answer_that_switches_adapters_has_the_tokens_of_separate_requests() {
    watched(|| {
        let (deployment, fresh) = (shared(), DeploymentPlan::with_examples().start());
        let client = &deployment.client;
        let prompt = fixtures::prompt(31, 50);
        let append = "\nAs JSON:";
        for sampling in [json!({ "temperature": 0 }), json!({ "temperature": 0.8, "seed": 11 })] {
            let (base, choice) = ask(client, BASE, (&prompt, 20), &sampling);
            let (token, text, at) = marker(client, &base, &choice);
            let mut extra = sampling.clone();
            extra["adapter_switches"] = json!([
                { "model": "pirate", "marker": text },
                { "model": "json", "after_tokens": 28, "append": append },
                { "model": BASE, "after_tokens": 34 },
            ]);
            let (answer, choice) = ask(client, BASE, (&prompt, MOST), &extra);
            let stage = |model, appended, end| Stage { model, appended, end };
            let stages = [
                stage(BASE, Vec::new(), StageEnd::Marker(token)),
                stage("pirate", Vec::new(), StageEnd::Tokens(28)),
                stage("json", tokenize(client, append), StageEnd::Tokens(34)),
                stage(BASE, Vec::new(), StageEnd::Tokens(MOST)),
            ];
            // A deployment without these prefixes computes each prompt anew.
            let expected = ask_in_sequence(&fresh.client, &prompt, &stages, &sampling);
            assert_eq!(answer, expected, "{sampling}");
            let counts = choice["adapter_stages"].as_array().expect("stages").iter();
            let counts: Vec<_> = counts.map(|stage| stage["tokens"].as_u64().expect("a count")).collect();
            assert_eq!(counts, [at as u64 + 1, 27 - at as u64, 6, 6], "{sampling}");
            assert_ne!(answer.tokens, ask(client, BASE, (&prompt, MOST), &sampling).0.tokens, "{sampling}");
        }
    });
}

#[test]
fn a_switch_to_an_activated_adapter_and_back_keeps_the_blocks_of_the_base() {
    watched(|| {
        let (deployment, fresh) = (shared(), DeploymentPlan::with_examples().start());
        let invocation = tokenize(&deployment.client, "\nReview:");
        for host in [&*deployment, &fresh] {
            let path = host.place().adapters().join("reviewer");
            fixtures::activated("pirate", &invocation, &path);
            host.client.load("reviewer", &path);
        }
        let prompt = fixtures::prompt(32, 100);
        let sampling = json!({ "temperature": 0.8, "seed": 7 });
        let mut extra = sampling.clone();
        extra["adapter_switches"] = json!([
            { "model": "reviewer", "after_tokens": 14, "append": "\nReview:" },
            { "model": BASE, "after_tokens": 30 },
        ]);
        let (answer, choice) = ask(&deployment.client, BASE, (&prompt, MOST), &extra);
        let cached = choice["adapter_stages"].as_array().expect("stages").iter();
        let cached: Vec<_> = cached.map(|stage| stage["cached_tokens"].as_u64().expect("a count")).collect();
        // The base computed 113 tokens in seven blocks, which both later stages continue.
        assert_eq!(cached, [0, 112, 112]);
        let stages = [
            Stage { model: BASE, appended: Vec::new(), end: StageEnd::Tokens(14) },
            Stage { model: "reviewer", appended: invocation, end: StageEnd::Tokens(30) },
            Stage { model: BASE, appended: Vec::new(), end: StageEnd::Tokens(MOST) },
        ];
        assert_eq!(answer, ask_in_sequence(&fresh.client, &prompt, &stages, &sampling));
        assert_ne!(answer.tokens, ask(&deployment.client, BASE, (&prompt, MOST), &sampling).0.tokens);
    });
}
