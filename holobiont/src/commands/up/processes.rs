//! All processes of a deployment, together.

use super::{
    errors::UpError,
    greeting::ProcessIds,
    log::LogSink,
    managed::{Change, Managed, State, next_of},
    plan::Recipes,
    process::Role,
    restart::Deaths,
};
use crate::deployment::config::RestartPolicy;

/// The processes, dead or alive.
#[derive(Debug)]
pub(crate) struct Processes {
    /// In the order of [`super::process::Instance::index`].
    executors: Vec<Managed>,
    /// Executors of other hosts.
    elsewhere: usize,
    pub(crate) gateway: Managed,
    trainer: Option<Managed>,
    /// In the order of [`super::process::Worker::index`].
    workers: Vec<Managed>,
}

/// Whose turn it is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It drains.
    Gateway,
    /// Nobody asks it any more; what it computes with still runs.
    Trainer,
    /// They drain.
    Executors,
    /// All at once.
    Workers,
    /// All have ended.
    Nobody,
}

impl Processes {
    /// Processes of which none has been started.
    pub(crate) fn new(recipes: Recipes, restarts: RestartPolicy) -> Self {
        let managed = |role, recipe| Managed::new(role, recipe, Deaths::new(restarts));
        let (executors, workers) = (recipes.executors.into_iter(), recipes.workers.into_iter());
        Self {
            executors: executors
                .map(|(instance, recipe)| managed(Role::Executor(instance), recipe))
                .collect(),
            elsewhere: recipes.elsewhere,
            gateway: managed(Role::Gateway, recipes.gateway),
            trainer: recipes.trainer.map(|recipe| managed(Role::Trainer, recipe)),
            workers: workers.map(|(worker, recipe)| managed(Role::Worker(worker), recipe)).collect(),
        }
    }

    /// Starts those without which there is no deployment.
    pub(crate) fn start_needed(&mut self, log: &LogSink) -> Result<(), UpError> {
        self.executors.iter_mut().try_for_each(|executor| executor.start(log))?;
        self.gateway.start(log)
    }

    /// The others.
    pub(crate) fn helpers(&self) -> Vec<Role> {
        self.trainer.iter().chain(&self.workers).map(|managed| managed.role).collect()
    }

    /// Waits for the next change of any of them. May be dropped and called again without losing anything.
    pub(crate) async fn next(&mut self) -> (Role, Change) {
        tokio::select! {
            change = self.gateway.next() => (Role::Gateway, change),
            change = next_of(self.executors.iter_mut().chain(&mut self.trainer).chain(&mut self.workers)) => change,
        }
    }

    /// The one of this role, which is one of them.
    pub(crate) fn of(&mut self, role: Role) -> &mut Managed {
        match role {
            Role::Executor(instance) => &mut self.executors[instance.index],
            Role::Gateway => &mut self.gateway,
            Role::Trainer => self.trainer.as_mut().expect("only a trainer that there is does anything"),
            Role::Worker(worker) => &mut self.workers[worker.index],
        }
    }

    fn all(&self) -> impl Iterator<Item = &Managed> {
        self.executors.iter().chain([&self.gateway]).chain(&self.trainer).chain(&self.workers)
    }

    /// Requests can be answered.
    pub(crate) fn serve(&self) -> bool {
        (self.is_any_executor_ready() || self.elsewhere > 0) && self.gateway.is_ready()
    }

    /// Requests have somewhere to go.
    pub(crate) fn is_any_executor_ready(&self) -> bool {
        self.executors.iter().any(Managed::is_ready)
    }

    /// Executors beside this one that have not been given up, as far as one knows: those of other hosts among them.
    pub(crate) fn other_executors(&self, role: Role) -> usize {
        let is_other = |executor: &&Managed| executor.role != role && !matches!(executor.state, State::Ended);
        self.executors.iter().filter(is_other).count() + self.elsewhere
    }

    /// All executors have been asked to stop.
    pub(crate) fn are_executors_stopping(&self) -> bool {
        self.executors.iter().all(|executor| executor.is_stopping() || !executor.is_running())
    }

    pub(crate) fn ids(&self) -> ProcessIds {
        ProcessIds {
            executors: self.executors.iter().map(|executor| (executor.role, executor.process_id())).collect(),
            gateway: self.gateway.process_id(),
            trainer: self.trainer.as_ref().and_then(Managed::process_id),
            workers: self.workers.iter().filter_map(Managed::process_id).collect(),
        }
    }

    /// Workers that have not been given up.
    pub(crate) fn workers_left(&self) -> usize {
        self.workers.iter().filter(|worker| !matches!(worker.state, State::Ended)).count()
    }

    /// A stop has begun: what does not run yet will not.
    pub(crate) fn forget_plans(&mut self) {
        let Self { executors, gateway, trainer, workers, .. } = self;
        executors.iter_mut().chain([gateway]).chain(trainer).chain(workers).for_each(Managed::forget_plans);
    }

    /// Who is to stop next: the gateway, then the trainer, then all executors, then all workers.
    pub(crate) fn turn(&self) -> Turn {
        let is_running = |managed: &Managed| managed.is_running();
        if self.gateway.is_running() {
            Turn::Gateway
        } else if self.trainer.as_ref().is_some_and(is_running) {
            Turn::Trainer
        } else if self.executors.iter().any(is_running) {
            Turn::Executors
        } else if self.workers.iter().any(is_running) {
            Turn::Workers
        } else {
            Turn::Nobody
        }
    }

    /// Asks those whose turn it is to stop.
    pub(crate) fn terminate(&mut self, turn: Turn) {
        match turn {
            Turn::Gateway => self.gateway.terminate(),
            Turn::Trainer => self.trainer.iter_mut().for_each(Managed::terminate),
            Turn::Executors => self.executors.iter_mut().for_each(Managed::terminate),
            Turn::Workers => self.workers.iter_mut().for_each(Managed::terminate),
            Turn::Nobody => {}
        }
    }

    pub(crate) fn kill_trainer(&self) {
        self.trainer.iter().for_each(Managed::kill);
    }

    pub(crate) fn kill_all(&self) {
        self.all().for_each(Managed::kill);
    }
}
