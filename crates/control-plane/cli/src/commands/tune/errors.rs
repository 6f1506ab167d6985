//! Errors of `tune`: an adapter was not trained, or not served.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::name::RunName;
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
    #[error("{0} is the name of the base model")]
    NameOfBase(RunName),
    /// The name belongs to an adapter that this run may not replace.
    #[error("an adapter called {name} is served already (generation {})", short_generation(generation))]
    NameTaken {
        name: RunName,
        /// Version of the adapter that has the name.
        generation: String,
    },
    #[error("the adapter {0} that this run was to replace is gone")]
    NameGone(RunName),
    /// The gateway reads adapters from a directory where this process cannot write.
    #[error("the gateway does not say where on this host it reads adapters")]
    NoAdapterRoot,
    #[error("the deployment in {} serves no layers to trainers: its weights are random, or its layer service is off", .0.display())]
    NoLayers(PathBuf),
    /// Another process holds the run's lock.
    #[error("a run called {0} is under way")]
    UnderWay(RunName),
    #[error("there is no run called {0}")]
    NoRun(RunName),
    /// The run is complete, so nothing can be resumed.
    #[error("the run {name} is done")]
    AlreadyDone {
        name: RunName,
        /// Path of the run's adapter.
        output: PathBuf,
    },
    #[error("nothing was changed")]
    Declined,
    /// A file or directory of the run's record cannot be read or written.
    #[error("cannot use {path}")]
    Keep { path: PathBuf, source: io::Error },
    #[error("holobiont-trainer cannot be run")]
    Run(#[source] io::Error),
    /// The data has faults, each of which has been printed.
    #[error("{faults} faults in {}; nothing was trained", data.as_deref().unwrap_or(Path::new("the data")).display())]
    Data { data: Option<PathBuf>, faults: usize },
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
        Some(step) => format!("a checkpoint is kept, after step {step}"),
        None => "there was no checkpoint yet".into(),
    })]
    Stopped {
        /// Step of the last checkpoint.
        checkpoint: Option<u64>,
        /// Command that resumes the run.
        resume: String,
    },
    /// The adapter is trained, but the gateway refused it.
    #[error("the adapter is trained, in {}, but not served", output.display())]
    NotServed {
        /// Path of the trained adapter.
        output: PathBuf,
        /// Command that serves the adapter.
        serve: String,
        source: ClientError,
    },
    #[error("no model called {} is served", printable(.0))]
    NoModel(String),
    #[error("{answered} of {of} prompts are answered; one was not")]
    NotAnswered {
        /// Number of prompts whose answers are kept.
        answered: usize,
        of: usize,
        /// Command that resumes the run.
        resume: String,
        source: ClientError,
    },
    /// The user stopped a run while it collected answers.
    #[error("stopped; {answered} of {of} prompts are answered, and the answers are kept")]
    AskingStopped {
        /// Number of prompts whose answers are kept.
        answered: usize,
        of: usize,
        /// Command that resumes the run.
        resume: String,
    },
    #[error("cannot draw {path}: {reason}")]
    Plot { path: PathBuf, reason: String },
    #[error("the run {0} is not under way")]
    NotUnderWay(RunName),
    #[error("the run {0} was asked to stop and has not yet")]
    StillRunning(RunName),
}

impl Explain for TuneError {
    fn exit(&self) -> Exit {
        match self {
            Self::Selection(error) => error.exit(),
            Self::Client(error) => error.exit(),
            Self::NotServed { source, .. } | Self::NotAnswered { source, .. } => source.exit(),
            Self::Trainer { exit, .. } => *exit,
            Self::Input { source, .. } | Self::Keep { source, .. } => Exit::of_system(source),
            Self::NoTrainer | Self::NoRun(_) | Self::NotUnderWay(_) | Self::NoModel(_) => Exit::NotFound,
            Self::NameTaken { .. } | Self::NameGone(_) | Self::UnderWay(_) | Self::AlreadyDone { .. } => {
                Exit::Conflict
            }
            Self::NameOfBase(_) | Self::Data { .. } => Exit::Usage,
            Self::NoAdapterRoot | Self::NoLayers(_) | Self::StillRunning(_) => Exit::Unavailable,
            Self::Declined
            | Self::Run(_)
            | Self::Stopped { .. }
            | Self::AskingStopped { .. }
            | Self::Plot { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        Some(match self {
            Self::Selection(error) => return error.next(),
            Self::Client(error) => return error.next(),
            Self::NoTrainer => "cargo build --release --bin holobiont-trainer".into(),
            Self::NameOfBase(_) => "another --name".into(),
            Self::NameTaken { .. } => {
                "--replace, which puts the trained one in its place, or another --name".into()
            }
            Self::NameGone(_) => "--replace, which takes the name as it is now".into(),
            Self::NoLayers(_) => {
                "start it with the model's own weights, and without [layers] local = false".into()
            }
            Self::NoAdapterRoot => "a deployment of this host, with a gateway of this version".into(),
            Self::UnderWay(name) | Self::StillRunning(name) => {
                format!("holobiont tune show {0}, holobiont tune cancel {0}", quoted(name.as_str()))
            }
            Self::NoRun(_) | Self::NotUnderWay(_) => "holobiont tune ls".into(),
            Self::AlreadyDone { output, .. } => {
                format!("--from {}, for a new run that goes on from it", quoted(&output.to_string_lossy()))
            }
            Self::Trainer { resume, .. } => return resume.clone(),
            Self::Stopped { checkpoint: Some(_), resume }
            | Self::AskingStopped { resume, .. }
            | Self::NotAnswered { resume, .. } => resume.clone(),
            Self::NoModel(_) => "holobiont ls".into(),
            Self::NotServed { serve, .. } => serve.clone(),
            Self::Input { .. }
            | Self::Declined
            | Self::Keep { .. }
            | Self::Run(_)
            | Self::Data { .. }
            | Self::Stopped { .. }
            | Self::Plot { .. } => {
                return None;
            }
        })
    }
}
