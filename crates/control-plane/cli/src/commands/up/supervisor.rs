//! The loop over everything that can happen to a running deployment.
//!
//! All processes start at once: the gateway says at `/ready` how far the executor is with its model. Each may die at
//! any moment: it is started again, sooner the first time, later each further time, until it has died too often. An
//! executor or gateway that has never been ready and ends by itself has said why on stderr and would say it again: that
//! is the end. A helper is never the end: what a worker would compute the executor computes, and who trains asks again.
//! Stopping has an order: the gateway drains, the trainer keeps what it has, the executor drains, then the workers go.

use std::{future::pending, time::Duration};

use indicatif::ProgressBar;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    banner::{GatewayNotice, StartupBanner},
    detach::{self, ForegroundMode},
    errors::UpError,
    log::LogSink,
    plan::StartPlan,
    process::{ProcessExit, ProcessRole},
    processes::{Processes, StopStage},
    restart::RestartDecision,
    sd_notify::NotifyMessage,
    service,
    stop::{DeploymentStop, StopMode},
    supervised::{Experience, ProcessChange, ProcessState, Readiness},
};
use crate::{
    deployment::{config::DeploymentConfig, registry::Registration},
    terminal::{
        Terminal, printable,
        stop_signals::{StopSignal, StopSignals},
    },
};

/// Processes that have told their last callers why they stop need a moment more than those callers had.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long workers get to end. They hold nothing that could be lost: one that is stopped is killed.
const WORKER_GRACE: Duration = Duration::from_secs(1);

/// How long a killed process is waited for: it cannot refuse, but the kernel may take its time.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// Everything that can happen.
#[derive(Debug)]
enum SupervisorEvent {
    /// To one of the processes.
    Process(ProcessRole, ProcessChange),
    /// The gateway says what it serves.
    News(GatewayNotice),
    /// Somebody asked to stop.
    StopAsked(StopSignal),
    /// The time for stopping is over.
    GraceOver,
    /// systemd wants to hear from us.
    WatchdogDue,
}

/// Whether the loop goes on.
enum Flow {
    Continue,
    Done(Result<(), UpError>),
}

/// Whether the greeting has been printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Welcome {
    NotYet,
    Said,
}

/// Keeps a deployment's processes alive, and stops them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    processes: Processes,
    greeting: StartupBanner,
    /// Where the gateway listens, once it said so.
    url: String,
    /// Tells other commands where.
    registration: Option<Registration>,
    news: (mpsc::Sender<GatewayNotice>, mpsc::Receiver<GatewayNotice>),
    welcome: Welcome,
    place: ForegroundMode,
    log: LogSink,
    grace: Duration,
    stop: Option<DeploymentStop>,
    progress: ProgressBar,
    terminal: Terminal,
    started: Instant,
}

impl Supervisor {
    /// A supervisor that has not started anything yet.
    pub(crate) fn new(
        plan: StartPlan,
        config: &DeploymentConfig,
        place: ForegroundMode,
        log: LogSink,
        terminal: Terminal,
    ) -> Self {
        let greeting = StartupBanner::new(&plan, place, terminal);
        let progress = terminal.spinner(format!("loading {}", plan.served_name));
        log.draw_above(progress.clone());
        Self {
            processes: Processes::new(plan.recipes, config.restarts()),
            greeting,
            url: String::new(),
            registration: plan.registration,
            news: mpsc::channel(1),
            welcome: Welcome::NotYet,
            place,
            log,
            grace: config.grace(),
            stop: None,
            progress,
            terminal,
            started: Instant::now(),
        }
    }

    /// Starts the processes and returns when all have ended.
    pub(crate) async fn run(mut self) -> Result<(), UpError> {
        let mut signals = StopSignals::new().map_err(UpError::Runtime)?;
        let mut watchdog = service::Watchdog::new();
        self.processes.start_needed(&self.log)?;
        for helper in self.processes.helpers() {
            self.start(helper);
        }
        loop {
            let event = tokio::select! {
                event = self.next_event() => event,
                signal = signals.next() => SupervisorEvent::StopAsked(signal),
                () = watchdog.due() => SupervisorEvent::WatchdogDue,
            };
            if let Flow::Done(result) = self.handle(event) {
                self.progress.finish_and_clear();
                return result;
            }
        }
    }

    async fn next_event(&mut self) -> SupervisorEvent {
        let deadline = self.stop.as_ref().map(|stop| stop.deadline);
        tokio::select! {
            (role, change) = self.processes.next() => SupervisorEvent::Process(role, change),
            Some(news) = self.news.1.recv() => SupervisorEvent::News(news),
            () = at(deadline) => SupervisorEvent::GraceOver,
        }
    }

