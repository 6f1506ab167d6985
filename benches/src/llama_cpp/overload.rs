//! Ten times as many requests as a server can serve: goodput, first tokens, and time to rejection.
//!
//! A closed loop with as many clients as batch slots finds the peak. Then requests arrive at ten times the
//! served rate as a Poisson process. The first seconds are a burst that a server may queue; the measurement
//! starts after them. Clients are threads on the server's cores, so their cost lowers its capacity.

use std::{
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    servers::{Adapters, warmed_up},
    setup::Setup,
};
use crate::{
    holobiont_runner::Holobiont,
    http::{Attempt, Dialect, DialectServer, Timeline},
    measure::{Samples, alternate},
    peer::LlamaServer,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{BenchRequest, STREAMS, arrival},
};

/// Clients of the closed loop: `--max-running`, so that no request waits and no slot idles.
const PEAK_CLIENTS: usize = 64;
/// Arrivals per second, as a multiple of the requests per second at the peak.
const OVERLOAD: f64 = 10.0;
/// Maximum number of open requests of the client: more than our server runs and queues. A server that rejects
/// in time stays below it.
const MAX_OPEN: usize = 1024;
/// Maximum number of open requests at the peer, which rejects none: all must complete at the end.
const PEER_MAX_OPEN: usize = 512;
/// Capacity of the channel between the arrival clock and the client threads.
const HAND_OVER: usize = 32;
/// Measured time of each loop; requests that begin within it are followed to their end.
const LOOP: Duration = Duration::from_secs(15);
/// Time of a closed loop before its tokens count.
const RAMP: Duration = Duration::from_secs(2);
/// Time of arrivals before the measurement, in which the initial burst is served.
const SETTLE: Duration = Duration::from_secs(45);

/// Server of a side, clients that keep it busy, and its maximum number of open requests.
#[derive(Debug, Clone, Copy)]
struct OverloadSide {
    clients: usize,
    max_open: usize,
}

#[derive(Debug, Clone, PartialEq, Default)]
struct OverloadStats {
    served: Vec<Timeline>,
    refused: Vec<Duration>,
    /// Arrivals for which no client thread was free: the server left too many requests open.
    unsent: usize,
    /// Tokens that arrived in the measured time, and its length.
    tokens: f64,
    seconds: f64,
}

impl OverloadStats {
    fn goodput(&self) -> f64 {
        self.tokens / self.seconds
    }

    fn served_per_s(&self) -> f64 {
        let tokens: usize = self.served.iter().map(|timeline| timeline.tokens).sum();
        self.goodput() * self.served.len() as f64 / tokens as f64
    }

    /// 99th percentile of the time to the first token, in milliseconds.
    fn first_token_ms(&self) -> f64 {
        percentile_ms(self.served.iter().map(|timeline| timeline.first - timeline.sent).collect())
    }

    fn refusal_ms(&self) -> f64 {
        percentile_ms(self.refused.clone())
    }
}

/// 99th percentile; 0 if there are no times.
fn percentile_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let at = (times.len() * 99).div_ceil(100).saturating_sub(1);
    times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
}

#[derive(Debug, Default)]
struct RequestLog {
    served: Vec<Timeline>,
    refused: Vec<(Instant, Duration)>,
}

impl RequestLog {
    /// Requests sent from `from` to the end of `measured`, and tokens that arrived within it.
    fn load(&self, from: Instant, measured: &Range<Instant>) -> OverloadStats {
        let is_meant = |sent: Instant| (from..measured.end).contains(&sent);
        let refused = self.refused.iter().filter(|(sent, _)| is_meant(*sent));
        OverloadStats {
            served: self.served.iter().filter(|timeline| is_meant(timeline.sent)).copied().collect(),
            refused: refused.map(|(_, after)| *after).collect(),
            unsent: 0,
            tokens: self.served.iter().map(|timeline| tokens_within(timeline, measured)).sum(),
            seconds: (measured.end - measured.start).as_secs_f64(),
        }
    }
}

/// Tokens of a request within `measured`, assuming that they arrive evenly.
fn tokens_within(timeline: &Timeline, measured: &Range<Instant>) -> f64 {
    let from = timeline.first.max(measured.start);
    let until = timeline.last.min(measured.end);
    let whole = (timeline.last - timeline.first).as_secs_f64();
    let tokens = timeline.tokens as f64;
    match until.checked_duration_since(from) {
        None => 0.0,
        Some(_) if whole == 0.0 => tokens,
        Some(part) => tokens * part.as_secs_f64() / whole,
    }
}

