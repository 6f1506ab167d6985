//! Switches of the adapter during an answer: the stages that the executor gets, and what the answer says of
//! them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use shmproto::message::{Finish, Generate, Output, TokenOutput};

use crate::{
    client::Response,
    fake_executor::{CONTEXT_TOKENS, Reply, ReplyScript, hang_after, spoken},
    harness::Harness,
    text::{BEGIN, END, tokens},
};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const TEXT: &str = "/v1/completions";
const PAUSE: Duration = Duration::from_millis(30);

/// Executor that continues its requests, in order, with `texts`, within the limits and to the stop tokens of
/// each. A text without a limit and without a stop token ends with the end token.
fn continue_with(texts: &[&'static str], pause: Duration) -> Reply {
    let texts = Mutex::new(texts.iter().copied().collect::<VecDeque<_>>());
    Arc::new(move |generate| {
        let text = texts.lock().unwrap().pop_front().expect("no further request");
        ReplyScript { outputs: within_limits(text, generate), pause }
    })
}

fn within_limits(text: &'static str, generate: &Generate) -> Vec<Output> {
    let mut outputs = spoken(text);
    let end = TokenOutput { token: END, logprob: 0.0, top: Vec::new() };
    outputs.push(Output { tokens: vec![end], ..Output::default() });
    let stops = |output: &Output| generate.stop_tokens.contains(&output.tokens[0].token);
    let stop = outputs.iter().position(stops).map_or(outputs.len(), |position| position + 1);
    outputs.truncate(stop.min(generate.max_tokens as usize));
    let last = outputs.last_mut().unwrap();
    last.finish = Some(if stops(last) { Finish::Stop } else { Finish::Length });
    outputs[0].cached_tokens = 4;
    outputs
}

/// Starts a gateway with the adapters `a` and `b`; returns their versions too.
async fn with_adapters(reply: Reply) -> (Harness, [String; 2]) {
    let harness = Harness::start(reply).await;
    let mut generations = Vec::new();
    for name in ["a", "b"] {
        let load = json!({ "lora_name": name, "lora_path": harness.adapter(name, name) });
        let loaded = harness.client.post("/v1/load_lora_adapter", &load).await;
        generations.push(loaded.json()["generation"].as_str().unwrap().to_owned());
    }
    (harness, generations.try_into().unwrap())
}

fn ask(switches: &Value) -> Value {
    json!({ "model": "base", "prompt": "xy", "max_tokens": 20, "seed": 5, "adapter_switches": switches })
}

/// A switch to `a` after three tokens, and a switch back at a marker.
fn there_and_back() -> Value {
    json!([{ "model": "a", "after_tokens": 3, "append": "<A>" }, { "model": "base", "marker": "|" }])
}

fn read(response: &Response) -> String {
    let text = |chunk: Value| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    response.chunks().into_iter().map(text).collect()
}

fn stage(model: &str, generation: Option<&String>, tokens: usize) -> Value {
    json!({ "model": model, "adapter_generation": generation, "tokens": tokens, "cached_tokens": 4 })
}

#[tokio::test]
async fn each_stage_is_a_request_whose_prompt_is_all_that_precedes_it() {
    let (harness, [a, _]) = with_adapters(continue_with(&["abcd", "de|f", "gh"], Duration::ZERO)).await;
    let answer = harness.client.post(TEXT, &ask(&there_and_back())).await.json();
    assert_eq!(answer["choices"][0]["text"], "abcde|gh", "a marker is text like any token");
    let sent = harness.executor().generates();
    let prompts: Vec<_> = sent.iter().map(|stage| stage.prompt.clone()).collect();
    let prompt = |text: &str| [&[BEGIN][..], &tokens(text)].concat();
    assert_eq!(prompts, [prompt("xy"), prompt("xyabc<A>"), prompt("xyabc<A>de|")]);
    assert_eq!(sent.iter().map(|stage| stage.max_tokens).collect::<Vec<_>>(), [3, 17, 14]);
    let marked = vec![END, u32::from(b'|')];
    let stops: Vec<_> = sent.iter().map(|stage| stage.stop_tokens.clone()).collect();
    assert_eq!(stops, [vec![END], marked, vec![END]]);
    assert!(sent.iter().all(|stage| (stage.generated, stage.sampling.seed) == (0, 5)));
    assert_eq!(sent.iter().map(|stage| stage.adapter.is_some()).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(sent[0].namespace, sent[2].namespace);
    assert_ne!(sent[0].namespace, sent[1].namespace);
    assert!(sent.iter().all(|stage| stage.base_namespace == sent[0].namespace));

    let stages = json!([stage("base", None, 3), stage("a", Some(&a), 3), stage("base", None, 3)]);
    assert_eq!(answer["choices"][0]["adapter_stages"], stages);
    assert_eq!((&answer["model"], &answer["adapter_generation"]), (&json!("base"), &Value::Null));
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(6), &json!(9)));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 4, "of the prompt alone");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_stream_goes_on_over_its_stages_and_names_them_in_the_last_chunk() {
    let (harness, [a, _]) = with_adapters(continue_with(&["abcd", "de|f", "gh"], Duration::ZERO)).await;
    let mut body = ask(&there_and_back());
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let response = harness.client.post(TEXT, &body).await;
    assert_eq!(read(&response), "abcde|gh");
    let chunks = response.chunks();
    let ends: Vec<_> =
        chunks.iter().filter(|chunk| !chunk["choices"][0]["adapter_stages"].is_null()).collect();
    assert_eq!(ends.len(), 1);
    assert_eq!(ends[0]["choices"][0]["finish_reason"], "stop");
    assert_eq!(ends[0]["choices"][0]["adapter_stages"][1], stage("a", Some(&a), 3));
    assert_eq!(chunks.last().unwrap()["usage"]["prompt_tokens"], 6);
}

