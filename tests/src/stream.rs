//! Server-sent events, and the possible ends of a stream.

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
    /// The stream ended with a finish reason and `[DONE]`.
    Done,
    /// The stream ended with an error event of this code.
    Error(String),
    /// The connection closed without an end event, which no stream should do.
    Cut,
}

/// State of provisional tokens, as a conforming client displays it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShownDrafts {
    /// Provisional text after the accepted text, neither accepted nor retracted.
    pub standing: String,
    /// Number of accepted draft characters.
    pub came_true: usize,
    /// Number of retracted draft characters.
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

/// A streamed answer in progress. Dropping it disconnects.
pub struct CompletionStream {
    lines: BufReader<BodyReader<'static>>,
    /// Received part of the answer.
    pub answer: CompletionAnswer,
    /// State of provisional tokens.
    pub told: ShownDrafts,
    /// Adapter version that answers; `None` for the base, or before the first event.
    pub generation: Option<String>,
    /// Receipt of the last chunk, if the request asked for one.
    pub receipt: Option<Value>,
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
            receipt: None,
        }
    }

    /// Reads the next chunk; `Some` at the end.
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
        self.receipt = chunk.get("receipt").cloned();
        self.told.see(&chunk["choices"][0]);
        self.answer.add(&chunk["choices"][0]);
        None
    }

    /// Reads to the end, and checks that nothing follows it.
    pub fn read_to_end(&mut self) -> StreamEnd {
        let ending = loop {
            if let Some(ending) = self.step() {
                break ending;
            }
        };
        assert_eq!(self.event(), None, "an event after the end {ending:?}");
        ending
    }

    /// Reads to the end like [`read_to_end`](Self::read_to_end) and returns the answer with its end.
    #[must_use]
    pub fn finish(mut self) -> (CompletionAnswer, StreamEnd) {
        let ending = self.read_to_end();
        (self.answer, ending)
    }

    /// Returns the data of the next event; `None` at the end of the body, with or without an error.
    fn event(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            match self.lines.read_line(&mut line) {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
            // Empty lines and comments may separate events.
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }
}
