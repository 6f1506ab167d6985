//! Asks the executor each second what it has to report, and follows what its connection tells.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use shmproto::message::Stats;
use tokio::{sync::watch, time::MissedTickBehavior};

use super::{Metrics, placement};
use crate::{
    adapters::Registry,
    executor::{Executor, link::Link},
    lifecycle::Status,
};

/// How often the executor is asked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Metrics {
    /// Takes over what the executor reported about itself and about adapters of `registry`.
    fn report(&self, stats: Stats, registry: &Registry) {
        let mut latest = self.latest();
        let before = latest.before();
        self.executor.report(&stats, before);
        self.memory.report(&stats, before);
        self.placement.report(&self.store, &stats, before);
        placement::count_rank_rows(&self.store, &self.adapters, &stats, before, registry);
        self.layers.report(&self.store, &stats.layers, before.map(|before| &before.layers));
        let next = latest.next(stats, Instant::now());
        *latest = next;
    }

    /// Takes over what the connected executor says of itself; `instance` is the one that was seen last.
    fn see(&self, link: &Link, instance: &mut Option<u64>) {
        let Link::Up { welcome, .. } = link else { return };
        self.executor.greeted(welcome);
        self.placement.greeted(&self.store, welcome, &self.latest().stats);
        self.max_running.store(welcome.max_running, Relaxed);
        if instance.replace(welcome.instance).is_some_and(|before| before != welcome.instance) {
            self.latest().forget();
            self.executor.restarted();
        }
    }

    /// Says that the executor is not there.
    fn executor_lost(&self) {
        self.executor.lost();
        self.placement.lost();
        self.layers.lost(&self.store);
    }
}

/// Asks the executor for its figures, as long as there is one, and watches which process it is.
pub async fn poll(
    metrics: Arc<Metrics>,
    executor: Executor,
    registry: Arc<Registry>,
    mut status: watch::Receiver<Status>,
) {
    let mut link = executor.link();
    let mut instance = None;
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        metrics.see(&link.borrow_and_update(), &mut instance);
        if let Status::Ready(serving) = &*status.borrow_and_update() {
            metrics.serves(&serving.base_name);
        }
        tokio::select! {
            _ = ticks.tick() => match executor.stats().await {
                Ok(stats) => {
                    // Whose figures they are must be known before they are counted.
                    metrics.see(&link.borrow(), &mut instance);
                    metrics.report(stats, &registry);
                }
                Err(_) => metrics.executor_lost(),
            },
            changed = link.changed() => if changed.is_err() { return },
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}
