//! Signals that ask this process to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Source of a stop request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopSignal {
    /// Ctrl-C at the terminal.
    Interrupt,
    /// `SIGTERM` of a program, or `SIGHUP` of a closed terminal.
    Terminate,
}

#[derive(Debug)]
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl StopSignals {
    /// Installs the handlers of all three signals.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> StopSignal {
        tokio::select! {
            // Ctrl-C is polled first: of two simultaneous signals, the other one must not count as a second
            // Ctrl-C.
            biased;
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.hangup.recv() => StopSignal::Terminate,
        }
    }
}
