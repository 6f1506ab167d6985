//! A process across its restarts: waiting, running, backing off, ended.

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

#[derive(Debug)]
pub(crate) enum ProcessChange {
    Line(String),
    Notice(NotifyMessage),
    Exited(ProcessExit),
    Due,
}

#[derive(Debug)]
pub(crate) struct SupervisedProcess {
    pub(crate) role: ProcessRole,
    pub(crate) recipe: CommandSpec,
    pub(crate) state: ProcessState,
    pub(crate) deaths: RestartCounter,
    pub(crate) experience: ReadyHistory,
    /// Whether the gateway wants the process's base to be awake.
    pub(crate) wish: BaseTargetState,
    /// Reason for which the supervisor killed the process.
    killed_for: Option<String>,
}

#[derive(Debug)]
pub(crate) enum ProcessState {
    /// The process has not been started yet, or has just died.
    Waiting,
    /// The process died and restarts at this time.
    Backoff(Instant),
    Running(Box<ManagedChild>, ProcessPhase),
    /// The base of the process sleeps.
    Asleep,
    /// The process will not be started again.
    Ended,
}

/// Whether the base of a process is awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaseTargetState {
    Awake,
    Asleep,
}

/// Phase of a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessPhase {
    Starting,
    Ready,
    Stopping,
}

/// Whether a process has ever been ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadyHistory {
    None,
    ServedBefore,
}

/// Whether a process became ready for the first time.
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
            experience: ReadyHistory::None,
            wish: BaseTargetState::Awake,
            killed_for: None,
        }
    }

    pub(crate) fn start(&mut self, log: &LogSink) -> Result<(), UpError> {
        let process = ManagedChild::start(&self.recipe, log);
        let process = process.map_err(|source| UpError::Spawn { role: self.role, source })?;
        self.state = ProcessState::Running(Box::new(process), ProcessPhase::Starting);
        Ok(())
    }

    /// Waits for the next change; forever if none can come.
    pub(crate) async fn next(&mut self) -> ProcessChange {
        match &mut self.state {
            ProcessState::Waiting | ProcessState::Asleep | ProcessState::Ended => pending().await,
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

    /// Records readiness; `None` if this run of the process was ready already.
    pub(crate) fn become_ready(&mut self) -> Option<Readiness> {
        let ProcessState::Running(_, phase @ ProcessPhase::Starting) = &mut self.state else {
            return None;
        };
        *phase = ProcessPhase::Ready;
        match std::mem::replace(&mut self.experience, ReadyHistory::ServedBefore) {
            ReadyHistory::None => Some(Readiness::First),
            ReadyHistory::ServedBefore => Some(Readiness::Again),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, ProcessState::Running(_, ProcessPhase::Ready))
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, ProcessState::Running(..))
    }

    /// True if the process runs and has been asked to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(self.state, ProcessState::Running(_, ProcessPhase::Stopping))
    }

    /// Ends the process because its base sleeps.
    pub(crate) fn fall_asleep(&mut self) {
        self.wish = BaseTargetState::Asleep;
        match self.state {
            ProcessState::Running(..) => self.terminate(),
            _ => self.state = ProcessState::Asleep,
        }
    }

    /// True if the process does not run, and its base is to be awake.
    pub(crate) fn is_due_to_wake(&self) -> bool {
        self.wish == BaseTargetState::Awake && matches!(self.state, ProcessState::Asleep)
    }

    pub(crate) fn process_id(&self) -> Option<u32> {
        match &self.state {
            ProcessState::Running(process, _) => process.id(),
            _ => None,
        }
    }

    /// Cancels a planned start, because a stop has begun.
    pub(crate) fn forget_plans(&mut self) {
        if !self.is_running() {
            self.state = ProcessState::Ended;
        }
    }

    /// Asks the process to drain, once; a second signal would stop it at once.
    pub(crate) fn terminate(&mut self) {
        if let ProcessState::Running(process, phase) = &mut self.state
            && *phase != ProcessPhase::Stopping
        {
            *phase = ProcessPhase::Stopping;
            process.terminate();
        }
    }

    /// Kills the process and remembers `reason` for the report of its end.
    pub(crate) fn kill_for(&mut self, reason: String) {
        self.killed_for = Some(reason);
        self.kill();
    }

    /// Returns the reason for the end: that of the kill, or the exit status.
    pub(crate) fn why_it_ended(&mut self, ending: &ProcessExit) -> String {
        match self.killed_for.take() {
            Some(reason) => format!("{reason} and was killed"),
            None => ending.to_string(),
        }
    }

    pub(crate) fn kill(&self) {
        if let ProcessState::Running(process, _) = &self.state {
            process.kill();
        }
    }
}

/// Waits for the next change of any process; forever if there are none.
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
