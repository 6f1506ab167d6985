//! Formats in which models write tool calls, and their detection from a chat template.

use settings::ToolCallParser;

use super::tagged::OPENING;
use crate::openai::{reasoning::harmony, template_options::has_word};

/// The format of tool calls; each format is recognized by its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere, any number of calls: Hermes,
    /// Qwen.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, perhaps after `<|python_tag|>`; further
    /// calls follow `;`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS]` and then `[{"name": ..., "arguments": {...}}, ...]`, or `NAME{...}` or
    /// `NAME[ARGS]{...}`: Mistral.
    Mistral,
    /// `[name(key=value, ...), ...]` as the whole answer, with Python literals: Llama 3.2, Gemma 3 with
    /// prompts that ask for this format.
    Pythonic,
    /// `<|tool_call|>` and then `[{"name": ..., "arguments": {...}}, ...]`: Granite 3.
    Granite,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, anywhere, any
    /// number of calls: Qwen3-Coder, Qwen 3.5, Nemotron 3.
    Qwen3Coder,
    /// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`, one call: gpt-oss.
    Harmony,
}

impl ToolCallFormat {
    pub const ALL: [Self; 7] = [
        Self::Hermes,
        Self::Llama3,
        Self::Mistral,
        Self::Pythonic,
        Self::Granite,
        Self::Qwen3Coder,
        Self::Harmony,
    ];

    /// Returns the format that the operator or the chat template chooses; `None` if calls are not read or the
    /// template shows no tools.
    #[must_use]
    pub fn of(chosen: ToolCallParser, template: Option<&str>) -> Option<Self> {
        match chosen {
            ToolCallParser::None => None,
            ToolCallParser::Auto => template.and_then(Self::of_template),
            ToolCallParser::Hermes => Some(Self::Hermes),
            ToolCallParser::Llama3Json => Some(Self::Llama3),
            ToolCallParser::Mistral => Some(Self::Mistral),
            ToolCallParser::Pythonic => Some(Self::Pythonic),
            ToolCallParser::Granite => Some(Self::Granite),
            ToolCallParser::Qwen3Coder => Some(Self::Qwen3Coder),
            ToolCallParser::Harmony => Some(Self::Harmony),
        }
    }

    /// Detects the format by words that only its templates contain.
    fn of_template(template: &str) -> Option<Self> {
        if !shows_tools(template) {
            return None;
        }
        let has = |word: &str| template.contains(word);
        if has("<|channel|>commentary") && has("functions.") {
            Some(Self::Harmony)
        } else if has("<tool_call>") && has("<function=") {
            Some(Self::Qwen3Coder)
        } else if has("<tool_call>") {
            // Other models put tags of their own inside `<tool_call>`.
            (!has("<arg_key>") && !has("<invoke name=")).then_some(Self::Hermes)
        } else if has("<|tool_call|>") && has("JSON list") {
            Some(Self::Granite)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("\"parameters\": ") && (has("<|python_tag|>") || has("<|start_header_id|>")) {
            Some(Self::Llama3)
        } else if has("[func_name1(params_name1=") || has("func_name1(") {
            Some(Self::Pythonic)
        } else {
            None
        }
    }

    /// Returns the special token, or the text, that announces calls.
    #[must_use]
    pub(crate) fn announcement(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::Qwen3Coder => Some("<tool_call>"),
            Self::Granite => Some("<|tool_call|>"),
            Self::Llama3 => Some("<|python_tag|>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Harmony => Some(harmony::FUNCTION_CALL),
            Self::Pythonic => None,
        }
    }

    /// Returns the text that begins a call, for models that sometimes omit the tag before the call.
    #[must_use]
    pub(crate) fn opening(self) -> Option<&'static str> {
        (self == Self::Qwen3Coder).then_some(OPENING)
    }

    /// Returns special tokens that must be decoded as text although the decoder hides others.
    #[must_use]
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            Self::Granite => &["<|tool_call|>"],
            Self::Llama3 => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]"],
            Self::Harmony => &harmony::WORDS,
            Self::Pythonic => &[],
        }
    }
}

/// True if a chat template shows tools to its model.
#[must_use]
pub(crate) fn shows_tools(template: &str) -> bool {
    has_word(template, "tools")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_shows_its_format() {
        for (template, format) in [
            ("{% if tools %}<tool_call>{% endif %}", Some(ToolCallFormat::Hermes)),
            ("{% if tools %}<tool_call>\n<function=a>", Some(ToolCallFormat::Qwen3Coder)),
            ("{% if tools %}<tool_call>a<arg_key>", None),
            (
                "{% if tools %}respond with <|tool_call|> followed by a JSON list",
                Some(ToolCallFormat::Granite),
            ),
            (
                "{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
                Some(ToolCallFormat::Mistral),
            ),
            (
                "<|start_header_id|>{% for t in tools %}{\"name\": x, \"parameters\": y}",
                Some(ToolCallFormat::Llama3),
            ),
            ("{% if tools %}[func_name1(params_name1=params_value1...)]", Some(ToolCallFormat::Pythonic)),
            (
                "{% if tools %}to=functions.{{ name }}<|channel|>commentary json<|message|>",
                Some(ToolCallFormat::Harmony),
            ),
            ("{% if tools %}in a way nobody knows", None),
            ("{{ messages }}<tool_call>", None),
            ("{{ my_tools }}<tool_call>", None),
        ] {
            assert_eq!(ToolCallFormat::of(ToolCallParser::Auto, Some(template)), format, "{template}");
        }
        assert_eq!(ToolCallFormat::of(ToolCallParser::Auto, None), None);
        assert_eq!(ToolCallFormat::of(ToolCallParser::None, Some("{{ tools }}<tool_call>")), None);
        assert_eq!(ToolCallFormat::of(ToolCallParser::Mistral, None), Some(ToolCallFormat::Mistral));
    }
}
