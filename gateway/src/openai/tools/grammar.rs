//! What an answer with calls has to look like, where it has to: calls that are required, and functions that are strict.
//!
//! [`keywords`]: arguments that are written one by one, each with its name.

mod keywords;

use std::fmt::Write as _;

use serde_json::{Value, json};
use text::grammar::{Grammar, GrammarError, lark_json, lark_string};

use super::{
    asked::{Calls, Choice, Strictness, Tool, Tools},
    format::Format,
};

/// Why calls cannot be made to look like what they have to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallsError {
    /// A function's schema, or the whole, cannot be honoured.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// A way to write calls that has no place for what the schema says.
    #[error(
        "the parameters of '{name}' are no plain list of properties, and the model's way to write calls has no other"
    )]
    NoPlainList {
        /// The function.
        name: String,
    },
    /// A way to write calls that has no quotes around texts, and so no place for what a schema says of one.
    #[error(
        "'{keyword}' of the parameter '{parameter}' of '{name}' cannot be kept to in the model's way to write calls, which puts \
         texts in no quotes; leave it out"
    )]
    NoText {
        /// The function.
        name: String,
        /// Which of its parameters.
        parameter: String,
        /// What is said of it.
        keyword: String,
    },
    /// What else the answer has to look like is said in a way that calls cannot stand beside.
    #[error(
        "an answer that may call tools can besides be text or JSON; send 'tool_choice': \"none\" with any other grammar"
    )]
    Beside,
}

/// The grammar of answers with calls as `tools` wants them; where none are called `answer` says what they look like. `None`: nothing
/// has to be as it is. `announcement` is the token that announces calls, where it is one.
///
/// # Errors
/// See [`CallsError`].
pub fn of(
    tools: &Tools,
    format: Format,
    announcement: Option<u32>,
    answer: Option<&Grammar>,
) -> Result<Option<Grammar>, CallsError> {
    let is_strict = tools.list.iter().any(|tool| tool.strictness == Strictness::Strict);
    let is_free = tools.choice == Choice::Auto && !is_strict && answer.is_none();
    if is_free {
        return Ok(None);
    }
    let announcement = Announcement::of(format, announcement);
    let mut rules = Rules { format, source: String::new() };
    let start = match (&tools.choice, answer) {
        (Choice::Auto, None) => rules.text_or_calls(&announcement, tools.calls),
        (Choice::Auto, Some(Grammar::Json(schema))) => {
            rules.add("answer", &lark_json(schema)?);
            "answer | calls".to_owned()
        }
        (Choice::Auto, Some(_)) => return Err(CallsError::Beside),
        (Choice::Required | Choice::Named(_), _) => "calls".to_owned(),
    };
    rules.add("start", &start);
    rules.add("calls", &calls(format, &announcement.source, tools.calls));
    let names: Vec<String> = tools.callable().enumerate().map(|(index, _)| format!("call_{index}")).collect();
    rules.add("call", &names.join(" | "));
    for (index, tool) in tools.callable().enumerate() {
        rules.call(index, tool, &tools.choice)?;
    }
    Ok(Some(Grammar::Lark(rules.source)))
}

/// What announces calls, in Lark.
struct Announcement {
    source: String,
    is_token: bool,
}

impl Announcement {
    fn of(format: Format, token: Option<u32>) -> Self {
        match (format, token) {
            // Llama 3 announces nothing where it calls functions.
            (Format::Llama3 | Format::Pythonic, _) => Self { source: String::new(), is_token: false },
            (_, Some(token)) => Self { source: format!("<[{token}]>"), is_token: true },
            (_, None) => {
                Self { source: lark_string(format.announcement().unwrap_or_default()), is_token: false }
            }
        }
    }
}

/// All calls of an answer, of which each is a `call`.
fn calls(format: Format, announcement: &str, calls: Calls) -> String {
    let one = format!("{announcement} {}", behind_announcement(format, calls));
    match (format, calls) {
        (Format::Hermes | Format::Qwen3Coder, Calls::Many) => format!("{one} (\"\\n\" {one})*"),
        _ => one,
    }
}

