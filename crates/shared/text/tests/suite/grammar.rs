//! Grammars: allowed next tokens over the vocabulary of a real model.

use crate::support::{golden, smollm2};
use serde_json::{Value, json};
use text::{
    grammar::{
        Enforcement, Grammar, GrammarError, Grammars, HarmonyTags, MatchError, Matcher, ReasoningPrefix, Tag,
        TokenBytes, Tokens,
    },
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

const MAX_TOKENS: usize = 600;

struct Draws(u64);

impl Draws {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }
}

pub(crate) struct Model {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) grammars: Grammars,
}

impl Model {
    pub(crate) fn open() -> Self {
        let tokenizer = Tokenizer::from_gguf(&smollm2()).unwrap();
        let grammars = Grammars::of(&tokenizer).unwrap();
        Self { tokenizer, grammars }
    }

    fn matcher(&self, grammar: &Grammar) -> Matcher {
        self.grammars.compile(&grammar.source().unwrap()).unwrap()
    }

    fn allowed(&self, matcher: &mut Matcher) -> Vec<u32> {
        let set = matcher.allowed().unwrap();
        (0..self.tokenizer.vocab_size() as u32).filter(|&token| set.contains(token)).collect()
    }

    fn ends(&self, token: u32) -> bool {
        self.tokenizer.stop_tokens().contains(&token)
    }

    /// Walks through the grammar with any allowed token at each step, and ends as soon as possible; `None` if
    /// it is too long.
    pub(crate) fn walk(&self, grammar: &Grammar, seed: u64) -> Option<Vec<u32>> {
        let (mut matcher, mut draws, mut said) = (self.matcher(grammar), Draws(seed), Vec::new());
        while said.len() < MAX_TOKENS {
            let allowed = self.allowed(&mut matcher);
            if allowed.iter().any(|&token| self.ends(token)) {
                assert!(matcher.may_end());
                return Some(said);
            }
            assert!(!matcher.may_end());
            let token = allowed[draws.below(allowed.len())];
            assert!(!self.tokenizer.is_special(token), "{token} is no text");
            matcher.accept(token).unwrap();
            said.push(token);
        }
        None
    }

    pub(crate) fn text(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|&token| self.tokenizer.token_bytes(token).unwrap().to_vec()).collect();
        String::from_utf8(bytes).expect("what a grammar allows is text")
    }
}

fn schemas() -> Vec<(String, Value)> {
    let all = golden("schemas.json");
    let all = all.as_array().unwrap().iter();
    all.map(|one| (one["name"].as_str().unwrap().to_owned(), one["schema"].clone())).collect()
}

#[test]
fn every_schema_of_the_list_leads_to_json_and_the_end_of_the_answer_with_it() {
    let (model, schemas) = (Model::open(), schemas());
    assert!(schemas.len() >= 300);
    let mut whole = 0;
    for (name, schema) in &schemas {
        let grammar = Grammar::Json(schema.clone());
        for seed in 0..3 {
            let Some(said) = model.walk(&grammar, seed) else { continue };
            let text = model.text(&said);
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {text}: {error}"));
            if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
                assert!(allowed.contains(&value), "{name}: {value}");
            }
            whole += 1;
        }
    }
    assert!(whole >= schemas.len() * 2, "most walks come to an end: {whole}");
}

#[test]
fn what_may_follow_depends_on_what_was_said_alone() {
    let model = Model::open();
    let grammar = Grammar::Json(schemas().into_iter().find(|(name, _)| name == "pydantic model").unwrap().1);
    let said = model.walk(&grammar, 7).unwrap();
    let (mut first, mut sets) = (model.matcher(&grammar), Vec::new());
    for &token in &said {
        sets.push(first.allowed().unwrap());
        first.accept(token).unwrap();
    }
    // Replayed up to the middle, and rolled back to it.
    let half = said.len() / 2;
    let mut again = model.matcher(&grammar);
    said[..half].iter().for_each(|&token| again.accept(token).unwrap());
    first.take_back(said.len() - half).unwrap();
    for (index, &token) in said.iter().enumerate().skip(half) {
        assert_eq!(again.allowed().unwrap(), sets[index], "token {index}");
        assert_eq!(first.allowed().unwrap(), sets[index], "token {index}");
        again.accept(token).unwrap();
        first.accept(token).unwrap();
    }
    let end = model.tokenizer.stop_tokens()[0];
    assert!(again.allowed().unwrap().contains(end));
    again.accept(end).unwrap();
}

#[test]
fn expressions_choices_and_lark_are_kept_to() {
    let model = Model::open();
    let date = model.text(&model.walk(&Grammar::Regex(r"20[0-9]{2}-[01][0-9]/x".into()), 1).unwrap());
    assert!(date.len() == 9 && date.starts_with("20") && date.ends_with("/x"), "{date}");
    let choices = ["yes", "no", "it \"depends\"\n", "nothing"].map(str::to_owned);
    for seed in 0..8 {
        let said = model.text(&model.walk(&Grammar::Choice(choices.to_vec()), seed).unwrap());
        assert!(choices.contains(&said), "{said}");
    }
    let lark = "start: \"a=\" NUMBER (\", \" NUMBER)*\nNUMBER: /[0-9]{1,3}/";
    let sum = model.text(&model.walk(&Grammar::Lark(lark.into()), 3).unwrap());
    assert!(sum.starts_with("a="), "{sum}");
}

