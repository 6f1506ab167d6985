//! One choice: turns tokens into text, log-probabilities and a finish reason.
//!
//! Text that may begin a stop string is held back, with its log-probabilities, until the match is decided.
//! Text sent to a caller is therefore never taken back. Provisional text is the exception: it holds until the
//! next output, whose `retracted` says how many of its characters were wrong.

use std::collections::VecDeque;

use shmproto::message::{Finish, Output, TokenOutput};
use text::stop::{Scan, StopScanner};

use super::tools::ToolCallDelta;
use crate::{text::Decoder, usage::FinishReason};

#[derive(Debug, Clone, PartialEq)]
pub struct ScoredToken {
    /// Number of characters of the choice's text before this token.
    pub offset: usize,
    /// The token with its log-probabilities.
    pub token: TokenOutput,
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct ChoiceDelta {
    /// New text; may be empty.
    pub text: String,
    /// New reasoning content; empty without a reasoning parser.
    pub thought: String,
    /// True while the answer has not begun: all text so far is, or may be, reasoning content.
    pub thinks: bool,
    pub calls: Vec<ToolCallDelta>,
    /// New tokens, if log-probabilities were requested.
    pub scored: Vec<ScoredToken>,
    pub finish: Option<FinishReason>,
    /// Index of the stop string that ended the text.
    pub stop_string: Option<usize>,
    /// Number of characters at the end of earlier provisional text that verification rejected.
    pub retracted: usize,
    /// Continuation of the text if all draft tokens are accepted; may be empty.
    pub provisional: String,
}

impl ChoiceDelta {
    /// Returns the text and the parts of tool calls in the order in which the model wrote them.
    pub(crate) fn parts(&self) -> impl Iterator<Item = DeltaPart<'_>> {
        let ends = self.calls.iter().map(|call| call.at).chain([self.text.len()]);
        let begins = std::iter::once(0).chain(self.calls.iter().map(|call| call.at));
        let texts = begins.zip(ends).map(|(begin, end)| DeltaPart::Text(&self.text[begin..end]));
        let calls = self.calls.iter().map(|call| Some(DeltaPart::Call(call))).chain([None]);
        let parts = texts.zip(calls).flat_map(|(text, call)| [Some(text), call]).flatten();
        parts.filter(|part| *part != DeltaPart::Text(""))
    }

    /// Appends the next delta.
    pub(crate) fn append(&mut self, next: Self) {
        let before = self.text.len();
        self.text.push_str(&next.text);
        self.thought.push_str(&next.thought);
        self.calls.extend(next.calls.into_iter().map(|part| ToolCallDelta { at: before + part.at, ..part }));
        self.scored.extend(next.scored);
        self.retracted += next.retracted;
        (self.thinks, self.finish, self.provisional) = (next.thinks, next.finish, next.provisional);
        self.stop_string = next.stop_string;
    }
}

