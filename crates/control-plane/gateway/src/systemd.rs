//! Notifications to systemd: readiness, status text, and the watchdog.
//!
//! systemd starts dependent units after `READY=1`, shows `STATUS=` in `systemctl status`, and restarts a
//! process that stops feeding the watchdog. The watchdog is fed only while the runtime runs and the
//! connection tasks of the executors answer. Without systemd this module does nothing.

use std::time::Duration;

use process::notify::send_status;
use sd_notify::NotifyState;
use tokio::{sync::watch, time::timeout};

use crate::{executors::Executors, health::loading, lifecycle::GatewayReadiness};

/// Extension of the start timeout at each progress.
const MORE_TIME: Duration = Duration::from_secs(60);

/// Calls `tell` at each change of `status` until its sender is dropped; `adapters` counts registered
/// adapters.
pub async fn follow(
    mut status: watch::Receiver<GatewayReadiness>,
    adapters: impl Fn() -> usize,
    tell: impl Fn(&[NotifyState<'_>]),
) {
    loop {
        let now = status.borrow_and_update().clone();
        let text = describe(&now, adapters());
        match now {
            GatewayReadiness::Ready(_) | GatewayReadiness::Asleep(_) => {
                tell(&[NotifyState::Ready, NotifyState::Status(&text)])
            }
            GatewayReadiness::Starting { .. } => {
                let more_us = u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX);
                tell(&[NotifyState::ExtendTimeoutUsec(more_us), NotifyState::Status(&text)]);
            }
            GatewayReadiness::Lost { .. } | GatewayReadiness::Closing => tell(&[NotifyState::Status(&text)]),
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Formats the status as one line for `systemctl status`.
fn describe(status: &GatewayReadiness, adapters: usize) -> String {
    let text = match status {
        GatewayReadiness::Ready(_) => format!("ready, {adapters} adapters"),
        GatewayReadiness::Starting { stage, percent: None } => stage.clone(),
        GatewayReadiness::Starting { stage, percent } => format!("{} ({stage})", loading(stage, *percent)),
        GatewayReadiness::Lost { detail } => format!("executor lost: {detail}"),
        GatewayReadiness::Asleep(_) => format!("asleep, {adapters} adapters"),
        GatewayReadiness::Closing => "stopping".to_owned(),
    };
    text.replace(char::is_control, " ")
}

/// Feeds the watchdog, if systemd set one, while the executors' connection tasks answer.
pub(crate) async fn feed(bases: Vec<Executors>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(limit / 2);
    loop {
        ticks.tick().await;
        let answer = async {
            for executors in &bases {
                if !executors.links_answer().await {
                    return false;
                }
            }
            true
        };
        match timeout(limit / 2, answer).await {
            Ok(true) => send_status(&[NotifyState::Watchdog]),
            Ok(false) => return,
            Err(_) => {
                tracing::error!("the connection to the base-executor is stuck; the watchdog is not fed")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_line_for_a_person() {
        let starting = |percent| GatewayReadiness::Starting { stage: "reading weights".to_owned(), percent };
        assert_eq!(describe(&starting(Some(43)), 0), "loading 43 % (reading weights)");
        assert_eq!(describe(&starting(None), 0), "reading weights");
        let lost = GatewayReadiness::Lost { detail: "it closed\nthe connection".to_owned() };
        assert_eq!(describe(&lost, 3), "executor lost: it closed the connection");
    }
}
