//! Reasoning content: the text that a model generates before its answer.
//!
//! Reasoning models write reasoning between two tags, before the answer. The chat template shows which tags
//! the model uses. Some templates end the prompt with the first tag, which forces reasoning, or with both
//! tags, which prevents reasoning.
//!
//! # Layout
//!
//! - this file: the tags, and the state in which an answer begins. [`scan`]: separates reasoning content from
//!   the answer.
//! - [`effort`]: the requested reasoning effort.

pub mod effort;
pub mod scan;

use settings::ReasoningParser;
use text::grammar::ReasoningPrefix;

use self::scan::Scanner;
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
    tags: ReasoningTags,
    beginning: ReasoningStart,
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

impl ReasoningTags {
    pub const ALL: [Self; 2] = [THINK, MISTRAL];

    /// Returns the tags that the operator or the chat template chooses; `None` disables the separation.
    #[must_use]
    pub fn of(chosen: ReasoningParser, template: Option<&str>) -> Option<Self> {
        match chosen {
            ReasoningParser::None => None,
            ReasoningParser::Think => Some(THINK),
            ReasoningParser::Mistral => Some(MISTRAL),
            ReasoningParser::Auto => {
                let template = template?;
                Self::ALL.into_iter().find(|tags| template.contains(tags.close))
            }
        }
    }

    /// Returns the special tokens that must be decoded as text although the decoder hides others.
    #[must_use]
    pub fn words(self) -> [&'static str; 2] {
        [self.open, self.close]
    }
}

impl Reasoning {
    /// Returns the settings for an answer to `prompt`; `None` if the prompt ends with a closing tag.
    #[must_use]
    pub fn of(tags: ReasoningTags, prompt: &[u32], text: &dyn Text) -> Option<Self> {
        let tail = text.decode(&prompt[prompt.len().saturating_sub(TAIL)..]);
        let tail = tail.trim_end();
        let beginning =
            if tail.ends_with(tags.open) { ReasoningStart::Within } else { ReasoningStart::Before };
        (!tail.ends_with(tags.close)).then_some(Self { tags, beginning })
    }

    /// Returns the tags' special tokens.
    #[must_use]
    pub fn words(self) -> [&'static str; 2] {
        self.tags.words()
    }

    #[must_use]
    pub fn scanner(self) -> Scanner {
        Scanner::new(self.tags, self.beginning == ReasoningStart::Within)
    }

    /// Returns the reasoning content that a grammar permits or requires before structured output.
    #[must_use]
    pub fn thought(self, text: &dyn Text) -> ReasoningPrefix {
        let tag = |name| text::grammar::Tag { name, token: text.special_token(name) };
        let open = (self.beginning == ReasoningStart::Before).then(|| tag(self.tags.open));
        ReasoningPrefix { open, close: tag(self.tags.close) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_shows_its_tags() {
        let of = |template| ReasoningTags::of(ReasoningParser::Auto, template);
        assert_eq!(of(Some("{{ content.split('</think>')[-1] }}")), Some(THINK));
        assert_eq!(of(Some("[THINK]...[/THINK]")), Some(MISTRAL));
        assert_eq!(of(Some("{{ messages }} <think>")), None, "a tag that nothing closes");
        assert_eq!(of(None), None);
        assert_eq!(ReasoningTags::of(ReasoningParser::None, Some("</think>")), None);
        assert_eq!(ReasoningTags::of(ReasoningParser::Think, None), Some(THINK));
    }
}
