//! `holobiont-client` as a process that can be killed.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;

use super::{CERTIFIED, SplitEndpoints, SplitRoute, clean};
use crate::{
    chaos::FailpointDirectory,
    deployment::Deployment,
    fixtures,
    watchdog::{eventually, running},
};

/// Exit status and output of the program.
#[derive(Debug, Clone, PartialEq)]
pub struct ProgramEnd {
    /// Exit code; `None` if a signal ended the program.
    pub code: Option<i32>,
    /// Printed JSON, or null for other output.
    pub answer: Value,
    /// Output on standard error.
    pub complaint: String,
}

impl ProgramEnd {
    /// Returns the text of the answer.
    #[must_use]
    pub fn text(&self) -> &str {
        self.answer["text"].as_str().unwrap_or_else(|| panic!("no answer: {self:?}"))
    }

    /// Returns the number of reconnections.
    #[must_use]
    pub fn reconnections(&self) -> u64 {
        self.answer["timings"]["reconnections"].as_u64().expect("a count")
    }
}

/// The program with its arguments, not started.
#[derive(Debug)]
pub struct Program(Command);

impl Program {
    /// Builds `holobiont-client COMMAND` over `route`, with a certificate for TLS.
    #[must_use]
    pub fn new(
        command: &str,
        endpoints: &SplitEndpoints,
        deployment: &Deployment,
        route: SplitRoute,
    ) -> Self {
        Self::over(clean(&fixtures::program("holobiont-client")), command, endpoints, deployment, route)
    }

    /// Builds the command through `launcher`, which receives the program's arguments.
    #[must_use]
    pub fn over(
        launcher: Command,
        command: &str,
        endpoints: &SplitEndpoints,
        deployment: &Deployment,
        route: SplitRoute,
    ) -> Self {
        let executor = endpoints.executor(deployment, route);
        let program = Self::started_by(launcher).arg(command).renting(&executor, deployment.model());
        if route != SplitRoute::Tls {
            return program;
        }
        let (certificate, key) = endpoints.identity();
        let program = program.arg("--ca").arg(endpoints.ca());
        program.arg("--cert").arg(certificate).arg("--cert-key").arg(key)
    }

    /// Builds `holobiont-client` without a command.
    #[must_use]
    pub fn bare() -> Self {
        Self::started_by(clean(&fixtures::program("holobiont-client")))
    }

    fn started_by(mut launcher: Command) -> Self {
        launcher.args(["--json", "--quiet"]);
        launcher.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(launcher)
    }

    /// Uses the executor at an address, with a local copy of its model.
    #[must_use]
    pub fn renting(self, executor: &str, model: &Path) -> Self {
        self.arg("--executor").arg(executor).arg("--name").arg(CERTIFIED).arg("--model").arg(model)
    }

    /// Appends one more argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<std::ffi::OsStr>) -> Self {
        self.0.arg(argument);
        self
    }

    /// Uses the example adapter `name`.
    #[must_use]
    pub fn wearing(mut self, adapter: &Path) -> Self {
        self.0.arg("--adapter").arg(adapter);
        self
    }

    /// Requests a greedy answer of exactly `tokens` tokens to `prompt`.
    #[must_use]
    pub fn ask(mut self, prompt: &str, tokens: usize) -> Self {
        self.0.args(["--temperature", "0", "--max-tokens", &tokens.to_string(), "--raw", "--", prompt]);
        self
    }

    /// Arms the failpoints at `places`.
    #[must_use]
    pub fn mortal(mut self, places: &FailpointDirectory) -> Self {
        self.0.env("HOLOBIONT_FAILPOINTS", places.directory());
        self
    }

    /// Starts the built program.
    #[must_use]
    pub fn start(mut self) -> RunningProgram {
        let child = self.0.spawn().expect("holobiont-client starts");
        running().insert(child.id());
        RunningProgram(Some(child))
    }

    /// Runs the program to its end.
    #[must_use]
    pub fn run(self) -> ProgramEnd {
        self.start().finish()
    }
}

/// The running program, killed on drop.
#[derive(Debug)]
pub struct RunningProgram(Option<Child>);

impl RunningProgram {
    /// Returns the program's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.0.as_ref().expect("it runs until it is finished").id()
    }

    /// True if the program has ended.
    pub fn has_ended(&mut self) -> bool {
        self.0.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    /// Waits for the program's end.
    #[must_use]
    pub fn finish(mut self) -> ProgramEnd {
        eventually("the end of holobiont-client", || self.has_ended());
        let child = self.0.take().expect("it was not finished before");
        running().remove(&child.id());
        // Answers fit in the pipe's buffer.
        let output = child.wait_with_output().expect("its output can be read");
        ProgramEnd {
            code: output.status.code(),
            answer: serde_json::from_slice(&output.stdout).unwrap_or_default(),
            complaint: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
            running().remove(&child.id());
        }
    }
}
