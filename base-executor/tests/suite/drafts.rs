//! The program with model drafters: the base's own first layers, and a smaller model. No answer changes.

use std::fs;

use shmproto::message::{
    AdapterLoaded, DraftKind, ErrorCode, Generate, LoadAdapter, Stats, ToExecutor, ToGateway, UnloadAdapter,
};

use crate::{
    common::{prompt, request},
    gateway::{EVERYBODY, Gateway},
    process::{ChildProcess, ProcessFixture},
    tiny::{VOCAB, write_adapter, write_draft, write_model, write_model_of, write_tokens},
};

/// Slows steps down below any draft, so that every draft is worthwhile.
const SLOW: (&str, &str) = ("executor.before_step", "slow 4");

const TOKENS: u32 = 48;

fn start(place: &ProcessFixture, arguments: &[&str]) -> ChildProcess {
    let mut process = place.start_with(arguments);
    process.ready();
    process
}

async fn load(gateway: &mut Gateway, place: &ProcessFixture, name: &str) -> ToGateway {
    let path = place.path(name).to_str().unwrap().to_owned();
    gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(500, path, EVERYBODY))).await;
    gateway.answer().await
}

async fn loaded(gateway: &mut Gateway, place: &ProcessFixture, name: &str) -> AdapterLoaded {
    match load(gateway, place, name).await {
        ToGateway::AdapterLoaded(loaded) => loaded,
        other => panic!("{name} is to be loaded: {other:?}"),
    }
}

async fn refused(gateway: &mut Gateway, place: &ProcessFixture, name: &str) -> (ErrorCode, String) {
    match load(gateway, place, name).await {
        ToGateway::Failed(failed) => (failed.error.code, failed.error.message),
        other => panic!("{name} is to be refused: {other:?}"),
    }
}

async fn unload(gateway: &mut Gateway, adapter: [u8; 32]) {
    gateway.send(ToExecutor::UnloadAdapter(UnloadAdapter { request: 501, adapter })).await;
    let answer = gateway.answer().await;
    assert!(matches!(answer, ToGateway::AdapterUnloaded(_)), "{answer:?}");
}

/// Greedy and sampled requests of the base and of an adapter, numbered from `first` on.
fn asks(first: u64, adapter: impl Into<Option<[u8; 32]>>) -> Vec<Generate> {
    let adapter = adapter.into();
    let of = |(id, number): (u64, u64)| {
        let mut ask = request(id, prompt(number, 10 + number as usize), TOKENS);
        ask.stop_tokens.clear();
        ask.adapter = adapter.filter(|_| number % 3 == 2);
        if number % 2 == 1 {
            (ask.sampling.temperature, ask.sampling.seed) = (0.8, number);
        }
        ask
    };
    (first..).zip(0..6).map(of).collect()
}

async fn one_by_one(gateway: &mut Gateway, asks: &[Generate]) -> Vec<Vec<u32>> {
    let mut answers = Vec::new();
    for ask in asks {
        gateway.send(ToExecutor::Generate(ask.clone())).await;
        answers.push(gateway.tokens(ask.request).await);
    }
    answers
}

async fn together(gateway: &mut Gateway, asks: &[Generate]) -> Vec<Vec<u32>> {
    for ask in asks {
        gateway.send(ToExecutor::Generate(ask.clone())).await;
    }
    let mut answers = Vec::new();
    for ask in asks {
        answers.push(gateway.tokens(ask.request).await);
    }
    answers
}

/// Answers without drafts, of the base and of the adapter in `adapter`.
async fn without_drafts(place: &ProcessFixture) -> Vec<Vec<u32>> {
    let _process = start(place, &["--draft", "off"]);
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let adapter = loaded(&mut gateway, place, "adapter").await.adapter;
    one_by_one(&mut gateway, &asks(1, adapter)).await
}

fn place() -> ProcessFixture {
    let place = ProcessFixture::new();
    write_adapter(&place.path("adapter"), &[]);
    // All layers, all tokens and a zero delta: the base itself.
    write_draft(&place.path("same"), 2, None, 0.0);
    let listed: Vec<i64> = (0..VOCAB as i64).step_by(3).collect();
    write_draft(&place.path("first"), 1, Some(&listed), 1.0);
    write_draft(&place.path("deep"), 8, None, 1.0);
    place
}

