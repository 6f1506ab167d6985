//! All processes of a deployment.

use super::{
    banner::ProcessIds,
    errors::UpError,
    log::LogSink,
    plan::{BaseProcesses, CommandSpecs},
    process::ProcessRole,
    restart::RestartCounter,
    supervised::{BaseTargetState, ProcessChange, ProcessState, SupervisedProcess, next_of},
};
use crate::deployment::config::RestartPolicy;

/// The supervised processes, running or not.
#[derive(Debug)]
pub(crate) struct Processes {
    /// Executors in the order of [`super::process::Instance::index`].
    executors: Vec<SupervisedProcess>,
    /// Number of executors on other hosts.
    elsewhere: usize,
    pub(crate) gateway: SupervisedProcess,
    trainer: Option<SupervisedProcess>,
    /// Workers in the order of `WorkerSpec::index`.
    workers: Vec<SupervisedProcess>,
    bases: Vec<BaseProcesses>,
}

/// Stage of an orderly stop: the processes to stop next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopStage {
    /// The gateway drains first.
    Gateway,
    /// The gateway sends no more jobs, and the executors that the trainer needs still run.
    Trainer,
    /// All executors drain at once.
    Executors,
    /// All workers stop at once.
    Workers,
    /// All processes have ended.
    Nobody,
}

impl Processes {
    /// Creates the processes without starting any.
    pub(crate) fn new(recipes: CommandSpecs, restarts: RestartPolicy) -> Self {
        let managed = |role, recipe| SupervisedProcess::new(role, recipe, RestartCounter::new(restarts));
        let (executors, workers) = (recipes.executors.into_iter(), recipes.workers.into_iter());
        let mut processes = Self {
            executors: executors
                .map(|(instance, recipe)| managed(ProcessRole::Executor(instance), recipe))
                .collect(),
            elsewhere: recipes.elsewhere,
            gateway: managed(ProcessRole::Gateway, recipes.gateway),
            trainer: recipes.trainer.map(|recipe| managed(ProcessRole::Trainer, recipe)),
            workers: workers.map(|(worker, recipe)| managed(ProcessRole::Worker(worker), recipe)).collect(),
            bases: recipes.bases,
        };
        let asleep = processes.bases.iter().filter(|base| !base.is_awake).map(|base| base.name.clone());
        asleep.collect::<Vec<_>>().iter().for_each(|base| processes.fall_asleep(base));
        processes
    }

    /// Starts the gateway, and the executors of bases that are awake.
    pub(crate) fn start_needed(&mut self, log: &LogSink) -> Result<(), UpError> {
        let awake = |executor: &&mut SupervisedProcess| executor.wish == BaseTargetState::Awake;
        self.executors.iter_mut().filter(awake).try_for_each(|executor| executor.start(log))?;
        self.gateway.start(log)
    }

    /// Returns the roles of the trainer, and of the workers of bases that are awake.
    pub(crate) fn helpers(&self) -> Vec<ProcessRole> {
        let helpers = self.trainer.iter().chain(&self.workers);
        helpers.filter(|managed| managed.wish == BaseTargetState::Awake).map(|managed| managed.role).collect()
    }

    /// Ends the processes of a base.
    pub(crate) fn fall_asleep(&mut self, base: &str) {
        for role in self.roles_of(base) {
            self.of(role).fall_asleep();
        }
        self.tell_gateway();
    }

    /// Notes that the processes of a base are to run; [`Self::due_to_wake`] says when.
    pub(crate) fn wake(&mut self, base: &str) {
        for role in self.roles_of(base) {
            self.of(role).wish = BaseTargetState::Awake;
        }
        self.tell_gateway();
    }

    /// Returns the processes to start because their base wakes. Processes of bases that were sent to sleep
    /// give back their memory first.
    pub(crate) fn due_to_wake(&self) -> Vec<ProcessRole> {
        let of_bases = || self.executors.iter().chain(&self.workers);
        if of_bases().any(SupervisedProcess::is_stopping) {
            return Vec::new();
        }
        of_bases().filter(|managed| managed.is_due_to_wake()).map(|managed| managed.role).collect()
    }

    /// True if no process of any base has to run.
    fn all_sleep(&self) -> bool {
        !self.executors.is_empty()
            && self.executors.iter().all(|executor| executor.wish == BaseTargetState::Asleep)
    }

    fn roles_of(&self, base: &str) -> Vec<ProcessRole> {
        let Some(base) = self.bases.iter().find(|one| one.name == base) else { return Vec::new() };
        let executors = base.executors.iter().map(|instance| ProcessRole::Executor(*instance));
        executors.chain(base.workers.iter().map(|worker| ProcessRole::Worker(*worker))).collect()
    }

