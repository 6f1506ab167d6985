//! What the process tells systemd: how far it is, that it serves, that it lives, that it ends.
//!
//! Without `NOTIFY_SOCKET` nothing is said. The watchdog is fed only while the compute thread turns: a process whose
//! engine hangs answers nobody, and being started again is what helps.

use std::time::Duration;

use sd_notify::NotifyState;
use shmproto::{message::Loading, notify::send_status};
use tokio::time::{MissedTickBehavior, interval};

use crate::heartbeat::{ComputeHeartbeat, EngineGauges};

/// How often figures are looked at, at least.
const LOOK: Duration = Duration::from_secs(1);

/// How long systemd is asked to wait for the next word about the loading: large models on slow disks take longer than
/// it waits by itself.
const PATIENCE_US: u32 = 60_000_000;

/// How far the loading is.
pub(crate) fn loading(loading: &Loading) {
    let status = format!("loading: {}, {} %", loading.stage, loading.percent);
    send_status(&[NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(PATIENCE_US)]);
}

/// Gateways are served from now on.
pub(crate) fn ready() {
    send_status(&[NotifyState::Ready, NotifyState::Status(&serving(EngineGauges::default()))]);
}

/// The process is about to end.
pub(crate) fn stopping() {
    send_status(&[NotifyState::Stopping, NotifyState::Status("finishing what runs")]);
}

/// Feeds the watchdog and keeps the status line true, for ever. `poke` makes an idle compute thread turn.
pub(crate) async fn keep_posted(pulse: ComputeHeartbeat, poke: impl Fn()) {
    let watchdog = sd_notify::watchdog_enabled();
    let mut clock =
        interval(watchdog.map_or(LOOK, |limit| (limit / 4).clamp(Duration::from_millis(1), LOOK)));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut beats, mut figures) = (pulse.beats(), EngineGauges::default());
    loop {
        clock.tick().await;
        let now = (pulse.beats(), pulse.figures());
        if now.0 != beats && watchdog.is_some() {
            send_status(&[NotifyState::Watchdog]);
        }
        if now.1 != figures {
            send_status(&[NotifyState::Status(&serving(now.1))]);
        }
        (beats, figures) = now;
        poke();
    }
}

fn serving(figures: EngineGauges) -> String {
    let EngineGauges { adapters, running, waiting } = figures;
    format!("serving {adapters} adapters; {running} requests run, {waiting} wait")
}
