//! The loop over everything that can happen to a running deployment.
//!
//! The executor starts first, the gateway once the executor is ready. Either may die at any moment: it is started again,
//! sooner the first time, later each further time, until it has died too often. A process that has never been
//! ready and ends by itself has said why on stderr and would say it again: that is the end. Stopping goes the other
//! way round: the gateway drains, then the executor.

use std::{future::pending, process::ExitStatus, time::Duration};

use indicatif::ProgressBar;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep_until},
};

use super::{
    UpError,
    greeting::Greeting,
    plan::Plan,
    process::{Happening, Process, Recipe, Role},
    restart::{Deaths, MAX_DEATHS, Verdict},
};
use crate::terminal::Terminal;

/// Processes that have told their last callers why they stop need a moment more than those callers had.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long a killed process is waited for: it cannot refuse, but the kernel may take its time.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// Everything that can happen.
#[derive(Debug)]
enum Event {
    /// To one of the processes.
    Process(Role, Change),
    /// Somebody asked to stop.
    StopAsked(StopSignal),
    /// The time for stopping is over.
    GraceOver,
}

/// What can happen to a process.
#[derive(Debug)]
enum Change {
    Line(String),
    Exited(ExitStatus),
    Due,
}

/// Whether the loop goes on.
enum Flow {
    Continue,
    Done(Result<(), UpError>),
}

/// A process, dead or alive.
#[derive(Debug)]
struct Managed {
    role: Role,
    recipe: Recipe,
    state: State,
    deaths: Deaths,
    experience: Experience,
}

/// Where a process stands.
#[derive(Debug)]
enum State {
    /// Its turn comes when the executor is ready (or, for the executor, at once).
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
enum Phase {
    Starting,
    Ready,
    Stopping,
}

/// Whether a process has ever been ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Experience {
    None,
    ServedBefore,
}

/// Which readiness of a process this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    First,
    Again,
}

/// A stop under way.
#[derive(Debug)]
struct Stop {
    deadline: Instant,
    result: Result<(), UpError>,
    force: Force,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Force {
    Drain,
    Kill,
}

/// Keeps a deployment's processes alive, and stops them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    executor: Managed,
    gateway: Managed,
    greeting: Greeting,
    grace: Duration,
    stop: Option<Stop>,
    progress: ProgressBar,
    terminal: Terminal,
    started: Instant,
}

impl Supervisor {
    /// A supervisor that has not started anything yet.
    pub(crate) fn new(plan: Plan, grace: Duration, terminal: Terminal) -> Self {
        let greeting = Greeting::new(&plan, terminal);
        let progress = terminal.spinner(format!("loading {}", plan.served_name));
        Self {
            executor: Managed::new(Role::Executor, plan.executor),
            gateway: Managed::new(Role::Gateway, plan.gateway),
            greeting,
            grace,
            stop: None,
            progress,
            terminal,
            started: Instant::now(),
        }
    }

    /// Starts the processes and returns when both have ended.
    pub(crate) async fn run(mut self) -> Result<(), UpError> {
        let mut signals = StopSignals::new().map_err(UpError::Runtime)?;
        self.executor.start()?;
        loop {
            let event = self.next_event(&mut signals).await;
            if let Flow::Done(result) = self.handle(event) {
                self.progress.finish_and_clear();
                return result;
            }
        }
    }

    async fn next_event(&mut self, signals: &mut StopSignals) -> Event {
        let deadline = self.stop.as_ref().map(|stop| stop.deadline);
        tokio::select! {
            change = self.executor.next() => Event::Process(Role::Executor, change),
            change = self.gateway.next() => Event::Process(Role::Gateway, change),
            signal = signals.next() => Event::StopAsked(signal),
            () = at(deadline) => Event::GraceOver,
        }
    }