#[derive(Debug, Clone, PartialEq)]
struct OverloadTrial {
    peak: OverloadStats,
    overload: OverloadStats,
}

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let adapters = Adapters::generate(setup)?;
    let ours =
        Holobiont::start(&setup.holobiont, &adapters.ours[..STREAMS], &setup.temporary("holobiont-overload"))
            .and_then(warmed_up)?;
    let folder = setup.temporary("llama-server-overload");
    let peer =
        LlamaServer::start(&setup.peer, &setup.peer.q4_0, &adapters.peers, &folder).and_then(warmed_up)?;
    let [ours, peer] = alternate(
        setup.config.runs,
        [
            Box::new(|round| trial(&ours, round, OverloadSide { clients: PEAK_CLIENTS, max_open: MAX_OPEN })),
            Box::new(|round| trial(&peer, round, OverloadSide { clients: STREAMS, max_open: PEER_MAX_OPEN })),
        ],
    )?;
    compare(setup, &ours, &peer)
}

fn compare(setup: &Setup, ours: &[OverloadTrial], peer: &[OverloadTrial]) -> Result<Vec<Comparison>> {
    let row =
        |case: &str, unit, better, figure: &dyn Fn(&OverloadTrial) -> f64, target| -> Result<Comparison> {
            let rival = PeerSamples {
                name: "llama-server".to_owned(),
                format: setup.peer.q4_0.format.clone(),
                samples: Samples::of(peer, figure)?,
            };
            let (case, ours) = (case.to_owned(), Samples::of(ours, figure)?);
            Ok(Comparison { bench: "overload", case, unit, better, ours, rival, target })
        };
    let (higher, lower) = (Better::Higher, Better::Lower);
    Ok(vec![
        row("goodput at the peak", "tokens/s", higher, &|trial| trial.peak.goodput(), None)?,
        row(
            "goodput at 10 times the peak's rate",
            "tokens/s",
            higher,
            &|trial| trial.overload.goodput(),
            None,
        )?,
        row(
            "goodput under overload",
            "share of the peak",
            higher,
            &|trial| trial.overload.goodput() / trial.peak.goodput(),
            Some(BenchTarget::OursAtLeast(0.95)),
        )?,
        row("p99 first token at the peak", "ms", lower, &|trial| trial.peak.first_token_ms(), None)?,
        row(
            "p99 first token of the admitted under overload",
            "times that at the peak",
            lower,
            &|trial| trial.overload.first_token_ms() / trial.peak.first_token_ms(),
            Some(BenchTarget::OursAtMost(1.5)),
        )?,
        row(
            "p99 time to a refusal",
            "ms",
            lower,
            &|trial| trial.overload.refusal_ms(),
            Some(BenchTarget::OursAtMost(10.0)),
        )?,
        row(
            "arrivals left unanswered",
            "share",
            lower,
            &|trial| {
                let OverloadStats { served, refused, unsent, .. } = &trial.overload;
                *unsent as f64 / (served.len() + refused.len() + unsent).max(1) as f64
            },
            Some(BenchTarget::OursAtMost(0.0)),
        )?,
    ])
}

fn trial<D: Dialect>(server: &DialectServer<D>, round: usize, side: OverloadSide) -> Result<OverloadTrial> {
    let peak = closed_loop(server, round, side.clients)?;
    ensure!(!peak.served.is_empty(), "nothing was served at the peak");
    let rate = peak.served_per_s() * OVERLOAD;
    let overload = open_loop(server, round, rate, side.max_open)?;
    Ok(OverloadTrial { peak, overload })
}

/// Runs `clients` clients that each send their next request at once.
fn closed_loop<D: Dialect>(server: &DialectServer<D>, round: usize, clients: usize) -> Result<OverloadStats> {
    let (records, next, started) = (Mutex::new(RequestLog::default()), AtomicUsize::new(0), Instant::now());
    thread::scope(|scope| {
        let client = || -> Result<()> {
            while started.elapsed() < LOOP {
                let job = arrival(2 * round, next.fetch_add(1, Ordering::Relaxed));
                note(&records, server, &job)?;
            }
            Ok(())
        };
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        clients.into_iter().try_for_each(joined)
    })?;
    let records = records.into_inner().unwrap_or_else(PoisonError::into_inner);
    // First tokens count from the start, other tokens after the ramp.
    Ok(records.load(started, &(started + RAMP..started + LOOP)))
}

