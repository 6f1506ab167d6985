//! Targets for constraints on answers, and for the parsers of tool calls in models' answers.

use std::sync::{Arc, OnceLock};

use gateway::openai::{
    reasoning::{ReasoningFormat, scan::ReasoningSplit},
    tools::{format::ToolCallFormat, parameter_kinds::Function, scan::Scanner},
};
use text::grammar::{Grammar, Grammars, TokenBytes, Tokens};

use crate::{Outcome, targets::refused};

/// Number of tokens of a started answer.
const STEPS: usize = 24;
pub(crate) const END: u32 = 256;

/// Returns the grammar compiler for a vocabulary of bytes.
pub(crate) fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| {
        let bytes: Vec<u8> = (0..=255).collect();
        let texts = bytes.iter().map(|byte| TokenBytes::Text(std::slice::from_ref(byte)));
        let tokens = Tokens::new(texts.chain([TokenBytes::Special(b"<end>")]), &[END]);
        Grammars::over(&tokens).expect("bytes are a vocabulary")
    })
}

/// Compiles a schema, expression or grammar after a line with `json`, `regex`, `lark` or `gbnf`, and starts
/// an answer with the first allowed token of each step.
pub(crate) fn grammar(input: &[u8]) -> Outcome {
    let text = std::str::from_utf8(input).map_err(refused)?;
    let (kind, text) = text.split_once('\n').ok_or("there is no kind")?;
    let grammar = match kind {
        "json" => Grammar::Json(model_files::strict_json::parse(text.as_bytes()).map_err(refused)?),
        "regex" => Grammar::Regex(text.to_owned()),
        "lark" => Grammar::Lark(text.to_owned()),
        "gbnf" => Grammar::Gbnf(text.to_owned()),
        other => return Err(format!("there is no kind {other}")),
    };
    let mut matcher = grammars().compile(&grammar.source().map_err(refused)?).map_err(refused)?;
    for _ in 0..STEPS {
        let set = matcher.allowed().map_err(refused)?;
        let Some(token) = (0..END).find(|&token| set.contains(token)) else { break };
        matcher.accept(token).map_err(refused)?;
    }
    Ok(())
}

/// Parses an answer in every format of reasoning content and tool calls. The result is equal for the whole
/// text and for single characters.
pub(crate) fn tool_calls(input: &[u8]) -> Outcome {
    let answer = String::from_utf8_lossy(input);
    for format in ReasoningFormat::ALL {
        [false, true].into_iter().for_each(|is_within| thoughts(&answer, format, is_within));
    }
    let takes =
        serde_json::json!({ "properties": { "a": { "type": "integer" }, "b": { "type": "object" } } });
    let functions: Arc<[Function]> = ["f", "weather"].map(|name| Function::new(name, &takes)).into();
    for format in ToolCallFormat::ALL {
        let scanner = || Scanner::new(format, Arc::clone(&functions));
        let (mut at_once, mut letters) = (scanner(), scanner());
        let (found, rest) = (at_once.push(&answer), at_once.finish());
        let (mut content, mut arguments) = (String::new(), String::new());
        let mut buffer = [0; 4];
        for letter in answer.chars() {
            let found = letters.push(letter.encode_utf8(&mut buffer));
            content.push_str(&found.content);
            found.calls.iter().for_each(|call| arguments.push_str(&call.arguments));
        }
        let last = letters.finish();
        content.push_str(&last.content);
        last.calls.iter().for_each(|call| arguments.push_str(&call.arguments));
        assert_eq!(content, format!("{}{}", found.content, rest.content));
        let all: String = found.calls.iter().chain(&rest.calls).map(|call| call.arguments.as_str()).collect();
        assert_eq!(arguments, all);
        assert_eq!(at_once.calls(), letters.calls());
    }
    Ok(())
}

fn thoughts(answer: &str, format: ReasoningFormat, is_within: bool) {
    let scanner = || format.scanner(is_within);
    let (mut at_once, mut letters, mut joined) = (scanner(), scanner(), ReasoningSplit::default());
    let mut whole = at_once.push(answer);
    whole.append(&at_once.finish());
    let mut buffer = [0; 4];
    for letter in answer.chars() {
        joined.append(&letters.push(letter.encode_utf8(&mut buffer)));
    }
    joined.append(&letters.finish());
    assert_eq!(whole, joined);
}
