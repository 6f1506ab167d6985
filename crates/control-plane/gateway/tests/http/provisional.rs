//! Draft tokens are streamed on request, and rejected ones are retracted.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use shmproto::message::{ErrorCode, Finish, Output, ProvisionalMode, WireError};

use crate::{
    client::Response,
    fake_executor::{Reply, ReplyScript, reply_with, spoken},
    harness::{Harness, eventually},
    text::{ByteText, always, tokens},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn asked(extra: &Value) -> Value {
    let mut body = json!({
        "model": "base", "max_tokens": 40, "stream": true,
        "stream_options": { "provisional": true, "include_usage": true },
    });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn text(extra: &Value) -> Value {
    let mut body = asked(extra);
    body["prompt"] = "ab".into();
    body
}

fn provisional(text: &str) -> Output {
    Output { provisional: tokens(text), ..Output::default() }
}

/// Several tokens of one step.
fn said(text: &str) -> Output {
    let tokens = spoken(text).into_iter().flat_map(|output| output.tokens);
    Output { tokens: tokens.collect(), ..Output::default() }
}

fn last(text: &str) -> Output {
    Output { finish: Some(Finish::Length), ..said(text) }
}

fn script(outputs: Vec<Output>) -> Reply {
    Arc::new(move |_| ReplyScript { outputs: outputs.clone(), pause: Duration::from_millis(5) })
}

/// A choice as a conforming client displays it.
#[derive(Debug, Default)]
struct ShownChoice {
    text: String,
    provisional: String,
    /// All streamed draft texts, and the numbers of retracted characters.
    told: Vec<String>,
    retracted: Vec<usize>,
}

impl ShownChoice {
    fn of(chunks: &[Value], index: usize) -> Self {
        let mut shown = Self::default();
        let choices = chunks.iter().filter_map(|chunk| chunk["choices"].as_array()?.first());
        choices.filter(|choice| choice["index"] == index).for_each(|choice| shown.see(choice));
        shown
    }

    fn see(&mut self, choice: &Value) {
        if let Some(characters) = choice["retract"]["characters"].as_u64() {
            for _ in 0..characters {
                self.provisional.pop().expect("no more is taken back than was told");
            }
            self.retracted.push(usize::try_from(characters).unwrap());
        }
        if let Some(text) = choice["provisional"]["text"].as_str() {
            assert_eq!(self.provisional, "", "one guess stands at a time");
            text.clone_into(&mut self.provisional);
            self.told.push(text.to_owned());
        }
        let said = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !said.is_empty() {
            assert!(said.starts_with(&self.provisional), "{said} in the place of {}", self.provisional);
            self.provisional.clear();
            self.text.push_str(said);
        }
    }
}

fn shown(response: &Response) -> ShownChoice {
    ShownChoice::of(&response.chunks(), 0)
}

#[tokio::test]
async fn what_comes_true_becomes_text_and_the_rest_is_taken_back() {
    let outputs = vec![
        said("a"),
        provisional("bcd"),
        said("bX"),
        provisional("YZ"),
        said("YZ!"),
        provisional("no"),
        last("?"),
    ];
    let harness = Harness::start(script(outputs)).await;
    let chat = asked(&json!({ "messages": [{ "role": "user", "content": "hi" }] }));
    for (route, body) in [(CHAT, chat), (TEXT, text(&json!({})))] {
        let response = harness.client.post(route, &body).await;
        let shown = shown(&response);
        assert_eq!((shown.text.as_str(), shown.provisional.as_str()), ("abXYZ!?", ""), "{route}");
        assert_eq!((shown.told, shown.retracted), (vec!["bcd".into(), "YZ".into(), "no".into()], vec![2, 2]));
        let chunks = response.chunks();
        assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 7, "guesses are no tokens");
        assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn an_executor_is_asked_for_guesses_only_where_the_caller_is() {
    let harness = Harness::start(reply_with("abc")).await;
    let whole = json!({ "model": "base", "prompt": "ab" });
    let plain = json!({ "model": "base", "prompt": "ab", "stream": true });
    for body in [&whole, &plain, &text(&json!({}))] {
        assert_eq!(harness.client.post(TEXT, body).await.status, 200);
    }
    let wishes: Vec<_> = harness.executor().generates().iter().map(|generate| generate.provisional).collect();
    assert_eq!(wishes, [ProvisionalMode::Unwanted, ProvisionalMode::Unwanted, ProvisionalMode::Wanted]);
    let refused = harness.client.post(TEXT, &text(&json!({ "stream": false }))).await;
    assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some("stream_options")));
}

#[tokio::test]
async fn neither_part_of_a_character_nor_of_a_stop_string_is_told() {
    let half = Output { provisional: tokens("xé")[..2].to_vec(), ..Output::default() };
    let outputs = vec![
        said("a"),
        half,
        said("xé"),
        provisional("b<E"),
        said("b<E"),
        provisional("ND>c"),
        said("N"),
        provisional("!c"),
        last("!"),
    ];
    let harness = Harness::start(script(outputs)).await;
    let response = harness.client.post(TEXT, &text(&json!({ "stop": ["<END>"] }))).await;
    let shown = shown(&response);
    assert_eq!((shown.text.as_str(), shown.provisional.as_str()), ("axéb<EN!", ""));
    // Withheld text is streamed together with the text after it.
    assert_eq!(shown.told, ["x", "b", "<EN!c"]);
    assert_eq!(shown.retracted, [1]);
}

#[tokio::test]
async fn a_guess_that_stands_when_the_executor_is_lost_is_taken_back_at_once() {
    let mut harness = Harness::start(script(vec![said("a"), said("b"), provisional("xyz")])).await;
    let mut exchange = harness.client.open_post(TEXT, &text(&json!({}))).await;
    exchange.read_until("\"provisional\":{\"text\":\"xyz\"}").await;
    harness.kill_executor().await;
    exchange.read_until("\"retract\":{\"characters\":3}").await;
    let request = tokio::spawn(exchange.rest());
    harness.restart_executor(reply_with("cd")).await;
    let shown = shown(&request.await.unwrap());
    assert_eq!((shown.text.as_str(), shown.provisional.as_str()), ("abcd", ""));
    assert_eq!(
        harness.executor().generates()[0].provisional,
        ProvisionalMode::Wanted,
        "who goes on guesses on"
    );
}

#[tokio::test]
async fn a_guess_that_stands_when_the_request_fails_is_taken_back_before_the_error() {
    let error = WireError { code: ErrorCode::DeadlineExceeded, message: "as the test wants it".to_owned() };
    let error = Output { error: Some(error), ..Output::default() };
    let harness = Harness::start(script(vec![said("a"), provisional("bcd"), error])).await;
    let events = harness.client.post(TEXT, &text(&json!({}))).await.events();
    let [.., retract, error] = events.as_slice() else { panic!("{events:?}") };
    assert!(
        retract.contains("\"retract\":{\"characters\":3}") && error.contains("deadline_exceeded"),
        "{events:?}"
    );
}

#[tokio::test]
async fn each_choice_has_its_own_guesses() {
    let reply: Reply = Arc::new(|generate| {
        let outputs = match generate.sampling.seed {
            7 => vec![said("a"), provisional("bc"), last("bc")],
            _ => vec![said("x"), provisional("y"), last("z")],
        };
        ReplyScript { outputs, pause: Duration::from_millis(5) }
    });
    let harness = Harness::start(reply).await;
    let chunks = harness.client.post(TEXT, &text(&json!({ "n": 2, "seed": 7 }))).await.chunks();
    let [first, second] = [0, 1].map(|index| ShownChoice::of(&chunks, index));
    assert_eq!((first.text.as_str(), first.retracted.len()), ("abc", 0));
    assert_eq!((second.text.as_str(), second.retracted), ("xz", vec![1]));
}

#[tokio::test]
async fn a_caller_who_goes_away_while_a_guess_stands_is_cancelled_as_any_other() {
    let harness = Harness::start(script(vec![said("a"), provisional("bc")])).await;
    let mut exchange = harness.client.open_post(TEXT, &text(&json!({}))).await;
    exchange.read_until("\"provisional\"").await;
    drop(exchange);
    eventually("a cancel", || harness.executor().cancels().len() == 1).await;
}

#[tokio::test]
async fn every_token_may_be_foretold() {
    let letters: Vec<String> = ('a'..='h').map(String::from).collect();
    let mut outputs: Vec<_> =
        letters.iter().flat_map(|letter| [provisional(letter), said(letter)]).skip(1).collect();
    outputs.last_mut().unwrap().finish = Some(Finish::Length);
    let harness = Harness::start(script(outputs)).await;
    let shown = shown(&harness.client.post(TEXT, &text(&json!({ "max_tokens": 8 }))).await);
    assert_eq!((shown.text.as_str(), shown.told.len(), shown.retracted.len()), ("abcdefgh", 7, 0));
}

#[tokio::test]
async fn what_is_drafted_of_a_thought_is_told_to_nobody_and_a_thought_has_as_many_tokens_however_they_come() {
    let outputs = vec![
        provisional("<th"),
        said("<think>a"),
        provisional("b</think>Ye"),
        said("b</think>Y"),
        provisional("es"),
        last("es."),
    ];
    let text = Arc::new(ByteText::with_template("{{ content.split('</think>') }}"));
    let harness = Harness::start_with_text(script(outputs), always(text), |_| {}).await;
    let body = asked(&json!({ "messages": [{ "role": "user", "content": "a" }] }));
    let chunks = harness.client.post(CHAT, &body).await.chunks();
    let joined = |name: &str| -> String {
        let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
        choices.filter_map(|choice| choice["delta"][name].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), ("ab", "Yes."));
    let told: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["provisional"]["text"])
        .filter(|text| text.is_string())
        .collect();
    assert_eq!(told, ["es"]);
    assert!(chunks.iter().all(|chunk| chunk["choices"][0].get("retract").is_none()));
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], "<think>ab</think>".len());
}
