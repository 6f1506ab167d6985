//! The signals that ask this process to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Who asks for a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopSignal {
    /// A person, with Ctrl-C.
    Interrupt,
    /// A program, or a terminal that was closed.
    Terminate,
}

/// The signals that ask for a stop.
#[derive(Debug)]
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl StopSignals {
    /// Listens for them from now on.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> StopSignal {
        tokio::select! {
            // Of two that came at once the person's counts first, so that the other one is no insisting.
            biased;
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.hangup.recv() => StopSignal::Terminate,
        }
    }
}
