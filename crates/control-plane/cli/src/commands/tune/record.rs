//! Record of a training run, in a directory of its own below `runs/`.
//!
//! ```text
//! run.json      request, state and result; replaced atomically
//! events.jsonl  events of the trainer, one per line
//! trainer.log   stderr of the trainer
//! answers.jsonl answers that a draft adapter learns from; asking.json: settings of the requests
//! rollouts.jsonl answers of GRPO and their rewards, one per line
//! checkpoints/  checkpoints of the trainer, until the run is done
//! lm-eval/      results of lm-eval before and after the run
//! lock          held while the run is under way
//! ```
//!
//! A kill at any moment leaves a readable record; at worst the last event line is incomplete.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use control_protocol::training::{RunResult, TrainingEvent};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Deserializer, Serialize};

use super::{name::RunName, options::TrainingOptions};
use crate::{
    deployment::running::{ProcessId, RunningProcess},
    home::HomeDirectory,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RunState {
    /// A process of the run is alive.
    Running,
    /// The run's adapter is served.
    Done,
    /// The run ended by a fault.
    Failed,
    /// The user stopped the run.
    Stopped,
}

impl RunState {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }
}

/// Options of the model that answers the prompts of a draft adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TeacherOptions {
    /// Name of the model; the base if `None`.
    pub(super) model: Option<String>,
    /// Maximum number of tokens per answer.
    pub(super) answer_tokens: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RunRecord {
    /// Name of the run and its adapter.
    pub(super) name: RunName,
    /// Last written state; [`RunRecord::settled`] corrects the state of killed runs.
    pub(super) state: RunState,
    /// Paths of the training data; none for a draft adapter that learns from the shipped prompts.
    #[serde(deserialize_with = "one_or_several")]
    pub(super) data: Vec<PathBuf>,
    /// Teacher options of a draft adapter.
    #[serde(default)]
    pub(super) asks: TeacherOptions,
    /// File or URL of the rewards of GRPO.
    #[serde(default)]
    pub(super) reward: Option<String>,
    pub(super) options: TrainingOptions,
    /// Path of the written adapter.
    pub(super) output: PathBuf,
    /// Adapter version that the name stood for at the start; no other version may be replaced.
    pub(super) replaces: Option<String>,
    /// Process of this command.
    pub(super) process: ProcessId,
    /// Process of the trainer child.
    pub(super) trainer: Option<ProcessId>,
    /// Start time in seconds since 1970.
    pub(super) started_at: u64,
    /// End time in seconds since 1970.
    pub(super) ended_at: Option<u64>,
    /// Result of a finished run.
    pub(super) result: Option<RunResult>,
    /// Reason why the run is not done.
    pub(super) error: Option<String>,
}

/// Reads a list of paths; records of earlier versions hold one path, or null.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Paths {
        Several(Vec<PathBuf>),
        One(Option<PathBuf>),
    }
    Ok(match Paths::deserialize(deserializer)? {
        Paths::Several(paths) => paths,
        Paths::One(path) => path.into_iter().collect(),
    })
}

impl RunRecord {
    /// Returns the paths of the data for people.
    pub(super) fn data_text(&self) -> String {
        let paths: Vec<String> = self.data.iter().map(|path| path.display().to_string()).collect();
        if paths.is_empty() { "built-in prompts".to_owned() } else { paths.join(", ") }
    }

    /// Returns the record with its current state: a run whose processes were killed could not write that it
    /// failed.
    pub(super) fn settled(mut self) -> Self {
        if self.state == RunState::Running && self.under_way().is_none() {
            self.state = RunState::Failed;
            self.error = Some("the trainer ended without an error message".into());
        }
        self
    }

