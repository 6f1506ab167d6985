//! Scores and classes from the real programs: the same bits by every route, and refusals by name.

use std::{sync::Arc, thread};

use serde_json::{Value, json};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan, RequestFault, StateDirectory,
    direct_adapters::write_classifier, eventually, watched,
};

/// Documents of different lengths, so that small chunks divide some of them.
const DOCUMENTS: [&str; 4] = [
    "Rain falls from clouds.",
    "The stock market closed higher on Friday, led by shares of technology companies and of banks.",
    "A cloud is water that floats in the air as small drops. When the drops grow they fall, and that is rain; \
     where the air is cold they fall as snow or as hail instead.",
    "No.",
];

/// Requests of every method: embeddings, tokens of the base, and an adapter's head.
fn requests() -> [(&'static str, Value); 4] {
    let query = "Why does it rain?";
    let tokens = json!(["no", "yes"]);
    [
        ("/v1/rerank", json!({ "model": BASE, "query": query, "documents": DOCUMENTS })),
        (
            "/v1/score",
            json!({ "model": "pirate", "text_1": query, "text_2": DOCUMENTS, "classifier_from_token": tokens }),
        ),
        ("/v2/rerank", json!({ "model": "mood", "query": query, "documents": DOCUMENTS })),
        ("/v1/classify", json!({ "model": "mood", "input": DOCUMENTS })),
    ]
}

fn with_classifier(plan: &DeploymentPlan) -> Deployment {
    let place = Arc::new(StateDirectory::new());
    let files = place.adapters().join("mood");
    write_classifier(7, &["irrelevant", "relevant"], &files);
    let deployment = plan.start_in(place);
    deployment.client.load("mood", &files);
    deployment
}

/// Answers without the fields that differ between equal requests.
fn answers(client: &Client) -> [Value; 4] {
    requests().map(|(route, body)| {
        let mut answer = client.try_post(route, &body).unwrap_or_else(|fault| panic!("{route}: {fault:?}"));
        for field in ["id", "created"] {
            answer.as_object_mut().expect("an object").remove(field);
        }
        answer
    })
}

#[test]
fn scores_and_classes_have_the_same_bits_alone_together_in_chunks_cached_and_after_an_executors_death() {
    watched(|| {
        let whole = with_classifier(&DeploymentPlan::with_examples().cores(2));
        let alone = answers(&whole.client);
        let together: Vec<[Value; 4]> = thread::scope(|scope| {
            let asked: Vec<_> = (0..3).map(|_| scope.spawn(|| answers(&whole.client))).collect();
            asked.into_iter().map(|answers| answers.join().expect("answers")).collect()
        });
        assert!(together.iter().all(|answers| *answers == alone), "in company, from the prefix cache");
        whole.kill_executor();
        let [.., (route, body)] = requests();
        eventually("requests are served again", || whole.client.try_post(route, &body).is_ok());
        assert_eq!(answers(&whole.client), alone, "computed by another executor");
        let chunked =
            with_classifier(&DeploymentPlan::with_examples().cores(1).workers(0).set("CHUNK_TOKENS", "16"));
        assert_eq!(answers(&chunked.client), alone, "in small chunks");
        let labels: Vec<&Value> =
            alone[3]["data"].as_array().unwrap().iter().map(|one| &one["label"]).collect();
        assert!(labels.iter().all(|label| ["irrelevant", "relevant"].contains(&label.as_str().unwrap())));
    });
}

#[test]
fn a_cold_classifier_gives_the_same_classes_by_workers() {
    watched(|| {
        let cached = with_classifier(&DeploymentPlan::with_examples().workers(0).set("COLD_START", "cached"));
        let cold = with_classifier(&DeploymentPlan::with_examples().workers(1).cold(2 << 10, 0.002));
        for (route, body) in &requests()[2..] {
            let [mut one, mut other] = [&cached, &cold].map(|deployment| {
                deployment.client.try_post(route, body).unwrap_or_else(|fault| panic!("{route}: {fault:?}"))
            });
            for answer in [&mut one, &mut other] {
                answer["id"] = Value::Null;
                answer["created"] = Value::Null;
            }
            assert_eq!(one, other, "{route}");
        }
        eventually("workers computed rows of the classifier", || {
            cold.client.adapter("mood")["rank_rows"]["workers"].as_u64() > Some(0)
        });
    });
}

#[test]
fn a_classifier_generates_no_text_and_the_base_has_no_classes() {
    watched(|| {
        let deployment = with_classifier(&DeploymentPlan::with_examples());
        for (route, body) in [
            ("/v1/completions", json!({ "model": "mood", "prompt": "Hi" })),
            ("/v1/classify", json!({ "model": BASE, "input": "Hi" })),
        ] {
            match deployment.client.try_post(route, &body) {
                Err(RequestFault::Refused { status: 400, .. }) => {}
                other => panic!("{route}: {other:?}"),
            }
        }
    });
}