#[tokio::test]
async fn a_base_that_guesses_for_itself_says_what_it_says_anyway_and_sooner() {
    let place = place();
    let wanted = without_drafts(&place).await;
    place.arm(SLOW.0, SLOW.1);
    for draft in ["early-exit", "auto"] {
        let _process = start(&place, &["--draft", draft]);
        let mut gateway = Gateway::greet(&place.socket(), 2).await;
        let adapter = loaded(&mut gateway, &place, "adapter").await.adapter;
        let own = loaded(&mut gateway, &place, "same").await;
        assert_eq!((own.draft_layers, own.rank), (2, 2));
        let stats = loop {
            assert_eq!(one_by_one(&mut gateway, &asks(1, adapter)).await, wanted);
            let stats = gateway.stats().await;
            // On a busy machine drafting may look too expensive at first.
            if stats.speculation.model_accepted > 0 {
                break stats;
            }
        };
        let Stats { steps, speculation, memory, generated_tokens, .. } = stats;
        assert_eq!((speculation.kind, speculation.adapter), (DraftKind::Itself, own.adapter));
        assert!(speculation.drafting_us > 0, "{speculation:?}");
        assert!(speculation.model_drafted >= speculation.model_accepted, "{speculation:?}");
        assert!(steps < generated_tokens, "{steps} steps: {speculation:?}");
        assert!(memory.held.drafts_bytes > 0);
        assert_eq!(together(&mut gateway, &asks(11, adapter)).await, wanted);
        unload(&mut gateway, own.adapter).await;
        let stats = gateway.stats().await;
        assert_eq!(stats.memory.held.drafts_bytes, 0, "nothing of it is left");
        assert_eq!(
            stats.speculation.kind,
            if draft == "early-exit" { DraftKind::Nobody } else { DraftKind::Ngram }
        );
    }
}

#[tokio::test]
async fn drafts_come_are_replaced_and_go_while_requests_run() {
    let place = place();
    let wanted = without_drafts(&place).await;
    // A twentieth of this delay exceeds the time of a draft, so drafting is worthwhile in a batch too.
    place.arm(SLOW.0, "slow 20");
    // So little memory that texts evict each other.
    let _process = start(&place, &["--draft", "early-exit", "--draft-bytes", "96KiB"]);
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    let adapter = loaded(&mut gateway, &place, "adapter").await.adapter;
    let mut last: Option<[u8; 32]> = None;
    for (round, name) in ["same", "first", "same", "first"].into_iter().enumerate() {
        let asks = asks(100 * (round as u64 + 1), adapter);
        for ask in &asks {
            gateway.send(ToExecutor::Generate(ask.clone())).await;
        }
        let own = loaded(&mut gateway, &place, name).await.adapter;
        assert_eq!(gateway.stats().await.speculation.adapter, own, "the newest drafts");
        if let Some(before) = last.replace(own) {
            unload(&mut gateway, before).await;
            assert_eq!(gateway.stats().await.speculation.adapter, own, "still");
        }
        for (ask, wanted) in asks.iter().zip(&wanted) {
            assert_eq!(&gateway.tokens(ask.request).await, wanted);
        }
    }
    assert!(gateway.stats().await.speculation.model_drafted > 0);
    unload(&mut gateway, last.unwrap()).await;
    let stats = gateway.stats().await;
    assert_eq!((stats.speculation.kind, stats.memory.held.drafts_bytes), (DraftKind::Nobody, 0));
    assert_eq!(together(&mut gateway, &asks(900, adapter)).await, wanted);
}

#[tokio::test]
async fn preempted_and_cold_requests_have_the_same_answers_beside_a_draft() {
    let place = place();
    let wanted = without_drafts(&place).await;
    place.arm(SLOW.0, "slow 20");
    // Six of these requests exceed the memory, and the link keeps the adapter in transit.
    let arguments =
        ["--draft", "early-exit", "--device-bytes", "160KiB", "--kv-bytes", "96KiB", "--link-gbps", "0.0002"];
    let _process = start(&place, &arguments);
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    let adapter = loaded(&mut gateway, &place, "adapter").await.adapter;
    loaded(&mut gateway, &place, "same").await;
    // Whether a draft is worth its time depends on measured times, so a round may have none that is accepted.
    for first in (1..).step_by(100).take(10) {
        assert_eq!(together(&mut gateway, &asks(first, adapter)).await, wanted);
        if gateway.stats().await.speculation.model_accepted > 0 {
            break;
        }
    }
    let Stats { speculation, preemptions, cold_starts, .. } = gateway.stats().await;
    assert!(speculation.model_accepted > 0, "{speculation:?}");
    assert!(preemptions > 0 && cold_starts > 0, "{preemptions} gave way, {cold_starts} were cold");
}

