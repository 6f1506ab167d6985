//! The `holobiont` command, run as a user would, with shell scripts in place of the processes it supervises.
#![allow(dead_code, reason = "each test file uses a part of this")]

pub(crate) mod gateway;
pub(crate) mod terminal;

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use tempfile::TempDir;

pub(crate) use testkit::eventually_some;

/// Fake process that logs to `$FAKE_LOG`. `$FAKE_<ROLE>` sets its behaviour: `serve` (default), `refuse` to
/// start, `die` once ready, `mute` (never ready), or `stubborn` (ignores SIGTERM).
const FAKE_PROCESS: &str = r#"#!/usr/bin/env bash
role=ROLE
behaviour=FAKE_ROLE
log() { echo "$role $*" >>"$FAKE_LOG"; }
log "started $$ $*"
listen=
while (($#)); do [[ $1 != --listen ]] || listen=$2; shift; done
case ${!behaviour-serve} in
    refuse) echo "error: the model is too large" >&2; exit 2 ;;
    stubborn) trap 'log asked' TERM ;;
    *) trap 'log stopped; exit 0' TERM ;;
esac
if [[ ${!behaviour-serve} == mute ]]; then :
elif [[ $role == gateway ]]; then echo "ready http://${listen/%:0/:45678}"; else echo ready; fi
[[ ${!behaviour-serve} != die ]] || exit 9
while :; do
    IFS= read -r -t 0.1 _
    # More than 128 means that the time is over; anything else that the pipe is closed.
    (($? > 128)) && continue
    log drained
    exit 0
done
"#;

pub(crate) struct CommandFixture {
    programs: TempDir,
    pub(crate) home: TempDir,
}

impl CommandFixture {
    pub(crate) fn new() -> Self {
        let programs = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // A link, since a copied program could still be open for writing in another thread's fork.
        fs::hard_link(env!("CARGO_BIN_EXE_holobiont"), programs.path().join("holobiont")).unwrap();
        for (role, program) in [
            ("EXECUTOR", "base-executor"),
            ("GATEWAY", "gateway"),
            ("TRAINER", "holobiont-trainer"),
            ("WORKER", "lora-worker"),
        ] {
            let text = FAKE_PROCESS
                .replace("role=ROLE", &format!("role={}", role.to_lowercase()))
                .replace("FAKE_ROLE", &format!("FAKE_{role}"));
            add_program(programs.path(), program, &text);
        }
        let home = TempDir::new().unwrap();
        fs::create_dir(home.path().join("models")).unwrap();
        fs::write(home.path().join("models/tiny.gguf"), "weights").unwrap();
        Self { programs, home }
    }

    pub(crate) fn with(self, program: &str, script: &str) -> Self {
        add_program(self.programs.path(), program, script);
        self
    }

    pub(crate) fn without(self, program: &str) -> Self {
        fs::remove_file(self.programs.path().join(program)).unwrap();
        self
    }

    /// The command in an environment of its own, by default without workers and trainers.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.path().join("holobiont"));
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOLOBIONT_HOME", self.home.path())
            .env("FAKE_LOG", self.log_path())
            .env("HOLOBIONT_WORKERS", "0")
            .env("HOLOBIONT_MAX_TRAINERS", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn log_path(&self) -> PathBuf {
        self.home.path().join("fake.log")
    }

    pub(crate) fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.log_path()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn short_log(&self) -> Vec<String> {
        let short = |line: String| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        self.log().into_iter().map(short).collect()
    }

    /// Number of lines of the short log that are `line`.
    pub(crate) fn count(&self, line: &str) -> usize {
        self.short_log().iter().filter(|logged| *logged == line).count()
    }

    /// Waits until `count` lines of the log start with `start`; returns the last of them.
    pub(crate) fn wait_for_log(&self, start: &str, count: usize) -> String {
        eventually_some(&format!("{count} x {start:?} in the log"), || {
            let lines: Vec<_> = self.log().into_iter().filter(|line| line.starts_with(start)).collect();
            (lines.len() >= count).then(|| lines[count - 1].clone())
        })
    }

    pub(crate) fn wait_for_process(&self, role: &str, count: usize) -> i32 {
        let line = self.wait_for_log(&format!("{role} started"), count);
        line.split(' ').nth(2).unwrap().parse().unwrap()
    }
}

fn add_program(directory: &Path, program: &str, script: &str) {
    let path = directory.join(program);
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A running command, with its output in files so that no pipe can fill up.
pub(crate) struct RunningCommand {
    child: Child,
    out: PathBuf,
    err: PathBuf,
    _directory: TempDir,
}

#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl RunningCommand {
    pub(crate) fn start(command: &mut Command) -> Self {
        let directory = TempDir::new().unwrap();
        let (out, err) = (directory.path().join("out"), directory.path().join("err"));
        command.stdout(fs::File::create(&out).unwrap()).stderr(fs::File::create(&err).unwrap());
        Self { child: command.spawn().unwrap(), out, err, _directory: directory }
    }

    /// Starts `up` and waits until the gateway serves.
    pub(crate) fn up(command: &mut Command) -> Self {
        let running = Self::start(command);
        running.wait_for_out("OpenAI(");
        running
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        kill(self.child.id().try_into().unwrap(), signal);
    }

    pub(crate) fn wait_for_out(&self, text: &str) {
        wait_for_text(&self.out, text);
    }

    pub(crate) fn wait_for_err(&self, text: &str) {
        wait_for_text(&self.err, text);
    }

    pub(crate) fn end(mut self) -> CommandOutput {
        let status = eventually_some("the end of the command", || self.child.try_wait().unwrap());
        CommandOutput { status, out: read(&self.out), err: read(&self.err) }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn run(command: &mut Command) -> CommandOutput {
    RunningCommand::start(command).end()
}

pub(crate) fn kill(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn wait_for_text(path: &Path, text: &str) {
    eventually_some(&format!("{text:?}"), || read(path).contains(text).then_some(()));
}

fn read(path: &Path) -> String {
    let mut text = String::new();
    fs::File::open(path).unwrap().read_to_string(&mut text).unwrap();
    text
}
