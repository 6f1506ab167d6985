//! Separates the messages of OpenAI's harmony format, which gpt-oss writes.
//!
//! ```text
//! <|channel|>analysis<|message|>reasoning content<|end|>
//! <|start|>assistant<|channel|>final<|message|>answer<|return|>
//! <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
//! ```
//!
//! The recipient of a call may also stand before the channel. A text of the channel `commentary` without a
//! recipient is shown to the user before a call, so the text belongs to the answer. A message to another tool
//! than a function belongs to the reasoning content. A call is passed on with one form of its header, for the
//! reader of tool calls. The result does not depend on how the text is split.

use text::grammar::HarmonyTags;

use super::scan::ReasoningSplit;

/// Header of reasoning content, which chat templates of the format contain.
pub(super) const ANALYSIS: &str = "<|channel|>analysis<|message|>";
/// End of a prompt that an answer with its header follows.
pub(super) const ASSISTANT: &str = "<|start|>assistant";
/// Ends a call of a tool.
pub(crate) const CALL: &str = "<|call|>";
/// Beginning of the call of a function, up to its name.
pub(crate) const FUNCTION_CALL: &str = "<|channel|>commentary to=functions.";
/// Special tokens of the format that answers contain.
pub(crate) const WORDS: [&str; 6] = [
    HarmonyTags::START,
    HarmonyTags::END,
    HarmonyTags::CHANNEL,
    HarmonyTags::MESSAGE,
    HarmonyTags::CONSTRAIN,
    CALL,
];

/// Maximum length of a header in bytes.
const MAX_HEADER_BYTES: usize = 512;
/// Tags that end a text.
const ENDS: [&str; 3] = [HarmonyTags::END, CALL, HarmonyTags::START];
const RECIPIENT: &str = "to=";
const FUNCTIONS: &str = "functions.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HarmonyState {
    /// In a header, up to its end.
    Header,
    /// In a text of reasoning content, perhaps for a tool of the server.
    Thought,
    /// In a text for the user.
    Answer,
    /// In the arguments of a call.
    Call,
}

#[derive(Debug)]
pub struct HarmonyScanner {
    state: HarmonyState,
    /// Header so far, or text that may be the beginning of a tag.
    held: String,
    has_thought: bool,
    has_answer: bool,
    /// Whether a line break precedes the next character, since messages are joined.
    joins: bool,
}

impl HarmonyScanner {
    /// Creates a scanner; `is_within` says that the prompt has begun reasoning content.
    #[must_use]
    pub fn new(is_within: bool) -> Self {
        let state = if is_within { HarmonyState::Thought } else { HarmonyState::Header };
        Self { state, held: String::new(), has_thought: false, has_answer: false, joins: false }
    }

    /// True outside of text for the user.
    #[must_use]
    pub(super) fn thinks(&self) -> bool {
        matches!(self.state, HarmonyState::Header | HarmonyState::Thought)
    }

    #[must_use]
    pub(super) fn is_within(&self) -> bool {
        self.state == HarmonyState::Thought
    }

    pub(super) fn push(&mut self, text: &str) -> ReasoningSplit {
        let mut split = ReasoningSplit::default();
        text.chars().for_each(|c| self.push_char(c, &mut split));
        split
    }

    /// Ends the answer; a partial tag counts as text, and a partial header is dropped.
    pub(super) fn finish(&mut self) -> ReasoningSplit {
        let mut split = ReasoningSplit::default();
        let held = std::mem::take(&mut self.held);
        if self.state != HarmonyState::Header {
            held.chars().for_each(|c| self.emit(c, &mut split));
        }
        split
    }

    fn push_char(&mut self, c: char, split: &mut ReasoningSplit) {
        self.held.push(c);
        if self.state == HarmonyState::Header {
            return self.in_header(split);
        }
        if let Some(end) = ENDS.into_iter().find(|end| self.held == *end) {
            return self.end(end, split);
        }
        while !ENDS.iter().any(|end| end.starts_with(&self.held)) {
            let c = self.held.remove(0);
            self.emit(c, split);
        }
    }

    fn in_header(&mut self, split: &mut ReasoningSplit) {
        if let Some(header) = self.held.strip_suffix(HarmonyTags::MESSAGE) {
            let header = header.to_owned();
            self.held.clear();
            return self.begin(&header, split);
        }
        if !is_header(&self.held) || self.held.len() > MAX_HEADER_BYTES {
            self.enter(HarmonyState::Answer);
            std::mem::take(&mut self.held).chars().for_each(|c| self.emit(c, split));
        }
    }

    /// Begins the text behind `header`.
    fn begin(&mut self, header: &str, split: &mut ReasoningSplit) {
        let recipient = word_behind(header, RECIPIENT);
        let state = match (recipient, word_behind(header, HarmonyTags::CHANNEL)) {
            (Some(recipient), _) if recipient.starts_with(FUNCTIONS) => HarmonyState::Call,
            (Some(_), _) | (None, Some("analysis")) => HarmonyState::Thought,
            (None, _) => HarmonyState::Answer,
        };
        self.enter(state);
        if state == HarmonyState::Call {
            let name = recipient.and_then(|recipient| recipient.strip_prefix(FUNCTIONS)).unwrap_or_default();
            for part in [FUNCTION_CALL, name, HarmonyTags::MESSAGE] {
                split.answer.push_str(part);
            }
        }
    }