    fn handle(&mut self, event: Event) -> Flow {
        match event {
            Event::Process(role, Change::Line(line)) => self.heard(role, &line),
            Event::Process(role, Change::Exited(status)) => self.exited(role, status),
            Event::Process(role, Change::Due) => self.due(role),
            Event::StopAsked(_) if self.stop.is_none() => self.begin_stop(Ok(())),
            // A script that got the same Ctrl-C may pass it on as a SIGTERM: only a person insists.
            Event::StopAsked(StopSignal::Terminate) => Flow::Continue,
            Event::StopAsked(StopSignal::Interrupt) => self.kill(UpError::Interrupted),
            Event::GraceOver => self.grace_over(),
        }
    }

    /// A line on a process's stdout: `ready`, `ready http://ADDR`, or something for the log.
    fn heard(&mut self, role: Role, line: &str) -> Flow {
        let mut words = line.split_whitespace();
        let readiness = match words.next() {
            Some("ready") => self.managed(role).become_ready(),
            _ => None,
        };
        match (role, readiness) {
            (_, None) => tracing::info!(process = %role, "{line}"),
            (_, Some(Readiness::Again)) => tracing::info!(process = %role, "serves again"),
            (Role::Executor, Some(Readiness::First)) => self.progress.set_message("starting the gateway"),
            (Role::Gateway, Some(Readiness::First)) => self.greet(words.next().unwrap_or_default()),
        }
        let gateways_turn = self.executor.is_ready() && matches!(self.gateway.state, State::Waiting);
        if gateways_turn { self.start(Role::Gateway) } else { Flow::Continue }
    }

    fn greet(&mut self, url: &str) {
        self.progress.finish_and_clear();
        self.keep_address(url);
        let ids = [self.executor.process_id(), self.gateway.process_id()];
        self.greeting.print_in_background(url.to_owned(), self.started.elapsed(), ids);
    }

    /// A gateway that is started again must listen where the first one did, also if that was any free port.
    fn keep_address(&mut self, url: &str) {
        let arguments = &mut self.gateway.recipe.arguments;
        if let Some(address) = url.strip_prefix("http://")
            && let Some(flag) = arguments.iter().position(|argument| argument == "--listen")
            && let Some(value) = arguments.get_mut(flag + 1)
        {
            *value = address.trim_end_matches('/').into();
        }
    }

    fn exited(&mut self, role: Role, status: ExitStatus) -> Flow {
        if self.stop.is_some() {
            self.managed(role).state = State::Ended;
            return self.advance_stop();
        }
        let managed = self.managed(role);
        managed.state = State::Waiting;
        if managed.experience == Experience::None && status.code().is_some() {
            return self.begin_stop(Err(UpError::NotReady { role, status }));
        }
        match managed.deaths.another(Instant::now().into_std()) {
            Verdict::GiveUp => self.begin_stop(Err(UpError::KeepsDying { role, deaths: MAX_DEATHS, status })),
            Verdict::Restart(delay) => {
                let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
                tracing::warn!(process = %role, %status, delay_ms, "died; starting it again");
                managed.state = State::Backoff(Instant::now() + delay);
                Flow::Continue
            }
        }
    }

    fn due(&mut self, role: Role) -> Flow {
        self.managed(role).state = State::Waiting;
        match (role, self.executor.is_ready()) {
            // The executor starts the gateway when it is ready.
            (Role::Gateway, false) => Flow::Continue,
            _ => self.start(role),
        }
    }

    fn start(&mut self, role: Role) -> Flow {
        match self.managed(role).start() {
            Ok(()) => Flow::Continue,
            Err(error) => self.begin_stop(Err(error)),
        }
    }

    fn begin_stop(&mut self, result: Result<(), UpError>) -> Flow {
        if result.is_ok() {
            self.progress.finish_and_clear();
            self.terminal.note("stopping; Ctrl-C again stops at once");
        }
        self.stop =
            Some(Stop { deadline: Instant::now() + self.grace + LAST_WORDS, result, force: Force::Drain });
        for managed in [&mut self.executor, &mut self.gateway] {
            managed.forget_plans();
        }
        self.advance_stop()
    }