#[test]
fn grammars_in_backus_naur_form_are_kept_to() {
    let model = Model::open();
    let query = r#"
        root ::= "SELECT " column (", " column)* " FROM " table  # no conditions
        column ::= "id" | "name" | "col-" [0-9]{1,2}
        table ::= [a-z_]+ "."? "t"
    "#;
    let expected = Grammar::Regex(
        "SELECT (id|name|col-[0-9]{1,2})(, (id|name|col-[0-9]{1,2}))* FROM [a-z_]+\\.?t".into(),
    );
    let sums = r#"
        root ::= ws sum
        sum ::= term (ws [-+*/] ws term)*
        term ::= [0-9]+ | "(" sum ")"
        ws ::= [ \t]{0,2}
    "#;
    for seed in 0..8 {
        if let Some(said) = model.walk(&Grammar::Gbnf(query.into()), seed) {
            let mut judge = model.matcher(&expected);
            said.iter().for_each(|&token| judge.accept(token).unwrap());
            assert!(judge.may_end(), "{}", model.text(&said));
        }
        if let Some(said) = model.walk(&Grammar::Gbnf(sums.into()), seed) {
            let text = model.text(&said);
            let count = |sign| text.matches(sign).count();
            assert_eq!(count('('), count(')'), "{text}");
            assert!(text.chars().all(|character| "0123456789()+-*/ \t".contains(character)), "{text}");
        }
    }
    for (sentence, allowed) in
        [("12 + (3*4)", true), ("1", true), ("  1", true), ("1 + ", false), ("(1", false)]
    {
        let mut matcher = model.matcher(&Grammar::Gbnf(sums.into()));
        let tokens = model.tokenizer.encode(sentence, AddSpecial::No, ParseSpecial::No).unwrap();
        let whole = tokens.iter().all(|&token| matcher.accept(token).is_ok()) && matcher.may_end();
        assert_eq!(whole, allowed, "{sentence:?}");
    }
}

#[test]
fn a_token_that_may_not_come_is_told() {
    let model = Model::open();
    let mut matcher = model.matcher(&Grammar::json_object());
    let token = model.tokenizer.token_id("a").unwrap();
    assert_eq!(matcher.accept(token), Err(MatchError::NotAllowed { token }));
    matcher.accept(model.tokenizer.token_id("{").unwrap()).unwrap();
}

#[test]
fn white_space_comes_to_an_end() {
    let model = Model::open();
    let mut matcher = model.matcher(&Grammar::json_object());
    matcher.accept(model.tokenizer.token_id("{").unwrap()).unwrap();
    let line = model.tokenizer.token_id("\u{10a}").unwrap();
    let lines = (0..100).take_while(|_| matcher.accept(line).is_ok()).count();
    assert_eq!(lines, 32);
}

