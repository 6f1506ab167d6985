//! Tests of tool call parsing in every format.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// An answer, its text outside calls, and its calls with arguments.
type ToolCallCase = (ToolCallFormat, &'static str, &'static str, &'static [(&'static str, &'static str)]);

const CASES: &[ToolCallCase] = &[
    (ToolCallFormat::Hermes, "Hello  there.\n", "Hello  there.\n", &[]),
    (
        ToolCallFormat::Hermes,
        "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call> é\"}}\n</tool_call>",
        "I look.",
        &[("f", "{\"a\": \"</tool_call> é\"}")],
    ),
    (
        ToolCallFormat::Hermes,
        "<tool_call>{\"name\":\"f\"}</tool_call>\n<tool_call>{\"arguments\":{\"b\":[1,2]},\"name\":\"g\"}</tool_call>\n",
        "",
        &[("f", "{}"), ("g", "{\"b\":[1,2]}")],
    ),
    (
        ToolCallFormat::Hermes,
        "<tool_call>{\"name\":\"f\"}<tool_call>{\"name\":\"g\"}",
        "",
        &[("f", "{}"), ("g", "{}")],
    ),
    (ToolCallFormat::Hermes, "a <tool_call> b", "a <tool_call> b", &[]),
    (ToolCallFormat::Hermes, "<tool_call>{\"x\": 1}</tool_call>", "<tool_call>{\"x\": 1}</tool_call>", &[]),
    (ToolCallFormat::Hermes, "<tool_call>{\"name\":\"f\"}</tool_call> Done.", " Done.", &[("f", "{}")]),
    (ToolCallFormat::Hermes, "a <tool_cal", "a <tool_cal", &[]),
    (ToolCallFormat::Hermes, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":", "", &[("f", "{\"a\":")]),
    (ToolCallFormat::Llama3, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]),
    (
        ToolCallFormat::Llama3,
        "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"b\": \"{\"}}",
        "",
        &[("f", "{}"), ("g", "{\"b\": \"{\"}")],
    ),
    (ToolCallFormat::Llama3, "{\"name\": \"Bob\", \"age\": 3}", "{\"name\": \"Bob\", \"age\": 3}", &[]),
    (ToolCallFormat::Llama3, "{\"answer\": 42}", "{\"answer\": 42}", &[]),
    (ToolCallFormat::Llama3, "The set {1, 2} is small.", "The set {1, 2} is small.", &[]),
    (
        ToolCallFormat::Mistral,
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
        "",
        &[("f", "{\"a\": 1}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Mistral,
        "Well. [TOOL_CALLS]f[ARGS]{\"a\": {\"b\": 1}}[TOOL_CALLS]g{}",
        "Well.",
        &[("f", "{\"a\": {\"b\": 1}}"), ("g", "{}")],
    ),
    (ToolCallFormat::Mistral, "[1, 2]", "[1, 2]", &[]),
    (
        ToolCallFormat::Harmony,
        "I look.<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        "I look.",
        &[("f", "{\"a\": 1}")],
    ),
    (
        ToolCallFormat::Harmony,
        "<|channel|>commentary to=functions.f<|message|>{}<|call|><|channel|>commentary to=functions.g json<|message|> {\"b\": {}}",
        "",
        &[("f", "{}"), ("g", "{\"b\": {}}")],
    ),
    (
        ToolCallFormat::Harmony,
        "<|channel|>commentary to=functions.f<|message|>{\"a\":",
        "",
        &[("f", "{\"a\":")],
    ),
    (
        ToolCallFormat::Harmony,
        "<|channel|>commentary to=functions.f<|message|>none",
        "<|channel|>commentary to=functions.f<|message|>none",
        &[],
    ),
    (ToolCallFormat::Harmony, "to=functions.f {}", "to=functions.f {}", &[]),
    (
        ToolCallFormat::Granite,
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
        "",
        &[("f", "{\"a\": 1}"), ("g", "{}")],
    ),
    (ToolCallFormat::Granite, "<|tool_call|>f[ARGS]{}", "<|tool_call|>f[ARGS]{}", &[]),
    (
        ToolCallFormat::Qwen3Coder,
        "I look.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>\n\
         <tool_call>\n<function=g>\n</function>\n</tool_call>",
        "I look.",
        &[("f", "{\"a\": 1, \"b\": \"1\"}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Qwen3Coder,
        "<tool_call><function=f><parameter=c>{\"d\": \"</parameter>\\\"\"}</parameter><parameter=b>\nx\n\n y\n</parameter></function><function=g></function></tool_call> Done.",
        " Done.",
        &[("f", "{\"c\": {\"d\":\"</parameter>\\\"\"}, \"b\": \"x\\n\\n y\"}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Qwen3Coder,
        "<tool_call>\n<function=h>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=h>\n<parameter=a>\n1\n</parameter>\n</function>",
        &[],
    ),
    (ToolCallFormat::Qwen3Coder, "<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]),
    (ToolCallFormat::Qwen3Coder, "a <tool_call> <functions", "a <tool_call> <functions", &[]),
    (
        ToolCallFormat::Qwen3Coder,
        "I look.\n<function=f>\n</function>\n</tool_call>",
        "I look.",
        &[("f", "{}")],
    ),
    (
        ToolCallFormat::Qwen3Coder,
        "<function=f><parameter=a>1</parameter></function><function=g></function>",
        "",
        &[("f", "{\"a\": 1}"), ("g", "{}")],
    ),
    (ToolCallFormat::Qwen3Coder, "Write <function=x> there, <func", "Write <function=x> there, <func", &[]),
    (
        ToolCallFormat::Qwen3Coder,
        "<tool_call>\n<function=f>\n<parameter=a>\n1",
        "<tool_call>\n<function=f>\n<parameter=a>\n1",
        &[],
    ),
    (
        ToolCallFormat::Qwen3Coder,
        "<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>}\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>}\n</function>\n</tool_call>",
        &[],
    ),
    (
        ToolCallFormat::Pythonic,
        "[f(a=1, b='x, )', c=[True, None]), g()]",
        "",
        &[("f", "{\"a\": 1, \"b\": \"x, )\", \"c\": [true,null]}"), ("g", "{}")],
    ),
    (ToolCallFormat::Pythonic, "[1, 2]", "[1, 2]", &[]),
    (ToolCallFormat::Pythonic, "[h(1)]", "[h(1)]", &[]),
    (ToolCallFormat::Pythonic, "As [f(a=1)] says", "As [f(a=1)] says", &[]),
    (ToolCallFormat::Pythonic, "[f(a=1), g(b=now())]", ", g(b=now())]", &[("f", "{\"a\": 1}")]),
];

/// Answers with calls of undeclared functions between declared ones, and a call without tags.
const UNKNOWN_AND_BARE: &[ToolCallCase] = &[
    (
        ToolCallFormat::Hermes,
        "<tool_call>{\"name\":\"f\"}</tool_call>\n<tool_call>{\"name\":\"nope\",\"arguments\":{\"x\":\"<tool_call>\"}}</tool_call>\n\
         <tool_call>{\"name\":\"g\"}</tool_call>",
        "\n<tool_call>{\"name\":\"nope\",\"arguments\":{\"x\":\"<tool_call>\"}}</tool_call>",
        &[("f", "{}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Llama3,
        "{\"name\":\"f\"}; {\"name\":\"nope\",\"parameters\":{}}; {\"name\":\"g\"}",
        "{\"name\":\"nope\",\"parameters\":{}}",
        &[("f", "{}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Mistral,
        "[TOOL_CALLS][{\"name\":\"f\"}, {\"name\":\"nope\",\"arguments\":{\"a\":[1]}}, {\"name\":\"g\"}]",
        "{\"name\":\"nope\",\"arguments\":{\"a\":[1]}}",
        &[("f", "{}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Mistral,
        "[TOOL_CALLS]f[ARGS]{\"x\":1}[TOOL_CALLS]nope[ARGS]{\"x\":1}[TOOL_CALLS]g[ARGS]{}",
        "[TOOL_CALLS]nope[ARGS]{\"x\":1}",
        &[("f", "{\"x\":1}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Granite,
        "<|tool_call|>[{\"name\":\"nope\"}, {\"name\":\"f\"}]",
        "<|tool_call|>[{\"name\":\"nope\"}",
        &[("f", "{}")],
    ),
    (
        ToolCallFormat::Granite,
        "<|tool_call|>[{\"name\":\"nope\"}]",
        "<|tool_call|>[{\"name\":\"nope\"}]",
        &[],
    ),
    (
        ToolCallFormat::Pythonic,
        "[f(a=1), nope(b='f()'), g()]",
        "nope(b='f()')",
        &[("f", "{\"a\": 1}"), ("g", "{}")],
    ),
    (
        ToolCallFormat::Qwen3Coder,
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=nope>\n</function>\n</tool_call>\n\
         <tool_call>\n<function=g>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=nope>\n</function>\n</tool_call>",
        &[("f", "{}"), ("g", "{}")],
    ),
    (ToolCallFormat::Hermes, "{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n", "", &[("f", "{\"a\": 1}")]),
    (
        ToolCallFormat::Hermes,
        "\n```json\n{\"name\": \"f\", \"arguments\": {\"a\": \"```\"}}\n```\n",
        "",
        &[("f", "{\"a\": \"```\"}")],
    ),
    (ToolCallFormat::Hermes, "```\n{\"name\": \"g\"}```", "", &[("g", "{}")]),
    (ToolCallFormat::Hermes, "{\"name\": \"f\"} calls it.", "{\"name\": \"f\"} calls it.", &[]),
    (ToolCallFormat::Hermes, "```json\n{\"name\": \"f\"}", "```json\n{\"name\": \"f\"}", &[]),
    (ToolCallFormat::Hermes, "```json\n{\"name\": \"nope\"}\n```", "```json\n{\"name\": \"nope\"}\n```", &[]),
    (
        ToolCallFormat::Hermes,
        "{\"name\": \"f\", \"arguments\": {\"a\": 1,, }}",
        "{\"name\": \"f\", \"arguments\": {\"a\": 1,, }}",
        &[],
    ),
    (ToolCallFormat::Hermes, "{\"a\": 1}", "{\"a\": 1}", &[]),
    (
        ToolCallFormat::Hermes,
        "{\"name\": \"f\"}\n<tool_call>{\"name\":\"g\"}</tool_call>",
        "{\"name\": \"f\"}",
        &[("g", "{}")],
    ),
];

fn scan<'a>(
    format: ToolCallFormat,
    pieces: impl Iterator<Item = &'a str>,
) -> (String, Vec<(String, String)>) {
    let schema = json!({ "properties": { "a": { "type": "integer" }, "b": { "type": "string" }, "c": { "type": "object" } } });
    let mut scanner = Scanner::new(format, ["f", "g"].map(|name| Function::new(name, &schema)).into());
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    let mut add = |found: ScanResult| {
        content.push_str(&found.content);
        for ParsedCallDelta { index, name, arguments, .. } in found.calls {
            if let Some(name) = name {
                assert_eq!(index, calls.len(), "calls begin in order");
                calls.push((name, String::new()));
            }
            assert_eq!(index + 1, calls.len(), "only the last call goes on");
            calls[index].1.push_str(&arguments);
        }
    };
    pieces.for_each(|piece| add(scanner.push(piece)));
    add(scanner.finish());
    (content, calls)
}

#[test]
fn calls_are_found_however_the_answer_is_cut() {
    for &(format, answer, content, calls) in CASES.iter().chain(UNKNOWN_AND_BARE) {
        let calls: Vec<_> =
            calls.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let expected = (content.to_owned(), calls);
        for cut in (0..=answer.len()).filter(|&cut| answer.is_char_boundary(cut)) {
            let (before, behind) = answer.split_at(cut);
            assert_eq!(
                scan(format, [before, behind].into_iter()),
                expected,
                "{format:?} {answer} cut at {cut}"
            );
        }
        let mut buffer = [0; 4];
        let letters: Vec<String> = answer.chars().map(|c| c.encode_utf8(&mut buffer).to_owned()).collect();
        assert_eq!(scan(format, letters.iter().map(String::as_str)), expected, "{format:?} {answer}");
    }
}

#[test]
fn arguments_go_out_before_their_call_ends() {
    let mut scanner = Scanner::new(ToolCallFormat::Hermes, [Function::new("f", &json!({}))].into());
    const BEGIN: &str = "<tool_call>{\"name\": \"f\", \"arguments\": {\"city\": \"Par";
    let call = ParsedCallDelta {
        name: Some("f".to_owned()),
        arguments: "{\"city\": \"Par".to_owned(),
        written: BEGIN.to_owned(),
        ..ParsedCallDelta::default()
    };
    assert_eq!(scanner.push(BEGIN), ScanResult { content: String::new(), calls: vec![call] });
    const END: &str = "is\"}}</tool_call>";
    let (arguments, written) = ("is\"}".to_owned(), END.to_owned());
    assert_eq!(
        scanner.push(END).calls,
        [ParsedCallDelta { arguments, written, ..ParsedCallDelta::default() }]
    );
}

#[test]
fn calls_and_text_keep_their_order_within_a_piece() {
    let mut scanner = Scanner::new(ToolCallFormat::Hermes, [Function::new("f", &json!({}))].into());
    let first = scanner.push("Well. <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1");
    assert_eq!((first.content.as_str(), first.calls[0].at), ("Well.", 5));
    let second = scanner.push("}}</tool_call> Done.");
    assert_eq!((second.content.as_str(), second.calls[0].arguments.as_str()), (" Done.", "}"));
    assert_eq!(second.calls[0].at, 0, "the text stands behind the call");
}

#[test]
fn the_input_of_a_custom_tool_goes_to_the_answers_end() {
    for (format, before) in [
        (ToolCallFormat::Hermes, "I look.\n<tool_call>\n{\"name\": \"p\"}\n"),
        (ToolCallFormat::Llama3, "{\"name\": \"p\"}\n"),
        (ToolCallFormat::Mistral, "[TOOL_CALLS][{\"name\": \"p\"}\n"),
        (ToolCallFormat::Granite, "<|tool_call|>[{\"name\": \"p\"}\n"),
        (ToolCallFormat::Pythonic, "[p(\n"),
        (ToolCallFormat::Qwen3Coder, "<tool_call>\n<function=p>\n<parameter=input>\n"),
    ] {
        const INPUT: &str = "\n*** {\"\n</tool_call>\n</parameter>]\n";
        let answer = format!("{before}{INPUT}");
        let mut scanner = Scanner::new(format, [Function::custom("p")].into()).of_grammar();
        let mut found: Vec<ScanResult> =
            answer.split_inclusive(char::is_whitespace).map(|piece| scanner.push(piece)).collect();
        found.push(scanner.finish());
        let calls: Vec<&ParsedCallDelta> = found.iter().flat_map(|found| &found.calls).collect();
        assert_eq!(calls[0].name.as_deref(), Some("p"), "{format:?}");
        assert!(calls.iter().all(|call| (call.index, call.kind) == (0, CallKind::Custom)), "{format:?}");
        let input: String = calls.iter().map(|call| call.arguments.as_str()).collect();
        assert_eq!(input, INPUT, "{format:?}");
        let written: String = calls.iter().map(|call| call.written.as_str()).collect();
        assert!(answer.ends_with(&written), "{format:?}: {written}");
    }
}

proptest! {
    #[test]
    fn whatever_a_model_says_is_scanned_alike_in_all_pieces(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("[TOOL_CALLS]"), Just("[ARGS]"), Just("<|python_tag|>"),
                Just("{\"name\": \"f\""), Just("\"arguments\": {\"a\": 1}"), Just("}"), Just("{"), Just("["), Just("]"),
                Just(","), Just(";"), Just(" "), Just("\n"), Just("f("), Just("a=1"), Just(")"), Just("\""), Just("<|tool_call|>"),
                Just("<function=f>"), Just("<parameter=a>"), Just("</parameter>"), Just("</function>"), Just("x"), Just("é"),
            ],
            0..24,
        ),
        format in prop_oneof![
            Just(ToolCallFormat::Hermes), Just(ToolCallFormat::Llama3), Just(ToolCallFormat::Mistral), Just(ToolCallFormat::Pythonic),
            Just(ToolCallFormat::Granite), Just(ToolCallFormat::Qwen3Coder),
        ],
    ) {
        let whole = parts.concat();
        prop_assert_eq!(scan(format, parts.iter().copied()), scan(format, std::iter::once(whole.as_str())));
    }
}
