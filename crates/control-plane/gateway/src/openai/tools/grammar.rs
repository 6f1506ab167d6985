//! The grammar of an answer with tool calls, for required calls and strict functions.
//!
//! [`keywords`]: arguments that are written one by one, each with its name.

mod keywords;

use std::fmt::Write as _;

use serde_json::{Value, json};
use text::grammar::{Enforcement, Grammar, GrammarError, HarmonyTags, lark_json, lark_source, lark_string};

use super::{
    super::structured::{SchemaWarning, Structure},
    format::ToolCallFormat,
    tool_params::{CallLimit, CustomInput, INPUT, Strictness, Tool, ToolChoice, Tools},
};

/// Why tool calls cannot be constrained by a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallsError {
    /// A function's schema or the whole grammar cannot be expressed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The schema is more than a list of properties, which the call format cannot express.
    #[error("the parameters of '{name}' must be a plain list of properties in the model's tool-call format")]
    NoPlainList { name: String },
    /// The call format writes strings without quotes, so it cannot enforce this keyword of a string.
    #[error(
        "'{keyword}' of the parameter '{parameter}' of '{name}' cannot be enforced in the model's \
         tool-call format, which has no quotes; remove it"
    )]
    NoText { name: String, parameter: String, keyword: String },
    /// The request has tools and another grammar that cannot be combined with them.
    #[error(
        "an answer with tools may otherwise be only text or JSON; send 'tool_choice': \"none\" with \
         another grammar"
    )]
    Beside,
}

/// Returns the grammar of answers with the calls that `tools` requires, and warnings about unenforced
/// keywords. `answer` constrains answers without calls. `token` finds the special token of a name, if the
/// tokenizer has one. Returns `None` if nothing is constrained.
///
/// # Errors
/// See [`CallsError`].
pub(crate) fn of(
    tools: &Tools,
    format: ToolCallFormat,
    token: &dyn Fn(&str) -> Option<u32>,
    answer: Option<&Structure>,
) -> Result<Option<(Grammar, Vec<SchemaWarning>)>, CallsError> {
    let is_free = tools.choice == ToolChoice::Auto && !tools.are_formed() && answer.is_none();
    if is_free {
        return Ok(None);
    }
    let tags = HarmonyTags::of(token);
    let announcement = match format {
        ToolCallFormat::Harmony => CallPrefix { source: tags.call(), is_token: true },
        _ => CallPrefix::of(format, format.announcement().and_then(token)),
    };
    // An answer of gpt-oss ends with its first call.
    let limit = if format == ToolCallFormat::Harmony { CallLimit::One } else { tools.calls };
    let mut rules = GrammarRules { format, tags, limit, source: String::new(), warnings: Vec::new() };
    let ways = rules.ways(tools, &announcement.source)?;
    let start = match (&tools.choice, answer) {
        (ToolChoice::Auto, None) => rules.text_or_calls(&announcement, limit, ways),
        (ToolChoice::Auto, Some(Structure { grammar: Grammar::Json(schema), field, enforcement })) => {
            rules.json("answer", schema, (field, *enforcement))?;
            let header = if format == ToolCallFormat::Harmony { tags.header("final") } else { String::new() };
            format!("{header} answer | {}", ways.any())
        }
        (ToolChoice::Auto, Some(_)) => return Err(CallsError::Beside),
        (ToolChoice::Required | ToolChoice::Named(_), _) => ways.any(),
    };
    rules.add("start", &start);
    Ok(Some((Grammar::Rules(rules.source), rules.warnings)))
}

/// The rules of calls that an answer may have. A custom tool's input extends to the answer's end, since it
/// may contain any text, so such a call is the last.
#[derive(Debug, Clone, Copy)]
struct AllowedCalls {
    /// The rule `calls`: calls of functions.
    functions: bool,
    /// The rule `last`: a call of a custom tool, perhaps after calls of functions.
    custom: bool,
}

impl AllowedCalls {
    fn any(self) -> String {
        let rules = [("calls", self.functions), ("last", self.custom)];
        rules.iter().filter(|(_, is_there)| *is_there).map(|(rule, _)| *rule).collect::<Vec<_>>().join(" | ")
    }
}

