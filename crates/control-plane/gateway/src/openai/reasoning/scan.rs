//! Separates reasoning content from the answer in a stream of text.
//!
//! The result does not depend on how the text is split into pieces: text that may begin a tag is held back
//! until the match is decided. White space beside tags is dropped. Only reasoning content at the beginning of
//! an answer counts; later tags are text.

use super::ReasoningTags;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReasoningSplit {
    /// Further text of the reasoning.
    pub thought: String,
    /// Further text of the answer.
    pub answer: String,
}

impl ReasoningSplit {
    pub fn append(&mut self, more: &Self) {
        self.thought.push_str(&more.thought);
        self.answer.push_str(&more.answer);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningState {
    /// Reasoning content may begin.
    Before,
    /// Inside reasoning content that is empty so far.
    Silent,
    /// Inside reasoning content that has begun to be emitted.
    Within,
    /// After reasoning content, before the first character of the answer.
    Behind,
    Answer,
}

#[derive(Debug)]
pub struct Scanner {
    tags: ReasoningTags,
    state: ReasoningState,
    /// White space held back until the next character decides whether to drop it.
    space: String,
    /// Text after `space` that may be the beginning of a tag.
    tag: String,
}

impl Scanner {
    /// Creates a scanner; `is_within` says that the prompt has opened reasoning content.
    #[must_use]
    pub fn new(tags: ReasoningTags, is_within: bool) -> Self {
        let state = if is_within { ReasoningState::Silent } else { ReasoningState::Before };
        Self { tags, state, space: String::new(), tag: String::new() }
    }

    /// True if the answer has not begun.
    #[must_use]
    pub(crate) fn thinks(&self) -> bool {
        self.state != ReasoningState::Answer
    }

    #[must_use]
    pub fn is_within(&self) -> bool {
        matches!(self.state, ReasoningState::Silent | ReasoningState::Within)
    }

    pub fn push(&mut self, text: &str) -> ReasoningSplit {
        let mut split = ReasoningSplit::default();
        text.chars().for_each(|c| self.push_char(c, &mut split));
        split
    }

    /// Ends the answer; a partial tag counts as text.
    pub fn finish(&mut self) -> ReasoningSplit {
        let mut split = ReasoningSplit::default();
        if self.is_within() {
            while !self.tag.is_empty() {
                let c = self.tag.remove(0);
                self.think(c, &mut split);
            }
        } else {
            self.flush_held(&mut split);
        }
        self.state = ReasoningState::Answer;
        split
    }

    fn push_char(&mut self, c: char, split: &mut ReasoningSplit) {
        match self.state {
            ReasoningState::Before if c.is_whitespace() && self.tag.is_empty() => self.space.push(c),
            ReasoningState::Before => {
                self.tag.push(c);
                if self.tag == self.tags.open {
                    self.enter_state(ReasoningState::Silent);
                } else if !self.tags.open.starts_with(&self.tag) {
                    self.flush_held(split);
                    self.state = ReasoningState::Answer;
                }
            }
            ReasoningState::Silent | ReasoningState::Within => {
                self.tag.push(c);
                if self.tag == self.tags.close {
                    return self.enter_state(ReasoningState::Behind);
                }
                while !self.tags.close.starts_with(&self.tag) {
                    let c = self.tag.remove(0);
                    self.think(c, split);
                }
            }
            ReasoningState::Behind if c.is_whitespace() => {}
            ReasoningState::Behind | ReasoningState::Answer => {
                self.state = ReasoningState::Answer;
                split.answer.push(c);
            }
        }
    }

    /// Enters `state` after a tag and drops the white space beside the tag.
    fn enter_state(&mut self, state: ReasoningState) {
        self.state = state;
        self.space.clear();
        self.tag.clear();
    }

    /// Adds a character to the reasoning content, without white space at its beginning and end.
    fn think(&mut self, c: char, split: &mut ReasoningSplit) {
        if !c.is_whitespace() {
            self.state = ReasoningState::Within;
            split.thought.push_str(&self.space);
            split.thought.push(c);
            self.space.clear();
        } else if self.state == ReasoningState::Within {
            self.space.push(c);
        }
    }

    /// Releases held text as part of the answer.
    fn flush_held(&mut self, split: &mut ReasoningSplit) {
        split.answer.push_str(&std::mem::take(&mut self.space));
        split.answer.push_str(&std::mem::take(&mut self.tag));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::THINK, *};

    fn split(pieces: &[&str], is_within: bool) -> (String, String) {
        let mut scanner = Scanner::new(THINK, is_within);
        let mut all = ReasoningSplit::default();
        pieces.iter().for_each(|piece| all.append(&scanner.push(piece)));
        all.append(&scanner.finish());
        (all.thought, all.answer)
    }

    #[test]
    fn a_thought_is_what_an_answer_begins_with() {
        for (is_within, text, thought, answer) in [
            (false, "<think>\nhm, 2 < 3\n</think>\n\nYes.", "hm, 2 < 3", "Yes."),
            (false, "\n<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
            (false, "<think>\n\n</think>\n\nYes.", "", "Yes."),
            (false, "Yes, <think>a</think>", "", "Yes, <think>a</think>"),
            (false, " <thin air>", "", " <thin air>"),
            (false, "<thi", "", "<thi"),
            (false, "<think>cut off </thi", "cut off </thi", ""),
            (false, "<think>cut off\n\n", "cut off", ""),
            (true, "hm\n</think>\n\nYes.\n", "hm", "Yes.\n"),
            (true, "\n  a\n\n  b </thinking> </think>", "a\n\n  b </thinking>", ""),
            (true, "never over", "never over", ""),
            (true, "</think>\n", "", ""),
        ] {
            assert_eq!(split(&[text], is_within), (thought.to_owned(), answer.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn what_is_told_is_told_as_soon_as_it_is_decided() {
        let mut scanner = Scanner::new(THINK, false);
        let mut push = |text: &str| {
            let split = scanner.push(text);
            (split.thought, split.answer, scanner.thinks())
        };
        let thought = |text: &str| (text.to_owned(), String::new(), true);
        assert_eq!(push("<think>\n"), thought(""));
        assert_eq!(push("I see\n"), thought("I see"));
        assert_eq!(push("</"), thought(""));
        assert_eq!(push("b> and"), thought("\n</b> and"));
        assert_eq!(push("</think>\n\n"), thought(""));
        assert_eq!(push("Yes "), (String::new(), "Yes ".to_owned(), false));
        assert_eq!(push("<think>"), (String::new(), "<think>".to_owned(), false));
    }

    proptest! {
        #[test]
        fn however_a_text_is_cut_its_thought_is_the_same(
            text in "(<think>|</think>|</th|<t|[ab]| |\n){0,12}",
            cuts in proptest::collection::vec(0_usize..60, 0..6),
            is_within: bool,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
            prop_assert_eq!(split(&pieces, is_within), split(&[&text], is_within));
        }
    }
}
