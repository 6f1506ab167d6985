//! Polls each executor once per second, and follows the state of its connection.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use shmproto::message::Stats;
use tokio::{sync::watch, time::MissedTickBehavior};

use super::{GatewayMetrics, placement};
use crate::{
    adapters::Registry,
    executor::{Executor, link_messages::LinkState},
    lifecycle::GatewayReadiness,
};

const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl GatewayMetrics {
    fn report(&self, index: usize, stats: Stats, registry: &Registry) {
        let executor = &self.executors[index];
        let mut latest = executor.latest();
        let before = latest.before();
        executor.report(&stats, before);
        placement::count_by_adapter(&self.store, &self.adapters, &stats, before, registry);
        let next = latest.next(stats, Instant::now());
        *latest = next;
    }

    /// Updates the metrics from a connected executor's welcome message; `instance` is the process seen last.
    fn see(&self, index: usize, link: &LinkState, instance: &mut Option<u64>) {
        let LinkState::Up { welcome, .. } = link else { return };
        let executor = &self.executors[index];
        executor.greeted(welcome);
        if instance.replace(welcome.instance).is_some_and(|before| before != welcome.instance) {
            executor.restarted();
        }
    }
}

/// Polls the executor at `index`, and detects when its process is replaced.
pub(crate) async fn poll(
    metrics: Arc<GatewayMetrics>,
    index: usize,
    executor: Executor,
    registry: Arc<Registry>,
    mut status: watch::Receiver<GatewayReadiness>,
) {
    let mut link = executor.link();
    let mut instance = None;
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        metrics.see(index, &link.borrow_and_update(), &mut instance);
        if let GatewayReadiness::Ready(serving) = &*status.borrow_and_update() {
            metrics.serves(&serving.base_name);
        }
        tokio::select! {
            _ = ticks.tick() => match executor.stats().await {
                Ok(stats) => {
                    // The reporting process must be known before its counters are added.
                    metrics.see(index, &link.borrow(), &mut instance);
                    metrics.report(index, stats, &registry);
                }
                Err(_) => metrics.executors[index].lost(),
            },
            changed = link.changed() => if changed.is_err() { return },
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}
