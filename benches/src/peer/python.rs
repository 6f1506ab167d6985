//! Python with PyTorch, kept running between measurements: the import takes longer than a measurement.

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

/// Timeout of an answer, the import included.
const LIMIT: Duration = Duration::from_secs(300);

/// Python process that answers each line with a line; dropping it stops the process.
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
    /// Fails if `python` cannot be started.
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
        // The thread ends with the child's output.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, questions, answers })
    }

    /// Returns the answer to `question`.
    ///
    /// # Errors
    /// If the process ends, or the timeout passes.
    pub(crate) fn ask(&mut self, question: &str) -> Result<String> {
        writeln!(self.questions, "{question}").context("Python has ended; has it torch?")?;
        self.answers.recv_timeout(LIMIT).context("Python does not answer; has it torch?")
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // `kill` fails only if the child has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