#[tokio::test]
async fn chats_and_responses_switch_too() {
    let switches = json!([{ "model": "a", "marker": "|" }]);
    for (route, body) in [
        (CHAT, json!({ "model": "base", "messages": [{ "role": "user", "content": "hi" }] })),
        (RESPONSES, json!({ "model": "base", "input": "hi" })),
    ] {
        let (harness, [a, _]) = with_adapters(continue_with(&["ab|", "cd"], Duration::ZERO)).await;
        let mut body = body;
        body["adapter_switches"] = switches.clone();
        let answer = harness.client.post(route, &body).await.json();
        let (text, stages) = match route {
            CHAT => (&answer["choices"][0]["message"]["content"], &answer["choices"][0]["adapter_stages"]),
            _ => (&answer["output"][0]["content"][0]["text"], &answer["adapter_stages"]),
        };
        assert_eq!(text, "ab|cd", "{route}");
        assert_eq!(stages[1], stage("a", Some(&a), 3), "{route}");
    }
}

#[tokio::test]
async fn every_choice_has_stages_of_its_own() {
    let (harness, [a, _]) = with_adapters(continue_with(&["abc", "ef|", "d", "gh"], Duration::ZERO)).await;
    let mut body = ask(&json!([{ "model": "a", "marker": "|" }]));
    (body["n"], body["max_tokens"]) = (2.into(), 4.into());
    let answer = harness.client.post(TEXT, &body).await.json();
    let of = |index: usize| (&answer["choices"][index]["text"], &answer["choices"][index]["adapter_stages"]);
    assert_eq!(of(0), (&json!("abc"), &json!([stage("base", None, 4)])));
    assert_eq!(of(1), (&json!("ef|d"), &json!([stage("base", None, 3), stage("a", Some(&a), 1)])));
}

#[tokio::test]
async fn an_answer_that_ends_by_itself_has_no_further_stage() {
    let (harness, _) = with_adapters(continue_with(&["ab"], Duration::ZERO)).await;
    let answer = harness.client.post(TEXT, &ask(&there_and_back())).await.json();
    assert_eq!((&answer["choices"][0]["text"], &answer["usage"]["prompt_tokens"]), (&json!("ab"), &json!(3)));
    assert_eq!(answer["choices"][0]["adapter_stages"], json!([stage("base", None, 3)]));
    assert_eq!(harness.executor().generates().len(), 1);
}