    fn handle(&mut self, event: SupervisorEvent) -> Flow {
        match event {
            SupervisorEvent::Process(role, ProcessChange::Line(line)) => self.heard(role, &line),
            SupervisorEvent::Process(role, ProcessChange::Exited(ending)) => self.exited(role, ending),
            SupervisorEvent::Process(role, ProcessChange::Due) => self.start(role),
            SupervisorEvent::Process(
                ProcessRole::Executor(_),
                ProcessChange::Notice(NotifyMessage::Status(text)),
            ) => self.show_status(&text),
            // `/v1/status` says more of the others.
            SupervisorEvent::Process(_, ProcessChange::Notice(NotifyMessage::Status(_))) => Flow::Continue,
            SupervisorEvent::Process(role, ProcessChange::Notice(NotifyMessage::Silence)) => {
                self.silent(role)
            }
            SupervisorEvent::News(GatewayNotice::Loading(loading)) => {
                self.progress.set_message(loading.text());
                Flow::Continue
            }
            SupervisorEvent::News(GatewayNotice::Welcome { url, models }) => self.greet(&url, &models),
            SupervisorEvent::WatchdogDue => {
                service::still_alive();
                Flow::Continue
            }
            SupervisorEvent::StopAsked(_) if self.stop.is_none() => self.begin_stop(Ok(())),
            // A script that got the same Ctrl-C may pass it on as a SIGTERM: only a person insists.
            SupervisorEvent::StopAsked(StopSignal::Terminate) => Flow::Continue,
            SupervisorEvent::StopAsked(StopSignal::Interrupt) => self.kill(UpError::Interrupted),
            SupervisorEvent::GraceOver => self.grace_over(),
        }
    }

    /// A line on a process's stdout: `ready`, `ready http://ADDR`, or something for the log.
    fn heard(&mut self, role: ProcessRole, line: &str) -> Flow {
        let mut words = line.split_whitespace();
        let readiness = match words.next() {
            Some("ready") => self.processes.of(role).become_ready(),
            _ => None,
        };
        match (role, readiness) {
            (_, None) => tracing::info!(process = %role, "{line}"),
            (_, Some(Readiness::Again)) => tracing::info!(process = %role, "serves again"),
            (ProcessRole::Executor(_), Some(Readiness::First)) => {
                self.progress.set_message("starting the gateway")
            }
            (ProcessRole::Gateway, Some(Readiness::First)) => {}
            (ProcessRole::Trainer | ProcessRole::Worker(_), Some(Readiness::First)) => {
                tracing::info!(process = %role, "works")
            }
        }
        if let (ProcessRole::Gateway, Some(_), Some(url)) = (role, readiness, words.next()) {
            self.keep_address(url);
        }
        if readiness.is_some() && self.processes.serve() && self.welcome == Welcome::NotYet {
            self.greeting.ask_in_background(self.url.clone(), self.news.0.clone());
        }
        Flow::Continue
    }

    /// What the executor says while it is loading; later `/v1/status` says more.
    fn show_status(&mut self, text: &str) -> Flow {
        if self.welcome == Welcome::NotYet && self.stop.is_none() && !self.processes.is_any_executor_ready() {
            service::status(text);
            self.progress.set_message(printable(text));
        }
        Flow::Continue
    }

    fn greet(&mut self, url: &str, models: &[String]) -> Flow {
        // A gateway that died in the meantime is asked again when it is back.
        if self.welcome == Welcome::Said || self.stop.is_some() || !self.processes.gateway.is_ready() {
            return Flow::Continue;
        }
        self.welcome = Welcome::Said;
        self.progress.finish_and_clear();
        self.greeting.print(url, models, self.started.elapsed(), &self.processes.ids());
        service::ready(url);
        if self.place == ForegroundMode::Behind {
            self.log.leave_stderr();
            if let Err(error) = detach::leave_streams() {
                return self.begin_stop(Err(UpError::Background(error)));
            }
        }
        Flow::Continue
    }

    /// A gateway that is started again must listen where the first one did, also if that was any free port.
    fn keep_address(&mut self, url: &str) {
        url.clone_into(&mut self.url);
        self.registration.iter_mut().for_each(|registration| registration.serves_at(url));
        if let Some(address) = url.strip_prefix("http://") {
            self.processes.gateway.recipe.set("--listen", address.trim_end_matches('/'));
        }
    }

    /// A process that lives and does nothing is as good as dead, and worse: others wait for it.
    fn silent(&mut self, role: ProcessRole) -> Flow {
        // At a stop its grace decides.
        if self.stop.is_none() {
            let managed = self.processes.of(role);
            let silence = managed.recipe.longest_silence;
            managed.kill_for(format!("gave no sign of life for {:.0?}", silence));
        }
        Flow::Continue
    }

