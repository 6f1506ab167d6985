//! PyTorch, kept running between measurements: importing it takes longer than what is measured.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

const SCRIPT: &str = include_str!("torch_xab.py");

/// How long an answer may take, the import included.
const LIMIT: Duration = Duration::from_secs(120);

/// A Python process that multiplies on demand. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Torch {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
}

impl Torch {
    /// Starts `python`, which must have torch, with the script's `arguments`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(python: &Path, arguments: &[usize]) -> Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", SCRIPT])
            .args(arguments.iter().map(usize::to_string))
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

    /// Milliseconds of one product in `kind` on `threads` threads: the median of a few calls.
    ///
    /// # Errors
    /// If it ends, is silent for too long, or says something else.
    pub(crate) fn ms(&mut self, kind: &str, threads: usize) -> Result<f64> {
        writeln!(self.questions, "{kind} {threads}").context("Python has ended; has it torch?")?;
        let answer = self.answers.recv_timeout(LIMIT).context("Python does not answer; has it torch?")?;
        answer.trim().parse().with_context(|| format!("Python answered {answer:?}, which is no number"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
