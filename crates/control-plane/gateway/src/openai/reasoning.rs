//! Reasoning content: the text that a model generates before its answer.
//!
//! Reasoning models write reasoning between two tags, before the answer, or in messages of their own. The
//! chat template shows which form the model uses. Some templates end the prompt with the first tag, which
//! forces reasoning, or with both tags, which prevents reasoning.
//!
//! # Layout
//!
//! - this file: the formats, and the state in which an answer begins. [`scan`]: separates reasoning content
//!   between tags from the answer. [`harmony`]: the same for the messages of gpt-oss.
//! - [`effort`]: the requested reasoning effort.

pub mod effort;
pub mod harmony;
pub mod scan;

use settings::ReasoningParser;
use text::grammar::{HarmonyTags, ReasoningPrefix};

use self::{
    harmony::HarmonyScanner,
    scan::{ReasoningSplit, Scanner},
};
use crate::text::Text;

/// Number of final prompt tokens that are searched for a tag followed by white space.
const TAIL: usize = 24;

/// State in which an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningStart {
    /// Before the first tag, if the model writes one.
    Before,
    /// Inside reasoning content that the prompt has opened.
    Within,
}

/// Parser settings of the reasoning content of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reasoning {
    format: ReasoningFormat,
    beginning: ReasoningStart,
}

/// Form in which a model writes reasoning content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Text between two tags.
    Tags(ReasoningTags),
    /// Messages of the channel `analysis` (gpt-oss).
    Harmony,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningTags {
    open: &'static str,
    close: &'static str,
}

/// Qwen 3, DeepSeek R1, SmolLM 3 and most other models.
const THINK: ReasoningTags = ReasoningTags { open: "<think>", close: "</think>" };
/// Tags of Mistral's Magistral models.
const MISTRAL: ReasoningTags = ReasoningTags { open: "[THINK]", close: "[/THINK]" };

impl ReasoningFormat {
    pub const ALL: [Self; 3] = [Self::Tags(THINK), Self::Tags(MISTRAL), Self::Harmony];

    /// Returns a scanner of an answer; `is_within` says that the prompt has opened reasoning content.
    #[must_use]
    pub fn scanner(self, is_within: bool) -> ReasoningScanner {
        match self {
            Self::Tags(tags) => ReasoningScanner::Tags(Scanner::new(tags, is_within)),
            Self::Harmony => ReasoningScanner::Harmony(HarmonyScanner::new(is_within)),
        }
    }

    /// Returns the format that the operator or the chat template chooses; `None` disables the separation.
    #[must_use]
    pub fn of(chosen: ReasoningParser, template: Option<&str>) -> Option<Self> {
        match chosen {
            ReasoningParser::None => None,
            ReasoningParser::Think => Some(Self::Tags(THINK)),
            ReasoningParser::Mistral => Some(Self::Tags(MISTRAL)),
            ReasoningParser::Harmony => Some(Self::Harmony),
            ReasoningParser::Auto => {
                let template = template?;
                let tags = || [THINK, MISTRAL].into_iter().find(|tags| template.contains(tags.close));
                let is_harmony = template.contains(harmony::ANALYSIS);
                if is_harmony { Some(Self::Harmony) } else { tags().map(Self::Tags) }
            }
        }
    }
}

impl Reasoning {
    /// Returns the settings for an answer to `prompt`; `None` if the prompt has ended reasoning content.
    #[must_use]
    pub fn of(format: ReasoningFormat, prompt: &[u32], text: &dyn Text) -> Option<Self> {
        let tail = text.decode(&prompt[prompt.len().saturating_sub(TAIL)..]);
        let tail = tail.trim_end();
        let beginning = match format {
            ReasoningFormat::Tags(tags) if tail.ends_with(tags.open) => ReasoningStart::Within,
            ReasoningFormat::Tags(tags) if tail.ends_with(tags.close) => return None,
            ReasoningFormat::Harmony if tail.ends_with(harmony::ANALYSIS) => ReasoningStart::Within,
            // A prompt that ends within another message has its header already.
            ReasoningFormat::Harmony if !tail.ends_with(harmony::ASSISTANT) => return None,
            ReasoningFormat::Tags(_) | ReasoningFormat::Harmony => ReasoningStart::Before,
        };
        Some(Self { format, beginning })
    }

