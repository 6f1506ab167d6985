//! `/v1/classify`, and scores of models with classes, as clients see them.

use std::{sync::Arc, time::Duration};

use gateway::config::ScoringDefaults;
use serde_json::{Value, json};
use shmproto::message::{Finish, Generate, Output, Pooling};
use text::pair_template::PairTemplate;

use crate::{
    fake_executor::{CONTEXT_TOKENS, Reply, ReplyScript},
    harness::Harness,
    text::tokens,
};

const CLASSIFY: &str = "/v1/classify";
const RERANK: &str = "/v1/rerank";

/// The logits of tokens are how often the prompt contains them; those of labels, how often it has `a`, `b`...
fn count() -> Reply {
    Arc::new(|generate| {
        let often = |token: u32| generate.prompt.iter().filter(|other| **other == token).count() as f32;
        let pooled = match generate.pooling.as_ref().expect("a vector") {
            Pooling::TokenLogits(tokens) => tokens.iter().map(|&token| often(token)).collect(),
            Pooling::ClassLogits => vec![often(u32::from(b'a')), often(u32::from(b'b'))],
            Pooling::Last | Pooling::Mean => vec![1.0, 0.0],
        };
        let output = Output { pooled, finish: Some(Finish::Length), ..Output::default() };
        ReplyScript { outputs: vec![output], pause: Duration::ZERO }
    })
}

async fn with_classifier(labels: &str) -> Harness {
    let harness = Harness::start(count()).await;
    let path = harness.adapter("mood", &format!("labels:{labels}"));
    let load = json!({ "lora_name": "mood", "lora_path": path });
    let loaded = harness.client.post("/v1/load_lora_adapter", &load).await;
    assert_eq!(loaded.status, 200, "{}", loaded.body);
    harness
}

async fn post(harness: &Harness, route: &str, body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    harness.client.post(route, &body).await.json()
}

fn logistic(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}

fn sent(harness: &Harness) -> Vec<Generate> {
    harness.executor().generates()
}

#[tokio::test]
async fn an_adapters_head_names_the_class_of_each_text() {
    let harness = with_classifier("no,yes").await;
    let listed = harness.client.get("/v1/lora_adapters").await.json();
    assert_eq!(listed["data"][0]["labels"], json!(["no", "yes"]), "{listed}");
    let body = json!({ "model": "mood", "input": ["aab", "b", [98, 98]] });
    for route in [CLASSIFY, "/classify"] {
        let answer = post(&harness, route, &body, &json!({})).await;
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("mood")));
        assert!(answer["id"].as_str().unwrap().starts_with("classify-") && answer["created"].is_u64());
        assert!(answer["adapter_generation"].is_string());
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 8, "total_tokens": 8 }));
        let labels: Vec<_> = answer["data"].as_array().unwrap().iter().map(|one| &one["label"]).collect();
        assert_eq!(labels, ["no", "yes", "yes"], "{answer}");
        let first = &answer["data"][0];
        assert_eq!((&first["index"], &first["num_classes"]), (&json!(0), &json!(2)));
        assert!((first["probs"][0].as_f64().unwrap() - logistic(1.0)).abs() < 1e-6, "{answer}");
    }
    let raw = post(&harness, CLASSIFY, &body, &json!({ "use_activation": false })).await;
    assert_eq!(raw["data"][0]["probs"], json!([2.0, 1.0]));
    assert!(
        sent(&harness).iter().all(|one| one.pooling == Some(Pooling::ClassLogits) && one.max_tokens == 0)
    );
}

#[tokio::test]
async fn labels_survive_a_restart_of_the_gateway() {
    let mut harness = with_classifier("no,yes").await;
    harness.restart_gateway().await;
    let answer = post(&harness, CLASSIFY, &json!({ "model": "mood", "input": "b" }), &json!({})).await;
    assert_eq!(answer["data"][0]["label"], "yes", "{answer}");
}

#[tokio::test]
async fn a_head_of_two_labels_ranks_documents_by_the_second() {
    let harness = with_classifier("no,yes").await;
    let body = json!({ "model": "mood", "query": "q", "documents": ["ab", "bb", "a"] });
    let answer = post(&harness, RERANK, &body, &json!({})).await;
    let results = answer["results"].as_array().unwrap();
    let order: Vec<_> = results.iter().map(|one| one["index"].as_u64().unwrap()).collect();
    assert_eq!(order, [1, 0, 2], "{answer}");
    assert!((results[0]["relevance_score"].as_f64().unwrap() - logistic(2.0)).abs() < 1e-6);
    let mut pair = vec![257, u32::from(b'q'), 257];
    pair.extend(tokens("ab"));
    assert_eq!(sent(&harness)[0].prompt, pair, "both texts, each with its special tokens");
    let template = json!({ "template": "Q:{query} D:{document}", "use_activation": false });
    let answer = post(&harness, RERANK, &body, &template).await;
    assert_eq!(answer["results"][0]["relevance_score"], 2.0);
    assert_eq!(sent(&harness)[3].prompt, tokens("Q:q D:ab"));
}