/// The announcement of calls, in Lark.
struct CallPrefix {
    source: String,
    is_token: bool,
}

impl CallPrefix {
    fn of(format: ToolCallFormat, token: Option<u32>) -> Self {
        match (format, token) {
            // Llama 3 announces no calls of functions.
            (ToolCallFormat::Llama3 | ToolCallFormat::Pythonic, _) => {
                Self { source: String::new(), is_token: false }
            }
            (_, Some(token)) => Self { source: format!("<[{token}]>"), is_token: true },
            (_, None) => {
                Self { source: lark_string(format.announcement().unwrap_or_default()), is_token: false }
            }
        }
    }
}

/// Returns the rule of all calls of an answer; each call is a `call`.
fn calls(format: ToolCallFormat, announcement: &str, calls: CallLimit) -> String {
    let one = format!("{announcement} {}", behind_announcement(format, calls));
    match (format, calls) {
        (ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder, CallLimit::Many) => {
            format!("{one} (\"\\n\" {one})*")
        }
        _ => one,
    }
}

/// Returns the rule of calls that end with a custom tool's `input_call`.
fn last(format: ToolCallFormat, announcement: &str, (calls, functions): (CallLimit, bool)) -> String {
    let many = functions && calls == CallLimit::Many;
    if !matches!(format, ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder) {
        return format!("{announcement} {}", behind_last_announcement(format, many));
    }
    let one = format!("{announcement} {}", behind_announcement(format, calls));
    let before = if many { format!("({one} \"\\n\")* ") } else { String::new() };
    format!("{before}{announcement} {}", behind_last_announcement(format, many))
}

/// Returns the rule of a custom tool's call; in a list, function calls may precede the call if `many`.
fn behind_last_announcement(format: ToolCallFormat, many: bool) -> String {
    let Some((open, between, _)) = brackets(format) else { return "\"\\n\" input_call".to_owned() };
    let before = if many { format!("(call {})* ", lark_string(between)) } else { String::new() };
    format!("{} {before}input_call", bracket(open))
}

/// Returns the text before, between and after calls in a list; `None` if each call is announced.
fn brackets(format: ToolCallFormat) -> Option<(&'static str, &'static str, &'static str)> {
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder => None,
        ToolCallFormat::Llama3 => Some(("", "; ", "")),
        ToolCallFormat::Harmony => Some(("", "", "")),
        ToolCallFormat::Mistral | ToolCallFormat::Granite | ToolCallFormat::Pythonic => {
            Some(("[", ", ", "]"))
        }
    }
}

fn bracket(text: &str) -> String {
    if text.is_empty() { String::new() } else { lark_string(text) }
}

/// Returns the rule after an announcement: one call, or the list of all calls.
fn behind_announcement(format: ToolCallFormat, calls: CallLimit) -> String {
    let Some((open, between, close)) = brackets(format) else {
        return "\"\\n\" call \"\\n</tool_call>\"".to_owned();
    };
    let more = match calls {
        CallLimit::One => String::new(),
        CallLimit::Many => format!("({} call)*", lark_string(between)),
    };
    format!("{} call {more} {}", bracket(open), bracket(close))
}

/// Returns a terminal for the matches of `text` that do not contain `word`.
fn without(text: &str, word: Option<&str>) -> String {
    let Some(word) = word else { return text.to_owned() };
    let word = word.replace('|', r"\|").replace('/', r"\/");
    format!("{text} & ~/(?s:.*){word}(?s:.*)/")
}

