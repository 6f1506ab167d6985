//! A closed loop of callers: each sends its next request when its last one is answered.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::traffic::prompt;
use crate::client::{Client, ClientError, Usage};

/// The load of one run.
#[derive(Debug)]
pub(super) struct Load {
    /// Whom to ask.
    pub(super) models: Vec<String>,
    /// For each request, the index of its model.
    pub(super) picks: Vec<usize>,
    /// Requests under way at once.
    pub(super) concurrency: usize,
    /// Tokens of a prompt, about.
    pub(super) prompt_tokens: usize,
    /// Tokens of an answer.
    pub(super) max_tokens: u32,
    /// Chooses the prompts.
    pub(super) seed: u64,
}

/// What a caller saw of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    /// From sending to the first piece of text.
    pub(super) first_token: Duration,
    /// From sending to the end of the stream.
    pub(super) total: Duration,
    /// From the first piece of text to the last.
    pub(super) decode: Duration,
    /// The gateway's own counts.
    pub(super) usage: Usage,
}

/// What all callers saw.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Complete answers.
    pub(super) answers: Vec<Answer>,
    /// The others.
    pub(super) failures: Vec<ClientError>,
    /// From the first request to the end of the last answer.
    pub(super) wall: Duration,
}

impl Load {
    /// Sends all requests and waits for all answers.
    pub(super) fn run(&self, client: &Client) -> Outcome {
        let next = AtomicUsize::new(0);
        let start = Instant::now();
        let caller = || {
            let requests = std::iter::from_fn(|| {
                let request = next.fetch_add(1, Ordering::Relaxed);
                (request < self.picks.len()).then_some(request)
            });
            requests.map(|request| self.ask(client, request)).collect::<Vec<_>>()
        };
        let results: Vec<_> = thread::scope(|scope| {
            let callers: Vec<_> =
                (0..self.concurrency.min(self.picks.len())).map(|_| scope.spawn(caller)).collect();
            callers.into_iter().filter_map(|caller| caller.join().ok()).flatten().collect()
        });
        let wall = start.elapsed();
        let (answers, failures): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        Outcome {
            answers: answers.into_iter().filter_map(Result::ok).collect(),
            failures: failures.into_iter().filter_map(Result::err).collect(),
            wall,
        }
    }

    fn ask(&self, client: &Client, request: usize) -> Result<Answer, ClientError> {
        let body = json!({
            "model": self.models[self.picks[request]],
            "prompt": prompt(self.prompt_tokens, self.seed, request),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let start = Instant::now();
        let mut first = None;
        let mut last = start;
        let mut usage = None;
        for piece in client.stream("/v1/completions", &body)? {
            let piece = piece?;
            if !piece.text.is_empty() {
                last = Instant::now();
                first.get_or_insert(last);
            }
            usage = piece.usage.or(usage);
        }
        let total = start.elapsed();
        let first = first.unwrap_or(start + total);
        // A gateway that does not count leaves nothing to report.
        let usage = usage.ok_or(ClientError::Lost(None))?;
        Ok(Answer { first_token: first - start, total, decode: last.saturating_duration_since(first), usage })
    }
}