    /// Writes into the gateway's command which bases sleep, so that a restarted gateway knows them.
    fn tell_gateway(&mut self) {
        let sleeps = |base: &&BaseProcesses| {
            let first = base.executors.first().map(|instance| &self.executors[instance.index]);
            first.is_some_and(|executor| executor.wish == BaseTargetState::Asleep)
        };
        let asleep: Vec<&str> = self.bases.iter().filter(sleeps).map(|base| base.name.as_str()).collect();
        let asleep = asleep.join(",");
        self.gateway.recipe.set("--asleep", &asleep);
    }

    /// Waits for the next change of any process. Cancellation-safe: dropping the future loses no change.
    pub(crate) async fn next(&mut self) -> (ProcessRole, ProcessChange) {
        tokio::select! {
            change = self.gateway.next() => (ProcessRole::Gateway, change),
            change = next_of(self.executors.iter_mut().chain(&mut self.trainer).chain(&mut self.workers)) => change,
        }
    }

    /// Returns the process of `role`, which must exist.
    pub(crate) fn of(&mut self, role: ProcessRole) -> &mut SupervisedProcess {
        match role {
            ProcessRole::Executor(instance) => &mut self.executors[instance.index],
            ProcessRole::Gateway => &mut self.gateway,
            ProcessRole::Trainer => {
                self.trainer.as_mut().expect("only a trainer that there is does anything")
            }
            ProcessRole::Worker(worker) => &mut self.workers[worker.index],
        }
    }

    fn all(&self) -> impl Iterator<Item = &SupervisedProcess> {
        self.executors.iter().chain([&self.gateway]).chain(&self.trainer).chain(&self.workers)
    }

    /// True if requests can be answered.
    pub(crate) fn serve(&self) -> bool {
        (self.is_any_executor_ready() || self.elsewhere > 0 || self.all_sleep()) && self.gateway.is_ready()
    }

    pub(crate) fn is_any_executor_ready(&self) -> bool {
        self.executors.iter().any(SupervisedProcess::is_ready)
    }

    /// Counts other executors that are not given up, including those on other hosts.
    pub(crate) fn other_executors(&self, role: ProcessRole) -> usize {
        let is_other = |executor: &&SupervisedProcess| {
            executor.role != role && !matches!(executor.state, ProcessState::Ended)
        };
        self.executors.iter().filter(is_other).count() + self.elsewhere
    }

    /// True if no executor runs without having been asked to stop.
    pub(crate) fn are_executors_stopping(&self) -> bool {
        self.executors.iter().all(|executor| executor.is_stopping() || !executor.is_running())
    }

    pub(crate) fn ids(&self) -> ProcessIds {
        ProcessIds {
            executors: self.executors.iter().map(|executor| (executor.role, executor.process_id())).collect(),
            gateway: self.gateway.process_id(),
            trainer: self.trainer.as_ref().and_then(SupervisedProcess::process_id),
            workers: self.workers.iter().filter_map(SupervisedProcess::process_id).collect(),
        }
    }

    /// Counts the workers that are not given up.
    pub(crate) fn workers_left(&self) -> usize {
        self.workers.iter().filter(|worker| !matches!(worker.state, ProcessState::Ended)).count()
    }

    /// Cancels starts and restarts of processes that do not run, because a stop has begun.
    pub(crate) fn forget_plans(&mut self) {
        let Self { executors, gateway, trainer, workers, .. } = self;
        executors
            .iter_mut()
            .chain([gateway])
            .chain(trainer)
            .chain(workers)
            .for_each(SupervisedProcess::forget_plans);
    }

    /// Returns the next stage of the stop: gateway, trainer, all executors, then all workers.
    pub(crate) fn next_to_stop(&self) -> StopStage {
        let is_running = |managed: &SupervisedProcess| managed.is_running();
        if self.gateway.is_running() {
            StopStage::Gateway
        } else if self.trainer.as_ref().is_some_and(is_running) {
            StopStage::Trainer
        } else if self.executors.iter().any(is_running) {
            StopStage::Executors
        } else if self.workers.iter().any(is_running) {
            StopStage::Workers
        } else {
            StopStage::Nobody
        }
    }

    /// Asks the processes of a stage to stop.
    pub(crate) fn terminate(&mut self, turn: StopStage) {
        match turn {
            StopStage::Gateway => self.gateway.terminate(),
            StopStage::Trainer => self.trainer.iter_mut().for_each(SupervisedProcess::terminate),
            StopStage::Executors => self.executors.iter_mut().for_each(SupervisedProcess::terminate),
            StopStage::Workers => self.workers.iter_mut().for_each(SupervisedProcess::terminate),
            StopStage::Nobody => {}
        }
    }

    pub(crate) fn kill_trainer(&self) {
        self.trainer.iter().for_each(SupervisedProcess::kill);
    }

    pub(crate) fn kill_all(&self) {
        self.all().for_each(SupervisedProcess::kill);
    }
}