#[test]
fn what_cannot_be_honoured_is_refused_by_its_name() {
    let model = Model::open();
    let refused = |grammar: &Grammar| {
        let source = grammar.source();
        source.and_then(|source| model.grammars.compile(&source)).unwrap_err().to_string()
    };
    for (schema, word) in [
        (json!({ "not": { "type": "integer" } }), "not"),
        (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
        (json!({ "type": "array", "contains": { "const": 1 } }), "contains"),
        (json!({ "if": { "pattern": "a" }, "then": { "type": "string" } }), "if"),
        (json!({ "type": "object", "propertyNames": { "pattern": "a", "maxLength": 3 } }), "propertyNames"),
        (json!({ "type": "string", "format": "colour" }), "colour"),
        (json!({ "oneOf": [{ "type": "number" }, { "type": "integer" }] }), "oneOf"),
        (json!({ "type": "strung" }), "strung"),
        (json!({ "$ref": "#/$defs/nowhere" }), "nowhere"),
        (json!({ "$ref": "https://example.com/schema" }), "example.com"),
        (json!({ "type": "integer", "minimum": 3, "maximum": 2 }), "minimum"),
        (json!({ "type": "integer", "multipleOf": 1_000_003 }), "multipleOf"),
        (json!({ "type": "object", "required": ["a"], "additionalProperties": false }), "'a'"),
        (
            json!({ "type": "object", "additionalProperties": { "type": "boolean" }, "minProperties": 2 }),
            "minProperties",
        ),
        (json!({ "enum": [] }), "no finite value"),
        (json!({ "x-guidance": { "lenient": true } }), "x-guidance"),
    ] {
        let error = refused(&Grammar::Json(schema.clone()));
        assert!(error.contains(word), "{schema}: {error}");
    }
    assert!(refused(&Grammar::Regex("(".into())).contains("regex"));
    assert!(refused(&Grammar::Lark("begin: \"a\"".into())).contains("start"));
    assert_eq!(Grammar::Choice(Vec::new()).source(), Err(GrammarError::NoChoice));
    assert_eq!(Grammar::Regex("(".repeat(100)).source(), Err(GrammarError::TooDeep));
    let long = Grammar::Regex("a".repeat(300 << 10));
    assert!(matches!(long.source(), Err(GrammarError::TooLong { .. })));
}

#[test]
fn a_vocabulary_without_an_end_has_no_grammars() {
    let tokens = Tokens::new((0..=255_u8).map(|_| TokenBytes::Text(b"a")), &[]);
    assert_eq!(Grammars::over(&tokens).unwrap_err(), GrammarError::NoEnd);
}

#[test]
fn a_thought_stands_before_a_form_where_it_may_or_has_to() {
    let model = Model::open();
    let grammar = Grammar::Json(json!({ "type": "object", "properties": { "a": { "type": "integer" } } }));
    let tag = |name, token| Tag { name, token };
    let (open, close) = (tag("<think>", None), tag("</think>", None));
    let may = ReasoningPrefix::Tags { open: Some(open), close };
    let has_to = ReasoningPrefix::Tags { open: None, close };
    // Special tokens without text.
    let (first, last) = (3, 4);
    assert!([first, last].iter().all(|&token| model.tokenizer.is_special(token)));
    let by_tokens =
        ReasoningPrefix::Tags { open: Some(tag("<a>", Some(first))), close: tag("<b>", Some(last)) };
    let tokens = |text: &str| model.tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).unwrap();
    let is_whole = |thought, said: &[u32]| {
        let source = grammar.source_behind(Some(thought), Enforcement::Strict).unwrap();
        let mut matcher = model.grammars.compile(&source.text).unwrap();
        said.iter().all(|&token| matcher.accept(token).is_ok()) && matcher.may_end()
    };
    for (thought, text, whole) in [
        (may, "{\"a\": 1}", true),
        (may, "<think>hm {\"a\": 1} </thin\n</think>\n\n{\"a\": 1}", true),
        (may, "<think></think>{\"a\": 1}", true),
        (may, "<think>{\"a\": 1}", false),
        (may, "hm</think>{\"a\": 1}", false),
        (may, "<think>hm</think>hm", false),
        (may, "<think>hm</think><think>hm</think>{\"a\": 1}", false),
        (has_to, "hm</think>\n{\"a\": 1}", true),
        (has_to, "</think>{\"a\": 1}", true),
        (has_to, "{\"a\": 1}", false),
    ] {
        assert_eq!(is_whole(thought, &tokens(text)), whole, "{thought:?} {text}");
    }
    let answer = tokens("{\"a\": 1}");
    let said = |thought: &str| [&[first][..], &tokens(thought), &[last], &answer].concat();
    assert!(
        is_whole(by_tokens, &answer) && is_whole(by_tokens, &said("hm {")) && is_whole(by_tokens, &said(""))
    );
    assert!(!is_whole(by_tokens, &said("hm")[..2]));
}

#[test]
fn a_form_holds_for_the_final_message_of_the_harmony_format_alone() {
    let model = Model::open();
    let grammar = Grammar::Json(json!({ "type": "object", "properties": { "a": { "type": "integer" } } }));
    // Special tokens without text, one for each tag.
    let token = |name: &str| match name {
        HarmonyTags::START => Some(3),
        HarmonyTags::END => Some(4),
        HarmonyTags::CHANNEL => Some(5),
        HarmonyTags::MESSAGE => Some(6),
        _ => None,
    };
    assert!([3, 4, 5, 6].iter().all(|&token| model.tokenizer.is_special(token)));
    let said = |parts: &[&str]| -> Vec<u32> {
        let tokens = |part: &&str| match token(part) {
            Some(token) => vec![token],
            None => model.tokenizer.encode(part, AddSpecial::No, ParseSpecial::No).unwrap(),
        };
        parts.iter().flat_map(tokens).collect()
    };
    let is_whole = |is_open: bool, parts: &[&str]| {
        let thought = ReasoningPrefix::Harmony { tags: HarmonyTags::of(token), is_open, opens_final: true };
        let source = grammar.source_behind(Some(thought), Enforcement::Strict).unwrap();
        let mut matcher = model.grammars.compile(&source.text).unwrap();
        said(parts).iter().all(|&token| matcher.accept(token).is_ok()) && matcher.may_end()
    };
    let (start, end, channel, message) =
        (HarmonyTags::START, HarmonyTags::END, HarmonyTags::CHANNEL, HarmonyTags::MESSAGE);
    let thought = [channel, "analysis", message, "hm {", end, start, "assistant"];
    let answer = [channel, "final", message, "{\"a\": 1}"];
    assert!(is_whole(false, &[&thought[..], &answer].concat()));
    assert!(is_whole(false, &[&thought[..], &thought, &answer].concat()));
    assert!(is_whole(false, &answer), "a model may answer at once");
    assert!(is_whole(true, &[&thought[3..], &answer].concat()), "the prompt has begun the reasoning content");
    assert!(!is_whole(true, &answer));
    assert!(!is_whole(false, &[&thought[..], &[channel, "final", message, "hm"]].concat()));
    assert!(!is_whole(false, &["{\"a\": 1}"]), "an answer has a header");
}
