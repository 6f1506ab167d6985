//! Whether a model has a trainer.

use std::time::Instant;

use training_protocol::session::Refusal;

use super::{passages::Passage, trainer::Trainer};
use crate::trainers::places::Place;

/// See the module's description.
pub(super) enum Stage {
    /// It has none, for this reason.
    Without(Refusal),
    /// It has one.
    Trains(Open),
    /// It gave its own to others. What it has learned is on the disk.
    Suspended(Suspended),
}

/// A trainer, and how long the model has had it.
pub(super) struct Open {
    pub(super) trainer: Trainer,
    pub(super) place: Place,
    pub(super) since: Instant,
    /// When it last did something.
    pub(super) used: Instant,
}

/// What another trainer goes on with.
pub(super) struct Suspended {
    pub(super) passage: Passage,
    /// Given back when the model goes on or ends.
    pub(super) _place: Place,
}

impl Stage {
    /// There is nothing to train.
    pub(super) fn new() -> Self {
        Self::Without(Refusal::server("this model has not begun"))
    }

    pub(super) fn has_trainer(&self) -> bool {
        matches!(self, Self::Trains(_))
    }
}
