//! The callers of a run. In a closed loop, each caller sends its next request after its last answer; in an
//! open loop, requests are sent at planned times.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::traffic::{arrivals, prompt};
use crate::client::{ClientError, GatewayClient, Usage};

/// When requests are sent: at once by a number of callers, or at random times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum LoadPattern {
    /// A fixed number of concurrent requests.
    Closed {
        /// Number of concurrent callers.
        concurrency: usize,
    },
    /// Requests at random times, independent of answers.
    Open {
        /// Mean rate of a Poisson process, in requests per second.
        per_s: f64,
        /// Maximum number of concurrent requests; a request beyond it is sent late and reported as late.
        callers: usize,
    },
}

#[derive(Debug)]
pub(super) struct LoadPlan {
    /// Names of the requested models.
    pub(super) models: Vec<String>,
    /// Index of the model of each request.
    pub(super) picks: Vec<usize>,
    pub(super) pattern: LoadPattern,
    /// Approximate number of tokens per prompt.
    pub(super) prompt_tokens: usize,
    /// Number of tokens per answer.
    pub(super) max_tokens: u32,
    /// Random seed of the prompts.
    pub(super) seed: u64,
}

/// Times and usage of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerTiming {
    /// Time from sending to the first piece of text.
    pub(super) first_token: Duration,
    /// Time from sending to the end of the stream.
    pub(super) total: Duration,
    /// Time from the first piece of text to the last.
    pub(super) decode: Duration,
    /// Token counts reported by the gateway.
    pub(super) usage: Usage,
}

/// Outcome of one request.
#[derive(Debug)]
pub(super) struct RequestResult {
    pub(super) request: usize,
    /// Send time, counted from the start of the run.
    pub(super) sent: Duration,
    /// Delay of sending after the planned time.
    pub(super) late: Duration,
    /// Time from sending to the end of answer or error.
    pub(super) took: Duration,
    pub(super) answer: Result<AnswerTiming, ClientError>,
}

impl RequestResult {
    /// True if the gateway refused the request because it is full (429, 503).
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self.answer, Err(ClientError::Refused { status: 429 | 503, .. }))
    }
}

/// Outcomes of all requests of a run.
#[derive(Debug)]
pub(super) struct LoadResult {
    /// Outcomes in the order of the requests.
    pub(super) results: Vec<RequestResult>,
    /// Time from the first request to the end of the last answer.
    pub(super) wall: Duration,
}

impl LoadPlan {
    pub(super) fn run(&self, client: &GatewayClient) -> LoadResult {
        let (callers, times) = match self.pattern {
            LoadPattern::Closed { concurrency } => (concurrency, None),
            LoadPattern::Open { per_s, callers } => {
                (callers, Some(arrivals(per_s, self.picks.len(), self.seed)))
            }
        };
        let next = AtomicUsize::new(0);
        let start = Instant::now();
        let caller = || {
            let requests = std::iter::from_fn(|| {
                let request = next.fetch_add(1, Ordering::Relaxed);
                (request < self.picks.len()).then_some(request)
            });
            let send = |request: usize| {
                let due = times.as_ref().map_or_else(|| start.elapsed(), |times| times[request]);
                thread::sleep(due.saturating_sub(start.elapsed()));
                self.send(client, request, start, due)
            };
            requests.map(send).collect::<Vec<_>>()
        };
        let mut results: Vec<_> = thread::scope(|scope| {
            let callers: Vec<_> = (0..callers.min(self.picks.len())).map(|_| scope.spawn(caller)).collect();
            callers.into_iter().filter_map(|caller| caller.join().ok()).flatten().collect()
        });
        results.sort_by_key(|result| result.request);
        LoadResult { results, wall: start.elapsed() }
    }

    fn send(&self, client: &GatewayClient, request: usize, start: Instant, due: Duration) -> RequestResult {
        let sent = start.elapsed();
        let answer = self.ask(client, request);
        let took = start.elapsed().saturating_sub(sent);
        RequestResult { request, sent, late: sent.saturating_sub(due), took, answer }
    }

    fn ask(&self, client: &GatewayClient, request: usize) -> Result<AnswerTiming, ClientError> {
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
        // Without the gateway's token counts there is nothing to report.
        let usage = usage.ok_or(ClientError::Lost(None))?;
        Ok(AnswerTiming {
            first_token: first - start,
            total,
            decode: last.saturating_duration_since(first),
            usage,
        })
    }
}
