//! The event loop of a running deployment.
//!
//! All processes start at once; the gateway reports at `/ready` how far the executor has loaded its model.
//! A process that dies is restarted with growing delays until it has died too often. An executor or gateway
//! that ends by itself before it was ever ready would fail again, so the deployment ends with its error.
//! The loss of a helper never ends the deployment: the executor computes a worker's share, and training
//! clients retry. A stop has an order: the gateway drains, the trainer saves its checkpoint, the executors
//! drain, then the workers end.

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
    supervised::{ProcessChange, ProcessState, Readiness, ReadyHistory},
};
use crate::{
    deployment::{config::DeploymentConfig, registry::Registration},
    terminal::{
        Terminal, printable,
        stop_signals::{StopSignal, StopSignals},
    },
};

/// Time beyond the grace period in which processes report the stop to their last callers.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Grace period of workers, which hold nothing that could be lost; a stopped worker is killed.
const WORKER_GRACE: Duration = Duration::from_secs(1);

/// Longest wait for a killed process; the kernel may need time to end it.
const KILL_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum SupervisorEvent {
    /// Change of one of the processes.
    Process(ProcessRole, ProcessChange),
    /// Message about the gateway's readiness.
    News(GatewayNotice),
    /// Stop signal from the user or system.
    StopAsked(StopSignal),
    /// End of the time for stopping.
    GraceOver,
    /// Time to send systemd a heartbeat.
    WatchdogDue,
}

