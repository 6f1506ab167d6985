//! `holobiont up` as a value: started by a [`Plan`], stopped when it is dropped.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    chaos::Places,
    client::Client,
    cores,
    fixtures::{BASE, EXAMPLES, example, model, program},
    place::Place,
    proc::{self, SharedMemory},
    watchdog::{WATCHDOG, running, signal},
};

/// One of the processes of a deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// Owns the weights.
    Executor,
    /// Owns the text.
    Gateway,
    /// Owns a core.
    Worker,
    /// Starts trainers.
    Trainer,
}

impl Process {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Executor, Self::Gateway, Self::Worker, Self::Trainer];

    /// What the program is called.
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

/// A deployment that has not been started.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Instead of the model of all tests.
    model: Option<PathBuf>,
    /// One unless told otherwise, whatever machine this is.
    workers: usize,
    /// One unless told otherwise, which one differs between deployments that run at once.
    cores: Option<usize>,
    arguments: Vec<String>,
    settings: Vec<(String, String)>,
    /// The deployment file, if there is one.
    file: String,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            model: None,
            workers: 1,
            cores: None,
            arguments: Vec::new(),
            settings: Vec::new(),
            file: String::new(),
        }
    }
}

impl Plan {
    /// The base model alone.
    #[must_use]
    pub fn bare() -> Self {
        Self::default()
    }

    /// The base model and the example adapters.
    #[must_use]
    pub fn with_examples() -> Self {
        let adapters = EXAMPLES.map(|name| format!("{name}={}", example(name).display()));
        let arguments = adapters.into_iter().flat_map(|pair| ["--adapter".to_owned(), pair]).collect();
        Self { arguments, ..Self::default() }
    }

    /// Serves the model at `path` instead of the one all tests share.
    #[must_use]
    pub fn model(mut self, path: &Path) -> Self {
        self.model = Some(path.to_owned());
        self
    }

    /// Computes on the first `count` cores.
    #[must_use]
    pub fn cores(mut self, count: usize) -> Self {
        self.cores = Some(count);
        self
    }

    /// Lets `count` workers compute adapters.
    #[must_use]
    pub fn workers(mut self, count: usize) -> Self {
        self.workers = count;
        self
    }

    /// Serves on several executors, called so. All compute on the same core.
    #[must_use]
    pub fn executors(self, names: &[&str]) -> Self {
        let sections = names.iter().map(|name| format!("[[executor]]\nname = \"{name}\"\n"));
        self.file(&sections.collect::<String>())
    }

    /// Serves on one more executor, which somebody else has started at `address`.
    #[must_use]
    pub fn elsewhere(self, name: &str, address: SocketAddr) -> Self {
        self.file(&format!("[[executor]]\nname = \"{name}\"\naddress = \"{address}\"\n"))
    }

    /// Says `sections` in its deployment file.
    #[must_use]
    pub fn file(mut self, sections: &str) -> Self {
        self.file.push_str(sections);
        self
    }

    /// Lets adapters come to a device of `device_bytes` over an emulated link of `link_gbps`: most requests find theirs
    /// missing there.
    #[must_use]
    pub fn cold(self, device_bytes: &str, link_gbps: &str) -> Self {
        self.set("DEVICE_ADAPTER_BYTES", device_bytes).set("LINK_GBPS", link_gbps)
    }

    /// Sets `HOLOBIONT_<name>`, as in `CHUNK_TOKENS`.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((format!("HOLOBIONT_{name}"), value.to_owned()));
        self
    }

    /// Sets a variable of somebody else's, such as the loader's or a driver's.
    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Lets its processes die as often as it takes, and come back soon.
    #[must_use]
    pub fn restless(self) -> Self {
        self.set("MAX_DEATHS", "1000000").set("RESTART_DELAY_MS", "0")
    }

    /// Lets its processes die at `places`, as often as it takes, and come back soon.
    #[must_use]
    pub fn mortal(self, places: &Places) -> Self {
        let directory = places.directory().display().to_string();
        self.restless().set("FAILPOINTS", &directory)
    }

    /// Starts it with a state directory of its own.
    #[must_use]
    pub fn start(&self) -> Deployment {
        self.start_in(Arc::new(Place::new()))
    }

    /// Starts it with the state that is in `place`.
    #[must_use]
    pub fn start_in(&self, place: Arc<Place>) -> Deployment {
        let mut up = self.command(&place);
        let log = File::options().append(true).create(true).open(place.log()).expect("a log file");
        let mut child = up.stdout(Stdio::piped()).stderr(log).spawn().expect("holobiont starts");
        running().insert(child.id());
        let stdout = child.stdout.take().expect("its stdout is a pipe");
        // From here on dropping stops it, also if it never greets.
        let mut deployment =
            Deployment { child, needed: vec![Process::Gateway], client: Client::new(""), place };
        deployment.read_greeting(stdout);
        deployment
    }

    /// The command line, for those who want to see it fail.
    #[must_use]
    pub fn command(&self, place: &Place) -> Command {
        let mut up = Command::new(program("holobiont"));
        // Settings of whoever runs the tests must not reach what is tested.
        for (name, _) in env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"HOLOBIONT_"))
        {
            up.env_remove(name);
        }
        up.args(["--json", "up"]);
        if !self.file.is_empty() {
            let file = place.home().join("deployment.toml");
            fs::write(&file, &self.file).expect("a deployment file");
            up.arg("--config").arg(file);
        }
        up.args(["--listen", "127.0.0.1:0", "--log-format", "human", "--model"])
            .arg(self.model.clone().unwrap_or_else(model))
            .arg("--state")
            .arg(place.state())
            .args(["--workers", &self.workers.to_string()])
            .args(cores::options(self.cores, self.workers))
            .args(&self.arguments)
            .env("HOLOBIONT_HOME", place.home())
            .env("HOLOBIONT_SERVED_MODEL_NAME", BASE)
            .env("HOLOBIONT_ADAPTER_ROOT", place.adapters())
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        up
    }
}