    fn exited(&mut self, role: ProcessRole, ending: ProcessExit) -> Flow {
        if self.stop.is_some() {
            self.processes.of(role).state = ProcessState::Ended;
            return self.advance_stop();
        }
        let how = self.processes.of(role).why_it_ended(&ending);
        if !role.is_needed() || self.can_do_without(role) {
            return self.lost_helper(role, &how);
        }
        // An executor that could not load its model would say the same again.
        let never_served = matches!(role, ProcessRole::Executor(_)) && self.welcome == Welcome::NotYet;
        let managed = self.processes.of(role);
        managed.state = ProcessState::Waiting;
        if (managed.experience == Experience::None || never_served) && ending.status.code().is_some() {
            return self.begin_stop(Err(UpError::NotReady { role, ending }));
        }
        match self.start_again_later(role, &how) {
            RestartDecision::GiveUp { deaths } => {
                tracing::error!(process = %role, how = %ending, deaths, "died too often; giving up");
                self.begin_stop(Err(UpError::KeepsDying { role, deaths, ending }))
            }
            RestartDecision::Restart(_) => Flow::Continue,
        }
    }

    /// One of several executors, once the others serve: they take over what it had.
    fn can_do_without(&self, role: ProcessRole) -> bool {
        let is_executor = matches!(role, ProcessRole::Executor(_));
        is_executor && self.welcome == Welcome::Said && self.processes.other_executors(role) > 0
    }

    /// A worker, the trainer or an executor that others stand in for died or could not be started, as `how` says.
    fn lost_helper(&mut self, role: ProcessRole, how: &str) -> Flow {
        if let RestartDecision::GiveUp { deaths } = self.start_again_later(role, how) {
            self.processes.of(role).state = ProcessState::Ended;
            let (left, without) = match role {
                ProcessRole::Worker(_) => (self.processes.workers_left(), "adapters are computed without it"),
                ProcessRole::Executor(_) => {
                    (self.processes.other_executors(role), "the others serve without it")
                }
                _ => (0, "nothing is trained any more"),
            };
            tracing::warn!(process = %role, how, deaths, left, "died too often and is given up; {without}");
        }
        Flow::Continue
    }

    /// Counts a death and plans the next start, unless there were too many.
    fn start_again_later(&mut self, role: ProcessRole, how: &str) -> RestartDecision {
        let managed = self.processes.of(role);
        let verdict = managed.deaths.another(Instant::now().into_std());
        if let RestartDecision::Restart(delay) = verdict {
            managed.state = ProcessState::Backoff(Instant::now() + delay);
            let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(process = %role, how, delay_ms, "died; starting it again");
            service::status(&format!("{role} died ({how}); starting it again"));
        }
        verdict
    }

    fn start(&mut self, role: ProcessRole) -> Flow {
        let log = self.log.clone();
        match self.processes.of(role).start(&log) {
            Ok(()) => Flow::Continue,
            Err(error) if role.is_needed() => self.begin_stop(Err(error)),
            Err(error) => self.lost_helper(role, &error.to_string()),
        }
    }

    fn begin_stop(&mut self, result: Result<(), UpError>) -> Flow {
        if result.is_ok() {
            self.progress.finish_and_clear();
            self.terminal.note("stopping; Ctrl-C again stops at once");
        }
        service::stopping();
        self.stop = Some(DeploymentStop {
            deadline: Instant::now() + self.grace + LAST_WORDS,
            result,
            force: StopMode::Drain,
        });
        self.processes.forget_plans();
        self.advance_stop()
    }

    /// Asks those whose turn it is to stop.
    fn advance_stop(&mut self) -> Flow {
        let turn = self.processes.next_to_stop();
        self.processes.terminate(turn);
        match (turn, &mut self.stop) {
            (StopStage::Nobody, stop) => return Flow::Done(stop.take().map_or(Ok(()), |stop| stop.result)),
            (StopStage::Workers, Some(stop)) => {
                stop.deadline = stop.deadline.min(Instant::now() + WORKER_GRACE);
            }
            _ => {}
        }
        Flow::Continue
    }

    fn grace_over(&mut self) -> Flow {
        let turn = self.processes.next_to_stop();
        match self.stop.as_mut() {
            Some(stop) if stop.force == StopMode::Kill => {
                return Flow::Done(std::mem::replace(&mut stop.result, Ok(())));
            }
            Some(stop) if turn == StopStage::Workers => {
                stop.force = StopMode::Kill;
                stop.deadline = Instant::now() + KILL_WAIT;
                self.processes.kill_all();
            }
            // What is trained has its checkpoints, and nobody asks the executor for anything else.
            Some(stop) if turn == StopStage::Trainer && !self.processes.are_executors_stopping() => {
                stop.deadline = Instant::now() + KILL_WAIT;
                self.processes.kill_trainer();
                self.processes.terminate(StopStage::Executors);
            }
            _ => return self.kill(UpError::GraceOver { waited: self.grace + LAST_WORDS }),
        }
        Flow::Continue
    }

    /// Kills what still runs. An error that came first stays the answer.
    fn kill(&mut self, reason: UpError) -> Flow {
        let earlier = self.stop.take().map_or(Ok(()), |stop| stop.result);
        let result = earlier.and(Err(reason));
        self.stop =
            Some(DeploymentStop { deadline: Instant::now() + KILL_WAIT, result, force: StopMode::Kill });
        self.processes.kill_all();
        Flow::Continue
    }
}

/// Sleeps until `deadline`; for ever without one.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
