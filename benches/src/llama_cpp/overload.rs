//! Ten times as many requests as a server can serve: what is left of its goodput and of its first tokens, and how soon
//! the rest is told to come back.
//!
//! A closed loop finds the peak: as many clients as streams run together, each asking again at once. Then requests
//! arrive at ten times the rate that was served, at exponentially distributed intervals, whatever happens to those
//! before them. Clients are threads on the same cores as the server: what they cost, it cannot serve with.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    servers::{Adapters, warmed_up},
    setup::Setup,
};
use crate::{
    http::{Attempt, Dialect, Server, Timeline},
    measure::{Samples, alternate},
    ours::Holobiont,
    peer::LlamaServer,
    report::{Better, Comparison, Rival, Target},
    workload::{STREAMS, arrival},
};

/// Clients of the closed loop: `--max-running`, so that nobody waits and nothing idles.
const PEAK_CLIENTS: usize = 64;
/// Arrivals a second, over what was served a second at the peak.
const OVERLOAD: f64 = 10.0;
/// Requests that may be open at once on the client's side. A server that refuses in time never gets there.
const MAX_OPEN: usize = 512;
/// Arrivals that may be between the clock and a client's thread: threads take them one after the other.
const HAND_OVER: usize = 32;
/// How long each loop runs. What begins within it is followed to its end.
const LOOP: Duration = Duration::from_secs(15);

/// What one loop saw.
#[derive(Debug, Clone, PartialEq, Default)]
struct Load {
    served: Vec<Timeline>,
    /// How long each refusal took.
    refused: Vec<Duration>,
    /// Arrivals the client had no thread for: the server left [`MAX_OPEN`] requests open.
    unsent: usize,
    seconds: f64,
}

impl Load {
    /// Tokens a second of requests that were served.
    fn goodput(&self) -> f64 {
        self.served.iter().map(|timeline| timeline.tokens).sum::<usize>() as f64 / self.seconds
    }

    fn served_per_s(&self) -> f64 {
        self.served.len() as f64 / self.seconds
    }

    /// 99th percentile of the time to the first token, in milliseconds.
    fn first_token_ms(&self) -> f64 {
        percentile_ms(self.served.iter().map(|timeline| timeline.first - timeline.sent).collect())
    }

    fn refusal_ms(&self) -> f64 {
        percentile_ms(self.refused.clone())
    }
}

/// The 99th percentile; 0 of nothing.
fn percentile_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let at = (times.len() * 99).div_ceil(100).saturating_sub(1);
    times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
}

/// A peak and what became of it.
#[derive(Debug, Clone, PartialEq)]
struct Trial {
    peak: Load,
    overload: Load,
}

/// Every comparison of this benchmark.
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
        [Box::new(|round| trial(&ours, round, PEAK_CLIENTS)), Box::new(|round| trial(&peer, round, STREAMS))],
    )?;
    compare(setup, &ours, &peer)
}

fn compare(setup: &Setup, ours: &[Trial], peer: &[Trial]) -> Result<Vec<Comparison>> {
    let row = |case: &str, unit, better, figure: &dyn Fn(&Trial) -> f64, target| -> Result<Comparison> {
        let rival = Rival {
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
            Some(Target::OursAtLeast(0.95)),
        )?,
        row("p99 first token at the peak", "ms", lower, &|trial| trial.peak.first_token_ms(), None)?,
        row(
            "p99 first token of the admitted under overload",
            "times that at the peak",
            lower,
            &|trial| trial.overload.first_token_ms() / trial.peak.first_token_ms(),
            Some(Target::OursAtMost(1.5)),
        )?,
        row(
            "p99 time to a refusal",
            "ms",
            lower,
            &|trial| trial.overload.refusal_ms(),
            Some(Target::OursAtMost(10.0)),
        )?,
        row(
            "arrivals left unanswered",
            "share",
            lower,
            &|trial| {
                let Load { served, refused, unsent, .. } = &trial.overload;
                *unsent as f64 / (served.len() + refused.len() + unsent).max(1) as f64
            },
            Some(Target::OursAtMost(0.0)),
        )?,
    ])
}

