//! A process over its lives: waiting, running, dead and started again, ended.

use std::{
    future::{Future as _, pending, poll_fn},
    task::Poll,
};

use tokio::time::{Instant, sleep_until};

use super::{
    errors::UpError,
    log::LogSink,
    notices::Notice,
    process::{Ending, Happening, Process, Recipe, Role},
    restart::Deaths,
};

/// What can happen to a process.
#[derive(Debug)]
pub(crate) enum Change {
    Line(String),
    Notice(Notice),
    Exited(Ending),
    Due,
}

/// A process, dead or alive.
#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) role: Role,
    pub(crate) recipe: Recipe,
    pub(crate) state: State,
    pub(crate) deaths: Deaths,
    pub(crate) experience: Experience,
    /// Why it was killed, if it was.
    killed_for: Option<String>,
}

/// Where a process stands.
#[derive(Debug)]
pub(crate) enum State {
    /// It has not been started yet, or has just died.
    Waiting,
    /// It died and is started again then.
    Backoff(Instant),
    /// It runs.
    Running(Box<Process>, Phase),
    /// It is over.
    Ended,
}

/// How far a running process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
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

impl Managed {
    pub(crate) fn new(role: Role, recipe: Recipe, deaths: Deaths) -> Self {
        Self { role, recipe, state: State::Waiting, deaths, experience: Experience::None, killed_for: None }
    }

    pub(crate) fn start(&mut self, log: &LogSink) -> Result<(), UpError> {
        let process = Process::start(&self.recipe, log);
        let process = process.map_err(|source| UpError::Spawn { role: self.role, source })?;
        self.state = State::Running(Box::new(process), Phase::Starting);
        Ok(())
    }

    /// Waits for the next change; for ever, if none can come.
    pub(crate) async fn next(&mut self) -> Change {
        match &mut self.state {
            State::Waiting | State::Ended => pending().await,
            State::Backoff(until) => {
                sleep_until(*until).await;
                Change::Due
            }
            State::Running(process, _) => match process.next().await {
                Happening::Line(line) => Change::Line(line),
                Happening::Notice(notice) => Change::Notice(notice),
                Happening::Exited(ending) => Change::Exited(ending),
            },
        }
    }

    /// Notes readiness; `None` if this run of it has been ready already.
    pub(crate) fn become_ready(&mut self) -> Option<Readiness> {
        let State::Running(_, phase @ Phase::Starting) = &mut self.state else {
            return None;
        };
        *phase = Phase::Ready;
        match std::mem::replace(&mut self.experience, Experience::ServedBefore) {
            Experience::None => Some(Readiness::First),
            Experience::ServedBefore => Some(Readiness::Again),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, State::Running(_, Phase::Ready))
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running(..))
    }

    /// It runs and has been asked to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(self.state, State::Running(_, Phase::Stopping))
    }

    pub(crate) fn process_id(&self) -> Option<u32> {
        match &self.state {
            State::Running(process, _) => process.id(),
            _ => None,
        }
    }

    /// A stop has begun: what does not run yet will not.
    pub(crate) fn forget_plans(&mut self) {
        if !self.is_running() {
            self.state = State::Ended;
        }
    }

    /// Asks it to drain, once: a second signal would mean "at once".
    pub(crate) fn terminate(&mut self) {
        if let State::Running(process, phase) = &mut self.state
            && *phase != Phase::Stopping
        {
            *phase = Phase::Stopping;
            process.terminate();
        }
    }

    /// Kills it for a reason that is said when it has ended.
    pub(crate) fn kill_for(&mut self, reason: String) {
        self.killed_for = Some(reason);
        self.kill();
    }

    /// Why it ended: as the kernel says, or for what it was killed.
    pub(crate) fn why_it_ended(&mut self, ending: &Ending) -> String {
        match self.killed_for.take() {
            Some(reason) => format!("{reason}, and was killed"),
            None => ending.to_string(),
        }
    }

    pub(crate) fn kill(&self) {
        if let State::Running(process, _) = &self.state {
            process.kill();
        }
    }
}

/// Waits for the next change of any of them; for ever, if there are none.
pub(crate) async fn next_of(all: impl Iterator<Item = &mut Managed>) -> (Role, Change) {
    let mut waits: Vec<_> =
        all.map(|managed| Box::pin(async { (managed.role, managed.next().await) })).collect();
    poll_fn(|context| {
        let mut polls = waits.iter_mut().map(|wait| wait.as_mut().poll(context));
        polls.find(Poll::is_ready).unwrap_or(Poll::Pending)
    })
    .await
}
