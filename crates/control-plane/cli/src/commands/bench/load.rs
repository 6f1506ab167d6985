//! The callers of a run: a closed loop, where each sends its next request when its last one is answered, or an open one,
//! where requests are sent when their time has come.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::traffic::{arrivals, prompt};
use crate::client::{ClientError, GatewayClient, Usage};

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum LoadPattern {
    /// So many are under way at once.
    Closed {
        /// Callers.
        concurrency: usize,
    },
    /// So many come in a second, whatever becomes of them.
    Open {
        /// Mean of a Poisson process.
        per_s: f64,
        /// Requests under way at once at most; a request beyond them is sent late and counted so.
        callers: usize,
    },
}

/// The load of one run.
#[derive(Debug)]
pub(super) struct LoadPlan {
    /// Whom to ask.
    pub(super) models: Vec<String>,
    /// For each request, the index of its model.
    pub(super) picks: Vec<usize>,
    /// When they are sent.
    pub(super) pace: LoadPattern,
    /// Tokens of a prompt, about.
    pub(super) prompt_tokens: usize,
    /// Tokens of an answer.
    pub(super) max_tokens: u32,
    /// Chooses the prompts.
    pub(super) seed: u64,
}

/// What a caller saw of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerTiming {
    /// From sending to the first piece of text.
    pub(super) first_token: Duration,
    /// From sending to the end of the stream.
    pub(super) total: Duration,
    /// From the first piece of text to the last.
    pub(super) decode: Duration,
    /// The gateway's own counts.
    pub(super) usage: Usage,
}

/// What became of one request.
#[derive(Debug)]
pub(super) struct RequestFate {
    /// Index of the request.
    pub(super) request: usize,
    /// When it was sent, counted from the start of the run.
    pub(super) sent: Duration,
    /// How much later than its time it was sent.
    pub(super) late: Duration,
    /// From sending to the end, however it came.
    pub(super) took: Duration,
    /// The answer, or why there is none.
    pub(super) result: Result<AnswerTiming, ClientError>,
}

impl RequestFate {
    /// True if the gateway said at once that it will not, because it is full.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self.result, Err(ClientError::Refused { status: 429 | 503, .. }))
    }
}

/// What all callers saw.
#[derive(Debug)]
pub(super) struct LoadResult {
    /// Every request, in order.
    pub(super) fates: Vec<RequestFate>,
    /// From the first request to the end of the last answer.
    pub(super) wall: Duration,
}

impl LoadPlan {
    /// Sends all requests and waits for all answers.
    pub(super) fn run(&self, client: &GatewayClient) -> LoadResult {
        let (callers, times) = match self.pace {
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
            let fate = |request: usize| {
                let due = times.as_ref().map_or_else(|| start.elapsed(), |times| times[request]);
                thread::sleep(due.saturating_sub(start.elapsed()));
                self.send(client, request, start, due)
            };
            requests.map(fate).collect::<Vec<_>>()
        };
        let mut fates: Vec<_> = thread::scope(|scope| {
            let callers: Vec<_> = (0..callers.min(self.picks.len())).map(|_| scope.spawn(caller)).collect();
            callers.into_iter().filter_map(|caller| caller.join().ok()).flatten().collect()
        });
        fates.sort_by_key(|fate| fate.request);
        LoadResult { fates, wall: start.elapsed() }
    }

    fn send(&self, client: &GatewayClient, request: usize, start: Instant, due: Duration) -> RequestFate {
        let sent = start.elapsed();
        let result = self.ask(client, request);
        let took = start.elapsed().saturating_sub(sent);
        RequestFate { request, sent, late: sent.saturating_sub(due), took, result }
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
        // A gateway that does not count leaves nothing to report.
        let usage = usage.ok_or(ClientError::Lost(None))?;
        Ok(AnswerTiming {
            first_token: first - start,
            total,
            decode: last.saturating_duration_since(first),
            usage,
        })
    }
}
