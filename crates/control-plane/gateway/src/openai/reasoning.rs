//! What a model thinks before it answers, told apart from its answer.
//!
//! Models that reason write their thoughts between two tags, and their answer behind them. Chat templates tell which tags, and some
//! end a prompt with the first one, or with a thought that is over: so that the model has to think, or does not.
//!
//! # Layout
//!
//! - this file: the tags, and where an answer begins. [`scan`]: thoughts out of an answer's text, as it comes.
//! - [`effort`]: how much a model is to think.

pub mod effort;
pub mod scan;

use settings::ReasoningParser;
use text::grammar::Thought;

use self::scan::Scanner;
use crate::text::Text;

/// Last tokens of a prompt among which a tag is looked for, with white space behind it.
const TAIL: usize = 24;

/// Where an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningStart {
    /// Before a thought, if there is one.
    Before,
    /// In a thought that the prompt has begun.
    Within,
}

/// How thoughts are told from the text of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reasoning {
    tags: ReasoningTags,
    beginning: ReasoningStart,
}

/// What stands around a thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningTags {
    open: &'static str,
    close: &'static str,
}

/// Qwen 3, DeepSeek R1, SmolLM 3 and most others.
const THINK: ReasoningTags = ReasoningTags { open: "<think>", close: "</think>" };
/// Magistral.
const MISTRAL: ReasoningTags = ReasoningTags { open: "[THINK]", close: "[/THINK]" };

impl ReasoningTags {
    /// All of them.
    pub const ALL: [Self; 2] = [THINK, MISTRAL];

    /// Those that an operator has chosen, or else those of a chat template; `None` if no thoughts are to be told apart.
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

    /// Names of tokens that are tags, and to be read where others are no text.
    #[must_use]
    pub fn words(self) -> [&'static str; 2] {
        [self.open, self.close]
    }
}

impl Reasoning {
    /// Of an answer to `prompt`. `None` if it has no thoughts: the prompt ends with one that is over.
    #[must_use]
    pub fn of(tags: ReasoningTags, prompt: &[u32], text: &dyn Text) -> Option<Self> {
        let tail = text.decode(&prompt[prompt.len().saturating_sub(TAIL)..]);
        let tail = tail.trim_end();
        let beginning =
            if tail.ends_with(tags.open) { ReasoningStart::Within } else { ReasoningStart::Before };
        (!tail.ends_with(tags.close)).then_some(Self { tags, beginning })
    }

    /// Names of tokens that are tags.
    #[must_use]
    pub fn words(self) -> [&'static str; 2] {
        self.tags.words()
    }

    /// For one answer.
    #[must_use]
    pub fn scanner(self) -> Scanner {
        Scanner::new(self.tags, self.beginning == ReasoningStart::Within)
    }

    /// What may, or has to, stand before an answer that has to look like something.
    #[must_use]
    pub fn thought(self, text: &dyn Text) -> Thought {
        let tag = |name| text::grammar::Tag { name, token: text.special_token(name) };
        let open = (self.beginning == ReasoningStart::Before).then(|| tag(self.tags.open));
        Thought { open, close: tag(self.tags.close) }
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
