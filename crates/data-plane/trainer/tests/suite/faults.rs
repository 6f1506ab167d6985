//! Every fault of training data is found before the run, with its line and advice.

use crate::support::{CHATML, TemplateTokenizer, file};
use proptest::prelude::*;
use serde_json::{Value, json};
use trainer::data::{DataError, DataLimits};

fn conversation(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]})
}

fn assert_faults(cases: &[(Value, &str)]) {
    let model = TemplateTokenizer::new(CHATML);
    for (line, expected) in cases {
        let fault = model.fault(line);
        assert!(fault.contains(expected), "{line}: {fault}");
    }
}

#[test]
fn a_field_that_is_missing_or_of_another_type_is_named_by_its_path() {
    let assistant = json!({"role": "assistant", "content": "Yes"});
    assert_faults(&[
        (json!([1]), "a JSON object"),
        (json!({}), "no field; a line needs 'chosen' and 'rejected', or "),
        (json!({"question": "Hi", "answer": "Yes"}), "the fields 'question', 'answer'"),
        (json!({"messages": "Hi"}), "'messages' must be an array of messages, not a string"),
        (json!({"messages": ["Hi"]}), "'messages[0]' must be an object"),
        (json!({"messages": null}), "'messages' is missing"),
        (json!({"messages": [assistant, {"content": "Hi"}]}), "'messages[1].role' is missing"),
        (json!({"messages": [{"role": "user"}]}), "'messages[0].content' is missing"),
        (
            json!({"messages": [{"role": "user", "content": 7}]}),
            "'messages[0].content' must be a string or an array of text",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "'messages[0].content[0].type' is not supp",
        ),
        (json!({"messages": [{"role": 1, "content": ""}]}), "'messages[0].role' must be a string"),
        (
            json!({"messages": [{"role": "robot", "content": ""}]}),
            "'messages[0].role' is 'robot'; use system, user",
        ),
        (json!({"conversations": [{"from": "alien", "value": ""}]}), "use system, human, gpt or tool"),
        (json!({"conversations": [{"from": "gpt"}]}), "'conversations[0].value' is missing"),
        (json!({"prompt": 1, "completion": "a"}), "'prompt' must be a string"),
        (json!({"prompt": "a", "completion": ["a"]}), "'completion' must be a string"),
        (json!({"instruction": "a", "input": [], "output": "b"}), "'input' must be a string"),
        (json!({"text": {}}), "'text' must be a string, not an object"),
        (json!({"chosen": "a", "rejected": [assistant]}), "'rejected' must be a string"),
        (
            json!({"input": [], "preferred_output": [], "non_preferred_output": []}),
            "'input' must be an object",
        ),
    ]);
}

#[test]
fn what_teaches_nothing_or_would_be_dropped_in_silence_is_refused() {
    let user = json!({"role": "user", "content": "Hi"});
    let no = json!({"role": "assistant", "content": "No"});
    assert_faults(&[
        (json!({"messages": []}), "'messages' is empty"),
        (json!({"messages": [user]}), "no assistant message to learn"),
        (
            json!({"messages": [user, {"role": "assistant", "content": "No", "weight": 0}]}),
            "no assistant message to learn",
        ),
        (conversation(""), "'messages[1].content' is empty"),
        (
            json!({"messages": [{"role": "user", "content": "Hi", "weight": 1}, no]}),
            "'messages[0].weight' must be 0 or false, or 1",
        ),
        (
            json!({"messages": [user, {"role": "assistant", "content": "No", "weight": 0.5}]}),
            "'messages[1].weight'",
        ),
        (
            json!({"messages": [user, {"role": "assistant", "tool_calls": [{}]}]}),
            "'messages[1].tool_calls[0].function' is missing",
        ),
        (json!({"messages": [user, no], "tools": [{}]}), "'tools[0].function.name' is missing"),
        (json!({"text": ""}), "'text' is empty"),
        (json!({"prompt": "a", "completion": ""}), "'completion' is empty"),
        (json!({"instruction": "a", "output": ""}), "'output' is empty"),
        (json!({"chosen": "a", "rejected": "a"}), "are equal"),
        (json!({"chosen": "", "rejected": "a"}), "'chosen' is empty"),
        (json!({"prompt": [user], "chosen": [no], "rejected": [no]}), "are equal"),
        (
            json!({"chosen": [user, no], "rejected": [no]}),
            "must be equal except for one last assistant message",
        ),
        (
            json!({"chosen": [no, user], "rejected": [no, user]}),
            "must be equal except for one last assistant message",
        ),
    ]);
    let mut model = TemplateTokenizer::new(CHATML);
    model.template = None;
    assert!(model.fault(&conversation("Yes")).contains("no chat template; use 'prompt' and 'completion'"));
    let refusing = TemplateTokenizer::new("{{ raise_exception('never') }}");
    assert!(refusing.fault(&conversation("Yes")).contains("refuses these messages: never"));
}