#[tokio::test]
async fn tokens_score_texts_with_the_prompt_of_qwen3_reranker() {
    let harness = Harness::start(count()).await;
    let body = json!({ "model": "base", "text_1": "q", "text_2": ["x", "xyy"], "classifier_from_token": ["x", "y"], "instruction": "Find {query}" });
    let answer = post(&harness, "/v1/score", &body, &json!({})).await;
    let all = sent(&harness);
    let expected = text::pair_template::QWEN3_RERANKER
        .replace("{query}", "q")
        .replace("{instruction}", "Find {query}")
        .replace("{document}", "x");
    // The template has an `x` and an `y` of its own.
    assert_eq!(all[0].prompt, tokens(&expected));
    let ids = [b'x', b'y'].map(u32::from).to_vec();
    assert!(all.iter().all(|one| one.pooling == Some(Pooling::TokenLogits(ids.clone()))));
    let logit = |prompt: &[u32]| {
        let often = |token: u32| prompt.iter().filter(|other| **other == token).count() as f64;
        often(ids[1]) - often(ids[0])
    };
    for (index, one) in all.iter().enumerate() {
        let score = answer["data"][index]["score"].as_f64().unwrap();
        assert!((score - logistic(logit(&one.prompt))).abs() < 1e-6, "{answer}");
    }
    let total: usize = all.iter().map(|one| one.prompt.len()).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], total);
}

#[tokio::test]
async fn tokens_and_template_of_the_configuration_serve_clients_that_name_none() {
    let harness = Harness::start_with(count(), |config| {
        let template = PairTemplate::parse("{query}|{document}").unwrap();
        let tokens = vec!["n".to_owned(), "y".to_owned()];
        config.scoring = ScoringDefaults { tokens, template: Some(Arc::new(template)) };
    })
    .await;
    let body = json!({ "model": "base", "query": "q", "documents": ["n", "y"] });
    let answer = post(&harness, "/v2/rerank", &body, &json!({})).await;
    assert_eq!(answer["results"][0]["document"]["text"], "y", "{answer}");
    assert_eq!(sent(&harness)[0].prompt, tokens("q|n"));
    let answer = post(&harness, RERANK, &body, &json!({ "classifier_from_token": [] })).await;
    assert_eq!(answer["results"][0]["relevance_score"], 1.0, "embeddings are compared: {answer}");
    let body = json!({ "model": "base", "input": "yyn", "classifier_from_token": [121, "n"] });
    let answer = post(&harness, CLASSIFY, &body, &json!({})).await;
    assert_eq!((&answer["data"][0]["label"], &answer["data"][0]["num_classes"]), (&json!("y"), &json!(2)));
}

#[tokio::test]
async fn a_long_document_is_cut_so_that_the_end_of_the_template_stays() {
    let harness = Harness::start(count()).await;
    let long = "d".repeat(2 * CONTEXT_TOKENS as usize);
    let body = json!({
        "model": "base", "query": "q", "documents": [long], "classifier_from_token": ["x"],
        "template": "{query}|{document}|end",
    });
    let refused = post(&harness, RERANK, &body, &json!({})).await["error"].take();
    assert_eq!(
        (&refused["code"], &refused["param"]),
        (&json!("context_length_exceeded"), &json!("documents"))
    );
    for (asked, length) in [(-1, CONTEXT_TOKENS as usize), (20, 20)] {
        let answer = post(&harness, RERANK, &body, &json!({ "truncate_prompt_tokens": asked })).await;
        assert_eq!(answer["usage"]["prompt_tokens"], length, "{answer}");
        let expected = format!("q|{}|end", "d".repeat(length - 6));
        assert_eq!(sent(&harness).last().unwrap().prompt, tokens(&expected));
    }
    let hopeless = post(&harness, RERANK, &body, &json!({ "truncate_prompt_tokens": 5 })).await;
    assert_eq!(hopeless["error"]["code"], "context_length_exceeded", "{hopeless}");
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let harness = with_classifier("bad,fair,good").await;
    let pair = json!({ "model": "base", "text_1": "a", "text_2": "b" });
    let text = json!({ "model": "base", "input": "a" });
    let many = vec!["a"; 257];
    for (route, body, more, param) in [
        (CLASSIFY, &text, json!({}), "model"),
        (CLASSIFY, &text, json!({ "classifier_from_token": ["yes"] }), "classifier_from_token"),
        (CLASSIFY, &text, json!({ "classifier_from_token": [9999] }), "classifier_from_token"),
        (CLASSIFY, &text, json!({ "classifier_from_token": [true] }), "classifier_from_token"),
        (CLASSIFY, &text, json!({ "classifier_from_token": many }), "classifier_from_token"),
        (
            CLASSIFY,
            &text,
            json!({ "model": "mood", "classifier_from_token": ["a"] }),
            "classifier_from_token",
        ),
        (CLASSIFY, &text, json!({ "input": null, "classifier_from_token": ["a"] }), "input"),
        (CLASSIFY, &text, json!({ "activation": false, "model": "mood" }), "activation"),
        ("/v1/score", &pair, json!({ "model": "mood" }), "model"),
        ("/v1/score", &pair, json!({ "classifier_from_token": ["a", "b", "c"] }), "classifier_from_token"),
        ("/v1/score", &pair, json!({ "classifier_from_token": ["a"], "pooling": "mean" }), "pooling"),
        ("/v1/score", &pair, json!({ "template": "{query}{document}" }), "template"),
        ("/v1/score", &pair, json!({ "instruction": "x" }), "instruction"),
        ("/v1/score", &pair, json!({ "classifier_from_token": ["a"], "template": "{query}" }), "template"),
        (
            "/v1/score",
            &pair,
            json!({ "classifier_from_token": ["a"], "template": "{query}{document}", "instruction": "x" }),
            "instruction",
        ),
    ] {
        let before = sent(&harness).len();
        let answer = post(&harness, route, body, &more).await;
        assert_eq!(answer["error"]["param"], param, "{more}: {answer}");
        assert_eq!(sent(&harness).len(), before, "{more}");
    }
}