enum Flow {
    Continue,
    Done(Result<(), UpError>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Welcome {
    NotYet,
    Said,
}

/// Starts a deployment's processes, keeps them alive and stops them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    processes: Processes,
    greeting: StartupBanner,
    /// URL of the gateway, once it is known.
    url: String,
    /// Entry by which other commands find the deployment.
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
            // Status messages of other processes are not shown; `/v1/status` says more about them.
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
            // A script that got the same Ctrl-C may pass it on as SIGTERM, so only a second Ctrl-C kills.
            SupervisorEvent::StopAsked(StopSignal::Terminate) => Flow::Continue,
            SupervisorEvent::StopAsked(StopSignal::Interrupt) => self.kill(UpError::Interrupted),
            SupervisorEvent::GraceOver => self.grace_over(),
        }
    }

    /// Handles a line on a process's stdout: `ready`, `ready http://ADDR`, or text for the log.
    fn heard(&mut self, role: ProcessRole, line: &str) -> Flow {
        let mut words = line.split_whitespace();
        if role == ProcessRole::Gateway
            && let Some((request, base)) =
                line.split_once(' ').filter(|(word, _)| ["sleep", "wake"].contains(word))
        {
            return self.change_sleep(request, base);
        }
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

    /// Ends or starts the processes of a base, as the gateway asks.
    fn change_sleep(&mut self, request: &str, base: &str) -> Flow {
        // A stop ends all processes, and starts none.
        if self.stop.is_some() {
            return Flow::Continue;
        }
        tracing::info!(base, "the gateway asks for a {request} of the base");
        match request {
            "sleep" => self.processes.fall_asleep(base),
            _ => self.processes.wake(base),
        }
        self.wake_due()
    }

    /// Starts the processes of bases that wake.
    fn wake_due(&mut self) -> Flow {
        for role in self.processes.due_to_wake() {
            if let Flow::Done(result) = self.start(role) {
                return Flow::Done(result);
            }
        }
        Flow::Continue
    }

    /// Shows the executor's loading status; later `/v1/status` says more.
    fn show_status(&mut self, text: &str) -> Flow {
        if self.welcome == Welcome::NotYet && self.stop.is_none() && !self.processes.is_any_executor_ready() {
            service::status(text);
            self.progress.set_message(printable(text));
        }
        Flow::Continue
    }

    fn greet(&mut self, url: &str, models: &[String]) -> Flow {
        // A gateway that died in the meantime is asked again once it is back.
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

    /// Fixes the gateway's address, so that a restarted gateway listens at the same port, even an ephemeral
    /// one.
    fn keep_address(&mut self, url: &str) {
        url.clone_into(&mut self.url);
        self.registration.iter_mut().for_each(|registration| registration.serves_at(url));
        if let Some(address) = url.strip_prefix("http://") {
            self.processes.gateway.recipe.set("--listen", address.trim_end_matches('/'));
        }
    }

    /// Kills a process without heartbeats, because other processes wait for it.
    fn silent(&mut self, role: ProcessRole) -> Flow {
        // During a stop, the grace period decides.
        if self.stop.is_none() {
            let managed = self.processes.of(role);
            let silence = managed.recipe.longest_silence;
            managed.kill_for(format!("sent no heartbeat for {:.0?}", silence));
        }
        Flow::Continue
    }

    fn exited(&mut self, role: ProcessRole, ending: ProcessExit) -> Flow {
        if self.stop.is_some() {
            self.processes.of(role).state = ProcessState::Ended;
            return self.advance_stop();
        }
        if self.processes.of(role).is_stopping() {
            // The process was asked to end because its base sleeps, and may be needed again by now.
            self.processes.of(role).state = ProcessState::Asleep;
            return self.wake_due();
        }
        let how = self.processes.of(role).why_it_ended(&ending);
        if !role.is_needed() || self.can_do_without(role) {
            return self.lost_helper(role, &how);
        }
        // An executor that could not load its model would fail in the same way again.
        let never_served = matches!(role, ProcessRole::Executor(_)) && self.welcome == Welcome::NotYet;
        let managed = self.processes.of(role);
        managed.state = ProcessState::Waiting;
        if (managed.experience == ReadyHistory::None || never_served) && ending.status.code().is_some() {
            return self.begin_stop(Err(UpError::NotReady { role, ending }));
        }
        match self.start_again_later(role, &how) {
            RestartDecision::GiveUp { deaths } => {
                tracing::error!(process = %role, how = %ending, deaths, "the process crashed too often; \
                    the deployment stops");
                self.begin_stop(Err(UpError::KeepsDying { role, deaths, ending }))
            }
            RestartDecision::Restart(_) => Flow::Continue,
        }
    }

    /// True for one of several executors once the deployment serves: other executors take over its
    /// requests.
    fn can_do_without(&self, role: ProcessRole) -> bool {
        let is_executor = matches!(role, ProcessRole::Executor(_));
        is_executor && self.welcome == Welcome::Said && self.processes.other_executors(role) > 0
    }

    /// Handles the death or failed start of a worker, the trainer or a replaceable executor; `how` gives
    /// the reason.
    fn lost_helper(&mut self, role: ProcessRole, how: &str) -> Flow {
        if let RestartDecision::GiveUp { deaths } = self.start_again_later(role, how) {
            self.processes.of(role).state = ProcessState::Ended;
            let (left, without) = match role {
                ProcessRole::Worker(_) => {
                    (self.processes.workers_left(), "the executor computes adapters without it")
                }
                ProcessRole::Executor(_) => {
                    (self.processes.other_executors(role), "the other executors continue to serve")
                }
                _ => (0, "training is off"),
            };
            tracing::warn!(process = %role, how, deaths, left, "the process crashed too often and is not \
                restarted; {without}");
        }
        Flow::Continue
    }

    /// Counts a death and plans the next start, unless there were too many deaths.
    fn start_again_later(&mut self, role: ProcessRole, how: &str) -> RestartDecision {
        let managed = self.processes.of(role);
        let verdict = managed.deaths.another(Instant::now().into_std());
        if let RestartDecision::Restart(delay) = verdict {
            managed.state = ProcessState::Backoff(Instant::now() + delay);
            let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(process = %role, how, delay_ms, "the process crashed; restarting it");
            service::status(&format!("{role} crashed ({how}); restarting it"));
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
            self.terminal.note("stopping after running requests; a second Ctrl-C stops at once");
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

    /// Asks the processes of the next stage to stop.
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
            // Training has its checkpoints, and no other process needs the executors any more.
            Some(stop) if turn == StopStage::Trainer && !self.processes.are_executors_stopping() => {
                stop.deadline = Instant::now() + KILL_WAIT;
                self.processes.kill_trainer();
                self.processes.terminate(StopStage::Executors);
            }
            _ => return self.kill(UpError::GraceOver { waited: self.grace + LAST_WORDS }),
        }
        Flow::Continue
    }

    /// Kills the running processes. An earlier error stays the result.
    fn kill(&mut self, reason: UpError) -> Flow {
        let earlier = self.stop.take().map_or(Ok(()), |stop| stop.result);
        let result = earlier.and(Err(reason));
        self.stop =
            Some(DeploymentStop { deadline: Instant::now() + KILL_WAIT, result, force: StopMode::Kill });
        self.processes.kill_all();
        Flow::Continue
    }
}

/// Sleeps until `deadline`; forever without one.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