#[tokio::test]
async fn a_stop_string_in_the_output_with_the_marker_ends_the_answer() {
    let at_once: Reply = Arc::new(|generate| {
        let tokens = within_limits("ab|", generate).into_iter().flat_map(|output| output.tokens).collect();
        let output = Output { tokens, finish: Some(Finish::Stop), ..Output::default() };
        ReplyScript { outputs: vec![output], pause: Duration::ZERO }
    });
    let (harness, _) = with_adapters(at_once).await;
    let mut body = ask(&json!([{ "model": "a", "marker": "|" }]));
    body["stop"] = "b".into();
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]),
        (&json!("a"), &json!(2))
    );
    assert_eq!(harness.executor().generates().len(), 1);
}

#[tokio::test]
async fn switches_that_a_late_marker_has_overtaken_follow_at_once() {
    let (harness, [a, b]) = with_adapters(continue_with(&["abcd|", "ef"], Duration::ZERO)).await;
    let switches = json!([
        { "model": "a", "marker": "|", "append": "1" },
        { "model": "b", "after_tokens": 4, "append": "2" },
    ]);
    let answer = harness.client.post(TEXT, &ask(&switches)).await.json();
    let sent = harness.executor().generates();
    assert_eq!(sent[1].prompt, [&[BEGIN][..], &tokens("xyabcd|12")].concat());
    let mut skipped = stage("a", Some(&a), 0);
    skipped["cached_tokens"] = 0.into();
    let stages = json!([stage("base", None, 5), skipped, stage("b", Some(&b), 3)]);
    assert_eq!(answer["choices"][0]["adapter_stages"], stages);
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
}

#[tokio::test]
async fn an_answer_without_room_for_the_next_stage_ends_at_its_length() {
    let (harness, _) = with_adapters(continue_with(&["ab|", "ab|"], Duration::ZERO)).await;
    let mut body = ask(&json!([{ "model": "a", "marker": "|" }]));
    body["max_tokens"] = 3.into();
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&json!("ab|"), &json!("length"))
    );
    let append = "x".repeat(CONTEXT_TOKENS as usize);
    let body = ask(&json!([{ "model": "a", "marker": "|", "append": append }]));
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
}

#[tokio::test]
async fn a_stage_that_loses_its_executor_goes_on_from_its_own_prompt() {
    let hanging: Reply = Arc::new(|generate| match generate.adapter {
        None => ReplyScript { outputs: within_limits("abc", generate), pause: Duration::ZERO },
        Some(_) => {
            let mut script = hang_after("de")(generate);
            script.outputs[0].cached_tokens = 4;
            script
        }
    });
    let (mut harness, [a, _]) = with_adapters(hanging).await;
    let mut body = ask(&there_and_back());
    body["stream"] = true.into();
    let mut exchange = harness.client.open_post(TEXT, &body).await;
    exchange.read_until_any(&["\"text\":\"e\"", "\"text\":\"de\""]).await;
    harness.restart_executor(continue_with(&["f|", "g"], Duration::ZERO)).await;
    let response = exchange.rest().await;
    assert_eq!(read(&response), "abcdef|g");
    let sent = harness.executor().generates();
    assert_eq!(sent[0].prompt, [&[BEGIN][..], &tokens("xyabc<A>de")].concat());
    assert_eq!((sent[0].generated, sent[0].max_tokens), (2, 15));
    assert_eq!((sent[1].generated, sent[1].adapter), (0, None));
    let stages = response.chunks().pop().unwrap()["choices"][0]["adapter_stages"].take();
    assert_eq!(stages[1], stage("a", Some(&a), 4));
}