#[derive(Debug, PartialEq)]
pub(crate) enum DeltaPart<'a> {
    Text(&'a str),
    Call(&'a ToolCallDelta),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    /// Keeps scores, without those of a stop string's tokens.
    Keep,
    /// Keeps all scores, including those of a stop string's tokens.
    KeepAll,
    Drop,
}

/// A token whose text is not fully emitted.
struct HeldToken {
    scored: ScoredToken,
    /// Byte range of the token's text in all decoded text.
    start: usize,
    end: usize,
}

pub(crate) struct Choice {
    decoder: Box<dyn Decoder>,
    /// `None` if the request has no stop strings.
    stop: Option<StopScanner>,
    min_tokens: usize,
    scores: Scores,
    tokens: usize,
    /// Length of the text decoded so far, in bytes and characters.
    decoded_bytes: usize,
    decoded_chars: usize,
    /// Length of the emitted text, in bytes.
    emitted_bytes: usize,
    held: VecDeque<HeldToken>,
    /// Provisional text after the emitted text, not yet verified.
    provisional: String,
}

impl std::fmt::Debug for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Choice").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl Choice {
    #[must_use]
    pub(crate) fn new(
        decoder: Box<dyn Decoder>,
        stop: Option<StopScanner>,
        min_tokens: u32,
        scores: Scores,
    ) -> Self {
        Self {
            decoder,
            stop,
            min_tokens: min_tokens as usize,
            scores,
            tokens: 0,
            decoded_bytes: 0,
            decoded_chars: 0,
            emitted_bytes: 0,
            held: VecDeque::new(),
            provisional: String::new(),
        }
    }

    #[must_use]
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Processes the output of one step; after a delta with a finish reason, the caller pushes no more.
    pub(crate) fn push(&mut self, mut output: Output) -> ChoiceDelta {
        let drafted = std::mem::take(&mut output.provisional);
        let mut piece = ChoiceDelta::default();
        self.append_tokens(output, &mut piece);
        piece.retracted = self.retract(&piece.text);
        if !drafted.is_empty() && piece.finish.is_none() {
            self.provisional = self.provisional_text(&drafted);
            piece.provisional.clone_from(&self.provisional);
        }
        piece
    }

    /// Ends the provisional text; returns how many of its characters `said`, the next text, does not repeat.
    pub(crate) fn retract(&mut self, said: &str) -> usize {
        let shown = std::mem::take(&mut self.provisional);
        let same = shown.chars().zip(said.chars()).take_while(|(shown, said)| shown == said).count();
        shown.chars().count() - same
    }

    /// Returns the text that the draft tokens would add.
    fn provisional_text(&self, drafted: &[u32]) -> String {
        let (mut decoder, mut stop) = (self.decoder.fork(), self.stop.clone());
        let mut text = String::new();
        for (token, tokens) in drafted.iter().zip(self.tokens + 1..) {
            let scanner = stop.as_mut().filter(|_| tokens >= self.min_tokens);
            if scan(scanner, decoder.push(*token), &mut text).is_some() {
                break;
            }
        }
        text
    }

    fn append_tokens(&mut self, output: Output, piece: &mut ChoiceDelta) {
        let last = output.tokens.len().checked_sub(1);
        for (position, token) in output.tokens.into_iter().enumerate() {
            // The token that ended the generation adds no text.
            let silent = output.finish == Some(Finish::Stop) && Some(position) == last;
            if let Some(stop) = self.token(token, silent, &mut piece.text) {
                return self.cut(stop, piece);
            }
        }
        match output.finish {
            Some(finish) => self.finish(finish, piece),
            None => self.release(piece),
        }
    }

    /// Processes one token; returns the index of the stop string that is complete, if any.
    fn token(&mut self, token: TokenOutput, silent: bool, out: &mut String) -> Option<usize> {
        self.tokens += 1;
        let fresh = if silent { "" } else { self.decoder.push(token.token) };
        let (start, offset) = (self.decoded_bytes, self.decoded_chars);
        self.decoded_bytes += fresh.len();
        self.decoded_chars += fresh.chars().count();
        if self.scores != Scores::Drop {
            self.held.push_back(HeldToken {
                scored: ScoredToken { offset, token },
                start,
                end: self.decoded_bytes,
            });
        }
        let before = out.len();
        // Stop strings do not count before `min_tokens`.
        let scanner = self.stop.as_mut().filter(|_| self.tokens >= self.min_tokens);
        let stopped = scan(scanner, fresh, out);
        self.emitted_bytes += out.len() - before;
        stopped
    }

    fn finish(&mut self, finish: Finish, piece: &mut ChoiceDelta) {
        let rest = self.decoder.finish();
        self.decoded_bytes += rest.len();
        let before = piece.text.len();
        if let Some(stop) = scan(self.stop.as_mut(), rest, &mut piece.text) {
            self.emitted_bytes += piece.text.len() - before;
            return self.cut(stop, piece);
        }
        if let Some(stop) = self.stop.take() {
            piece.text.push_str(&stop.finish());
        }
        self.emitted_bytes = self.decoded_bytes;
        self.release(piece);
        piece.finish = Some(match finish {
            Finish::Stop => FinishReason::Stop,
            Finish::Length => FinishReason::Length,
        });
    }

    /// Ends the choice where the stop string of the index `stop` began.
    fn cut(&mut self, stop: usize, piece: &mut ChoiceDelta) {
        let end = if self.scores == Scores::KeepAll { usize::MAX } else { self.emitted_bytes };
        let kept = self.held.drain(..).filter(|held| held.start < end);
        piece.scored.extend(kept.map(|held| held.scored));
        (piece.finish, piece.stop_string) = (Some(FinishReason::Stop), Some(stop));
    }

    /// Releases the scores of tokens whose text is emitted.
    fn release(&mut self, piece: &mut ChoiceDelta) {
        while self.held.front().is_some_and(|held| held.end <= self.emitted_bytes) {
            piece.scored.extend(self.held.pop_front().map(|held| held.scored));
        }
    }
}

