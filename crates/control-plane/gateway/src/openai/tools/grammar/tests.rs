//! Tests that tool call parsers read every answer that the grammars permit.

use text::grammar::{Grammars, TokenBytes, Tokens};

use super::{
    super::{parameter_kinds::Function, scan::Scanner, tool_params},
    *,
};
use crate::openai::strict_fields::StrictFields;

const END: u32 = 256;
const ANNOUNCED: u32 = 257;
fn grammars() -> Grammars {
    let bytes: Vec<u8> = (0..=255).collect();
    let texts = bytes.iter().map(|byte| TokenBytes::Text(std::slice::from_ref(byte)));
    let special = [TokenBytes::Special(b"<end>"), TokenBytes::Special(b"[TOOL_CALLS]")];
    Grammars::over(&Tokens::new(texts.chain(special), &[END])).unwrap()
}

fn tools(more: &Value) -> Tools {
    let unit = json!({ "$ref": "#/$defs/unit" });
    let properties = json!({ "city": { "type": "string", "maxLength": 5 }, "days": { "type": "integer", "minimum": 1, "maximum": 7 }, "unit": unit });
    let weather = json!({
        "type": "object", "properties": properties, "required": ["city", "unit"], "additionalProperties": false,
        "$defs": { "unit": { "enum": ["c", "f"] } }
    });
    let function = |name: &str, parameters: Value| json!({ "type": "function", "function": { "name": name, "parameters": parameters, "strict": true } });
    let mut body = json!({ "tools": [function("weather", weather), { "type": "function", "function": { "name": "now" } }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut fields = StrictFields::parse(body.to_string().as_bytes()).unwrap();
    tool_params::read(&mut fields).unwrap().unwrap()
}

/// Walks through the grammar: any permitted token at each step, and the end as soon as the end is permitted.
fn walk(grammars: &Grammars, grammar: &Grammar, seed: u64) -> String {
    let (mut draws, mut said) = (seed, Vec::new());
    let mut matcher = grammars.compile(&grammar.source().unwrap()).unwrap();
    loop {
        let set = matcher.allowed().unwrap();
        if set.contains(END) && !said.is_empty() {
            break;
        }
        let allowed: Vec<u32> =
            (0..=ANNOUNCED).filter(|&token| token != END && set.contains(token)).collect();
        draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let token = allowed[(draws >> 33) as usize % allowed.len()];
        matcher.accept(token).unwrap();
        match u8::try_from(token) {
            Ok(byte) => said.push(byte),
            Err(_) => said.extend(b"[TOOL_CALLS]"),
        }
    }
    String::from_utf8(said).unwrap()
}

/// Returns the calls in `answer`, which must contain nothing else.
fn calls_of(format: ToolCallFormat, answer: &str) -> Vec<(String, Value)> {
    let functions = tools(&json!({})).list;
    let functions = functions.iter().map(|tool| Function::new(&tool.name, &tool.parameters)).collect();
    let mut scanner = Scanner::new(format, functions);
    let (found, rest) = (scanner.push(answer), scanner.finish());
    assert_eq!(format!("{}{}", found.content, rest.content), "", "{format:?}: {answer}");
    let mut calls: Vec<(String, String)> = Vec::new();
    for piece in found.calls.into_iter().chain(rest.calls) {
        if let Some(name) = piece.name {
            calls.push((name, String::new()));
        }
        calls[piece.index].1.push_str(&piece.arguments);
    }
    let parsed = |(name, text): (String, String)| (name, serde_json::from_str(&text).expect(answer));
    calls.into_iter().map(parsed).collect()
}

fn check(name: &str, arguments: &Value) {
    let keys: Vec<&str> = arguments.as_object().unwrap().keys().map(String::as_str).collect();
    if name == "now" {
        return assert!(keys.is_empty(), "{arguments}");
    }
    assert_eq!(name, "weather");
    assert!(keys == ["city", "unit"] || keys == ["city", "days", "unit"], "{arguments}");
    assert!(arguments["city"].as_str().unwrap().chars().count() <= 5);
    assert!(["c", "f"].contains(&arguments["unit"].as_str().unwrap()));
}

#[test]
fn calls_that_are_required_keep_to_their_schemas_in_every_format() {
    let grammars = grammars();
    let named = json!({ "tool_choice": { "type": "function", "function": { "name": "weather" } } });
    for format in ToolCallFormat::ALL {
        let announced = (format == ToolCallFormat::Mistral).then_some(ANNOUNCED);
        for (more, seeds) in [(json!({ "tool_choice": "required" }), 0..6), (named.clone(), 6..9)] {
            let (grammar, _) = of(&tools(&more), format, &|_| announced, None).unwrap().unwrap();
            for seed in seeds {
                let calls = calls_of(format, &walk(&grammars, &grammar, seed));
                assert!(!calls.is_empty(), "{format:?}");
                calls.iter().for_each(|(name, arguments)| check(name, arguments));
                assert!(more["tool_choice"].is_string() || calls.iter().all(|(name, _)| name == "weather"));
            }
        }
    }
}

#[test]
fn where_a_function_is_strict_text_is_free_and_calls_are_not() {
    let grammars = grammars();
    for format in ToolCallFormat::ALL {
        for announced in [None, (format == ToolCallFormat::Mistral).then_some(ANNOUNCED)] {
            let (grammar, _) = of(&tools(&json!({})), format, &|_| announced, None).unwrap().unwrap();
            let mut matcher = grammars.compile(&grammar.source().unwrap()).unwrap();
            let set = matcher.allowed().unwrap();
            // Text of the harmony format has a header.
            let may_be_text = match format {
                ToolCallFormat::Harmony => set.contains(b'<'.into()),
                _ => set.contains(END) && set.contains(b'H'.into()),
            };
            assert!(may_be_text, "{format:?}: an answer may be text, or nothing");
            let call = match (format, announced) {
                (ToolCallFormat::Hermes, _) => "I look.<tool_call>\n{\"name\": \"weather\", \"arguments\": ",
                (ToolCallFormat::Llama3, _) => "{\"name\": \"weather\", \"parameters\": ",
                (ToolCallFormat::Mistral, Some(_)) => "[{\"name\": \"weather\", \"arguments\": ",
                (ToolCallFormat::Mistral, None) => "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": ",
                (ToolCallFormat::Pythonic, _) => "[weather(",
                (ToolCallFormat::Granite, _) => {
                    "I look.<|tool_call|>[{\"name\": \"weather\", \"arguments\": "
                }
                (ToolCallFormat::Qwen3Coder, _) => "I look.<tool_call>\n<function=weather>\n",
                (ToolCallFormat::Harmony, _) => {
                    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
                }
            };
            if announced.is_some() {
                matcher.accept(ANNOUNCED).unwrap();
            }
            for byte in call.bytes() {
                matcher.accept(byte.into()).unwrap_or_else(|error| panic!("{format:?} {call}: {error}"));
            }
            let next = matcher.allowed().unwrap();
            let wanted = match format {
                ToolCallFormat::Pythonic => b'c',
                ToolCallFormat::Qwen3Coder => b'<',
                _ => b'{',
            };
            assert!(next.contains(wanted.into()) && !next.contains(b'7'.into()), "{format:?}");
        }
    }
}

#[test]
fn beside_text_nothing_has_to_be_as_it_is_unless_somebody_wants_it() {
    let mut free = tools(&json!({}));
    free.list.iter_mut().for_each(|tool| tool.strictness = Strictness::Free);
    assert_eq!(of(&free, ToolCallFormat::Hermes, &|_| None, None), Ok(None));
    let structure = |grammar| Structure::strict("response_format", grammar);
    let answer = structure(Grammar::Json(json!({ "type": "integer", "minimum": 0, "maximum": 9 })));
    let (grammar, _) = of(&free, ToolCallFormat::Hermes, &|_| None, Some(&answer)).unwrap().unwrap();
    let mut matcher = grammars().compile(&grammar.source().unwrap()).unwrap();
    let next = matcher.allowed().unwrap();
    assert!(next.contains(b'7'.into()) && next.contains(b'<'.into()) && !next.contains(b'a'.into()));
    let other = structure(Grammar::Regex("a".into()));
    assert_eq!(of(&free, ToolCallFormat::Hermes, &|_| None, Some(&other)), Err(CallsError::Beside));
    free.choice = ToolChoice::Required;
    free.list[0].parameters = json!({ "anyOf": [] });
    let error = of(&free, ToolCallFormat::Pythonic, &|_| None, None).unwrap_err();
    assert!(error.to_string().contains("weather"), "{error}");
}

#[test]
fn beside_a_strict_function_a_free_one_takes_any_arguments() {
    let grammars = grammars();
    for (format, call) in [
        (
            ToolCallFormat::Hermes,
            "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": [1]}}\n</tool_call>",
        ),
        (ToolCallFormat::Pythonic, "[now(a=[1], b=\"x\")]"),
        (
            ToolCallFormat::Qwen3Coder,
            "<tool_call>\n<function=now>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
        ),
    ] {
        let (grammar, _) = of(&tools(&json!({})), format, &|_| None, None).unwrap().unwrap();
        let mut matcher = grammars.compile(&grammar.source().unwrap()).unwrap();
        for byte in call.bytes() {
            matcher.accept(byte.into()).unwrap_or_else(|error| panic!("{format:?} {call}: {error}"));
        }
    }
}

#[test]
fn texts_in_no_quotes_keep_to_what_can_be_kept_to_and_the_rest_is_refused_by_name() {
    let of = |schema: Value| {
        let parameters = json!({ "type": "object", "properties": { "p": schema }, "required": ["p"] });
        let mut tools = tools(&json!({ "tool_choice": "required" }));
        tools.list.truncate(1);
        tools.list[0].parameters = parameters;
        of(&tools, ToolCallFormat::Qwen3Coder, &|_| None, None)
            .map(|built| built.unwrap().0.source().unwrap())
    };
    let text = json!({ "type": "string", "minLength": 2, "maxLength": 3, "description": "two or three" });
    let optional = json!({ "anyOf": [{ "enum": ["a", "b"] }, { "type": "null" }], "default": null });
    let list = json!({ "type": "array", "items": { "type": "string", "pattern": "^x" }, "minItems": 1 });
    let free = json!({ "type": "string" });
    let grammars = grammars();
    for (schema, value, is_taken) in [
        (&text, "ab", true),
        (&text, "abcd", false),
        (&text, "a", false),
        (&optional, "a", true),
        (&optional, "null", true),
        (&optional, "c", false),
        (&list, "[\"xy\"]", true),
        (&list, "[\"y\"]", false),
        (&list, "[\"x</parameter>\"]", true),
        (&free, "a\n<parameter>\n</param", true),
        (&free, "a</parameter>b", false),
    ] {
        let mut matcher = grammars.compile(&of(schema.clone()).unwrap()).unwrap();
        let call = format!(
            "<tool_call>\n<function=weather>\n<parameter=p>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let taken = call.bytes().try_for_each(|byte| matcher.accept(byte.into()));
        assert_eq!(taken.is_ok(), is_taken, "{schema} {value}");
    }
    for (schema, keyword) in [
        (json!({ "type": "string", "pattern": "a" }), "pattern"),
        (json!({ "type": ["string", "integer"] }), "type"),
        (json!({ "enum": ["a", 1] }), "enum"),
        (json!({ "enum": ["a", "b\n</parameter>c"] }), "enum"),
        (json!({ "const": "</parameter>" }), "const"),
        (json!({ "anyOf": [{ "type": "string", "format": "date" }, { "type": "null" }] }), "format"),
    ] {
        let error = of(schema).unwrap_err();
        assert!(matches!(&error, CallsError::NoText { keyword: named, .. } if named == keyword), "{error}");
    }
}

/// Returns the beginning of a call of the custom tool `p`.
fn before_input(format: ToolCallFormat) -> &'static str {
    match format {
        ToolCallFormat::Hermes => "<tool_call>\n{\"name\": \"p\"}\n",
        ToolCallFormat::Llama3 => "{\"name\": \"p\"}\n",
        ToolCallFormat::Mistral => "[TOOL_CALLS][{\"name\": \"p\"}\n",
        ToolCallFormat::Granite => "<|tool_call|>[{\"name\": \"p\"}\n",
        ToolCallFormat::Pythonic => "[p(\n",
        ToolCallFormat::Qwen3Coder => "<tool_call>\n<function=p>\n<parameter=input>\n",
        ToolCallFormat::Harmony => "<|channel|>commentary to=functions.p<|message|>",
    }
}

/// True if the grammar of a request with a function and this custom tool accepts `answer`.
fn is_taken(
    grammars: &Grammars,
    format: ToolCallFormat,
    (custom, choice): (&Value, &Value),
    answer: &str,
) -> bool {
    let now = json!({ "type": "function", "function": { "name": "now" } });
    let body = json!({ "tools": [now, { "type": "custom", "custom": custom }], "tool_choice": choice });
    let mut fields = StrictFields::of(body, "the body").unwrap();
    let tools = tool_params::read(&mut fields).unwrap().unwrap();
    let grammar = of(&tools, format, &|_| None, None).unwrap().unwrap();
    let mut matcher = grammars.compile(&grammar.0.source().unwrap()).unwrap();
    let taken = answer.bytes().try_for_each(|byte| matcher.accept(byte.into()));
    taken.is_ok() && matcher.allowed().unwrap().contains(END)
}

#[test]
fn the_input_of_a_custom_tool_keeps_to_its_grammar_in_every_format() {
    const PATCH: &str = "start: begin hunk+ end\nbegin: \"*** Begin\" LF\nend: \"*** End\" LF?\nhunk: \"*** Add \" name LF line+ // a file\n\
                         name: /(.+)/\nline: \"+\" /(.*)/ LF -> added\n%import common.LF\n";
    let of = |syntax: &str, definition: &str| {
        let grammar = json!({ "syntax": syntax, "definition": definition });
        json!({ "name": "p", "format": { "type": "grammar", "grammar": grammar } })
    };
    let (lark, regex, text) = (of("lark", PATCH), of("regex", "[a-z/]+\\/"), json!({ "name": "p" }));
    let any = of("lark", "start: /.+/s");
    let grammars = grammars();
    for format in ToolCallFormat::ALL {
        for choice in
            [json!("auto"), json!("required"), json!({ "type": "custom", "custom": { "name": "p" } })]
        {
            for (custom, input, taken) in [
                (&lark, "*** Begin\n*** Add a/\"b\"\n+{}\n+\n*** End", true),
                (&lark, "*** Begin\n*** Add a\n+</tool_call>\n*** End\n", true),
                (&lark, "*** Begin\n*** Add a\n-x\n*** End", false),
                (&lark, "*** Begin\n*** End", false),
                (&regex, "a/b/", true),
                (&regex, "a/b", false),
                (&text, "any\n\"text\"]\n</tool_call>", true),
                (&text, "", true),
                (&any, "a\n]}</function>", true),
            ] {
                let answer = format!("{}{input}", before_input(format));
                let is_taken = is_taken(&grammars, format, (custom, &choice), &answer);
                assert_eq!(is_taken, taken, "{format:?} {choice} {custom}: {answer}");
            }
        }
    }
}

#[test]
fn a_thought_may_stand_before_a_call_of_a_custom_tool() {
    let grammar = json!({ "syntax": "lark", "definition": "start: \"a\" rest\nrest: /[b-c]*/" });
    let custom = json!({ "name": "p", "format": { "type": "grammar", "grammar": grammar } });
    let body = json!({ "tools": [{ "type": "custom", "custom": custom }], "tool_choice": "required" });
    let tools = tool_params::read(&mut StrictFields::of(body, "the body").unwrap()).unwrap().unwrap();
    let close = text::grammar::Tag { name: "</think>", token: None };
    let thought = Some(text::grammar::ReasoningPrefix::Tags { open: None, close });
    let source = of(&tools, ToolCallFormat::Hermes, &|_| None, None)
        .unwrap()
        .unwrap()
        .0
        .source_behind(thought, Enforcement::Strict)
        .unwrap()
        .text;
    let mut matcher = grammars().compile(&source).unwrap();
    let answer = format!("hm</think>\n{}abc", before_input(ToolCallFormat::Hermes));
    for byte in answer.bytes() {
        matcher.accept(byte.into()).unwrap_or_else(|error| panic!("{answer}: {error}"));
    }
    let next = matcher.allowed().unwrap();
    assert!(next.contains(END) && next.contains(b'b'.into()) && !next.contains(b'd'.into()));
}

#[test]
fn an_answer_of_gpt_oss_is_a_final_message_or_one_call_behind_its_reasoning() {
    let grammars = grammars();
    let thought = text::grammar::ReasoningPrefix::Harmony {
        tags: HarmonyTags::of(|_| None),
        is_open: false,
        opens_final: false,
    };
    let taken = |more: &Value, answer: &str| {
        let (grammar, _) = of(&tools(more), ToolCallFormat::Harmony, &|_| None, None).unwrap().unwrap();
        let source = grammar.source_behind(Some(thought), Enforcement::Strict).unwrap().text;
        let mut matcher = grammars.compile(&source).unwrap();
        let taken = answer.bytes().try_for_each(|byte| matcher.accept(byte.into()));
        taken.is_ok() && matcher.allowed().unwrap().contains(END)
    };
    const THOUGHT: &str = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant";
    const CALL: &str = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
    const TEXT: &str = "<|channel|>final<|message|>It is noon.";
    let (auto, required) = (json!({}), json!({ "tool_choice": "required" }));
    for (more, answer, is_taken) in [
        (&auto, format!("{THOUGHT}{CALL}"), true),
        (&auto, format!("{THOUGHT}{THOUGHT}{TEXT}"), true),
        (&auto, TEXT.to_owned(), true),
        (&auto, "It is noon.".to_owned(), false),
        (&required, format!("{THOUGHT}{CALL}"), true),
        (&required, CALL.to_owned(), true),
        (&required, format!("{THOUGHT}{TEXT}"), false),
        (&required, format!("{THOUGHT}{CALL}{CALL}"), false),
    ] {
        assert_eq!(taken(more, &answer), is_taken, "{more} {answer}");
    }
}

#[test]
fn a_call_of_a_custom_tool_stands_behind_text_and_calls_of_functions() {
    let (grammars, custom) = (grammars(), json!({ "name": "p" }));
    let taken =
        |answer: &str, choice: &Value| is_taken(&grammars, ToolCallFormat::Hermes, (&custom, choice), answer);
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let last = "<tool_call>\n{\"name\": \"p\"}\nx";
    let (auto, required) = (json!("auto"), json!("required"));
    for answer in ["I look.", "", call, last] {
        assert!(taken(answer, &auto), "{answer}");
    }
    assert!(taken(&format!("I look.\n{call}\n{call}\n{last}"), &auto));
    assert!(taken(&format!("{call}\n{last}"), &required) && taken(call, &required));
    assert!(!taken("I look.", &required));
}