    fn enter(&mut self, state: HarmonyState) {
        self.joins = match state {
            HarmonyState::Thought => self.has_thought,
            HarmonyState::Answer => self.has_answer,
            HarmonyState::Header | HarmonyState::Call => false,
        };
        self.state = state;
    }

    fn end(&mut self, end: &str, split: &mut ReasoningSplit) {
        if self.state == HarmonyState::Call {
            split.answer.push_str(CALL);
        }
        self.enter(HarmonyState::Header);
        // The tag that begins the next message is part of its header.
        if end != HarmonyTags::START {
            self.held.clear();
        }
    }

    /// Adds a character to the text of the current message.
    fn emit(&mut self, c: char, split: &mut ReasoningSplit) {
        let (to, has_text) = match self.state {
            HarmonyState::Thought => (&mut split.thought, &mut self.has_thought),
            HarmonyState::Answer => (&mut split.answer, &mut self.has_answer),
            HarmonyState::Header | HarmonyState::Call => return split.answer.push(c),
        };
        if std::mem::take(&mut self.joins) {
            to.push('\n');
        }
        *has_text = true;
        to.push(c);
    }
}

/// True if `text` may be the beginning of a header: the role, then a recipient or a channel.
fn is_header(text: &str) -> bool {
    let behind = text.strip_prefix(ASSISTANT).unwrap_or(text);
    let is_begun = |word: &str| word.starts_with(behind) || behind.starts_with(word);
    ASSISTANT.starts_with(text) || is_begun(HarmonyTags::CHANNEL) || is_begun(" to=")
}

/// Returns the word directly behind `mark`, up to white space or a tag.
fn word_behind<'a>(header: &'a str, mark: &str) -> Option<&'a str> {
    let (_, behind) = header.split_once(mark)?;
    let end = behind.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(behind.len());
    Some(&behind[..end])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(pieces: &[&str], is_within: bool) -> (String, String) {
        let mut scanner = HarmonyScanner::new(is_within);
        let mut all = ReasoningSplit::default();
        pieces.iter().for_each(|piece| all.append(&scanner.push(piece)));
        all.append(&scanner.finish());
        (all.thought, all.answer)
    }

    #[test]
    fn channels_are_told_apart() {
        const THOUGHT: &str = "<|channel|>analysis<|message|>2 < 3, so yes<|end|>";
        let call = "<|channel|>commentary to=functions.now<|message|>{}";
        for (is_within, text, thought, answer) in [
            (
                false,
                format!("{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes."),
                "2 < 3, so yes",
                "Yes.",
            ),
            (false, "<|channel|>final<|message|>Yes. <|end".to_owned(), "", "Yes. <|end"),
            (
                true,
                "hm<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|><|start|>assistant\
                 <|channel|>final<|message|>a"
                    .to_owned(),
                "hm\nso",
                "a",
            ),
            (
                false,
                format!(
                    "{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json\
                     <|message|>{{}}"
                ),
                "2 < 3, so yes",
                call,
            ),
            (
                false,
                format!(
                    "{THOUGHT}<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}"
                ),
                "2 < 3, so yes",
                call,
            ),
            (
                false,
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary \
                 to=functions.now<|message|>{}<|call|>"
                    .to_owned(),
                "",
                "I look.<|channel|>commentary to=functions.now<|message|>{}<|call|>",
            ),
            (false, "<|channel|>analysis to=python code<|message|>1 + 1<|call|>".to_owned(), "1 + 1", ""),
            (false, "<|channel|>ana".to_owned(), "", ""),
            (false, "No header.".to_owned(), "", "No header."),
            (true, "cut off".to_owned(), "cut off", ""),
        ] {
            assert_eq!(split(&[&text], is_within), (thought.to_owned(), answer.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn text_is_told_as_soon_as_it_is_decided() {
        let mut scanner = HarmonyScanner::new(false);
        let mut push = |text: &str| {
            let split = scanner.push(text);
            (split.thought, split.answer, scanner.thinks(), scanner.is_within())
        };
        let split = |thought: &str, answer: &str, thinks, is_within| {
            (thought.to_owned(), answer.to_owned(), thinks, is_within)
        };
        assert_eq!(push("<|channel|>analysis"), split("", "", true, false));
        assert_eq!(push("<|message|>hm"), split("hm", "", true, true));
        assert_eq!(push("<|e"), split("", "", true, true));
        assert_eq!(push("nd|><|start|>assistant"), split("", "", true, false));
        assert_eq!(push("<|channel|>final<|message|>Yes"), split("", "Yes", false, false));
    }

    proptest! {
        #[test]
        fn however_a_text_is_cut_its_channels_are_the_same(
            text in "(<\\|channel\\|>|<\\|message\\|>|<\\|end\\|>|<\\|start\\|>assistant|analysis|final|commentary to=functions\\.f|[ab<]| ){0,14}",
            cuts in proptest::collection::vec(0_usize..120, 0..6),
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
