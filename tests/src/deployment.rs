//! A running `holobiont up`, started by a [`DeploymentPlan`](crate::DeploymentPlan) and stopped on drop.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    client::Client,
    proc::{self, SharedMemory},
    state_directory::StateDirectory,
    watchdog::{WATCHDOG, running, signal},
};

/// Kind of process in a deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeploymentProcess {
    /// Process that owns the weights.
    Executor,
    /// Process that tokenizes text and serves HTTP.
    Gateway,
    /// Process that computes adapters on a core.
    Worker,
    /// Process that starts trainers.
    Trainer,
}

impl DeploymentProcess {
    /// All kinds of processes.
    pub const ALL: [Self; 4] = [Self::Executor, Self::Gateway, Self::Worker, Self::Trainer];

    /// Returns the program's name.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Executor => "base-executor",
            Self::Gateway => "gateway",
            Self::Worker => "lora-worker",
            Self::Trainer => "holobiont-trainer",
        }
    }
}

/// Processes of one `holobiont up`, which end with this value.
#[derive(Debug)]
pub struct Deployment {
    child: Child,
    needed: Vec<DeploymentProcess>,
    /// Client of the deployment's gateway.
    pub client: Client,
    place: Arc<StateDirectory>,
    model: PathBuf,
}

impl Deployment {
    /// Starts `up` with the state directory `place` and the served `model`.
    pub(crate) fn spawn(mut up: Command, place: Arc<StateDirectory>, model: PathBuf) -> Self {
        let log = File::options().append(true).create(true).open(place.log()).expect("a log file");
        let mut child = up.stdout(Stdio::piped()).stderr(log).spawn().expect("holobiont starts");
        running().insert(child.id());
        let stdout = child.stdout.take().expect("its stdout is a pipe");
        // From here on dropping stops the process, even if it never becomes ready.
        let (needed, client) = (vec![DeploymentProcess::Gateway], Client::new(""));
        let mut deployment = Self { child, needed, client, place, model };
        deployment.read_greeting(stdout);
        deployment
    }

    /// Returns the deployment in `slot`, and starts it unless a concurrent test has done so.
    #[must_use]
    pub fn shared(slot: &Mutex<Weak<Self>>, start: impl FnOnce() -> Self) -> Arc<Self> {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.upgrade().unwrap_or_else(|| {
            let started = Arc::new(start());
            *slot = Arc::downgrade(&started);
            started
        })
    }

    /// Returns the state directory.
    #[must_use]
    pub fn place(&self) -> &Arc<StateDirectory> {
        &self.place
    }

    /// Returns the served model, for split clients.
    #[must_use]
    pub fn model(&self) -> &Path {
        &self.model
    }

    /// Returns the process id of `holobiont up`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the executor with SIGKILL.
    pub fn kill_executor(&self) {
        self.signal(DeploymentProcess::Executor, Signal::KILL);
    }

    /// Returns the current id of the first process of a kind; `None` during a restart.
    #[must_use]
    pub fn process(&self, process: DeploymentProcess) -> Option<u32> {
        self.processes(process).first().copied()
    }

    /// Returns the ids of all processes of a kind, in ascending order.
    #[must_use]
    pub fn processes(&self, process: DeploymentProcess) -> Vec<u32> {
        let mut ids = proc::children(self.id());
        // The kernel truncates process names to this length.
        let name: String = process.program().chars().take(15).collect();
        ids.retain(|id| proc::name(*id).as_ref() == Some(&name));
        ids.sort_unstable();
        ids
    }

    /// Returns the ids of running trainers, which are children of the trainer process.
    #[must_use]
    pub fn trainers(&self) -> Vec<u32> {
        self.processes(DeploymentProcess::Trainer).into_iter().flat_map(proc::children).collect()
    }

    /// Whether a trainer runs for this job.
    #[must_use]
    pub fn trains(&self, job: &str) -> bool {
        self.trainers().into_iter().any(|trainer| proc::arguments(trainer).contains(job))
    }

