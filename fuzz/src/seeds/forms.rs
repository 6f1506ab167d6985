//! Grammars that explode, and answers that resemble tool calls.

use serde_json::{Value, json};

use super::{Maker, Seed};

const EXPLODES: &str = "grammars that explode (guided decoding's denials of service)";
const NEVER_ENDS: &str = "forms without an end";
const NEARLY: &str = "nearly calls";

fn schema(schema: &Value) -> Vec<u8> {
    format!("json\n{schema}").into_bytes()
}

fn of(kind: &str, text: &str) -> Vec<u8> {
    format!("{kind}\n{text}").into_bytes()
}

pub(super) fn grammars() -> Vec<Seed> {
    let mut make = Maker::new("grammar");
    let person = json!({ "type": "object", "properties": { "a": { "type": "string", "maxLength": 5 }, "b": { "type": "array", "items": { "type": "integer", "minimum": 3 } } }, "required": ["a"] });
    make.valid("a schema", schema(&person));
    make.valid("an expression", of("regex", "[a-c]{1,3}(x|y)?"));
    make.valid(
        "a grammar in Backus-Naur form",
        of("gbnf", "root ::= \"a\" b* # c\nb ::= [0-9] | \"(\" b \")\""),
    );
    make.valid("a grammar in Lark", of("lark", "start: \"a\" B*\nB: /[0-9]+/"));
    let any_of = |count: usize| -> Vec<Value> {
        (0..count).map(|index| json!({ "type": "object", "properties": { format!("p{index}"): { "type": "integer" } } })).collect()
    };
    let all_of: Vec<Value> = (0..12).map(|_| json!({ "anyOf": any_of(12) })).collect();
    make.bounded("12 times a choice of 12", EXPLODES, schema(&json!({ "allOf": all_of })));
    let mut doubled = json!({ "a29": { "type": "integer" } });
    for index in 0..29 {
        let next = json!({ "$ref": format!("#/$defs/a{}", index + 1) });
        doubled[format!("a{index}")] = json!({ "anyOf": [{ "type": "array", "items": next }, { "type": "object", "additionalProperties": next }] });
    }
    make.bounded(
        "references that double 29 times",
        EXPLODES,
        schema(&json!({ "$ref": "#/$defs/a0", "$defs": doubled })),
    );
    let both = |next: usize| json!({ "allOf": [{ "$ref": format!("#/$defs/a{next}") }, { "$ref": format!("#/$defs/a{next}") }] });
    let mut joined = json!({ "a24": { "type": "integer" } });
    (0..24).for_each(|index| joined[format!("a{index}")] = both(index + 1));
    make.bounded(
        "references that are joined 24 times",
        EXPLODES,
        schema(&json!({ "$ref": "#/$defs/a0", "$defs": joined })),
    );
    let number = |key: &str, value: Value| {
        schema(&json!({ "type": ["string", "array", "integer", "object"], key: value }))
    };
    for (name, key, value) in [
        ("a billion characters at most", "maxLength", json!(1_000_000_000)),
        ("a million characters at least", "minLength", json!(1_000_000)),
        ("a billion items at least", "minItems", json!(1_000_000_000)),
        ("a million properties at least", "minProperties", json!(1_000_000)),
        ("a multiple of nearly nothing", "multipleOf", json!(1e-300)),
        ("above the largest number", "minimum", json!(1e308)),
    ] {
        make.bounded(name, EXPLODES, number(key, value));
    }
    let words: Vec<String> = (0..10_000).map(|index| format!("word {index}")).collect();
    make.bounded("10,000 words", EXPLODES, schema(&json!({ "enum": words })));
    let patterns: serde_json::Map<String, Value> =
        (0..100).map(|index| (format!("^.*{index}.*$"), json!({}))).collect();
    make.bounded(
        "100 patterns of keys that overlap",
        EXPLODES,
        schema(&json!({ "type": "object", "patternProperties": patterns })),
    );
    let prime = json!({ "type": "integer", "multipleOf": 999_999_937 });
    make.refused("a multiple of a large prime", EXPLODES, schema(&prime), "multipleOf");
    expressions(&mut make);
    make.seeds
}

