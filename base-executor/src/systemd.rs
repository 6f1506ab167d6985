//! Notifications to systemd: loading progress, readiness, liveness and exit.
//!
//! Without `NOTIFY_SOCKET` nothing is sent. The watchdog is fed only while the compute thread loops, because
//! a process with a hanging engine must be restarted.

use std::time::Duration;

use process::notify::send_status;
use sd_notify::NotifyState;
use shmproto::message::Loading;
use tokio::time::{MissedTickBehavior, interval};

use crate::heartbeat::{ComputeHeartbeat, EngineGauges};

/// Maximum interval between two status reports.
const LOOK: Duration = Duration::from_secs(1);

/// Time by which each loading report extends systemd's start timeout, in microseconds. Large models on slow
/// disks exceed the default.
const PATIENCE_US: u32 = 60_000_000;

pub(crate) fn loading(loading: &Loading) {
    let status = format!("loading: {}, {} %", loading.stage, loading.percent);
    send_status(&[NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(PATIENCE_US)]);
}

pub(crate) fn ready() {
    send_status(&[NotifyState::Ready, NotifyState::Status(&serving(EngineGauges::default()))]);
}

pub(crate) fn stopping() {
    send_status(&[NotifyState::Stopping, NotifyState::Status("stopping after running requests")]);
}

/// Feeds the watchdog and updates the status line forever. `wake` makes an idle compute thread loop.
pub(crate) async fn report_status(heartbeat: ComputeHeartbeat, wake: impl Fn()) {
    let watchdog = sd_notify::watchdog_enabled();
    let mut clock =
        interval(watchdog.map_or(LOOK, |limit| (limit / 4).clamp(Duration::from_millis(1), LOOK)));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut beats, mut gauges) = (heartbeat.beats(), EngineGauges::default());
    loop {
        clock.tick().await;
        let now = (heartbeat.beats(), heartbeat.gauges());
        if now.0 != beats && watchdog.is_some() {
            send_status(&[NotifyState::Watchdog]);
        }
        if now.1 != gauges {
            send_status(&[NotifyState::Status(&serving(now.1))]);
        }
        (beats, gauges) = now;
        wake();
    }
}

fn serving(gauges: EngineGauges) -> String {
    let EngineGauges { adapters, running, waiting } = gauges;
    format!("serving {adapters} adapters; {running} requests run, {waiting} wait")
}
