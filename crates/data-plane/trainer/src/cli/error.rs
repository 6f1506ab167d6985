//! Errors of the trainer, and their exit codes.

use client::{cli::exit::CliError, error::CallError};
use model::{adapter::AdapterError, backward::TrainError};
use settings::exit::Exit;

use crate::{
    adapter::TargetModule, checkpoint::CheckpointError, data::DataError, job::JobError, peft::WriteError,
    step::TrainStepError,
};

#[derive(Debug, thiserror::Error)]
pub(super) enum TunerError {
    /// Connecting to the layer service failed.
    #[error("{}", first_line(.0))]
    Rent(#[from] CliError),
    /// The data cannot be read or have faults.
    #[error("{0}")]
    Data(#[from] DataError),
    /// The adapter whose training continues cannot be read.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The initial adapter is an activated LoRA, which changes only a part of each text.
    #[error(
        "training of an activated LoRA cannot continue here, because it would train on the whole text; \
         train it with PEFT"
    )]
    Activated,
    /// The initial adapter is of a type that is read as a LoRA, or of virtual tokens that are not trained.
    #[error(
        "training of an adapter of the type {0} cannot continue here; continue with the LoRA that `holobiont \
         adapters convert` writes, or train it with PEFT"
    )]
    OtherType(String),
    /// The model lacks a target layer.
    #[error(
        "this model has no trainable {0}, because experts of a mixture cannot be trained; remove it from \
         --targets"
    )]
    NoTarget(TargetModule),
    /// The checkpoint cannot be read or written.
    #[error("{}", with_causes(.0))]
    Checkpoint(#[from] CheckpointError),
    /// An optimizer step failed.
    #[error("{}", with_causes(.0))]
    Learn(#[from] TrainStepError<CallError>),
    /// The training job failed.
    #[error("{}", with_causes(.0))]
    Job(#[from] JobError<CallError>),
    /// The adapter cannot be written.
    #[error("{}", with_causes(.0))]
    Write(#[from] WriteError),
    /// The arguments are invalid or contradict each other.
    #[error("{0}")]
    Usage(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// Description of the failed operation.
        what: &'static str,
        source: std::io::Error,
    },
}

impl TunerError {
    pub(super) fn exit(&self) -> Exit {
        match self {
            Self::Rent(error) => error.exit(),
            Self::Data(DataError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Exit::NotFound
            }
            Self::Data(_)
            | Self::Usage(_)
            | Self::Adapter(_)
            | Self::Activated
            | Self::OtherType(_)
            | Self::NoTarget(_) => Exit::Usage,
            Self::Checkpoint(CheckpointError::Other { .. } | CheckpointError::Broken { .. }) => Exit::Usage,
            Self::Checkpoint(CheckpointError::InUse(_)) => Exit::Unavailable,
            Self::Learn(error) | Self::Job(JobError::Learn(error)) => of_learning(error),
            Self::Checkpoint(_) | Self::Job(_) | Self::Write(_) | Self::System { .. } => Exit::Failed,
        }
    }
}

fn of_learning(error: &TrainStepError<CallError>) -> Exit {
    match error {
        TrainStepError::Train(TrainError::Base(
            CallError::PeerGone { .. } | CallError::Quota { .. } | CallError::Busy { .. },
        )) => Exit::Unavailable,
        _ => Exit::Failed,
    }
}

fn first_line(error: &CliError) -> String {
    error.text().trim_start_matches("error: ").replace("\n  why: ", ": ")
}

/// Returns the message of `error`, followed by the causes that the message does not contain.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
