//! Why an adapter was not trained, or not served.

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

/// Why an adapter was not trained, or not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TuneError {
    /// No deployment is meant.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// The gateway did not say what had to be known.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The program is not installed.
    #[error("the program holobiont-trainer is neither beside `holobiont` nor on PATH")]
    NoTrainer,
    /// A file that was named is not there.
    #[error("cannot read {path}")]
    Input {
        /// As it was named.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The base is called so.
    #[error("{0} is the name of the base model")]
    NameOfBase(RunName),
    /// Something has the name that must not be replaced.
    #[error("an adapter called {name} is served already (generation {})", short_generation(generation))]
    NameTaken {
        /// The name.
        name: RunName,
        /// What has it.
        generation: String,
    },
    /// What was to be replaced is not there any more.
    #[error("the adapter {0} that this run was to replace is gone")]
    NameGone(RunName),
    /// The gateway reads adapters from where this process cannot write them.
    #[error("the gateway does not say where on this host it reads adapters")]
    NoAdapterRoot,
    /// No executor serves layers to a trainer.
    #[error("the deployment in {} serves no layers to trainers: its weights are random, or its layer service is off", .0.display())]
    NoLayers(PathBuf),
    /// Another process has it.
    #[error("a run called {0} is under way")]
    UnderWay(RunName),
    /// No run has the name.
    #[error("there is no run called {0}")]
    NoRun(RunName),
    /// There is nothing to go on with.
    #[error("the run {name} is done")]
    AlreadyDone {
        /// The run.
        name: RunName,
        /// Its adapter.
        output: PathBuf,
    },
    /// The person said no.
    #[error("nothing was changed")]
    Declined,
    /// What is kept of a run cannot be read or written.
    #[error("cannot use {path}")]
    Keep {
        /// A file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The trainer cannot be run.
    #[error("holobiont-trainer cannot be run")]
    Run(#[source] io::Error),
    /// The data is not good; each fault has been shown.
    #[error("{faults} faults in {}; nothing was trained", data.as_deref().unwrap_or(Path::new("the data")).display())]
    Data {
        /// The file.
        data: Option<PathBuf>,
        /// How many.
        faults: usize,
    },
    /// The trainer failed.
    #[error("{said}")]
    Trainer {
        /// The last it said.
        said: String,
        /// How it ended.
        exit: Exit,
        /// What goes on, if there is a checkpoint.
        resume: Option<String>,
    },
    /// Somebody stopped it.
    #[error("stopped; {}", match checkpoint {
        Some(step) => format!("a checkpoint is kept, after step {step}"),
        None => "there was no checkpoint yet".into(),
    })]
    Stopped {
        /// The step of the last checkpoint.
        checkpoint: Option<u64>,
        /// What goes on.
        resume: String,
    },
    /// It is trained, and the gateway did not take it.
    #[error("the adapter is trained, in {}, but not served", output.display())]
    NotServed {
        /// Where it is.
        output: PathBuf,
        /// The command that serves it.
        serve: String,
        /// Why.
        source: ClientError,
    },
    /// Nothing that is served has the name.
    #[error("no model called {} is served", printable(.0))]
    NoModel(String),
    /// The model did not answer all that a draft is to learn from.
    #[error("{answered} of {of} prompts are answered; one was not")]
    NotAnswered {
        /// These are kept.
        answered: usize,
        /// All.
        of: usize,
        /// What goes on.
        resume: String,
        /// Why.
        source: ClientError,
    },
    /// Somebody stopped a run that was asking.
    #[error("stopped; {answered} of {of} prompts are answered, and the answers are kept")]
    AskingStopped {
        /// These are kept.
        answered: usize,
        /// All.
        of: usize,
        /// What goes on.
        resume: String,
    },
    /// The losses cannot be drawn.
    #[error("cannot draw {path}: {reason}")]
    Plot {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It is not under way.
    #[error("the run {0} is not under way")]
    NotUnderWay(RunName),
    /// It was asked and has not ended.
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