/// Writes a regular expression as a Lark terminal, with slashes escaped.
fn lark_expression(expression: &str) -> String {
    if expression.is_empty() {
        return "\"\"".to_owned();
    }
    let (mut written, mut is_escaped) = (String::from("/"), false);
    for c in expression.chars() {
        if c == '/' && !is_escaped {
            written.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        written.push(c);
    }
    written.push('/');
    written
}

/// Returns the path of the tool's parameters for messages, and whether keywords that a grammar cannot
/// express are errors.
fn parameters_of(tool: &Tool) -> (String, Enforcement) {
    let enforcement = match tool.strictness {
        Strictness::Strict => Enforcement::Strict,
        Strictness::Free => Enforcement::BestEffort,
    };
    (format!("tools.{}.parameters", tool.name), enforcement)
}

struct GrammarRules {
    format: ToolCallFormat,
    /// Tags of [`ToolCallFormat::Harmony`].
    tags: HarmonyTags,
    limit: CallLimit,
    source: String,
    warnings: Vec<SchemaWarning>,
}

impl GrammarRules {
    fn add(&mut self, name: &str, rule: &str) {
        // Writing to memory cannot fail.
        let _ = writeln!(self.source, "{name}: {}", rule.trim());
    }

    /// Adds the rules `calls` and `last`, and those of each call.
    fn ways(&mut self, tools: &Tools, announcement: &str) -> Result<AllowedCalls, CallsError> {
        let (mut functions, mut custom) = (Vec::new(), Vec::new());
        for (index, tool) in tools.callable().enumerate() {
            if let Some(input) = &tool.input {
                self.input_call(index, tool, input)?;
                custom.push(format!("input_call_{index}"));
            } else {
                self.call(index, tool, &tools.choice)?;
                functions.push(format!("call_{index}"));
            }
        }
        let ways = AllowedCalls { functions: !functions.is_empty(), custom: !custom.is_empty() };
        if ways.functions {
            self.add("calls", &calls(self.format, announcement, self.limit));
            self.add("call", &functions.join(" | "));
        }
        if ways.custom {
            self.add("last", &last(self.format, announcement, (self.limit, ways.functions)));
            self.add("input_call", &custom.join(" | "));
        }
        Ok(ways)
    }

    /// Adds a call of a custom tool, with its input up to the answer's end.
    fn input_call(&mut self, index: usize, tool: &Tool, input: &CustomInput) -> Result<(), CallsError> {
        let name = Value::from(tool.name.as_str());
        let before = match self.format {
            ToolCallFormat::Harmony => format!("{} {}", lark_string(&tool.name), self.tags.begins(false)),
            ToolCallFormat::Pythonic => lark_string(&format!("{}(\n", tool.name)),
            ToolCallFormat::Qwen3Coder => {
                lark_string(&format!("<function={}>\n<parameter={INPUT}>\n", tool.name))
            }
            ToolCallFormat::Llama3
            | ToolCallFormat::Hermes
            | ToolCallFormat::Mistral
            | ToolCallFormat::Granite => lark_string(&format!("{{\"name\": {name}}}\n")),
        };
        let text = match input {
            CustomInput::Grammar { grammar: Grammar::Lark(source), .. } => {
                format!("%lark {{\n{}\n}}", lark_source(source)?)
            }
            CustomInput::Grammar { grammar: Grammar::Regex(expression), .. } => lark_expression(expression),
            _ => "/(?s:.*)/".to_owned(),
        };
        self.add(&format!("input_call_{index}"), &format!("{before} {text}"));
        Ok(())
    }

    /// Adds a JSON text that matches `schema`, which stands in `field` of the request.
    fn json(
        &mut self,
        name: &str,
        schema: &Value,
        (field, enforcement): (&str, Enforcement),
    ) -> Result<(), GrammarError> {
        let (rule, warnings) = lark_json(schema, enforcement)?;
        self.add(name, &rule);
        self.warnings.extend(warnings.into_iter().map(|warning| SchemaWarning::of(field, warning)));
        Ok(())
    }

    /// Returns the rule of text that calls may interrupt or replace.
    fn text_or_calls(&mut self, announcement: &CallPrefix, calls: CallLimit, ways: AllowedCalls) -> String {
        let many = if calls == CallLimit::Many { "*" } else { "?" };
        let last = if ways.custom { "last?" } else { "" };
        match self.format {
            ToolCallFormat::Llama3 => {
                self.add("TEXT", r"/[^{](?s:.*)/");
                format!("{} | TEXT | \"\"", ways.any())
            }
            ToolCallFormat::Pythonic => {
                self.add("TEXT", r"/[^\[](?s:.*)/");
                format!("{} | TEXT | \"\"", ways.any())
            }
            ToolCallFormat::Harmony => {
                self.add("TEXT", "/(?s:.+)/");
                format!("{} | {} TEXT?", ways.any(), self.tags.header("final"))
            }
            ToolCallFormat::Hermes
            | ToolCallFormat::Mistral
            | ToolCallFormat::Granite
            | ToolCallFormat::Qwen3Coder
                if announcement.is_token =>
            {
                self.add("TEXT", &without("/(?s:.+)/", self.format.opening()));
                let calls = if ways.functions { format!("(calls TEXT?){many}") } else { String::new() };
                format!("TEXT? {calls} {last}")
            }
            ToolCallFormat::Mistral => {
                self.add("TEXT", r"/[^\[](?s:.*)/");
                format!("{} | TEXT | \"\"", ways.any())
            }
            format @ (ToolCallFormat::Hermes | ToolCallFormat::Granite | ToolCallFormat::Qwen3Coder) => {
                self.text_up_to_calls(format, calls, ways)
            }
        }
    }

    /// Returns the rule of text and calls if the announcement is plain text.
    fn text_up_to_calls(&mut self, format: ToolCallFormat, calls: CallLimit, ways: AllowedCalls) -> String {
        let many = if calls == CallLimit::Many { "*" } else { "?" };
        let word = format.announcement().unwrap_or_default();
        // `announced` ends with the announcement; `TEXT` does not contain it.
        let text = without("/(?s:.*)/", format.opening());
        self.add(&format!("announced[suffix={}]", lark_string(word)), &text);
        self.add("TEXT", &without(&text, Some(word)));
        let functions = match ways.functions {
            true => format!("(announced {}){many}", behind_announcement(format, calls)),
            false => String::new(),
        };
        if !ways.custom {
            return format!("{functions} TEXT");
        }
        let is_list_of_many = ways.functions && calls == CallLimit::Many;
        format!("{functions} (announced {} | TEXT)", behind_last_announcement(format, is_list_of_many))
    }

    fn call(&mut self, index: usize, tool: &Tool, choice: &ToolChoice) -> Result<(), CallsError> {
        let (rule, arguments) = (format!("call_{index}"), format!("arguments_{index}"));
        let is_free = *choice == ToolChoice::Auto && tool.strictness == Strictness::Free;
        let name = Value::from(tool.name.as_str());
        let (before, behind) = match self.format {
            ToolCallFormat::Harmony => {
                let before = format!("{} {}", lark_string(&tool.name), self.tags.begins(true));
                self.add(&rule, &format!("{before} {arguments}"));
                return self.arguments(&arguments, tool, is_free);
            }
            ToolCallFormat::Pythonic => (format!("{}(", tool.name), ")"),
            ToolCallFormat::Qwen3Coder => (format!("<function={}>\n", tool.name), "</function>"),
            ToolCallFormat::Llama3 => (format!("{{\"name\": {name}, \"parameters\": "), "}"),
            ToolCallFormat::Hermes | ToolCallFormat::Mistral | ToolCallFormat::Granite => {
                (format!("{{\"name\": {name}, \"arguments\": "), "}")
            }
        };
        self.add(&rule, &format!("{} {arguments} {}", lark_string(&before), lark_string(behind)));
        self.arguments(&arguments, tool, is_free)
    }

    /// Adds the rule `name` of a tool's arguments, which may be any if `is_free`.
    fn arguments(&mut self, name: &str, tool: &Tool, is_free: bool) -> Result<(), CallsError> {
        match (self.format, is_free) {
            (ToolCallFormat::Pythonic | ToolCallFormat::Qwen3Coder, true) => self.any_keywords(name),
            (ToolCallFormat::Pythonic | ToolCallFormat::Qwen3Coder, false) => self.keywords(name, tool),
            (_, true) => {
                let any = json!({ "type": "object" });
                Ok(self.json(name, &any, ("tools", Enforcement::Strict))?)
            }
            (_, false) => {
                let (field, enforcement) = parameters_of(tool);
                Ok(self.json(name, &tool.parameters, (&field, enforcement))?)
            }
        }
    }
}

#[cfg(test)]
mod tests;
