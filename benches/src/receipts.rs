//! Receipts: the time to verify an answer, beside the time to decode the same answer.
//!
//! Both times are those of the HTTP request. A verification computes prompt and answer as a prompt, and samples
//! every token again. Answers are greedy or sampled with penalties, so the cost of sampling is included.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, Holobiont, Installation},
    http::post_json,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{AdapterChoice, prompt},
};

const PROMPT_TOKENS: usize = 32;
const ANSWER_TOKENS: usize = 256;
/// Target: how many times as fast a verification is as decoding.
const TIMES: f64 = 8.0;

/// Times of one kind of answer, in milliseconds.
#[derive(Debug, Default)]
struct ReceiptTimes {
    verified: Vec<f64>,
    decoded: Vec<f64>,
}

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for a deployment")?;
    let installation = Installation {
        binaries: config.ours.clone(),
        model: config.model.clone(),
        placement: DeploymentPlacement::Cores(cores.list()),
        key: None,
    };
    // Without drafts, so that decoding takes one step for each token.
    let settings = [("HOLOBIONT_WORKERS", "0".to_owned()), ("HOLOBIONT_DRAFT", "off".to_owned())];
    let server = Holobiont::start_with(&installation, &[], &folder.path().join("up"), &settings)?;
    let kinds = [
        ("greedy", json!({ "temperature": 0.0 })),
        ("sampled", json!({ "temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.2 })),
    ];
    let mut rows = Vec::new();
    for (index, (kind, sampling)) in kinds.iter().enumerate() {
        let mut times = ReceiptTimes::default();
        // The first round warms up.
        for round in 0..=config.runs {
            let (decoded, verified) = measure(&server, sampling, round * kinds.len() + index)?;
            if round > 0 {
                times.decoded.push(decoded);
                times.verified.push(verified);
            }
        }
        rows.push(row(kind, times)?);
    }
    Ok(rows)
}

/// Times an answer and the verification of its receipt, in milliseconds.
fn measure(server: &Holobiont, sampling: &Value, number: usize) -> Result<(f64, f64)> {
    let (port, model) = (server.port(), server.dialect().of(AdapterChoice::Base));
    let mut body = json!({
        "model": model, "prompt": prompt((1 << 51) + number as u64, PROMPT_TOKENS), "seed": number,
        "max_tokens": ANSWER_TOKENS, "ignore_eos": true, "receipt": true,
    });
    for (name, value) in sampling.as_object().context("sampling options")? {
        body[name] = value.clone();
    }
    let begun = Instant::now();
    let answer = post_json(port, "/v1/completions", &body)?;
    let decoded = begun.elapsed();
    let answer: Value = serde_json::from_str(&answer).context("the answer is JSON")?;
    let begun = Instant::now();
    let verdict = post_json(port, "/v1/receipts/verify", &json!({ "receipt": answer["receipt"] }))?;
    let verified = begun.elapsed();
    let verdict: Value = serde_json::from_str(&verdict).context("the verdict is JSON")?;
    ensure!(verdict["tokens"] == ANSWER_TOKENS, "the receipt does not hold: {verdict}");
    Ok((decoded.as_secs_f64() * 1e3, verified.as_secs_f64() * 1e3))
}

fn row(kind: &str, times: ReceiptTimes) -> Result<Comparison> {
    let ReceiptTimes { verified, decoded } = times;
    Ok(Comparison {
        bench: "receipts",
        case: format!("{kind}: verification of {ANSWER_TOKENS} tokens"),
        unit: "ms",
        better: Better::Lower,
        ours: Samples::new(verified)?,
        rival: PeerSamples {
            name: "decoding the answer".to_owned(),
            format: "as ours".to_owned(),
            samples: Samples::new(decoded)?,
        },
        target: Some(BenchTarget::RatioAtLeast(TIMES)),
    })
}