/// Runs arrivals at `rate` per second, independent of earlier requests.
fn open_loop<D: Dialect>(
    server: &DialectServer<D>,
    round: usize,
    rate: f64,
    max_open: usize,
) -> Result<OverloadStats> {
    let (records, started) = (Mutex::new(RequestLog::default()), Instant::now());
    let (arrivals, queue) = mpsc::sync_channel::<usize>(HAND_OVER);
    let (queue, over) = (Mutex::new(queue), AtomicBool::new(false));
    let unsent = thread::scope(|scope| {
        let client = || -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                let received = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(number) = received else { break };
                note(&records, server, &arrival(2 * round + 1, number))?;
            }
            Ok(())
        };
        let clients: Vec<_> = (0..max_open).map(|_| scope.spawn(client)).collect();
        let unsent = send_arrivals(&arrivals, rate, round as u64, started);
        drop(arrivals);
        clients.into_iter().try_for_each(joined)?;
        anyhow::Ok(unsent)
    })?;
    let records = records.into_inner().unwrap_or_else(PoisonError::into_inner);
    let from = started + SETTLE;
    Ok(OverloadStats { unsent, ..records.load(from, &(from..from + LOOP)) })
}

/// Sends request numbers at exponentially distributed intervals; returns how many found no free thread in the
/// measured time.
fn send_arrivals(arrivals: &mpsc::SyncSender<usize>, rate: f64, seed: u64, started: Instant) -> usize {
    let (mut random, mut at, mut unsent) = (StdRng::seed_from_u64(seed), 0.0, 0);
    for number in 0.. {
        at += -(1.0 - random.random::<f64>()).ln() / rate;
        if at > (SETTLE + LOOP).as_secs_f64() {
            break;
        }
        thread::sleep(Duration::from_secs_f64(at).saturating_sub(started.elapsed()));
        unsent += usize::from(arrivals.try_send(number).is_err() && at > SETTLE.as_secs_f64());
    }
    unsent
}

fn note<D: Dialect>(
    records: &Mutex<RequestLog>,
    server: &DialectServer<D>,
    job: &BenchRequest,
) -> Result<()> {
    let sent = Instant::now();
    let attempt = server.attempt(job)?;
    let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
    match attempt {
        Attempt::Served(timeline) => records.served.push(timeline),
        Attempt::Refused { after } => records.refused.push((sent, after)),
    }
    Ok(())
}

fn joined(client: thread::ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    client.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a client thread panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_the_greatest_of_few_and_leaves_one_in_a_hundred() {
        let ms = |range: std::ops::RangeInclusive<u64>| range.map(Duration::from_millis).collect::<Vec<_>>();
        assert_eq!(percentile_ms(ms(1..=10)), 10.0);
        assert_eq!(percentile_ms(ms(1..=200)), 198.0);
        assert_eq!(percentile_ms(Vec::new()), 0.0);
    }

    #[test]
    fn tokens_count_by_when_they_came_and_requests_by_when_they_were_sent() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let timeline = |sent, first, last| Timeline {
            sent: at(sent),
            first: at(first),
            last: at(last),
            tokens: 10,
            cached: 0,
            longest_gap: Duration::ZERO,
        };
        let served =
            vec![timeline(1, 8, 12), timeline(11, 12, 13), timeline(12, 19, 24), timeline(13, 30, 30)];
        let refused = vec![(at(9), Duration::ZERO), (at(15), Duration::ZERO)];
        let load = RequestLog { served, refused }.load(at(10), &(at(10)..at(20)));
        assert_eq!((load.served.len(), load.refused.len()), (3, 1));
        assert_eq!(load.tokens, 5.0 + 10.0 + 2.0);
    }

    #[test]
    fn arrivals_come_at_their_rate() {
        let (sender, receiver) = mpsc::sync_channel(100_000);
        // A start in the past, so that the loop never sleeps.
        let started = Instant::now().checked_sub(SETTLE + LOOP).unwrap();
        assert_eq!(send_arrivals(&sender, 100.0, 1, started), 0);
        drop(sender);
        let count = receiver.iter().count() as f64;
        assert!((count / (100.0 * (SETTLE + LOOP).as_secs_f64()) - 1.0).abs() < 0.1, "{count}");
    }
}
