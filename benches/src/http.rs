//! Streamed requests to either side's server and the arrival times of their tokens; [`plain`]: requests
//! without a stream.

mod plain;

use std::{
    io::{BufRead, BufReader, Read},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use self::plain::agent;
pub(crate) use self::plain::{get, get_as, post, post_json};
use crate::{measure::Samples, process::LoggedProcess, workload, workload::BenchRequest};
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

const READY_LIMIT: Duration = Duration::from_secs(120);
const READY_POLL: Duration = Duration::from_millis(5);
const REQUEST_LIMIT: Duration = Duration::from_secs(300);

const WARM_UP_TOKENS: usize = 8;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SseEvent {
    pub(crate) has_text: bool,
    pub(crate) generated: Option<usize>,
    pub(crate) cached: Option<usize>,
}

/// Request and response format of a kind of server.
pub(crate) trait Dialect: Sync {
    fn route(&self) -> &'static str;
    /// Body of a request for `job`: streamed, greedy, without end of text.
    fn body(&self, job: &BenchRequest) -> Value;
    /// Reads an event's JSON.
    ///
    /// # Errors
    /// Fails if the event reports an error.
    fn read(&self, event: &Value) -> Result<SseEvent>;
    fn key(&self) -> Option<&str> {
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeline {
    pub(crate) sent: Instant,
    pub(crate) first: Instant,
    pub(crate) last: Instant,
    pub(crate) tokens: usize,
    pub(crate) cached: usize,
    /// Longest time between two events with text.
    pub(crate) longest_gap: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    Served(Timeline),
    /// The server rejected the request for lack of capacity.
    Refused {
        /// From the request to the end of the rejection.
        after: Duration,
    },
}

/// Timelines of requests sent at the same moment, all answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Burst(pub(crate) Vec<Timeline>);

impl Burst {
    /// Tokens per second over all requests, from the first token of any to the last of all.
    pub(crate) fn decode_tokens_per_s(&self) -> f64 {
        let generated: usize = self.0.iter().map(|t| t.tokens).sum();
        // The first token opens the window and was generated before it.
        (generated - 1) as f64 / self.span(|t| t.first).as_secs_f64()
    }

    /// Tokens per second over all requests, from their start to the last token, prefill included.
    pub(crate) fn aggregate_tokens_per_s(&self) -> f64 {
        let generated: usize = self.0.iter().map(|t| t.tokens).sum();
        generated as f64 / self.span(|t| t.sent).as_secs_f64()
    }

    pub(crate) fn median_first_token_ms(&self) -> f64 {
        let waits = self.0.iter().map(|t| (t.first - t.sent).as_secs_f64() * 1000.0).collect();
        Samples::new(waits).map_or(0.0, |waits| waits.median())
    }

    pub(crate) fn worst_first_token_ms(&self) -> f64 {
        let worst = self.0.iter().map(|t| t.first - t.sent).max().unwrap_or_default();
        worst.as_secs_f64() * 1000.0
    }

    fn span(&self, start: impl Fn(&Timeline) -> Instant) -> Duration {
        let start = self.0.iter().map(start).min();
        let end = self.0.iter().map(|t| t.last).max();
        start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start)
    }
}

#[derive(Debug)]
pub(crate) struct DialectServer<D> {
    process: LoggedProcess,
    port: u16,
    dialect: D,
}

/// Returns a port of this machine that was free a moment ago.
///
/// # Errors
/// If there is none.
pub(crate) fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").context("cannot find a free port")?;
    Ok(listener.local_addr().context("cannot find a free port")?.port())
}

impl<D: Dialect> DialectServer<D> {
    /// Waits until a started server answers `GET /health` with 200.
    ///
    /// # Errors
    /// Fails if the server ends or takes too long; the error holds the end of its log.
    pub(crate) fn when_ready(process: LoggedProcess, port: u16, dialect: D) -> Result<Self> {
        Self::ready_within(READY_LIMIT, process, port, dialect)
    }

    /// Waits as [`DialectServer::when_ready`] does, for at most `limit`.
    ///
    /// # Errors
    /// Fails if the server ends or takes too long; the error holds the end of its log.
    pub(crate) fn ready_within(
        limit: Duration,
        mut process: LoggedProcess,
        port: u16,
        dialect: D,
    ) -> Result<Self> {
        let started = Instant::now();
        let agent = agent(Duration::from_secs(5));
        let health = format!("http://127.0.0.1:{port}/health");
        while !agent.get(&health).call().is_ok_and(|answer| answer.status() == 200) {
            process.ensure_running()?;
            ensure!(
                started.elapsed() < limit,
                "no answer at {health} for {limit:?}; the server's last words:\n{}",
                process.last_words()
            );
            thread::sleep(READY_POLL);
        }
        Ok(Self { process, port, dialect })
    }

    /// Returns this server with the dialect that `change` returns.
    ///
    /// # Errors
    /// Errors of `change`.
    pub(crate) fn with_dialect(self, change: impl FnOnce(D) -> Result<D>) -> Result<Self> {
        Ok(Self { dialect: change(self.dialect)?, ..self })
    }

    pub(crate) fn dialect(&self) -> &D {
        &self.dialect
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Sends one request and follows its stream to the end.
    ///
    /// # Errors
    /// Fails if the request fails or generates another number of tokens than requested.
    pub(crate) fn ask(&self, job: &BenchRequest) -> Result<Timeline> {
        stream(self.port, &self.dialect, job).map_err(|error| self.explain(error))
    }

    /// Sends one request with API key `key`, as [`DialectServer::attempt`] does.
    ///
    /// # Errors
    /// Fails if the request fails for another reason than lack of capacity.
    pub(crate) fn attempt_as(&self, key: &str, job: &BenchRequest) -> Result<Attempt> {
        attempt(self.port, &self.dialect, Some(key), job).map_err(|error| self.explain(error))
    }

    /// Sends one request that may be rejected for lack of capacity (429 or 503).
    ///
    /// # Errors
    /// Fails if the request fails for another reason.
    pub(crate) fn attempt(&self, job: &BenchRequest) -> Result<Attempt> {
        attempt(self.port, &self.dialect, self.dialect.key(), job).map_err(|error| self.explain(error))
    }

    /// Sends all of `jobs` at the same moment and follows them to the end.
    ///
    /// # Errors
    /// As [`DialectServer::ask`], of the first failed request.
    pub(crate) fn burst(&self, jobs: &[BenchRequest]) -> Result<Burst> {
        let gate = Barrier::new(jobs.len());
        let timelines: Result<Vec<Timeline>> = thread::scope(|scope| {
            let clients: Vec<_> = jobs
                .iter()
                .map(|job| {
                    let gate = &gate;
                    scope.spawn(move || {
                        gate.wait();
                        stream(self.port, &self.dialect, job)
                    })
                })
                .collect();
            clients
                .into_iter()
                .map(|client| client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked"))))
                .collect()
        });
        timelines.map(Burst).map_err(|error| self.explain(error))
    }

    /// Sends short versions of `jobs` without measuring, so that pages are mapped and adapters loaded.
    ///
    /// # Errors
    /// As [`DialectServer::burst`].
    pub(crate) fn warm_up(&self, jobs: &[BenchRequest]) -> Result<()> {
        let short = |job: &BenchRequest| BenchRequest { generate: WARM_UP_TOKENS, ..job.clone() };
        self.burst(&jobs.iter().map(short).collect::<Vec<_>>()).map(|_| ())
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        error.context(format!("a request failed; the server's last words:\n{}", self.process.last_words()))
    }
}

fn stream(port: u16, dialect: &impl Dialect, job: &BenchRequest) -> Result<Timeline> {
    match attempt(port, dialect, dialect.key(), job)? {
        Attempt::Served(timeline) => Ok(timeline),
        Attempt::Refused { .. } => Err(anyhow!("the server was full")),
    }
}

fn attempt(port: u16, dialect: &impl Dialect, key: Option<&str>, job: &BenchRequest) -> Result<Attempt> {
    let url = format!("http://127.0.0.1:{port}{}", dialect.route());
    let body = dialect.body(job);
    let agent = agent(REQUEST_LIMIT);
    let sent = Instant::now();
    let mut request = agent.post(&url);
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut answer = request.send_json(&body).with_context(|| format!("no answer to POST {url}"))?;
    let status = answer.status().as_u16();
    if status != 200 {
        let text = answer.body_mut().read_to_string().unwrap_or_default();
        ensure!(matches!(status, 429 | 503), "POST {url} was answered with {status}: {text}");
        return Ok(Attempt::Refused { after: sent.elapsed() });
    }
    follow(answer.body_mut().as_reader(), dialect, job, sent).map(Attempt::Served)
}

/// Reads server-sent events to their end and records when text arrived.
fn follow(body: impl Read, dialect: &impl Dialect, job: &BenchRequest, sent: Instant) -> Result<Timeline> {
    let (mut first, mut last, mut generated, mut cached) = (None, sent, None, 0);
    let mut longest_gap = Duration::ZERO;
    for line in BufReader::new(body).lines() {
        let line = line.context("a stream broke off")?;
        let Some(data) = line.strip_prefix("data:").map(str::trim) else {
            continue;
        };
        if data == "[DONE]" {
            break;
        }
        let event = serde_json::from_str(data).with_context(|| format!("an event is not JSON: {data}"))?;
        let event = dialect.read(&event)?;
        if event.has_text {
            let now = Instant::now();
            if first.is_some() {
                longest_gap = longest_gap.max(now - last);
            }
            last = now;
            first.get_or_insert(last);
        }
        generated = event.generated.or(generated);
        cached = event.cached.unwrap_or(cached);
    }
    let first = first.context("a stream ended without text")?;
    let tokens = generated.context("a stream ended without telling how many tokens it has")?;
    ensure!(
        tokens == job.generate,
        "a stream has {tokens} tokens where {} were asked for; is ignore_eos honoured?",
        job.generate
    );
    Ok(Timeline { sent, first, last, tokens, cached, longest_gap })
}

/// Fields of both dialects: greedy sampling, no early end of text (structured output has no end here, and we
/// reject both together).
pub(crate) fn with_prompt(mut body: Value, job: &BenchRequest) -> Value {
    body["prompt"] = job.prompt.iter().copied().collect();
    body["stream"] = true.into();
    body["ignore_eos"] = (job.says != workload::AnswerKind::Form).into();
    body["temperature"] = 0.into();
    body
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{TcpListener, TcpStream},
    };

    use serde_json::json;

    use super::*;
    use crate::workload::{BurstMix, burst};

    /// Test dialect: `{"t": text}` carries text, `{"n": tokens}` the count, `{"e": why}` an error.
    struct Toy;

    impl Dialect for Toy {
        fn route(&self) -> &'static str {
            "/toy"
        }
        fn body(&self, job: &BenchRequest) -> Value {
            with_prompt(json!({}), job)
        }
        fn read(&self, event: &Value) -> Result<SseEvent> {
            ensure!(event["e"].is_null(), "refused: {}", event["e"]);
            let generated = event["n"].as_u64().map(|n| n as usize);
            Ok(SseEvent { has_text: event["t"].is_string(), generated, cached: None })
        }
    }

    fn job() -> BenchRequest {
        BenchRequest { generate: 2, ..burst(BurstMix::Base, 0).swap_remove(0) }
    }

    fn followed(events: &str) -> Result<Timeline> {
        follow(events.as_bytes(), &Toy, &job(), Instant::now())
    }

    #[test]
    fn a_stream_is_read_to_its_end() {
        let events =
            "data: {\"t\":\"a\"}\n\n: ping\n\ndata: {\"t\":\"b\"}\n\ndata: {\"n\":2}\n\ndata: [DONE]\n\n";
        assert_eq!(followed(events).unwrap().tokens, 2);
    }

    #[test]
    fn a_stream_that_is_short_broken_or_refused_is_an_error() {
        for (events, why) in [
            ("data: {\"t\":\"a\"}\n\ndata: {\"n\":1}\n\n", "1 tokens where 2"),
            ("data: {\"t\":\"a\"}\n\n", "without telling"),
            ("data: {\"n\":2}\n\n", "without text"),
            ("data: {\"t\":\n\n", "not JSON"),
            ("data: {\"e\":\"full\"}\n\n", "full"),
        ] {
            let error = format!("{:#}", followed(events).unwrap_err());
            assert!(error.contains(why), "{error} should say {why}");
        }
    }

    #[test]
    fn rates_are_taken_over_the_window_of_all_requests() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let timeline = |first, last| Timeline {
            sent: start,
            first: at(first),
            last: at(last),
            tokens: 50,
            cached: 0,
            longest_gap: Duration::ZERO,
        };
        let burst = Burst(vec![timeline(100, 600), timeline(500, 1090)]);
        assert!((burst.decode_tokens_per_s() - 99.0 / 0.99).abs() < 1e-6);
        assert!((burst.aggregate_tokens_per_s() - 100.0 / 1.09).abs() < 1e-6);
        assert!((burst.median_first_token_ms() - 300.0).abs() < 1e-6);
        assert!((burst.worst_first_token_ms() - 500.0).abs() < 1e-6);
    }

    #[test]
    fn the_first_token_is_timed_when_it_arrives_and_not_when_the_stream_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = thread::spawn(move || serve_slowly(listener.accept().unwrap().0));
        let timeline = stream(port, &Toy, &job()).unwrap();
        server.join().unwrap();
        assert!(timeline.last - timeline.first >= Duration::from_millis(100));
        assert_eq!(timeline.longest_gap, timeline.last - timeline.first);
    }

    fn serve_slowly(mut socket: TcpStream) {
        let mut request = BufReader::new(socket.try_clone().unwrap());
        let mut length = 0;
        let mut line = String::new();
        while request.read_line(&mut line).unwrap() > 2 {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            line.clear();
        }
        request.read_exact(&mut vec![0; length]).unwrap();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        write!(socket, "{head}data: {{\"t\":\"a\"}}\n\n").unwrap();
        thread::sleep(Duration::from_millis(150));
        write!(socket, "data: {{\"t\":\"b\"}}\n\ndata: {{\"n\":2}}\n\n").unwrap();
    }
}