    /// Asks the next process to stop: the gateway, then the executor.
    fn advance_stop(&mut self) -> Flow {
        if self.gateway.is_running() {
            self.gateway.terminate();
        } else if self.executor.is_running() {
            self.executor.terminate();
        } else {
            return Flow::Done(self.stop.take().map_or(Ok(()), |stop| stop.result));
        }
        Flow::Continue
    }

    fn grace_over(&mut self) -> Flow {
        match self.stop.as_mut() {
            Some(stop) if stop.force == Force::Kill => {
                Flow::Done(std::mem::replace(&mut stop.result, Ok(())))
            }
            _ => self.kill(UpError::GraceOver { waited: self.grace + LAST_WORDS }),
        }
    }

    /// Kills what still runs. An error that came first stays the answer.
    fn kill(&mut self, reason: UpError) -> Flow {
        let earlier = self.stop.take().map_or(Ok(()), |stop| stop.result);
        let result = earlier.and(Err(reason));
        self.stop = Some(Stop { deadline: Instant::now() + KILL_WAIT, result, force: Force::Kill });
        for managed in [&self.executor, &self.gateway] {
            managed.kill();
        }
        Flow::Continue
    }

    fn managed(&mut self, role: Role) -> &mut Managed {
        match role {
            Role::Executor => &mut self.executor,
            Role::Gateway => &mut self.gateway,
        }
    }
}

impl Managed {
    fn new(role: Role, recipe: Recipe) -> Self {
        Self { role, recipe, state: State::Waiting, deaths: Deaths::default(), experience: Experience::None }
    }

    fn start(&mut self) -> Result<(), UpError> {
        let process = Process::start(&self.recipe);
        let process = process.map_err(|source| UpError::Spawn { role: self.role, source })?;
        self.state = State::Running(Box::new(process), Phase::Starting);
        Ok(())
    }

    /// Waits for the next change; for ever, if none can come.
    async fn next(&mut self) -> Change {
        match &mut self.state {
            State::Waiting | State::Ended => pending().await,
            State::Backoff(until) => {
                sleep_until(*until).await;
                Change::Due
            }
            State::Running(process, _) => match process.next().await {
                Happening::Line(line) => Change::Line(line),
                Happening::Exited(status) => Change::Exited(status),
            },
        }
    }

    /// Notes readiness; `None` if this run of it has been ready already.
    fn become_ready(&mut self) -> Option<Readiness> {
        let State::Running(_, phase @ Phase::Starting) = &mut self.state else {
            return None;
        };
        *phase = Phase::Ready;
        match std::mem::replace(&mut self.experience, Experience::ServedBefore) {
            Experience::None => Some(Readiness::First),
            Experience::ServedBefore => Some(Readiness::Again),
        }
    }

    fn is_ready(&self) -> bool {
        matches!(self.state, State::Running(_, Phase::Ready))
    }

    fn is_running(&self) -> bool {
        matches!(self.state, State::Running(..))
    }

    fn process_id(&self) -> Option<u32> {
        match &self.state {
            State::Running(process, _) => process.id(),
            _ => None,
        }
    }

    /// A stop has begun: what does not run yet will not.
    fn forget_plans(&mut self) {
        if !self.is_running() {
            self.state = State::Ended;
        }
    }

    /// Asks it to drain, once: a second signal would mean "at once".
    fn terminate(&mut self) {
        if let State::Running(process, phase) = &mut self.state
            && *phase != Phase::Stopping
        {
            *phase = Phase::Stopping;
            process.terminate();
        }
    }

    fn kill(&self) {
        if let State::Running(process, _) = &self.state {
            process.kill();
        }
    }
}

/// Who asks for a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopSignal {
    /// A person, with Ctrl-C.
    Interrupt,
    /// A program, or a terminal that was closed.
    Terminate,
}

/// The signals that ask for a stop.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> StopSignal {
        tokio::select! {
            // Of two that came at once the person's counts first, so that the other one is no insisting.
            biased;
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.hangup.recv() => StopSignal::Terminate,
        }
    }
}

/// Sleeps until `deadline`; for ever without one.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
