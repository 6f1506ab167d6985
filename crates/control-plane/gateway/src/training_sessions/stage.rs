//! Whether a model has a trainer.

use std::time::Instant;

use control_protocol::training::session::CommandRefusal;

use super::{trainer::Trainer, transfer_directories::TransferDirectory};
use crate::trainer_client::trainer_slots::TrainerSlot;

/// See the module's description.
pub(super) enum TrainerStage {
    /// It has none, for this reason.
    Without(CommandRefusal),
    /// It has one.
    Trains(OpenTrainer),
    /// It gave its own to others. What it has learned is on the disk.
    Suspended(SuspendedTrainer),
}

/// A trainer, and how long the model has had it.
pub(super) struct OpenTrainer {
    pub(super) trainer: Trainer,
    pub(super) place: TrainerSlot,
    pub(super) since: Instant,
    /// When it last did something.
    pub(super) used: Instant,
}

/// What another trainer goes on with.
pub(super) struct SuspendedTrainer {
    pub(super) passage: TransferDirectory,
    /// Given back when the model goes on or ends.
    pub(super) _place: TrainerSlot,
}

impl TrainerStage {
    /// There is nothing to train.
    pub(super) fn new() -> Self {
        Self::Without(CommandRefusal::server("this model has not begun"))
    }

    pub(super) fn has_trainer(&self) -> bool {
        matches!(self, Self::Trains(_))
    }
}