fn trial<D: Dialect>(server: &Server<D>, round: usize, clients: usize) -> Result<Trial> {
    let peak = closed_loop(server, round, clients)?;
    ensure!(!peak.served.is_empty(), "nothing was served at the peak");
    let rate = peak.served_per_s() * OVERLOAD;
    let overload = open_loop(server, round, rate)?;
    Ok(Trial { peak, overload })
}

/// `clients` clients, each of whom asks again at once.
fn closed_loop<D: Dialect>(server: &Server<D>, round: usize, clients: usize) -> Result<Load> {
    let (load, next, started) = (Mutex::new(Load::default()), AtomicUsize::new(0), Instant::now());
    thread::scope(|scope| {
        let client = || -> Result<()> {
            while started.elapsed() < LOOP {
                let job = arrival(2 * round, next.fetch_add(1, Ordering::Relaxed));
                note(&load, server.attempt(&job)?);
            }
            Ok(())
        };
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        clients.into_iter().try_for_each(joined)
    })?;
    finished(load, started)
}

/// Arrivals at `rate` a second, whatever happens to those before them.
fn open_loop<D: Dialect>(server: &Server<D>, round: usize, rate: f64) -> Result<Load> {
    let (load, started) = (Mutex::new(Load::default()), Instant::now());
    let (arrivals, queue) = mpsc::sync_channel::<usize>(HAND_OVER);
    let (queue, over) = (Mutex::new(queue), AtomicBool::new(false));
    let unsent = thread::scope(|scope| {
        let client = || -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                let received = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(number) = received else { break };
                note(&load, server.attempt(&arrival(2 * round + 1, number))?);
            }
            Ok(())
        };
        let clients: Vec<_> = (0..MAX_OPEN).map(|_| scope.spawn(client)).collect();
        let unsent = send_arrivals(&arrivals, rate, round as u64, started);
        drop(arrivals);
        clients.into_iter().try_for_each(joined)?;
        anyhow::Ok(unsent)
    })?;
    let mut load = finished(load, started)?;
    load.unsent = unsent;
    Ok(load)
}

/// Hands out numbers at exponentially distributed intervals; returns how many found nobody to take them.
fn send_arrivals(arrivals: &mpsc::SyncSender<usize>, rate: f64, seed: u64, started: Instant) -> usize {
    let (mut random, mut at, mut unsent) = (StdRng::seed_from_u64(seed), 0.0, 0);
    for number in 0.. {
        at += -(1.0 - random.random::<f64>()).ln() / rate;
        if at > LOOP.as_secs_f64() {
            break;
        }
        thread::sleep(Duration::from_secs_f64(at).saturating_sub(started.elapsed()));
        unsent += usize::from(arrivals.try_send(number).is_err());
    }
    unsent
}

fn note(load: &Mutex<Load>, attempt: Attempt) {
    let mut load = load.lock().unwrap_or_else(PoisonError::into_inner);
    match attempt {
        Attempt::Served(timeline) => load.served.push(timeline),
        Attempt::Refused { after } => load.refused.push(after),
    }
}

fn finished(load: Mutex<Load>, started: Instant) -> Result<Load> {
    let mut load = load.into_inner().unwrap_or_else(PoisonError::into_inner);
    let last = load.served.iter().map(|timeline| timeline.last).max().context("no request was served")?;
    load.seconds = (last - started).as_secs_f64();
    Ok(load)
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
    fn arrivals_come_at_their_rate() {
        let (sender, receiver) = mpsc::sync_channel(100_000);
        // As if all of the loop were in the past, so that nothing sleeps.
        let started = Instant::now().checked_sub(LOOP).unwrap();
        assert_eq!(send_arrivals(&sender, 100.0, 1, started), 0);
        drop(sender);
        let count = receiver.iter().count() as f64;
        assert!((count / (100.0 * LOOP.as_secs_f64()) - 1.0).abs() < 0.1, "{count}");
    }
}
