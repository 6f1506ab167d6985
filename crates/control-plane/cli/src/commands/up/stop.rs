//! State of a stop of the whole deployment.

use tokio::time::Instant;

use super::errors::UpError;

#[derive(Debug)]
pub(crate) struct DeploymentStop {
    /// Time until which processes may end by themselves.
    pub(crate) deadline: Instant,
    /// Result of `up` once all processes have ended.
    pub(crate) result: Result<(), UpError>,
    /// Whether the processes drain or were killed.
    pub(crate) force: StopMode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopMode {
    /// Running processes may end by themselves.
    Drain,
    /// Running processes are killed.
    Kill,
}
