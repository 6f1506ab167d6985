//! Whether a model has a trainer.

use std::time::Instant;

use control_protocol::training::session::CommandRefusal;

use super::{trainer::Trainer, transfer_directories::TransferDirectory};
use crate::trainer_client::trainer_slots::TrainerSlot;

pub(super) enum TrainerStage {
    /// The model has no trainer, for this reason.
    Without(CommandRefusal),
    Trains(OpenTrainer),
    /// The model gave its trainer to others; its state is on disk.
    Suspended(SuspendedTrainer),
}

/// Trainer of a model, with the times of its start and last use.
pub(super) struct OpenTrainer {
    pub(super) trainer: Trainer,
    pub(super) place: TrainerSlot,
    pub(super) since: Instant,
    /// Time of the last use.
    pub(super) used: Instant,
}

/// State on disk from which another trainer resumes.
pub(super) struct SuspendedTrainer {
    pub(super) passage: TransferDirectory,
    /// Slot that is released when the model resumes or ends.
    pub(super) _place: TrainerSlot,
}

impl TrainerStage {
    /// Stage of a model before its first command.
    pub(super) fn new() -> Self {
        Self::Without(CommandRefusal::server("this model has not started"))
    }

    pub(super) fn has_trainer(&self) -> bool {
        matches!(self, Self::Trains(_))
    }
}