#[tokio::test]
async fn an_unload_waits_for_the_answer_that_switches_to_the_adapter() {
    let (harness, [a, _]) = with_adapters(continue_with(&["abc", "de|", "f"], PAUSE)).await;
    let mut body = ask(&there_and_back());
    body["stream"] = true.into();
    let mut exchange = harness.client.open_post(TEXT, &body).await;
    exchange.read_until("\"text\":\"a\"").await;
    let client = harness.client.clone();
    let unload =
        tokio::spawn(
            async move { client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "a" })).await },
        );
    let response = exchange.rest().await;
    let stages = response.chunks().pop().unwrap()["choices"][0]["adapter_stages"].take();
    assert_eq!(stages[1], stage("a", Some(&a), 3));
    assert_eq!(unload.await.unwrap().status, 200);
    assert_eq!(harness.executor().unloads().len(), 1);
    let refused = harness.client.post(TEXT, &ask(&there_and_back())).await;
    assert_eq!((refused.status, refused.code().as_str()), (404, "model_not_found"));
}

#[tokio::test]
async fn a_switch_that_makes_no_sense_is_refused_by_name() {
    let (harness, _) = with_adapters(continue_with(&[], Duration::ZERO)).await;
    let refusal = async |extra: Value| {
        let mut body = ask(&json!([{ "model": "a", "after_tokens": 3 }]));
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        let refused = harness.client.post(TEXT, &body).await;
        assert!((400..=404).contains(&refused.status), "{extra}: {}", refused.body);
        let error = refused.json()["error"].take();
        (error["param"].as_str().unwrap().to_owned(), error["message"].as_str().unwrap().to_owned())
    };
    let switch = |switch: Value| json!({ "adapter_switches": [{ "model": "base", "marker": "|" }, switch] });
    for (extra, param, says) in [
        (json!({ "adapter_switches": 7 }), "adapter_switches", "an array"),
        (json!({ "adapter_switches": [7] }), "adapter_switches[0]", "a JSON object"),
        (switch(json!({ "after_tokens": 1 })), "adapter_switches[1].model", "required"),
        (switch(json!({ "model": "a" })), "adapter_switches[1].after_tokens", "'marker'"),
        (switch(json!({ "model": "a", "marker": "" })), "adapter_switches[1].after_tokens", "'marker'"),
        (
            switch(json!({ "model": "a", "after_tokens": 1, "marker": "|" })),
            "adapter_switches[1].marker",
            "one",
        ),
        (switch(json!({ "model": "a", "after_tokens": 0 })), "adapter_switches[1].after_tokens", "from 1"),
        (
            switch(json!({ "model": "a", "after_tokens": 20 })),
            "adapter_switches[1].after_tokens",
            "20 tokens",
        ),
        (switch(json!({ "model": "a", "marker": "two" })), "adapter_switches[1].marker", "3 tokens"),
        (switch(json!({ "model": "none", "marker": "|" })), "adapter_switches[1].model", "does not exist"),
        (
            switch(json!({ "model": "a", "marker": "|", "when": 1 })),
            "adapter_switches[1].when",
            "not supported",
        ),
        (
            switch(json!({ "model": "a", "marker": "|", "append": "x".repeat(4097) })),
            "adapter_switches[1].append",
            "4096",
        ),
        (json!({ "echo": true }), "adapter_switches", "'echo'"),
        (json!({ "structured_outputs": { "regex": "a" } }), "adapter_switches", "'structured_outputs"),
        (
            json!({ "adapter_switches": [{ "model": "a", "after_tokens": 3 }, { "model": "b", "after_tokens": 3 }] }),
            "adapter_switches[1].after_tokens",
            "more than the 3",
        ),
        (
            json!({ "adapter_switches": vec![json!({ "model": "a", "marker": "|" }); 17] }),
            "adapter_switches",
            "at most 16",
        ),
    ] {
        let (found, message) = refusal(extra.clone()).await;
        assert_eq!(found, param, "{extra}: {message}");
        assert!(message.contains(says), "{extra}: {message}");
    }
    assert!(harness.executor().generates().is_empty());
}