/// Appends the part of `fresh` that is safe to emit; returns the index of the complete stop string, if any.
fn scan(scanner: Option<&mut StopScanner>, fresh: &str, out: &mut String) -> Option<usize> {
    let Some(scanner) = scanner else {
        out.push_str(fresh);
        return None;
    };
    match scanner.push(fresh) {
        Scan::Text(text) => {
            out.push_str(&text);
            None
        }
        Scan::Stopped { text, stop } => {
            out.push_str(&text);
            Some(stop)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use text::stop::StopStrings;

    use super::*;

    /// Decodes tokens as ASCII letters.
    struct LetterDecoder(String);

    impl Decoder for LetterDecoder {
        fn push(&mut self, token: u32) -> &str {
            self.0 = char::from_u32(token).map(String::from).unwrap_or_default();
            &self.0
        }

        fn finish(&mut self) -> &str {
            ""
        }

        fn fork(&self) -> Box<dyn Decoder> {
            Box::new(LetterDecoder(String::new()))
        }
    }

    fn output(text: &str, finish: Option<Finish>) -> Output {
        let tokens = text.chars().map(|letter| TokenOutput {
            token: u32::from(letter),
            logprob: -1.0,
            top: Vec::new(),
        });
        Output { tokens: tokens.collect(), finish, ..Output::default() }
    }

    proptest! {
        #[test]
        fn what_is_told_of_drafts_is_never_a_stop_string_and_only_what_is_said_of_it_stays(
            steps in proptest::collection::vec(("[ab]{0,4}", "[ab]{0,4}"), 0..8),
            stop in "[ab]{1,3}",
        ) {
            let scanner = Some(StopScanner::new(StopStrings::new(&[&stop]).unwrap()));
            let mut choice = Choice::new(Box::new(LetterDecoder(String::new())), scanner, 0, Scores::Drop);
            let mut text = String::new();
            for (guess, said) in &steps {
                let update = choice.push(Output { provisional: guess.chars().map(u32::from).collect(), ..Output::default() });
                prop_assert_eq!((update.text.as_str(), update.retracted), ("", 0));
                let shown = format!("{text}{}", update.provisional);
                prop_assert!(!shown.contains(&stop), "{} in {}", stop, shown);
                let piece = choice.push(output(said, None));
                let (stays, rest) = update.provisional.split_at(update.provisional.len() - piece.retracted);
                let behind = piece.text.strip_prefix(stays);
                prop_assert!(behind.is_some_and(|behind| rest.is_empty() || !behind.starts_with(&rest[..1])));
                text.push_str(&piece.text);
                if piece.finish.is_some() {
                    break;
                }
            }
            prop_assert_eq!(choice.retract(""), 0);
            let said: String = steps.iter().map(|(_, said)| said.as_str()).collect();
            prop_assert!(said.starts_with(&text) && !text.contains(&stop));
        }

        #[test]
        fn however_tokens_arrive_text_and_scores_end_where_the_first_stop_string_begins(
            steps in proptest::collection::vec("[ab]{0,4}", 0..8),
            stop in "[ab]{1,3}",
        ) {
            let stops = StopStrings::new(&[&stop]).unwrap();
            let scanner = Some(StopScanner::new(stops));
            let mut choice = Choice::new(Box::new(LetterDecoder(String::new())), scanner, 0, Scores::Keep);
            let (mut text, mut scored, mut finish) = (String::new(), Vec::new(), None);
            let last = steps.len().saturating_sub(1);
            for (index, step) in steps.iter().enumerate() {
                let end = (index == last).then_some(Finish::Length);
                let piece = choice.push(output(step, end));
                text.push_str(&piece.text);
                scored.extend(piece.scored);
                finish = piece.finish;
                if finish.is_some() {
                    break;
                }
            }
            let whole = steps.concat();
            let found = whole.find(&stop);
            prop_assert_eq!(&text, &whole[..found.unwrap_or(whole.len())]);
            prop_assert_eq!(scored.len(), text.len());
            prop_assert!(scored.iter().enumerate().all(|(index, scored)| scored.offset == index));
            if !steps.is_empty() {
                let expected = if found.is_some() { FinishReason::Stop } else { FinishReason::Length };
                prop_assert_eq!(finish, Some(expected));
            }
        }
    }

    #[test]
    fn the_token_that_ended_it_is_counted_and_scored_but_is_no_text() {
        let mut choice = Choice::new(Box::new(LetterDecoder(String::new())), None, 0, Scores::Keep);
        let piece = choice.push(output("ab", Some(Finish::Stop)));
        assert_eq!((piece.text.as_str(), piece.scored.len(), choice.tokens()), ("a", 2, 2));
    }
}
