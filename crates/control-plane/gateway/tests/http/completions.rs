//! Content of complete answers, and of the executor's requests.

use serde_json::{Value, json};

use crate::{
    fake_executor::reply_with,
    harness::Harness,
    text::{BEGIN, END, tokens},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

#[tokio::test]
async fn a_chat_answer_has_openais_shape() {
    let harness = Harness::start(reply_with("Hello")).await;
    let body = json!({ "model": "base", "messages": [{ "role": "system", "content": "s" },
        { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }] });
    let answer = harness.client.post(CHAT, &body).await.json();
    assert_eq!(answer["object"], "chat.completion");
    let message = json!({ "role": "assistant", "content": "Hello", "refusal": null });
    let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": "stop" });
    assert_eq!(answer["choices"], json!([choice]));
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    assert_eq!(harness.executor().generates()[0].prompt, tokens("system:s;user:ab;assistant:"));
}

#[tokio::test]
async fn a_prompt_may_be_text_or_tokens_or_several_of_either() {
    let harness = Harness::start(reply_with("x")).await;
    let forms = [json!("ab"), json!(["ab", "c"]), json!([97, 98]), json!([[97, 98], [99]])];
    let mut sent = 0;
    for (prompt, expected) in forms.iter().zip([1, 2, 1, 2]) {
        let answer = harness.client.post(TEXT, &json!({ "model": "base", "prompt": prompt })).await.json();
        assert_eq!(answer["choices"].as_array().unwrap().len(), expected, "{prompt}");
        sent += expected;
        assert_eq!(harness.executor().generates().len(), sent);
    }
    let prompts: Vec<Vec<u32>> = harness.executor().generates().into_iter().map(|sent| sent.prompt).collect();
    assert_eq!(prompts[0], [BEGIN, 97, 98]);
    assert_eq!(prompts[3], [97, 98], "token ids are sent as they are");
}

#[tokio::test]
async fn choices_of_several_prompts_are_numbered_prompt_by_prompt() {
    let harness = Harness::start(reply_with("xyz")).await;
    let body = json!({ "model": "base", "prompt": ["a", "b"], "n": 2, "echo": true, "max_tokens": 3 });
    let answer = harness.client.post(TEXT, &body).await.json();
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["axyz", "axyz", "bxyz", "bxyz"]);
    assert_eq!(answer["usage"]["prompt_tokens"], 4, "a prompt counts once");
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn echoed_log_probabilities_are_what_an_evaluation_reads() {
    let harness = Harness::start(reply_with("z")).await;
    let body = json!({ "model": "base", "prompt": [[97, 98, 99]], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": true });
    let answer = harness.client.post(TEXT, &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "abcz");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "z"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.25, -0.25, -0.25]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][3], json!({ "z": -0.25, "?": -1.5 }));
}

#[tokio::test]
async fn a_prompt_can_be_scored_without_generating() {
    let harness = Harness::start(reply_with("z")).await;
    let body = json!({ "model": "base", "prompt": "ab", "max_tokens": 0, "logprobs": 0, "echo": true });
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], "ab");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["<begin>", "a", "b"]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn chat_log_probabilities_name_tokens_and_bytes() {
    let harness = Harness::start(reply_with("é")).await;
    let body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }],
        "logprobs": true, "top_logprobs": 2 });
    let answer = harness.client.post(CHAT, &body).await.json();
    let content = &answer["choices"][0]["logprobs"]["content"];
    let half = json!({ "token": r"bytes:\xc3", "logprob": -0.25, "bytes": [0xc3] });
    assert_eq!(content[0]["token"], half["token"]);
    assert_eq!(content[0]["top_logprobs"][0], half);
    assert_eq!(content.as_array().unwrap().len(), 3, "two halves of a character and the end");
}

#[tokio::test]
async fn tokens_can_be_called_by_their_numbers_which_no_two_share() {
    let harness = Harness::start(reply_with("é")).await;
    let chat = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }],
        "logprobs": true, "top_logprobs": 2, "return_tokens_as_token_ids": true });
    let answer = harness.client.post(CHAT, &chat).await.json();
    let content = &answer["choices"][0]["logprobs"]["content"];
    assert_eq!(content[0]["token"], "token_id:195");
    assert_eq!(content[0]["top_logprobs"][0]["token"], "token_id:195");
    let text = json!({ "model": "base", "prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": true,
        "return_tokens_as_token_ids": true });
    let logprobs = harness.client.post(TEXT, &text).await.json()["choices"][0]["logprobs"].take();
    assert_eq!(logprobs["tokens"], json!(["token_id:257", "token_id:97", "token_id:195"]));
    assert_eq!(logprobs["top_logprobs"][2]["token_id:195"], -0.25);
}

#[tokio::test]
async fn every_sampling_option_reaches_the_executor() {
    let harness = Harness::start(reply_with("x")).await;
    let body = json!({ "model": "base", "prompt": "a", "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 9,
        "logit_bias": { "65": -100 }, "max_tokens": 5, "min_tokens": 2, "ignore_eos": true,
        "stop_token_ids": [66], "deadline_ms": 1000, "user": "someone", "best_of": 1, "suffix": null });
    assert_eq!(harness.client.post(TEXT, &body).await.status, 200);
    let sent = &harness.executor().generates()[0];
    let sampling = &sent.sampling;
    let floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty);
    assert_eq!(floats, (0.5, 0.25, 0.125, 1.5));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
    assert_eq!(
        (sampling.top_k, sampling.seed, sampling.logit_bias.as_slice()),
        (7, 9, [(65, -100.0)].as_slice())
    );
    assert_eq!((sent.max_tokens, sent.min_tokens, sent.deadline_ms), (5, 2, 1000));
    assert_eq!(sent.stop_tokens, [66], "the model's own end token is ignored as asked");
}

#[tokio::test]
async fn without_options_an_answer_may_fill_the_context_and_stop_at_the_end_token() {
    let harness = Harness::start(reply_with("x")).await;
    let body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }] });
    harness.client.post(CHAT, &body).await;
    let sent = &harness.executor().generates()[0];
    assert_eq!(sent.stop_tokens, [END]);
    assert_eq!(sent.max_tokens as usize, 512 - sent.prompt.len());
    assert_eq!((sent.logprobs, sent.prompt_logprobs, sent.adapter), (None, None, None));
}

#[tokio::test]
async fn stop_strings_wait_for_the_least_number_of_tokens() {
    let harness = Harness::start(reply_with("a.b.c")).await;
    let body = json!({ "model": "base", "prompt": "a", "stop": ".", "min_tokens": 3, "max_tokens": 9 });
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], "a.b");
}

#[tokio::test]
async fn log_probabilities_end_where_the_text_was_cut() {
    let harness = Harness::start(reply_with("abXY")).await;
    let body = json!({ "model": "base", "prompt": "a", "stop": "XY", "logprobs": 0, "max_tokens": 9 });
    let answer = harness.client.post(TEXT, &body).await.json();
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(answer["usage"]["completion_tokens"], 4);
}