#[test]
fn what_is_no_json_or_says_a_name_twice_is_refused() {
    let model = TemplateTokenizer::new(CHATML);
    for (line, expected) in [
        ("{\"text\": \"a", "not JSON"),
        ("{\"text\": \"abc\"} {}", "not JSON"),
        ("{\"text\": \"abc\", \"text\": \"abd\"}", "'text' appears twice"),
        ("{\"text\": \"\\ud800\"}", "not JSON"),
        ("nothing", "not JSON"),
    ] {
        let error = model.read(line).unwrap_err().to_string();
        assert!(error.contains(expected), "{line}: {error}");
    }
    assert!(matches!(model.read(""), Err(DataError::Empty)));
    assert!(matches!(model.read("\n\n"), Err(DataError::Empty)));
    let utf16: Vec<u8> = "{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let error = model.read_within(&[&[0xff, 0xfe], utf16.as_slice()].concat(), &DataLimits::default());
    assert!(error.unwrap_err().to_string().contains("line 1: byte 1 is not UTF-8"));
}

#[test]
fn lines_of_another_kind_than_the_first_are_refused() {
    let lines = [json!({"text": "abc"}), conversation("Yes"), json!({"text": "abd"})];
    let error = TemplateTokenizer::new(CHATML).read(&file(&lines)).unwrap_err().to_string();
    assert!(error.contains("line 2: the previous lines have 'text', but this one has 'messages'"), "{error}");
}

#[test]
fn all_faults_are_counted_and_the_first_twenty_told() {
    let lines: Vec<Value> =
        (0..50).map(|at| if at % 2 == 0 { conversation("Yes") } else { json!(at) }).collect();
    let error = TemplateTokenizer::new(CHATML).read(&file(&lines)).unwrap_err();
    let DataError::Problems { problems, count } = &error else { panic!("{error}") };
    assert_eq!((problems.len(), *count), (20, 25));
    assert!(problems.iter().map(|problem| problem.line).eq((1..=20).map(|at| 2 * at)));
    let text = error.to_string();
    assert!(text.starts_with("25 lines are wrong, so nothing was trained:\n  line 2: "), "{text}");
    assert!(text.ends_with("\n  and 5 more"), "{text}");
}

#[test]
fn limits_are_told_with_what_was_found() {
    let model = TemplateTokenizer::new(CHATML);
    let file = file(&[conversation("Yes"), conversation("Yes, indeed")]);
    let error = |limits: &DataLimits| model.read_within(file.as_bytes(), limits).unwrap_err().to_string();
    let usual = DataLimits::default();
    let tokens = error(&DataLimits { max_tokens: 24, ..usual });
    assert!(tokens.contains("line 1: it has 25 tokens, and the limit is 24"), "{tokens}");
    assert!(error(&DataLimits { line_bytes: 85, ..usual }).contains("line 2: it has more than 85 bytes"));
    assert!(error(&DataLimits { lines: 1, ..usual }).contains("more than 1 lines"));
    assert!(
        error(&DataLimits { total_tokens: 30, ..usual })
            .contains("with line 2 the file has more than 30 tokens")
    );
    let many = vec![json!({"role": "user", "content": ""}); 4097];
    assert!(model.fault(&json!({"messages": many})).contains("more than 4096 messages"));
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let pieces = [
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\n",
        "\r\n",
        "\"",
        "\\",
        "null",
        "1",
        "0.5",
        "\"messages\"",
        "\"role\"",
        "\"user\"",
        "\"assistant\"",
        "\"content\"",
        "\"weight\"",
        "\"chosen\"",
        "\"rejected\"",
        "\"prompt\"",
        "\"text\"",
        "\"<|im_end|>\"",
        "{\"text\":\"abc\"}\n",
        "\u{feff}",
        "\u{f0000}",
    ];
    let piece = prop_oneof![
        8 => proptest::sample::select(pieces.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..4),
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![".*", "(a|\n|<\\|im_end\\|>|<\\|im_start\\|>|<|\u{f0000}){0,12}"]
}

#[test]
fn any_bytes_are_read_or_refused() {
    let model = TemplateTokenizer::new(CHATML);
    proptest!(|(file in bytes())| {
        let _ = model.read_within(&file, &DataLimits::default());
    });
}

#[test]
fn whatever_is_said_is_learned_whole_and_with_its_end() {
    let model = TemplateTokenizer::new(CHATML);
    proptest!(|(asked in any_text(), answer in any_text())| {
        let line = json!({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]});
        match model.read(&line.to_string()) {
            Ok(_) => {
                let expected = format!("<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n[{answer}<|im_end|>]");
                prop_assert_eq!(model.examples(&[line]), [expected]);
            }
            Err(error) => prop_assert!(answer.is_empty(), "{}", error),
        }
    });
}
