//! Python with PyTorch, kept running between measurements: importing it takes longer than what is measured.

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

/// How long an answer may take, the import included.
const LIMIT: Duration = Duration::from_secs(300);

/// A Python process that answers a line by a line. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Python {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
}

impl Python {
    /// Starts `python`, which must have torch, with the `arguments` of `script`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(python: &Path, script: &str, arguments: &[OsString]) -> Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", script])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}; give a Python with torch", python.display()))?;
        let questions = child.stdin.take().context("Python has no standard input")?;
        let output = child.stdout.take().context("Python has no standard output")?;
        let (sender, answers) = channel();
        // Ends with the child's output.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, questions, answers })
    }

    /// The answer to `question`.
    ///
    /// # Errors
    /// If it ends, or is silent for too long.
    pub(crate) fn ask(&mut self, question: &str) -> Result<String> {
        writeln!(self.questions, "{question}").context("Python has ended; has it torch?")?;
        self.answers.recv_timeout(LIMIT).context("Python does not answer; has it torch?")
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