fn expressions(make: &mut Maker) {
    for (name, expression) in [
        ("a repetition of repetitions", "((a{1,100}){1,100}){1,100}"),
        ("a hundred times anything", "(.*a){100}"),
        ("the letter before the last thousand", "(a|b)*a(a|b){1000}"),
        ("many ways to read the same", "(a|aa|aaa|b.*)*(c|cc)*[^x]{200}"),
        ("all letters of all alphabets", r"(\pL\pN){500}"),
        ("a long expression", &"(a|b)".repeat(20_000)),
    ] {
        make.bounded(name, EXPLODES, of("regex", expression));
    }
    make.bounded("every rule twice behind itself", EXPLODES, of("lark", "start: start start | \"a\" | \"\""));
    let chain: String =
        (0..2000).map(|index| format!("r{index}: r{} r{} | \"a\"\n", index + 1, index + 1)).collect();
    make.bounded(
        "a rule four times itself",
        EXPLODES,
        of("gbnf", "root ::= (root root)* (root root)+ | [^a]{0,9999}"),
    );
    make.bounded("2,000 rules in a row", EXPLODES, of("lark", &format!("start: r0\n{chain}r2000: \"b\"")));
    make.bounded("a schema that is itself", NEVER_ENDS, schema(&json!({ "$ref": "#" })));
    let endless = json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] });
    make.bounded("an object that holds itself", NEVER_ENDS, schema(&endless));
    make.refused(
        "the library's own options",
        "silent ignorance",
        schema(&json!({ "x-guidance": { "lenient": true } })),
        "x-guidance",
    );
    make.refused(
        "a keyword that is not honoured",
        "silent ignorance",
        schema(&json!({ "not": {} })),
        "no finite value",
    );
    make.refused("look-around", "silent ignorance", of("regex", "(?=a)b"), "look-around");
}

pub(super) fn tool_calls() -> Vec<Seed> {
    let mut make = Maker::new("tool_calls");
    make.valid(
        "a call of Hermes",
        b"Well.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>".to_vec(),
    );
    make.valid(
        "calls of Llama 3",
        b"{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"f\", \"parameters\": {\"a\": \"}\"}}".to_vec(),
    );
    make.valid("calls of Mistral", b"[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]".to_vec());
    make.valid("a call of Mistral by its name", b"[TOOL_CALLS]f[ARGS]{\"a\": [1]}[TOOL_CALLS]f{}".to_vec());
    make.valid("calls of Python", b"[f(a=1, b='x'), f(c={'d': [True, None]})]".to_vec());
    make.valid("calls of Granite", b"<|tool_call|>[{\"name\": \"f\", \"arguments\": {}}]".to_vec());
    make.valid(
        "calls of Qwen3-Coder",
        b"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{\"c\": \"</parameter>\"}\n</parameter>\n\
          </function>\n</tool_call>\n<tool_call><function=f></function></tool_call>"
            .to_vec(),
    );
    make.valid("a thought", b"<think>\nI </thi nk> so.\n</think>\n\n[THINK] Yes.".to_vec());
    make.valid("a thought of Magistral", b"[THINK]I [/ think.[/THINK] <think>Yes.".to_vec());
    let deep = "[".repeat(100_000);
    for (name, answer) in [
        ("arguments 100,000 deep", format!("<tool_call>{{\"name\":\"f\",\"arguments\":{deep}")),
        ("a list of Python's 100,000 deep", format!("[f(a={deep}")),
        ("a name without an end", format!("<tool_call>{{\"name\":\"{}", "x".repeat(100_000))),
        ("100,000 announcements", "<tool_call>".repeat(100_000)),
        ("a megabyte of white space", format!("[TOOL_CALLS]{}", " ".repeat(1 << 20))),
        ("white space, and white space", " \n".repeat(1 << 19)),
        ("a tag without an end", format!("<tool_call><function={}", "x".repeat(100_000))),
        (
            "a value that goes on behind its end",
            format!("<tool_call><function=f><parameter=b>{{\"{}", "</parameter>".repeat(80_000)),
        ),
        ("a megabyte of white space in a thought", format!("<think>a{}", " ".repeat(1 << 20))),
        ("a thought of half tags", "</think".repeat(80_000)),
        ("half announcements", "<tool_cal".repeat(50_000)),
    ] {
        make.bounded(name, NEARLY, answer.into_bytes());
    }
    make.seeds
}