    /// Returns the special tokens that must be decoded as text although the decoder hides others.
    #[must_use]
    pub fn words(self) -> Vec<&'static str> {
        match self.format {
            ReasoningFormat::Tags(tags) => vec![tags.open, tags.close],
            ReasoningFormat::Harmony => harmony::WORDS.to_vec(),
        }
    }

    #[must_use]
    pub fn scanner(self) -> ReasoningScanner {
        self.format.scanner(self.beginning == ReasoningStart::Within)
    }

    /// Returns the reasoning content that a grammar permits or requires before structured output. With
    /// `has_calls` the grammar is that of an answer with tool calls, which has headers of its own.
    #[must_use]
    pub fn thought(self, text: &dyn Text, has_calls: bool) -> ReasoningPrefix {
        let is_within = self.beginning == ReasoningStart::Within;
        match self.format {
            ReasoningFormat::Tags(tags) => {
                let tag = |name| text::grammar::Tag { name, token: text.special_token(name) };
                let open = (!is_within).then(|| tag(tags.open));
                ReasoningPrefix::Tags { open, close: tag(tags.close) }
            }
            ReasoningFormat::Harmony => ReasoningPrefix::Harmony {
                tags: HarmonyTags::of(|name| text.special_token(name)),
                is_open: is_within,
                opens_final: !has_calls,
            },
        }
    }
}

/// Separates reasoning content from an answer.
#[derive(Debug)]
pub enum ReasoningScanner {
    Tags(Scanner),
    Harmony(HarmonyScanner),
}

impl ReasoningScanner {
    /// True if all further text belongs to the answer.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Tags(scanner) => !scanner.thinks(),
            // Messages of any channel may follow.
            Self::Harmony(_) => false,
        }
    }

    /// True if the scanner is not inside of the answer.
    #[must_use]
    pub(crate) fn thinks(&self) -> bool {
        match self {
            Self::Tags(scanner) => scanner.thinks(),
            Self::Harmony(scanner) => scanner.thinks(),
        }
    }

    #[must_use]
    pub(crate) fn is_within(&self) -> bool {
        match self {
            Self::Tags(scanner) => scanner.is_within(),
            Self::Harmony(scanner) => scanner.is_within(),
        }
    }

    pub fn push(&mut self, text: &str) -> ReasoningSplit {
        match self {
            Self::Tags(scanner) => scanner.push(text),
            Self::Harmony(scanner) => scanner.push(text),
        }
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> ReasoningSplit {
        match self {
            Self::Tags(scanner) => scanner.finish(),
            Self::Harmony(scanner) => scanner.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_shows_its_tags() {
        let (of, tags) =
            (|template| ReasoningFormat::of(ReasoningParser::Auto, template), ReasoningFormat::Tags);
        assert_eq!(of(Some("{{ content.split('</think>')[-1] }}")), Some(tags(THINK)));
        assert_eq!(of(Some("[THINK]...[/THINK]")), Some(tags(MISTRAL)));
        let harmony = "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>";
        assert_eq!(of(Some(harmony)), Some(ReasoningFormat::Harmony));
        assert_eq!(of(Some("{{ messages }} <think>")), None, "a tag that nothing closes");
        assert_eq!(of(None), None);
        assert_eq!(ReasoningFormat::of(ReasoningParser::None, Some("</think>")), None);
        assert_eq!(ReasoningFormat::of(ReasoningParser::Think, None), Some(tags(THINK)));
        assert_eq!(ReasoningFormat::of(ReasoningParser::Harmony, None), Some(ReasoningFormat::Harmony));
    }
}
