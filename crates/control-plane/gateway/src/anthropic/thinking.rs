//! The reasoning that a request asks for, and the signatures of reasoning content.
//!
//! Anthropic signs reasoning content and checks the signature when the content comes back. This server checks
//! no signature, because a conversation may come from another server. If a request omits reasoning content
//! from its answer, the signature holds the content, so that the next request can return it.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use serde_json::Value;

use crate::{
    errors::ApiError,
    openai::{
        reasoning::effort::{ReasoningEffort, WithoutReasoning},
        strict_fields::{StrictFields, wrong},
    },
};

const THINKING: &str = "thinking";
const EFFORT: &str = "output_config.effort";
/// Levels of Anthropic's API, with the levels that chat templates know.
const LEVELS: [(&str, &str); 5] =
    [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "xhigh"), ("max", "xhigh")];
/// Budgets below these numbers of tokens are a low and a medium effort, as in litellm.
const LOW_BELOW: u32 = 2048;
const MEDIUM_BELOW: u32 = 4096;
/// Begins a signature that holds reasoning content.
const SEALED: &str = "holobiont:";

/// How an answer shows reasoning content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ThinkingDisplay {
    #[default]
    Text,
    /// The block has no text, and its signature holds the content.
    Omitted,
}

pub(super) struct RequestedThinking {
    pub effort: Option<ReasoningEffort>,
    pub display: ThinkingDisplay,
}

/// Reads `thinking`; `level` is the effort of the output, which also is the effort of the reasoning.
pub(super) fn read(fields: &mut StrictFields, level: Option<String>) -> Result<RequestedThinking, ApiError> {
    let level = level.map(|name| template_level(&name)).transpose()?;
    let Some(value) = fields.take(THINKING) else {
        let effort = level.map(|level| ReasoningEffort::hint(EFFORT, level));
        return Ok(RequestedThinking { effort, display: ThinkingDisplay::Text });
    };
    let fields = StrictFields::of(value, THINKING)?;
    config(fields, level).map_err(|error| error.within(THINKING))
}

fn template_level(name: &str) -> Result<&'static str, ApiError> {
    let known = LEVELS.iter().find(|(level, _)| *level == name).map(|(_, level)| *level);
    let names = LEVELS.map(|(level, _)| level).join(", ");
    known.ok_or_else(|| ApiError::invalid(EFFORT, format!("'{EFFORT}' must be one of {names}")))
}

fn config(mut fields: StrictFields, level: Option<&'static str>) -> Result<RequestedThinking, ApiError> {
    let kind = fields.required_text("type")?;
    let display = display(&mut fields)?;
    let effort = match kind.as_str() {
        "disabled" => ReasoningEffort::off(THINKING),
        "enabled" => {
            let budget = fields.count("budget_tokens", 1..=u32::MAX)?.map(level_of_budget);
            with_level(ReasoningEffort::on(THINKING), level.or(budget))
        }
        // The model decides whether to reason, so a model that never does may answer.
        "adaptive" => {
            with_level(ReasoningEffort::on(THINKING), level).without_reasoning(WithoutReasoning::Answer)
        }
        other => {
            let message = format!("the type '{other}' is not supported; use enabled, disabled or adaptive");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
        }
    };
    fields.finish()?;
    Ok(RequestedThinking { effort: Some(effort), display })
}

fn display(fields: &mut StrictFields) -> Result<ThinkingDisplay, ApiError> {
    match fields.text("display")?.as_deref() {
        None | Some("summarized") => Ok(ThinkingDisplay::Text),
        Some("omitted") => Ok(ThinkingDisplay::Omitted),
        Some(other) => Err(wrong("display", "summarized or omitted", &Value::from(other))),
    }
}

fn with_level(effort: ReasoningEffort, level: Option<&str>) -> ReasoningEffort {
    match level {
        Some(level) => effort.with_level(level),
        None => effort,
    }
}

/// Returns the level of a budget, because chat templates take levels and no budgets.
fn level_of_budget(tokens: u32) -> &'static str {
    match tokens {
        _ if tokens < LOW_BELOW => "low",
        _ if tokens < MEDIUM_BELOW => "medium",
        _ => "high",
    }
}

/// Returns the signature of reasoning content.
#[must_use]
pub(super) fn signature(text: &str, display: ThinkingDisplay) -> String {
    match display {
        ThinkingDisplay::Text => {
            let hash = blake3::derive_key("holobiont 2026 reasoning content v1", text.as_bytes());
            STANDARD_NO_PAD.encode(hash)
        }
        ThinkingDisplay::Omitted => format!("{SEALED}{}", STANDARD_NO_PAD.encode(text)),
    }
}

/// Returns the reasoning content that a signature holds, if it holds any.
#[must_use]
pub(super) fn sealed_text(signature: &str) -> Option<String> {
    let bytes = STANDARD_NO_PAD.decode(signature.strip_prefix(SEALED)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_of_omitted_content_returns_it_and_other_signatures_return_nothing() {
        for text in ["", "hm, 2 < 3", "né"] {
            assert_eq!(sealed_text(&signature(text, ThinkingDisplay::Omitted)).as_deref(), Some(text));
            assert_eq!(sealed_text(&signature(text, ThinkingDisplay::Text)), None);
        }
        for foreign in ["", "EqQBCgIYAhIM1gbcDa9GJwZA2b3h", "holobiont:é", "holobiont:/w"] {
            assert_eq!(sealed_text(foreign), None, "{foreign}");
        }
    }
}
