//! Why a job did not run, or did not run to its end.

use client::{
    cli::exit::{CliError, Exit},
    error::CallError,
};
use model::{adapter::AdapterError, backward::TrainError};

use crate::{
    adapter::TargetModule, checkpoint::CheckpointError, data::DataError, job::JobError, peft::WriteError,
    step::TrainStepError,
};

/// Why there is no adapter.
#[derive(Debug, thiserror::Error)]
pub(super) enum TunerError {
    /// The base cannot be rented.
    #[error("{}", first_line(.0))]
    Rent(#[from] CliError),
    /// The data are none, or faulty.
    #[error("{0}")]
    Data(#[from] DataError),
    /// The adapter to go on from cannot be read.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The adapter to go on from applies to a part of each text.
    #[error(
        "an activated LoRA cannot be trained further here, for it would be trained on all of each text; train it with PEFT"
    )]
    Activated,
    /// A layer is to learn that the model does not have.
    #[error("this model has no {0}: nothing learns in the experts of a mixture; leave it out of --targets")]
    NoTarget(TargetModule),
    /// There is no going on from the checkpoint, or nowhere to put one.
    #[error("{}", with_causes(.0))]
    Checkpoint(#[from] CheckpointError),
    /// A step was not made.
    #[error("{}", with_causes(.0))]
    Learn(#[from] TrainStepError<CallError>),
    /// The job ended.
    #[error("{}", with_causes(.0))]
    Job(#[from] JobError<CallError>),
    /// The adapter cannot be written.
    #[error("{}", with_causes(.0))]
    Write(#[from] WriteError),
    /// The command line says what cannot be.
    #[error("{0}")]
    Usage(String),
    /// The system refuses something.
    #[error("{what}: {source}")]
    System {
        /// What was asked of the system.
        what: &'static str,
        /// Cause.
        source: std::io::Error,
    },
}

impl TunerError {
    /// The exit code.
    pub(super) fn exit(&self) -> Exit {
        match self {
            Self::Rent(error) => error.exit(),
            Self::Data(DataError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Exit::NotFound
            }
            Self::Data(_) | Self::Usage(_) | Self::Adapter(_) | Self::Activated | Self::NoTarget(_) => {
                Exit::Usage
            }
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

/// A message, and what led to it as far as it has not said so.
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