/// What stands behind an announcement: one call, or all of them.
fn behind_announcement(format: Format, calls: Calls) -> String {
    let (open, between, close) = match format {
        Format::Hermes | Format::Qwen3Coder => return "\"\\n\" call \"\\n</tool_call>\"".to_owned(),
        Format::Llama3 => ("", "; ", ""),
        Format::Mistral | Format::Granite | Format::Pythonic => ("[", ", ", "]"),
    };
    let more = match calls {
        Calls::One => String::new(),
        Calls::Many => format!("({} call)*", lark_string(between)),
    };
    let bracket = |text: &str| if text.is_empty() { String::new() } else { lark_string(text) };
    format!("{} call {more} {}", bracket(open), bracket(close))
}

/// What `text` matches, without what has `word` in it.
fn without(text: &str, word: Option<&str>) -> String {
    let Some(word) = word else { return text.to_owned() };
    let word = word.replace('|', r"\|").replace('/', r"\/");
    format!("{text} & ~/(?s:.*){word}(?s:.*)/")
}

struct Rules {
    format: Format,
    source: String,
}

impl Rules {
    fn add(&mut self, name: &str, rule: &str) {
        // Into memory: writing cannot fail.
        let _ = writeln!(self.source, "{name}: {}", rule.trim());
    }

    /// Text in which, or behind which, calls may come.
    fn text_or_calls(&mut self, announcement: &Announcement, calls: Calls) -> String {
        let many = if calls == Calls::Many { "*" } else { "?" };
        match self.format {
            Format::Llama3 => {
                self.add("TEXT", r"/[^{](?s:.*)/");
                "calls | TEXT | \"\"".to_owned()
            }
            Format::Pythonic => {
                self.add("TEXT", r"/[^\[](?s:.*)/");
                "calls | TEXT | \"\"".to_owned()
            }
            Format::Hermes | Format::Mistral | Format::Granite | Format::Qwen3Coder
                if announcement.is_token =>
            {
                self.add("TEXT", &without("/(?s:.+)/", self.format.opening()));
                format!("TEXT? (calls TEXT?){many}")
            }
            Format::Mistral => {
                self.add("TEXT", r"/[^\[](?s:.*)/");
                "calls | TEXT | \"\"".to_owned()
            }
            format @ (Format::Hermes | Format::Granite | Format::Qwen3Coder) => {
                let word = format.announcement().unwrap_or_default();
                // Up to the announcement, and with it; and what has none in it.
                let text = without("/(?s:.*)/", format.opening());
                self.add(&format!("announced[suffix={}]", lark_string(word)), &text);
                self.add("TEXT", &without(&text, Some(word)));
                format!("(announced {}){many} TEXT", behind_announcement(format, calls))
            }
        }
    }

    fn call(&mut self, index: usize, tool: &Tool, choice: &Choice) -> Result<(), CallsError> {
        let (rule, arguments) = (format!("call_{index}"), format!("arguments_{index}"));
        let is_free = *choice == Choice::Auto && tool.strictness == Strictness::Free;
        let name = Value::from(tool.name.as_str());
        let (before, behind) = match self.format {
            Format::Pythonic => (format!("{}(", tool.name), ")"),
            Format::Qwen3Coder => (format!("<function={}>\n", tool.name), "</function>"),
            Format::Llama3 => (format!("{{\"name\": {name}, \"parameters\": "), "}"),
            Format::Hermes | Format::Mistral | Format::Granite => {
                (format!("{{\"name\": {name}, \"arguments\": "), "}")
            }
        };
        self.add(&rule, &format!("{} {arguments} {}", lark_string(&before), lark_string(behind)));
        match (self.format, is_free) {
            (Format::Pythonic | Format::Qwen3Coder, true) => self.any_keywords(&arguments),
            (Format::Pythonic | Format::Qwen3Coder, false) => self.keywords(&arguments, tool),
            (_, true) => {
                self.add(&arguments, &lark_json(&json!({ "type": "object" }))?);
                Ok(())
            }
            (_, false) => {
                self.add(&arguments, &lark_json(&tool.parameters)?);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests;
