//! Structured output: allowed tokens are computed beside the pass, and nothing else changes the sampled
//! tokens.

use std::thread;

use base_executor::constrained_decoding::GrammarWorkers;
use serde_json::{Value, json};
use text::grammar::{Enforcement, Grammar, ReasoningPrefix, Tag, TokenBytes, Tokens};

use super::*;
use crate::oracle_drafter::OracleDrafter;

const END: u32 = 59;

/// Texts of tokens: letters, digits and JSON's characters, some of them combined.
fn words() -> Vec<String> {
    let single = "{}[]\":, .-abcdefghijklmnopqrstuvwxyz0123456789".chars().map(String::from);
    let more = [
        "\": ",
        "\", \"",
        "name",
        "ages",
        "true",
        "null",
        "{\"",
        "12",
        "]}",
        "ab",
        "\"}",
        "{\"name\": \"",
        "\u{e9}",
    ];
    single.chain(more.map(str::to_owned)).collect()
}

fn helpers(budget: Duration) -> GrammarWorkers {
    let read = || {
        let words = words();
        assert_eq!(words.len(), END as usize);
        let texts = words.iter().map(|word| TokenBytes::Text(word.as_bytes()));
        // Tokens that break the pass are special here.
        let special = (END as usize..VOCAB).map(|_| TokenBytes::Special(b"<end>"));
        Ok(Tokens::new(texts.chain(special), &[END]))
    };
    GrammarWorkers::over(Box::new(read), env!("CARGO_BIN_EXE_base-executor").into(), budget, || {}).unwrap()
}

/// Engine that waits for each grammar result, even on a busy machine.
fn guided(bench: EngineHarness) -> EngineHarness {
    guided_for(bench, testkit::WATCHDOG)
}

fn guided_for(mut bench: EngineHarness, budget: Duration) -> EngineHarness {
    bench.engine = bench.engine.with_grammars(helpers(budget));
    bench
}

/// Steps until all requests are answered; compilation takes time.
fn finish(bench: &mut EngineHarness) {
    let begun = Instant::now();
    while !bench.engine.is_idle() {
        bench.step();
        assert!(begun.elapsed() < testkit::WATCHDOG, "the engine makes no progress: {:?}", bench.engine);
        thread::sleep(Duration::from_micros(50));
    }
    bench.step();
}

fn answered_alone(request: &Generate) -> RequestTranscript {
    let mut bench = guided(EngineHarness::new(ROOMY));
    bench.send(request.clone());
    finish(&mut bench);
    bench.answer(request.request).clone()
}

/// End of reasoning content: a part of many tokens.
const CLOSE: &str = "e";

/// Schema of a person, with or without reasoning content before.
fn person(thinks: bool) -> String {
    let ages = json!({ "type": "array", "items": { "type": "integer", "minimum": 0, "maximum": 99 }, "maxItems": 3 });
    let properties = json!({ "name": { "type": "string", "maxLength": 6 }, "ages": ages });
    let schema = json!({
        "type": "object", "properties": properties, "required": ["name", "ages"], "additionalProperties": false
    });
    let thought = ReasoningPrefix::Tags { open: None, close: Tag { name: CLOSE, token: None } };
    Grammar::Json(schema).source_behind(thinks.then_some(thought), Enforcement::Strict).unwrap().text
}

/// Sampled request; even ids have a grammar.
fn drawn(id: u64) -> Generate {
    let mut one = request(id, prompt(id, 20 + id as usize), 120);
    one.sampling.temperature = 1.0;
    one.stop_tokens = vec![END];
    one.logprobs = Some(1);
    one.grammar = id.is_multiple_of(2).then(|| person(thinks(id)));
    if one.grammar.is_none() {
        // Tokens that break the pass must not be sampled.
        one.sampling.logit_bias = (END..VOCAB as u32).map(|token| (token, -100.0)).collect();
    }
    one
}

fn thinks(id: u64) -> bool {
    id.is_multiple_of(4)
}

fn tokens(answer: &RequestTranscript) -> Vec<u32> {
    answer.tokens.iter().map(|token| token.token).collect()
}

fn text(answer: &RequestTranscript) -> String {
    let words = words();
    let said = tokens(answer).into_iter().filter(|&token| token != END);
    said.map(|token| words[token as usize].clone()).collect()
}

#[test]
fn an_answer_of_a_form_has_the_same_tokens_alone_beside_others_drafted_and_taken_up_again() {
    let requests: Vec<_> = (1..=8).map(drawn).collect();
    let alone: Vec<_> = requests.iter().map(answered_alone).collect();
    for (request, answer) in requests.iter().zip(&alone).filter(|(request, _)| request.grammar.is_some()) {
        let said = text(answer);
        assert_eq!(answer.finish, Some(Finish::Stop), "{said}");
        let form = if thinks(request.request) { said.split_once(CLOSE).expect("it thinks").1 } else { &said };
        let value: Value = serde_json::from_str(form).unwrap_or_else(|error| panic!("{request:?}: {error}"));
        assert!(value["name"].is_string() && value["ages"].is_array(), "{value}");
    }
    let known = requests.iter().zip(&alone).map(|(request, answer)| (request.prompt.clone(), tokens(answer)));
    let known = Arc::new(Mutex::new(known.collect()));
    let tight = EngineLimits { max_running: 5, chunk_tokens: 16, kv_blocks: 14, ..ROOMY };
    for (limits, drafts) in [
        (ROOMY, Drafts::default()),
        (tight, Drafts::default()),
        (ROOMY, OracleDrafter::drafts(&known, 0.7, Duration::ZERO)),
        (tight, OracleDrafter::drafts(&known, 0.9, Duration::ZERO)),
    ] {
        let mut bench = guided(EngineHarness::drafting(limits, drafts));
        requests.iter().for_each(|request| bench.send(request.clone()));
        finish(&mut bench);
        for (request, answer) in requests.iter().zip(&alone) {
            assert_eq!(bench.answer(request.request).content(), answer.content(), "{limits:?} {request:?}");
        }
        assert_nothing_held(&bench);
    }
    for (request, answer) in requests.iter().zip(&alone) {
        let whole = tokens(answer);
        for cut in [1, whole.len() / 2, whole.len() - 1] {
            let (generated, left) = (cut as u32, request.max_tokens - cut as u32);
            let mut rest = Generate { generated, max_tokens: left, ..request.clone() };
            rest.prompt.extend_from_slice(&whole[..cut]);
            assert_eq!(tokens(&answered_alone(&rest)), whole[cut..], "cut after {cut}");
        }
    }
}

