//! Progress of loading, for gateways and systemd.

use shmproto::message::Loading;
use tokio::sync::watch;

/// Sender of the loading progress, which never decreases within a stage.
#[derive(Debug)]
pub struct LoadingProgress(watch::Sender<Loading>);

impl LoadingProgress {
    /// Starts at zero, and returns the receiver too.
    #[must_use]
    pub fn new() -> (Self, watch::Receiver<Loading>) {
        let (sender, receiver) =
            watch::channel(Loading { stage: "opening the model".to_owned(), percent: 0 });
        (Self(sender), receiver)
    }

    /// Begins a stage with a readable `name`.
    pub fn stage(&self, name: &str) {
        self.0.send_replace(Loading { stage: name.to_owned(), percent: 0 });
    }

    /// Reports `done` of `total`. Several threads may call this, in any order.
    pub fn done(&self, done: u64, total: u64) {
        let percent = (u128::from(done) * 100).checked_div(u128::from(total)).unwrap_or(100);
        let percent = u32::try_from(percent.min(100)).unwrap_or(100);
        self.0.send_if_modified(|loading| {
            let further = percent > loading.percent;
            loading.percent = percent.max(loading.percent);
            further
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_goes_backwards_within_a_stage() {
        let (progress, watch) = LoadingProgress::new();
        progress.stage("reading weights");
        let percents =
            [(10, 100), (43, 100), (12, 100), (u64::MAX, u64::MAX), (50, 0)].map(|(done, total)| {
                progress.done(done, total);
                watch.borrow().percent
            });
        assert_eq!(percents, [10, 43, 43, 100, 100]);
        progress.stage("taking memory");
        assert_eq!(*watch.borrow(), Loading { stage: "taking memory".to_owned(), percent: 0 });
    }
}
