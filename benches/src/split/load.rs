//! Clients that only call: random rows through every site in turn, as in passes of a model. The client's own
//! computation is a sleep, as on another machine.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use client::session::{Session, calls::LayerCall};
use model::linear_sites::SiteId;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use shmproto::layer::{CallClass, SiteOp, SitePath};

use super::{
    executor::{CallTransport, SplitExecutor},
    watch::{CallWatcher, ObservedCall},
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Habits {
    pub(super) rows: usize,
    pub(super) class: CallClass,
    pub(super) pause: Duration,
}

/// Measurement of one client. A pass is every site except the head.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ClientMeasurement {
    /// Durations of the passes that ended in time.
    pub(super) passes: Vec<Duration>,
    pub(super) calls: Vec<ObservedCall>,
}

#[derive(Debug)]
pub(super) struct LoadClient {
    habits: Habits,
    session: Session,
    watcher: CallWatcher,
    rows: Vec<(Vec<f32>, Vec<f32>)>,
}

/// Input and output rows of each site of a session's base.
pub(super) fn rows(session: &Session, count: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
    let mut random = StdRng::seed_from_u64(1);
    let sites = session.catalog().sites.iter();
    sites
        .map(|site| {
            let outputs: usize = site.parts.iter().map(|part| part.rows as usize).sum();
            let x = (0..count * site.columns as usize).map(|_| random.random_range(-1.0..1.0)).collect();
            (x, vec![0.0; count * outputs])
        })
        .collect()
}

impl LoadClient {
    /// Opens a session.
    ///
    /// # Errors
    /// Fails if the session is rejected.
    pub(super) fn new(executor: &SplitExecutor, way: CallTransport, habits: Habits) -> Result<Self> {
        let watcher = CallWatcher::default();
        let session = executor.session(way, "off", Some(&watcher))?;
        let mut rows = rows(&session, habits.rows);
        // Most rows of a prompt or of training need no logits, and a client that skips a site would be at
        // another site than the rest.
        rows.pop();
        Ok(Self { habits, session, watcher, rows })
    }

    /// Runs passes until `end`; the last one is incomplete.
    fn passes(&mut self, end: Instant) -> Result<ClientMeasurement> {
        self.watcher.drain();
        let mut passes = Vec::new();
        let Habits { class, pause, .. } = self.habits;
        loop {
            let begun = Instant::now();
            for (site, (x, out)) in (0..).zip(&mut self.rows) {
                if Instant::now() >= end {
                    return Ok(ClientMeasurement { passes, calls: self.watcher.drain() });
                }
                let ask = LayerCall {
                    site: SiteId(site),
                    part: None,
                    op: SiteOp::Forward,
                    path: SitePath::Fast,
                    class,
                };
                self.session.call(ask, x, out).context("a call was not answered")?;
                if !pause.is_zero() {
                    thread::sleep(pause);
                }
            }
            passes.push(begun.elapsed());
        }
    }
}

pub(super) fn sites(clients: &[LoadClient]) -> usize {
    clients.first().map_or(1, |client| client.rows.len())
}

/// Runs all clients at once for `lasts` and returns their measurements.
///
/// # Errors
/// The first failed client.
pub(super) fn together(clients: &mut [LoadClient], lasts: Duration) -> Result<Vec<ClientMeasurement>> {
    let start = &Barrier::new(clients.len());
    thread::scope(|scope| {
        let run = move |client: &mut LoadClient| {
            start.wait();
            client.passes(Instant::now() + lasts)
        };
        let threads: Vec<_> = clients.iter_mut().map(|client| scope.spawn(move || run(client))).collect();
        let joined = |thread: thread::ScopedJoinHandle<'_, Result<ClientMeasurement>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a client's thread panicked")))
        };
        threads.into_iter().map(joined).collect()
    })
}
