//! A stop of the whole deployment, while it is under way.

use tokio::time::Instant;

use super::errors::UpError;

/// A stop under way.
#[derive(Debug)]
pub(crate) struct DeploymentStop {
    /// Until then what runs may end by itself.
    pub(crate) deadline: Instant,
    /// What `up` returns once all have ended.
    pub(crate) result: Result<(), UpError>,
    /// Whether they were killed already.
    pub(crate) force: StopMode,
}

/// How a stop is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopMode {
    /// What runs may end.
    Drain,
    /// What runs is killed.
    Kill,
}