#[tokio::test]
async fn a_draft_answers_nobody_and_one_that_cannot_be_computed_is_refused_by_name() {
    let place = place();
    write_draft(&place.path("unordered"), 1, Some(&[4, 2]), 1.0);
    let _process = start(&place, &["--draft", "early-exit", "--draft-bytes", "1KiB"]);
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    for (name, why) in [
        ("deep", "a draft of 8 layers cannot be: the base has 2"),
        ("unordered", "entry 1 of `draft.shortlist` is 2"),
        ("same", "raise --draft-bytes"),
    ] {
        let (code, message) = refused(&mut gateway, &place, name).await;
        assert_eq!(code, ErrorCode::InvalidAdapter, "{message}");
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(gateway.stats().await.speculation.kind, DraftKind::Nobody);
    drop(_process);
    // The draft adapter stays loaded without a drafter, since an operator may enable drafting again.
    let _process = start(&place, &["--draft", "ngram"]);
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let own = loaded(&mut gateway, &place, "same").await;
    let ask = Generate { adapter: Some(own.adapter), ..request(1, prompt(1, 10), 5) };
    gateway.send(ToExecutor::Generate(ask)).await;
    let error = gateway.outputs(1).await.last().and_then(|output| output.error.clone()).unwrap();
    assert_eq!(error.code, ErrorCode::InvalidRequest);
    assert!(error.message.contains("is a draft adapter and answers no requests"), "{}", error.message);
    assert_eq!(gateway.stats().await.speculation.kind, DraftKind::Ngram);
}

#[tokio::test]
async fn a_streamed_base_guesses_with_what_is_pinned_and_reads_nothing_for_it() {
    let place = place();
    write_model_of(&place.path("model"), 8);
    let process = start(&place, &["--draft", "off"]);
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let wanted = one_by_one(&mut gateway, &asks(1, None)).await;
    let whole = gateway.stats().await.memory.held.weights_bytes;
    drop(process);
    let least = place.start_with(&["--resident-weight-bytes", "1"]).fails(1);
    let least = least.split("raise it to ").nth(1).and_then(|rest| rest.split(',').next());
    let least: u64 = least.unwrap().parse().unwrap();
    // This bound streams half as much as the minimum bound, from a disk that is slower than any draft.
    let bound = (least + (whole - least) / 2).to_string();
    let _process =
        start(&place, &["--draft", "auto", "--resident-weight-bytes", &bound, "--weight-disk-gbps", "0.2"]);
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    let (code, message) = refused(&mut gateway, &place, "deep").await;
    assert_eq!(code, ErrorCode::InvalidAdapter);
    assert!(
        message.contains("computes 8 layers, but the base has only")
            && message.contains("raise --resident-weight-bytes")
    );
    assert_eq!(together(&mut gateway, &asks(11, None)).await, wanted);
    let plain = gateway.stats().await;
    loaded(&mut gateway, &place, "first").await;
    assert_eq!(together(&mut gateway, &asks(21, None)).await, wanted);
    assert_eq!(one_by_one(&mut gateway, &asks(31, None)).await, wanted);
    let stats = gateway.stats().await;
    assert!(stats.speculation.model_drafted > 0, "{:?}", stats.speculation);
    let sweep = plain.memory.weights.read_bytes as f64 / plain.steps as f64;
    let swept = stats.memory.weights.read_bytes - plain.memory.weights.read_bytes;
    let steps = (stats.steps - plain.steps) as f64;
    assert!(
        sweep > 0.0 && swept as f64 <= sweep * (steps + 2.0),
        "{swept} bytes in {steps} steps of {sweep}"
    );
}

#[tokio::test]
async fn a_smaller_model_guesses_and_one_with_other_tokens_is_refused_at_the_start() {
    let place = place();
    write_tokens(&place.path("model"), "t");
    let wanted = without_drafts(&place).await;
    for (name, tokens) in [("twin", "t"), ("stranger", "s")] {
        write_model(&place.path(name));
        write_tokens(&place.path(name), tokens);
    }
    let draft = |name| place.path(name).to_str().unwrap().to_owned();
    place.arm(SLOW.0, SLOW.1);
    let process = start(&place, &["--draft", &draft("twin")]);
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    let adapter = loaded(&mut gateway, &place, "adapter").await.adapter;
    assert_eq!(one_by_one(&mut gateway, &asks(1, adapter)).await, wanted);
    assert_eq!(together(&mut gateway, &asks(11, adapter)).await, wanted);
    let stats = gateway.stats().await;
    assert_eq!(stats.speculation.kind, DraftKind::Model);
    assert!(stats.speculation.model_accepted > 0, "{:?}", stats.speculation);
    assert!(
        stats.memory.held.drafts_bytes
            > fs::metadata(place.path("twin/model.safetensors")).unwrap().len() / 2
    );
    drop(process);
    let line = place.start_with(&["--draft", &draft("stranger")]).fails(2);
    assert!(line.contains("another tokenizer than the base") && line.contains("stranger"), "{line}");
    let line = place.start_with(&["--draft", &draft("nowhere")]).fails(3);
    assert!(line.contains("nowhere"), "{line}");
}
