//! Errors of `tune`: an adapter was not trained, or not served.

use std::{io, path::PathBuf};

use super::{
    name::RunName,
    rollouts::{RolloutError, reward::RewardError},
};
use crate::{
    client::ClientError,
    deployment::selection::SelectionError,
    exit::{Exit, Explain},
    terminal::{printable, quoted, table::short_generation},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum TuneError {
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the program holobiont-trainer is neither beside `holobiont` nor on PATH")]
    NoTrainer,
    #[error("cannot read {path}")]
    Input { path: PathBuf, source: io::Error },
    #[error("the name {0} belongs to the base model")]
    NameOfBase(RunName),
    /// The name belongs to an adapter that this run may not replace.
    #[error("an adapter called {name} is served already (generation {})", short_generation(generation))]
    NameTaken {
        name: RunName,
        /// Version of the adapter that has the name.
        generation: String,
    },
    #[error("the adapter {0}, which this run should replace, no longer exists")]
    NameGone(RunName),
    /// The gateway reads adapters from a directory where this process cannot write.
    #[error("the gateway reports no adapter directory on this host")]
    NoAdapterRoot,
    #[error("the deployment in {} serves no base layers, because its weights are random or its layer \
             service is off", .0.display())]
    NoLayers(PathBuf),
    /// Another process holds the run's lock.
    #[error("the run {0} is still running")]
    UnderWay(RunName),
    #[error("there is no run called {0}")]
    NoRun(RunName),
    /// The run is complete, so nothing can be resumed.
    #[error("the run {name} is complete and cannot be resumed")]
    AlreadyDone {
        name: RunName,
        /// Path of the run's adapter.
        output: PathBuf,
    },
    #[error("nothing was changed")]
    Declined,
    /// A file or directory of the run's record cannot be read or written.
    #[error("cannot read or write {path}")]
    Keep { path: PathBuf, source: io::Error },
    #[error("cannot run holobiont-trainer")]
    Run(#[source] io::Error),
    /// The data has faults, each of which has been printed.
    #[error("{data} has {faults} faults; nothing was trained")]
    Data {
        /// Paths of the data, for people.
        data: String,
        faults: usize,
    },
    #[error("{said}")]
    Trainer {
        /// Last error line of the trainer.
        said: String,
        exit: Exit,
        /// Command that resumes the run, if there is a checkpoint.
        resume: Option<String>,
    },
    /// The user stopped the trainer.
    #[error("stopped; {}", match checkpoint {
        Some(step) => format!("the checkpoint of step {step} is kept"),
        None => "there is no checkpoint yet".into(),
    })]
    Stopped {
        /// Step of the last checkpoint.
        checkpoint: Option<u64>,
        /// Command that resumes the run.
        resume: String,
    },
    /// The adapter is trained, but the gateway refused it.
    #[error("the adapter was trained into {}, but the gateway refused to serve it", output.display())]
    NotServed {
        /// Path of the trained adapter.
        output: PathBuf,
        /// Command that serves the adapter.
        serve: String,
        source: ClientError,
    },
    #[error("the gateway serves no model called {}", printable(.0))]
    NoModel(String),
    #[error("a prompt failed after {answered} of {of} answers")]
    NotAnswered {
        /// Number of prompts whose answers are kept.
        answered: usize,
        of: usize,
        /// Command that resumes the run.
        resume: String,
        source: ClientError,
    },
    /// The user stopped a run while it collected answers.
    #[error("stopped; the answers to {answered} of {of} prompts are kept")]
    AskingStopped {
        /// Number of prompts whose answers are kept.
        answered: usize,
        of: usize,
        /// Command that resumes the run.
        resume: String,
    },
    /// The rewards of GRPO cannot be computed.
    #[error("cannot open the rewards")]
    Rewards(#[from] RewardError),
    #[error("--method grpo needs rewards")]
    NoRewards,
    #[error("--reward works only with --method grpo")]
    UnusedRewards,
    /// The trainer got no answers of the adapter.
    #[error("the answers of a step failed")]
    Rollouts {
        source: RolloutError,
        /// Command that resumes the run.
        resume: String,
    },
    #[error("the program lm_eval is not on PATH, and python3 has no module lm_eval; nothing was trained")]
    NoLmEval,
    #[error("cannot run lm_eval")]
    RunLmEval(#[source] io::Error),
    #[error("lm_eval failed: {said}")]
    LmEval {
        /// Last line of its log.
        said: String,
        log: PathBuf,
    },
    /// The user stopped lm-eval.
    #[error("stopped during the evaluation")]
    EvaluationStopped,
    #[error("cannot draw {path}: {reason}")]
    Plot { path: PathBuf, reason: String },
    #[error("the run {0} is not running")]
    NotUnderWay(RunName),
    #[error("the run {0} was asked to stop and still runs")]
    StillRunning(RunName),
}

impl Explain for TuneError {
    fn exit(&self) -> Exit {
        match self {
            Self::Selection(error) => error.exit(),
            Self::Client(error) => error.exit(),
            Self::NotServed { source, .. } | Self::NotAnswered { source, .. } => source.exit(),
            Self::Trainer { exit, .. } => *exit,
            Self::Rollouts { source: RolloutError::Sample(error), .. } => error.exit(),
            Self::NoRewards | Self::UnusedRewards => Exit::Usage,
            Self::Input { source, .. } | Self::Keep { source, .. } => Exit::of_system(source),
            Self::NoTrainer | Self::NoLmEval | Self::NoRun(_) | Self::NotUnderWay(_) | Self::NoModel(_) => {
                Exit::NotFound
            }
            Self::NameTaken { .. } | Self::NameGone(_) | Self::UnderWay(_) | Self::AlreadyDone { .. } => {
                Exit::Conflict
            }
            Self::NameOfBase(_) | Self::Data { .. } => Exit::Usage,
            Self::NoAdapterRoot | Self::NoLayers(_) | Self::StillRunning(_) => Exit::Unavailable,
            Self::Declined
            | Self::Run(_)
            | Self::RunLmEval(_)
            | Self::LmEval { .. }
            | Self::EvaluationStopped
            | Self::Stopped { .. }
            | Self::AskingStopped { .. }
            | Self::Rewards(_)
            | Self::Rollouts { .. }
            | Self::Plot { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        Some(match self {
            Self::Selection(error) => return error.next(),
            Self::Client(error) => return error.next(),
            Self::NoLmEval => "pip install \"lm_eval[api]\"".into(),
            Self::LmEval { log, .. } => format!("less {}", quoted(&log.to_string_lossy())),
            Self::NoTrainer => "cargo build --release --bin holobiont-trainer".into(),
            Self::NameOfBase(_) => "choose another --name".into(),
            Self::NameTaken { .. } => "replace it with --replace, or choose another --name".into(),
            Self::NameGone(_) => "use --replace again, or choose another --name".into(),
            Self::NoLayers(_) => {
                "start it without [lab] random_weights and without [layers] local = false".into()
            }
            Self::NoAdapterRoot => "use a deployment on this host whose gateway has the same version".into(),
            Self::UnderWay(name) | Self::StillRunning(name) => {
                format!("holobiont tune show {0}, holobiont tune cancel {0}", quoted(name.as_str()))
            }
            Self::NoRun(_) | Self::NotUnderWay(_) => "holobiont tune ls".into(),
            Self::AlreadyDone { output, .. } => {
                format!("--from {} starts a new run from its adapter", quoted(&output.to_string_lossy()))
            }
            Self::Trainer { resume, .. } => return resume.clone(),
            Self::Stopped { checkpoint: Some(_), resume }
            | Self::AskingStopped { resume, .. }
            | Self::NotAnswered { resume, .. }
            | Self::Rollouts { resume, .. } => resume.clone(),
            Self::NoRewards => {
                "add --reward FILE.py with a function reward(prompt, answer, row), or --reward URL".into()
            }
            Self::UnusedRewards => "remove --reward, or add --method grpo".into(),
            Self::NoModel(_) => "holobiont ls".into(),
            Self::NotServed { serve, .. } => serve.clone(),
            Self::Input { .. }
            | Self::Declined
            | Self::Rewards(_)
            | Self::Keep { .. }
            | Self::Run(_)
            | Self::RunLmEval(_)
            | Self::EvaluationStopped
            | Self::Data { .. }
            | Self::Stopped { .. }
            | Self::Plot { .. } => {
                return None;
            }
        })
    }
}
