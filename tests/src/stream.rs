//! Server-sent events, and the ways in which a stream may end.

use std::{
    fmt,
    io::{BufRead as _, BufReader},
};

use serde_json::Value;
use ureq::BodyReader;

use crate::answer::CompletionAnswer;

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnd {
    /// A finish reason and `[DONE]`.
    Done,
    /// An error event with this code.
    Error(String),
    /// Nothing: the connection just closed. No stream should.
    Cut,
}

/// What a stream has told of drafts, as one who follows the rules shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShownDrafts {
    /// Behind the text, and neither said nor taken back.
    pub standing: String,
    /// Characters that have come true.
    pub came_true: usize,
    /// Characters that were taken back.
    pub retracted: usize,
}

impl ShownDrafts {
    fn see(&mut self, choice: &Value) {
        if let Some(characters) = choice["retract"]["characters"].as_u64() {
            for _ in 0..characters {
                self.standing.pop().expect("no more is taken back than was told");
                self.retracted += 1;
            }
        }
        let said = choice["text"].as_str().unwrap_or_default();
        if !said.is_empty() {
            let stood = std::mem::take(&mut self.standing);
            assert!(said.starts_with(&stood), "{said:?} in the place of {stood:?}");
            self.came_true += stood.chars().count();
        }
        if let Some(text) = choice["provisional"]["text"].as_str() {
            assert_eq!(self.standing, "", "one guess stands at a time");
            text.clone_into(&mut self.standing);
        }
    }
}

/// An answer under way. Dropping it disconnects.
pub struct CompletionStream {
    lines: BufReader<BodyReader<'static>>,
    /// What has come so far.
    pub answer: CompletionAnswer,
    /// What has been told of drafts.
    pub told: ShownDrafts,
    /// Which adapter answers; `None` is the base, or that nothing has come.
    pub generation: Option<String>,
}

impl fmt::Debug for CompletionStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("answer", &self.answer).finish_non_exhaustive()
    }
}

impl CompletionStream {
    pub(crate) fn new(body: BodyReader<'static>) -> Self {
        Self {
            lines: BufReader::new(body),
            answer: CompletionAnswer::default(),
            told: ShownDrafts::default(),
            generation: None,
        }
    }

    /// Reads the next chunk; `Some` if that was the end.
    pub fn step(&mut self) -> Option<StreamEnd> {
        testkit::step();
        let Some(data) = self.event() else { return Some(StreamEnd::Cut) };
        let ending = self.handle_event(&data);
        assert!(ending.is_none() || self.told.standing.is_empty(), "{:?} stands at the end", self.told);
        ending
    }

    fn handle_event(&mut self, data: &str) -> Option<StreamEnd> {
        if data == "[DONE]" {
            assert!(self.answer.finish.is_some(), "[DONE] without a finish reason");
            return Some(StreamEnd::Done);
        }
        let chunk: Value = serde_json::from_str(data).expect("an event is JSON");
        if let Some(code) = chunk["error"]["code"].as_str() {
            assert_eq!(self.answer.finish, None, "an error after a finish reason");
            return Some(StreamEnd::Error(code.to_owned()));
        }
        self.generation = chunk["adapter_generation"].as_str().map(str::to_owned);
        self.told.see(&chunk["choices"][0]);
        self.answer.add(&chunk["choices"][0]);
        None
    }

    /// Reads to the end, and makes sure that nothing comes after it.
    pub fn read_to_end(&mut self) -> StreamEnd {
        let ending = loop {
            if let Some(ending) = self.step() {
                break ending;
            }
        };
        assert_eq!(self.event(), None, "an event after the end {ending:?}");
        ending
    }

    /// What [`read_to_end`](Self::read_to_end) has read, and how it ended.
    #[must_use]
    pub fn finish(mut self) -> (CompletionAnswer, StreamEnd) {
        let ending = self.read_to_end();
        (self.answer, ending)
    }

    /// The data of the next event; `None` at the end of the body, orderly or not.
    fn event(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            match self.lines.read_line(&mut line) {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
            // Empty lines and comments lie between events.
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }
}