/// A running deployment.
#[derive(Debug)]
pub struct Deployment {
    child: Child,
    /// What runs as long as it does.
    needed: Vec<Process>,
    /// Talks to it.
    pub client: Client,
    place: Arc<Place>,
}

impl Deployment {
    /// What is in `slot`, started now unless a test that runs beside this one has done so.
    #[must_use]
    pub fn shared(slot: &Mutex<Weak<Self>>, plan: impl FnOnce() -> Plan) -> Arc<Self> {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.upgrade().unwrap_or_else(|| {
            let started = Arc::new(plan().start());
            *slot = Arc::downgrade(&started);
            started
        })
    }

    /// Where its state is.
    #[must_use]
    pub fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// Process id of `holobiont up`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the executor, which cannot do anything about it.
    pub fn kill_executor(&self) {
        self.signal(Process::Executor, Signal::KILL);
    }

    /// The id of a process as it is now, the first of several; `None` while it is started again.
    #[must_use]
    pub fn process(&self, process: Process) -> Option<u32> {
        self.processes(process).first().copied()
    }

    /// The ids of all processes of a kind, in ascending order.
    #[must_use]
    pub fn processes(&self, process: Process) -> Vec<u32> {
        let mut ids = proc::children(self.id());
        // The system keeps so many letters of a name.
        let name: String = process.program().chars().take(15).collect();
        ids.retain(|id| proc::name(*id).as_ref() == Some(&name));
        ids.sort_unstable();
        ids
    }

    /// The trainers that learn now: processes of the one that starts them.
    #[must_use]
    pub fn trainers(&self) -> Vec<u32> {
        self.processes(Process::Trainer).into_iter().flat_map(proc::children).collect()
    }

    /// Sends a signal to a process, if it runs.
    pub fn signal(&self, process: Process, how: Signal) {
        if let Some(id) = self.process(process) {
            signal(id, how);
        }
    }

    /// Sends a signal to `holobiont up` itself.
    pub fn signal_supervisor(&self, how: Signal) {
        signal(self.id(), how);
    }

    /// Files and sockets a process has open.
    #[must_use]
    pub fn open_files(&self, process: Process) -> usize {
        proc::open_files(self.process(process).expect("the process runs"))
    }

    /// Memory of a process that is in use and not a file's, in bytes.
    #[must_use]
    pub fn resident_bytes(&self, process: Process) -> u64 {
        proc::resident_bytes(self.process(process).expect("the process runs"))
    }

    /// The shared memory that each process of a kind holds.
    #[must_use]
    pub fn shared_memory(&self, process: Process) -> Vec<SharedMemory> {
        self.processes(process).into_iter().map(SharedMemory::of).collect()
    }

    /// Kills `holobiont up` itself, and waits until nothing of it is left.
    pub fn kill_supervisor(mut self) {
        self.end(Signal::KILL);
    }

    /// Sends SIGTERM and waits until it is over; nothing of it may be left.
    pub fn stop(mut self) -> ExitStatus {
        let status = self.end(Signal::TERM);
        let sockets = fs::read_dir(self.place.state().join("run")).map_or(0, Iterator::count);
        assert_eq!(sockets, 0, "run directories are left behind");
        status
    }

    /// Signals the supervisor, and waits until it and its processes are gone.
    fn end(&mut self, how: Signal) -> ExitStatus {
        let children = proc::children(self.id());
        for &process in &self.needed {
            assert!(self.process(process).is_some(), "{process:?} runs");
        }
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
        patience::step();
        assert!(read > 0, "holobiont did not start; its log:\n{}", self.log());
        let greeting: Value = serde_json::from_str(&line).expect("the greeting is JSON");
        self.client = Client::new(greeting["url"].as_str().expect("an address"));
        let processes = greeting["pids"].as_object().expect("processes by name");
        let executors = processes.iter().filter(|(name, _)| name.starts_with("base-executor"));
        let ids = executors.filter_map(|(_, id)| u32::try_from(id.as_u64()?).ok());
        let ids: BTreeSet<u32> = ids.collect();
        let running = self.processes(Process::Executor).into_iter().collect();
        assert_eq!(ids, running, "the greeting names the executors");
        // There is none where all are elsewhere.
        self.needed.extend((!ids.is_empty()).then_some(Process::Executor));
    }

    /// What was said so far.
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
        // Too late for manners; and without effect if it has gone.
        let _ = self.child.kill();
        if thread::panicking() {
            eprintln!("the log of the deployment:\n{}", self.log());
        }
    }
}