#[test]
fn answers_are_the_same_where_the_engine_waits_for_no_look() {
    let requests: Vec<_> = (1..=8).map(drawn).collect();
    let alone: Vec<_> = requests.iter().map(answered_alone).collect();
    let known = requests.iter().zip(&alone).map(|(request, answer)| (request.prompt.clone(), tokens(answer)));
    let known = Arc::new(Mutex::new(known.collect()));
    let tight = EngineLimits { max_running: 5, chunk_tokens: 16, kv_blocks: 14, ..ROOMY };
    for (limits, drafts) in [
        (ROOMY, Drafts::default()),
        (tight, Drafts::default()),
        (ROOMY, OracleDrafter::drafts(&known, 0.7, Duration::ZERO)),
        (tight, OracleDrafter::drafts(&known, 0.9, Duration::ZERO)),
    ] {
        let mut bench = guided_for(EngineHarness::drafting(limits, drafts), Duration::ZERO);
        requests.iter().for_each(|request| bench.send(request.clone()));
        finish(&mut bench);
        for (request, answer) in requests.iter().zip(&alone) {
            assert_eq!(bench.answer(request.request).content(), answer.content(), "{limits:?} {request:?}");
        }
        assert_nothing_held(&bench);
    }
}

#[test]
fn grammars_that_take_too_much_end_their_requests_alone_and_another_tenant_comes_between_them() {
    let endless = |id: u64| {
        let schema = json!({ "type": "integer", "multipleOf": 999_000 + id });
        let grammar = json!({ "grammars": [{ "json_schema": schema }] }).to_string();
        Generate { grammar: Some(grammar), owner: [1; 32], ..drawn(id) }
    };
    let mut bench = guided(EngineHarness::new(ROOMY));
    let many = 11..17;
    many.clone().for_each(|id| bench.send(endless(id)));
    bench.send(Generate { owner: [2; 32], ..drawn(2) });
    let begun = Instant::now();
    while bench.answers.get(&2).is_none_or(|answer| answer.finish.is_none()) {
        bench.step();
        assert!(begun.elapsed() < testkit::WATCHDOG, "the engine makes no progress: {:?}", bench.engine);
        thread::sleep(Duration::from_micros(50));
    }
    assert!(
        many.clone().any(|id| !bench.answers.contains_key(&id)),
        "another tenant is answered before them"
    );
    finish(&mut bench);
    many.for_each(|id| assert_eq!(bench.error(id), Some(ErrorCode::InvalidRequest)));
    assert_nothing_held(&bench);
}

#[test]
fn min_tokens_keeps_the_end_back_as_long_as_the_form_lets_anything_else_be_said() {
    let mut one = drawn(2);
    one.grammar = Some(Grammar::Regex("[ab]{2,30}".into()).source().unwrap());
    one.min_tokens = 20;
    let answer = answered_alone(&one);
    assert!(answer.tokens.len() >= 20, "{}", text(&answer));
    one.grammar = Some(Grammar::Choice(vec!["ab".into()]).source().unwrap());
    let answer = answered_alone(&one);
    assert_eq!((text(&answer).as_str(), answer.finish), ("ab", Some(Finish::Stop)));
}

#[test]
fn a_grammar_that_cannot_be_used_ends_its_request_alone() {
    let mut bench = guided(EngineHarness::new(ROOMY));
    bench.send(Generate { grammar: Some("no grammar".into()), ..drawn(2) });
    let strange = Generate { generated: 3, prompt: prompt(4, 20), ..drawn(10) };
    bench.send(strange);
    bench.send(drawn(6));
    finish(&mut bench);
    assert_eq!(
        (bench.error(2), bench.error(10)),
        (Some(ErrorCode::InvalidRequest), Some(ErrorCode::InvalidRequest))
    );
    assert_eq!(bench.answer(6).finish, Some(Finish::Stop));
    assert_nothing_held(&bench);
}

#[test]
fn an_engine_without_a_vocabulary_refuses_grammars() {
    let mut bench = EngineHarness::new(ROOMY);
    bench.send(drawn(2));
    bench.finish();
    assert_eq!(bench.error(2), Some(ErrorCode::InvalidRequest));
}

#[test]
fn a_request_that_is_cancelled_while_its_grammar_is_compiled_leaves_nothing_behind() {
    let mut bench = guided(EngineHarness::new(ROOMY));
    bench.send(drawn(2));
    bench.cancel(2);
    assert!(bench.engine.is_idle());
    bench.send(drawn(4));
    bench.step();
    bench.cancel(4);
    assert!(bench.engine.is_idle());
    assert_nothing_held(&bench);
}
