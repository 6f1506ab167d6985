//! A process over its lives: waiting, running, dead and started again, ended.

use std::{
    future::{Future as _, pending, poll_fn},
    task::Poll,
};

use tokio::time::{Instant, sleep_until};

use super::{
    errors::UpError,
    log::LogSink,
    process::{ChildEvent, CommandSpec, ManagedChild, ProcessExit, ProcessRole},
    restart::RestartCounter,
    sd_notify::NotifyMessage,
};

/// What can happen to a process.
#[derive(Debug)]
pub(crate) enum ProcessChange {
    Line(String),
    Notice(NotifyMessage),
    Exited(ProcessExit),
    Due,
}

/// A process, dead or alive.
#[derive(Debug)]
pub(crate) struct SupervisedProcess {
    pub(crate) role: ProcessRole,
    pub(crate) recipe: CommandSpec,
    pub(crate) state: ProcessState,
    pub(crate) deaths: RestartCounter,
    pub(crate) experience: Experience,
    /// Why it was killed, if it was.
    killed_for: Option<String>,
}

/// Where a process stands.
#[derive(Debug)]
pub(crate) enum ProcessState {
    /// It has not been started yet, or has just died.
    Waiting,
    /// It died and is started again then.
    Backoff(Instant),
    /// It runs.
    Running(Box<ManagedChild>, ProcessPhase),
    /// It is over.
    Ended,
}

/// How far a running process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessPhase {
    Starting,
    Ready,
    Stopping,
}

/// Whether a process has ever been ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Experience {
    None,
    ServedBefore,
}

/// Which readiness of a process this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    First,
    Again,
}

impl SupervisedProcess {
    pub(crate) fn new(role: ProcessRole, recipe: CommandSpec, deaths: RestartCounter) -> Self {
        Self {
            role,
            recipe,
            state: ProcessState::Waiting,
            deaths,
            experience: Experience::None,
            killed_for: None,
        }
    }

    pub(crate) fn start(&mut self, log: &LogSink) -> Result<(), UpError> {
        let process = ManagedChild::start(&self.recipe, log);
        let process = process.map_err(|source| UpError::Spawn { role: self.role, source })?;
        self.state = ProcessState::Running(Box::new(process), ProcessPhase::Starting);
        Ok(())
    }

    /// Waits for the next change; for ever, if none can come.
    pub(crate) async fn next(&mut self) -> ProcessChange {
        match &mut self.state {
            ProcessState::Waiting | ProcessState::Ended => pending().await,
            ProcessState::Backoff(until) => {
                sleep_until(*until).await;
                ProcessChange::Due
            }
            ProcessState::Running(process, _) => match process.next().await {
                ChildEvent::Line(line) => ProcessChange::Line(line),
                ChildEvent::Notice(notice) => ProcessChange::Notice(notice),
                ChildEvent::Exited(ending) => ProcessChange::Exited(ending),
            },
        }
    }

    /// Notes readiness; `None` if this run of it has been ready already.
    pub(crate) fn become_ready(&mut self) -> Option<Readiness> {
        let ProcessState::Running(_, phase @ ProcessPhase::Starting) = &mut self.state else {
            return None;
        };
        *phase = ProcessPhase::Ready;
        match std::mem::replace(&mut self.experience, Experience::ServedBefore) {
            Experience::None => Some(Readiness::First),
            Experience::ServedBefore => Some(Readiness::Again),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, ProcessState::Running(_, ProcessPhase::Ready))
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, ProcessState::Running(..))
    }

    /// It runs and has been asked to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(self.state, ProcessState::Running(_, ProcessPhase::Stopping))
    }

    pub(crate) fn process_id(&self) -> Option<u32> {
        match &self.state {
            ProcessState::Running(process, _) => process.id(),
            _ => None,
        }
    }

    /// A stop has begun: what does not run yet will not.
    pub(crate) fn forget_plans(&mut self) {
        if !self.is_running() {
            self.state = ProcessState::Ended;
        }
    }

    /// Asks it to drain, once: a second signal would mean "at once".
    pub(crate) fn terminate(&mut self) {
        if let ProcessState::Running(process, phase) = &mut self.state
            && *phase != ProcessPhase::Stopping
        {
            *phase = ProcessPhase::Stopping;
            process.terminate();
        }
    }

    /// Kills it for a reason that is said when it has ended.
    pub(crate) fn kill_for(&mut self, reason: String) {
        self.killed_for = Some(reason);
        self.kill();
    }

    /// Why it ended: as the kernel says, or for what it was killed.
    pub(crate) fn why_it_ended(&mut self, ending: &ProcessExit) -> String {
        match self.killed_for.take() {
            Some(reason) => format!("{reason}, and was killed"),
            None => ending.to_string(),
        }
    }

    pub(crate) fn kill(&self) {
        if let ProcessState::Running(process, _) = &self.state {
            process.kill();
        }
    }
}

/// Waits for the next change of any of them; for ever, if there are none.
pub(crate) async fn next_of(
    all: impl Iterator<Item = &mut SupervisedProcess>,
) -> (ProcessRole, ProcessChange) {
    let mut waits: Vec<_> =
        all.map(|managed| Box::pin(async { (managed.role, managed.next().await) })).collect();
    poll_fn(|context| {
        let mut polls = waits.iter_mut().map(|wait| wait.as_mut().poll(context));
        polls.find(Poll::is_ready).unwrap_or(Poll::Pending)
    })
    .await
}
