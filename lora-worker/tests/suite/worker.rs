//! A worker process, and its directory.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::{fs::DirBuilderExt as _, process::ExitStatusExt as _},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    time::Duration,
};

use lora_worker::FAILPOINTS;
use rustix::{
    process::{Pid, Signal, kill_process},
    thread::{CpuSet, sched_getaffinity},
};

pub(crate) use testkit::{eventually as until, eventually_some as until_some};

pub(crate) fn a_core() -> usize {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).find(|&core| allowed.is_set(core)).unwrap()
}

pub(crate) struct WorkerDirectory(tempfile::TempDir);

impl WorkerDirectory {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::DirBuilder::new().mode(0o700).create(directory.path().join("private")).unwrap();
        fs::create_dir(directory.path().join("failpoints")).unwrap();
        Self(directory)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("private/workers.sock")
    }

    pub(crate) fn arm(&self, place: &str, what: &str) {
        assert!(FAILPOINTS.contains(&place), "{place}");
        let _ = fs::remove_file(self.path("failpoints").join(format!("{place}.fired")));
        // Renamed into place, since the process may read the file at once.
        fs::write(self.path("armed"), what).unwrap();
        fs::rename(self.path("armed"), self.path("failpoints").join(place)).unwrap();
    }

    pub(crate) fn has_fired(&self, place: &str) -> bool {
        self.path("failpoints").join(format!("{place}.fired")).exists()
    }

    pub(crate) fn arguments(&self, core: usize) -> Vec<String> {
        let socket = self.socket().display().to_string();
        ["--executor", &socket, "--core", &core.to_string(), "--log-format", "human"]
            .map(str::to_owned)
            .to_vec()
    }

    /// A worker for tests with failpoints, which need system calls outside of the seccomp filter.
    pub(crate) fn start(&self) -> WorkerChild {
        self.start_with(&[], |command| {
            command.env("HOLOBIONT_FAILPOINTS", self.path("failpoints"));
        })
    }

    /// A worker as users run it.
    pub(crate) fn start_undisturbed(&self, options: &[&str]) -> WorkerChild {
        self.start_with(options, |_| {})
    }

    pub(crate) fn start_with(&self, options: &[&str], prepare: impl FnOnce(&mut Command)) -> WorkerChild {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lora-worker"));
        command.args(self.arguments(a_core())).args(options);
        prepare(&mut command);
        WorkerChild::spawn(command)
    }
}

pub(crate) struct WorkerChild {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl WorkerChild {
    pub(crate) fn spawn(command: Command) -> Self {
        Self::spawn_with_stdin(command, Stdio::piped())
    }

    pub(crate) fn spawn_with_stdin(mut command: Command, stdin: Stdio) -> Self {
        for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "RUST_LOG"] {
            if !command.get_envs().any(|(set, _)| set == name) {
                command.env_remove(name);
            }
        }
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn close_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    pub(crate) fn ready(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }

    /// Whether the main thread has this state letter of the kernel (stopped, sleeping).
    pub(crate) fn is_in_state(&self, state: char) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with(state)
    }

    /// User and system time of the process.
    pub(crate) fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    pub(crate) fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub(crate) fn shared_maps(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        maps.lines().filter(|line| line.contains("/memfd:")).count()
    }

    pub(crate) fn threads(&self) -> BTreeSet<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
        names.map(|name| name.trim().to_owned()).collect()
    }

    /// Waits for the end; exit code, or `None` after a signal.
    pub(crate) fn code(&mut self) -> Option<i32> {
        let status = until_some("the worker ends", || self.child.try_wait().unwrap());
        assert!(status.code().is_some() || status.signal().is_some());
        status.code()
    }

    pub(crate) fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for WorkerChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