    /// Sends a signal to a process, if it runs.
    pub fn signal(&self, process: DeploymentProcess, how: Signal) {
        if let Some(id) = self.process(process) {
            signal(id, how);
        }
    }

    /// Sends a signal to `holobiont up` itself.
    pub fn signal_supervisor(&self, how: Signal) {
        signal(self.id(), how);
    }

    /// Returns the open files of a process, sorted: a path, or the kind and inode of a socket or pipe.
    #[must_use]
    pub fn open_files(&self, process: DeploymentProcess) -> Vec<String> {
        proc::open_files(self.process(process).expect("the process runs"))
    }

    /// Returns the anonymous resident memory of a process in bytes.
    #[must_use]
    pub fn resident_bytes(&self, process: DeploymentProcess) -> u64 {
        proc::resident_bytes(self.process(process).expect("the process runs"))
    }

    /// Returns the shared memory that each process of a kind holds.
    #[must_use]
    pub fn shared_memory(&self, process: DeploymentProcess) -> Vec<SharedMemory> {
        self.processes(process).into_iter().map(SharedMemory::of).collect()
    }

    /// Kills `holobiont up` itself, and waits until all its processes are gone.
    pub fn kill_supervisor(mut self) {
        self.end(Signal::KILL);
    }

    /// Sends SIGTERM and waits for the end; no process may be left.
    pub fn stop(mut self) -> ExitStatus {
        for &process in &self.needed {
            assert!(self.process(process).is_some(), "{process:?} runs");
        }
        let status = self.end(Signal::TERM);
        let sockets = fs::read_dir(self.place.state().join("run")).map_or(0, Iterator::count);
        assert_eq!(sockets, 0, "run directories are left behind");
        status
    }

    /// Stops the deployment, of which no process of this kind has to run.
    pub fn stop_without(mut self, process: DeploymentProcess) -> ExitStatus {
        self.needed.retain(|needed| *needed != process);
        self.stop()
    }

    fn end(&mut self, how: Signal) -> ExitStatus {
        let children = proc::children(self.id());
        signal(self.id(), how);
        let started = Instant::now();
        let mut status = None;
        while status.is_none() || children.iter().any(|id| proc::parent(*id).is_some()) {
            assert!(started.elapsed() < WATCHDOG, "it did not stop; its log:\n{}", self.log());
            status = status.or_else(|| self.child.try_wait().expect("a child can be waited for"));
            thread::sleep(Duration::from_millis(10));
        }
        running().remove(&self.child.id());
        status.expect("the loop ends with a status")
    }

    fn read_greeting(&mut self, stdout: ChildStdout) {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line).expect("its stdout can be read");
        testkit::step();
        assert!(read > 0, "holobiont did not start; its log:\n{}", self.log());
        let greeting: Value = serde_json::from_str(&line).expect("the greeting is JSON");
        self.client = Client::new(greeting["url"].as_str().expect("an address"));
        let processes = greeting["pids"].as_object().expect("processes by name");
        let executors = processes.iter().filter(|(name, _)| name.starts_with("base-executor"));
        let ids = executors.filter_map(|(_, id)| u32::try_from(id.as_u64()?).ok());
        let ids: BTreeSet<u32> = ids.collect();
        let running = self.processes(DeploymentProcess::Executor).into_iter().collect();
        assert_eq!(ids, running, "the greeting names the executors");
        // There is no executor process if all executors are remote.
        self.needed.extend((!ids.is_empty()).then_some(DeploymentProcess::Executor));
    }

    /// Returns the text of the deployment's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.place.log()).unwrap_or_default()
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        if !running().remove(&self.child.id()) {
            return; // It has been stopped already.
        }
        signal(self.child.id(), Signal::TERM);
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && started.elapsed() < WATCHDOG {
            thread::sleep(Duration::from_millis(10));
        }
        // Has no effect if the process has ended.
        let _ = self.child.kill();
        if thread::panicking() {
            eprintln!("the log of the deployment:\n{}", self.log());
        }
    }
}