    /// Returns the process to ask for a stop: the command, or a trainer that has outlived the command.
    pub(super) fn under_way(&self) -> Option<RunningProcess> {
        let mut processes = [Some(self.process), self.trainer].into_iter().flatten();
        processes
            .find_map(|process| process.open().ok().flatten())
            .filter(|_| self.state == RunState::Running)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RunDirectory(PathBuf);

impl RunDirectory {
    /// Returns the directory of the run `name`, which need not exist.
    pub(super) fn of(home: &HomeDirectory, name: &RunName) -> Self {
        Self(home.runs().join(name.file_name()))
    }

    /// Returns the records of all runs, latest first, without unreadable ones.
    pub(super) fn records(home: &HomeDirectory) -> Vec<RunRecord> {
        let directories = fs::read_dir(home.runs()).into_iter().flatten().flatten();
        let records = directories.filter_map(|entry| Self(entry.path()).record().ok().flatten());
        let mut records: Vec<RunRecord> = records.collect();
        records.sort_by_key(|record| std::cmp::Reverse(record.started_at));
        records
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the directory of the trainer's checkpoints.
    pub(super) fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// Returns the file of answers for a draft adapter. A later run with the same settings reuses them.
    pub(super) fn answers(&self) -> PathBuf {
        self.0.join("answers.jsonl")
    }

    /// Returns the file with the settings of the answers.
    pub(super) fn asking(&self) -> PathBuf {
        self.0.join("asking.json")
    }

    /// Returns the file with the answers of GRPO and their rewards.
    pub(super) fn rollouts(&self) -> PathBuf {
        self.0.join("rollouts.jsonl")
    }

    /// Returns the directory of lm-eval's results.
    pub(super) fn evaluation(&self) -> PathBuf {
        self.0.join("lm-eval")
    }

    pub(super) fn trainer_log(&self) -> PathBuf {
        self.0.join("trainer.log")
    }

    fn events_path(&self) -> PathBuf {
        self.0.join("events.jsonl")
    }

    /// Returns the run's current record; `None` if no such run exists.
    pub(super) fn record(&self) -> io::Result<Option<RunRecord>> {
        let record: RunRecord = match fs::read(self.0.join("run.json")) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(record.settled()))
    }

    /// Returns the lines of the event log.
    pub(super) fn lines(&self) -> io::Result<Vec<String>> {
        match fs::read(self.events_path()) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Returns the parsed events.
    pub(super) fn events(&self) -> io::Result<Vec<TrainingEvent>> {
        Ok(self.lines()?.iter().map(|line| control_protocol::training::parse(line)).collect())
    }

    /// Returns the step of the last checkpoint, if the checkpoint still exists.
    pub(super) fn checkpoint(&self) -> io::Result<Option<u64>> {
        let step = |event: &TrainingEvent| {
            if let TrainingEvent::Checkpoint { step } = event { Some(*step) } else { None }
        };
        let last = self.events()?.iter().rev().find_map(step);
        Ok(last.filter(|_| self.checkpoints().is_dir()))
    }

    /// Locks the run for this process; `None` if another process has the lock.
    pub(super) fn claim(&self) -> io::Result<Option<RunLock>> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let lock = File::options().read(true).append(true).create(true).open(self.0.join("lock"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(RunLock { directory: self.clone(), lock })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A run that this process may write to, until this lock and all its copies are dropped.
#[derive(Debug)]
pub(super) struct RunLock {
    directory: RunDirectory,
    lock: File,
}

impl RunLock {
    pub(super) fn directory(&self) -> &RunDirectory {
        &self.directory
    }

    /// Returns a copy of the lock for a child, so that the run stays locked if this process is killed.
    pub(super) fn shared(&self) -> io::Result<File> {
        self.lock.try_clone()
    }

    pub(super) fn write(&self, record: &RunRecord) -> io::Result<()> {
        let mut new = tempfile::Builder::new().prefix(".new-").tempfile_in(&self.directory.0)?;
        serde_json::to_writer_pretty(&mut new, record)?;
        new.write_all(b"\n")?;
        new.as_file().sync_all()?;
        new.persist(self.directory.0.join("run.json")).map_err(|error| error.error)?;
        Ok(())
    }

    /// Opens the event log for appending.
    pub(super) fn events(&self) -> io::Result<EventLog> {
        let path = self.directory.events_path();
        let mut file = File::options().append(true).create(true).open(&path)?;
        // An incomplete line left by a kill must not spoil the next one.
        if fs::read(&path)?.last().is_some_and(|last| *last != b'\n') {
            file.write_all(b"\n")?;
        }
        Ok(EventLog(file))
    }

    /// Removes the files of an earlier run of this name, except answers, which are costly and reusable.
    pub(super) fn clear(&self) -> io::Result<()> {
        self.forget_checkpoints()?;
        let directory = &self.directory;
        for path in [directory.events_path(), directory.trainer_log(), directory.rollouts()] {
            gone(fs::remove_file(path))?;
        }
        Ok(())
    }

    /// Removes the checkpoints, which only a resumed run needs.
    pub(super) fn forget_checkpoints(&self) -> io::Result<()> {
        gone(fs::remove_dir_all(self.directory.checkpoints()))
    }
}

/// Event log open for appending, with one write per event.
#[derive(Debug)]
pub(super) struct EventLog(File);

impl EventLog {
    pub(super) fn add(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}

/// Treats a missing file as removed.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the current time in seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RunRecord {
        RunRecord {
            name: "pirate".parse().unwrap(),
            state: RunState::Running,
            data: vec!["/d.jsonl".into()],
            asks: TeacherOptions::default(),
            reward: None,
            options: TrainingOptions::default(),
            output: "/o".into(),
            replaces: None,
            process: ProcessId::this(),
            trainer: None,
            started_at: 1,
            ended_at: None,
            result: None,
            error: None,
        }
    }

    /// Returns the id of a process that has ended.
    fn ended() -> ProcessId {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = ProcessId::of(child.id());
        child.wait().unwrap();
        process
    }

    fn directory() -> (tempfile::TempDir, RunDirectory) {
        let home = tempfile::tempdir().unwrap();
        let directory = RunDirectory::of(&HomeDirectory::at(home.path()), &"org/pirate".parse().unwrap());
        (home, directory)
    }

    #[test]
    fn a_run_is_running_as_long_as_one_of_its_processes_is() {
        assert_eq!(record().settled().state, RunState::Running);
        let orphaned = RunRecord { process: ended(), trainer: Some(ProcessId::this()), ..record() };
        assert_eq!(orphaned.settled().state, RunState::Running);
        let killed = RunRecord { process: ended(), trainer: Some(ended()), ..record() }.settled();
        assert_eq!(killed.state, RunState::Failed);
        assert!(killed.error.unwrap().contains("without an error message"));
    }

    #[test]
    fn a_run_that_is_over_is_not_under_way_whoever_has_its_process_id() {
        for state in [RunState::Done, RunState::Failed, RunState::Stopped] {
            let record = RunRecord { state, ..record() };
            assert!(record.under_way().is_none());
            assert_eq!(record.settled().state, state);
        }
    }

    #[test]
    fn a_run_is_one_processs_until_the_last_copy_of_its_lock_is_gone() {
        let (_home, directory) = directory();
        let claim = directory.claim().unwrap().unwrap();
        assert!(directory.claim().unwrap().is_none());
        let childs = claim.shared().unwrap();
        drop(claim);
        assert!(directory.claim().unwrap().is_none(), "the child has it still");
        drop(childs);
        assert!(directory.claim().unwrap().is_some());
    }

    #[test]
    fn what_was_written_is_read_and_half_a_line_spoils_nothing() {
        let (home, directory) = directory();
        assert_eq!(directory.record().unwrap(), None);
        let claim = directory.claim().unwrap().unwrap();
        claim.write(&record()).unwrap();
        assert_eq!(directory.record().unwrap(), Some(record()));
        assert_eq!(RunDirectory::records(&HomeDirectory::at(home.path())), [record()]);
        fs::write(directory.events_path(), "{\"event\":\"checkpoint\",\"step\":5}\n{\"event\":\"st").unwrap();
        claim.events().unwrap().add("{\"event\":\"checkpoint\",\"step\":10}").unwrap();
        let expected = [
            TrainingEvent::Checkpoint { step: 5 },
            TrainingEvent::Other,
            TrainingEvent::Checkpoint { step: 10 },
        ];
        assert_eq!(directory.events().unwrap(), expected);
        assert_eq!(directory.checkpoint().unwrap(), None, "its files are not there");
        fs::create_dir(directory.checkpoints()).unwrap();
        assert_eq!(directory.checkpoint().unwrap(), Some(10));
        claim.clear().unwrap();
        assert_eq!((directory.lines().unwrap().len(), directory.checkpoint().unwrap()), (0, None));
    }
}
