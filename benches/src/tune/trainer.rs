//! Our jobs: `holobiont-trainer` over the layers of an executor.

use std::{
    cell::{Cell, RefCell},
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use control_protocol::training::TrainingEvent;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{BATCH, RANK, STEPS, TOKENS, WARM_UP_STEPS};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    process::memory_of,
    split::executor::{BatchingFlag, SplitExecutor},
};

const LIMIT: Duration = Duration::from_secs(180);

/// Words of one token each in most tokenizers, so that a line has about as many tokens as words.
const WORDS: [&str; 8] = ["water", "house", "time", "people", "world", "day", "work", "night"];

#[derive(Debug)]
pub(super) struct TrainerBench {
    executor: SplitExecutor,
    place: JobSetup,
    cores: String,
    count: Cell<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Trained {
    /// Tokens per second of all jobs over the measured steps.
    pub(super) tokens_per_s: f64,
    /// Resident bytes of all processes after the last step; each page counts once per process that maps it.
    pub(super) bytes: u64,
    /// Resident bytes of the executor then, without memory shared with the jobs.
    pub(super) executor_bytes: u64,
}

impl TrainerBench {
    pub(super) fn start(config: &SuiteConfig, cores: &Cores) -> Result<Self> {
        let executor = SplitExecutor::start(config, cores.numbers(), BatchingFlag::Opportunistic)?;
        let work = StepWork { batch: BATCH, tokens: TOKENS };
        let place = JobSetup::new(config, executor.layer_socket(), work)?;
        Ok(Self { executor, place, cores: cores.list(), count: Cell::new(0) })
    }

    /// Runs `jobs` simultaneous jobs for the measured steps: one on all cores, several on a thread each.
    pub(super) fn train(&self, jobs: usize) -> Result<Trained> {
        let cores = (jobs == 1).then_some(self.cores.as_str());
        let start = |_| {
            let number = self.count.replace(self.count.get() + 1);
            self.place.start(&format!("adapter-{number}"), WARM_UP_STEPS + STEPS, cores)
        };
        let jobs: Vec<RunningTrainer> =
            (0..jobs).map(|number| start(number)?.run()).collect::<Result<_>>()?;
        let steps: Vec<StepTimes> = jobs.into_iter().map(RunningTrainer::steps).collect::<Result<_>>()?;
        let trainers: u64 = steps.iter().map(|steps| steps.bytes).sum();
        let executor = memory_of(self.executor.id())?;
        Ok(Trained {
            tokens_per_s: together(&steps),
            bytes: trainers + executor.resident_bytes,
            executor_bytes: executor.resident_bytes - executor.shared_bytes,
        })
    }
}

/// Tokens per second while all jobs were past their warm-up and none had ended.
fn together(jobs: &[StepTimes]) -> f64 {
    let begun = jobs.iter().map(|job| job.ends[WARM_UP_STEPS - 1].0).max();
    let ended = jobs.iter().filter_map(|job| job.ends.last()).map(|(at, _)| *at).min();
    let (Some(begun), Some(ended)) = (begun, ended) else { return 0.0 };
    // A step across either end counts by its share within.
    let tokens: f64 = jobs.iter().map(|job| job.tokens_between(begun, ended)).sum();
    tokens / ended.saturating_duration_since(begun).as_secs_f64()
}

#[derive(Debug, Default)]
pub(super) struct StepTimes {
    ends: Vec<(Instant, u64)>,
    /// Resident bytes of the trainer at its last step.
    bytes: u64,
}

impl StepTimes {
    fn tokens_between(&self, begun: Instant, ended: Instant) -> f64 {
        let pairs = self.ends.windows(2).map(|pair| (pair[0].0, pair[1]));
        pairs
            .map(|(from, (to, tokens))| {
                let inside = to.min(ended).saturating_duration_since(from.max(begun)).as_secs_f64();
                tokens as f64 * inside / to.duration_since(from).as_secs_f64()
            })
            .sum()
    }
}

/// Running job; dropping it stops the process.
#[derive(Debug)]
pub(super) struct TrainerProcess(Child);

#[derive(Debug, Clone, Copy)]
pub(super) struct StepWork {
    pub(super) batch: usize,
    pub(super) tokens: usize,
}

#[derive(Debug)]
pub(super) struct JobSetup {
    work: StepWork,
    pub(super) trainer: PathBuf,
    pub(super) model: PathBuf,
    pub(super) layers: PathBuf,
    pub(super) folder: TempDir,
}

impl JobSetup {
    pub(super) fn new(config: &SuiteConfig, layers: PathBuf, work: StepWork) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for jobs")?;
        write_data(folder.path(), work)?;
        Ok(Self {
            work,
            trainer: config.ours.join("holobiont-trainer"),
            model: config.model.clone(),
            layers,
            folder,
        })
    }

    /// Starts a job of `steps` steps that writes to `output`, on `cores`, or on one unpinned thread.
    pub(super) fn start(&self, output: &str, steps: usize, cores: Option<&str>) -> Result<TrainerProcess> {
        // Niceness of a deployment's trainers.
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(&self.trainer).arg("run").arg("--executor").arg(&self.layers);
        command.arg("--model").arg(&self.model).arg("--data").arg(self.folder.path().join(DATA));
        command.arg("--output").arg(self.folder.path().join(output));
        let numbers = [
            ("--rank", RANK),
            ("--batch-size", self.work.batch),
            ("--max-steps", steps),
            ("--epochs", 1000),
            ("--held-out", 0),
        ];
        for (option, number) in numbers {
            command.arg(option).arg(number.to_string());
        }
        command.args(["--targets", "q_proj,v_proj"]);
        if let Some(cores) = cores {
            command.arg("--cores").arg(cores);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
        let child = child.with_context(|| format!("cannot start {}; is it built?", self.trainer.display()));
        Ok(TrainerProcess(child?))
    }
}

impl TrainerProcess {
    fn id(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn run(mut self) -> Result<RunningTrainer> {
        let (id, output) = (self.id(), self.0.stdout.take().context("no output")?);
        let (heard, steps) = channel();
        // The thread ends with the trainer's output.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let event = control_protocol::training::parse(&line);
                let bytes = memory_of(id).map_or(0, |memory| memory.resident_bytes);
                if heard.send((Instant::now(), bytes, event)).is_err() {
                    return;
                }
            }
        });
        Ok(RunningTrainer { _job: self, heard: steps, steps: RefCell::default() })
    }
}

/// Time of an event, resident bytes of the job then, and the event.
type TimedEvent = (Instant, u64, TrainingEvent);

#[derive(Debug)]
pub(super) struct RunningTrainer {
    _job: TrainerProcess,
    heard: Receiver<TimedEvent>,
    steps: RefCell<StepTimes>,
}

impl RunningTrainer {
    pub(super) fn wait_for_a_step(&self) -> Result<()> {
        while self.steps.borrow().ends.is_empty() {
            self.hear(LIMIT)?;
        }
        Ok(())
    }

    /// Tokens per second over at least `steps` complete steps since `begun`; `None` if there are fewer.
    pub(super) fn rate_since(&self, begun: Instant, steps: usize) -> Result<Option<f64>> {
        while let Ok(heard) = self.heard.try_recv() {
            self.record(heard)?;
        }
        let heard = self.steps.borrow();
        let since: Vec<_> = heard.ends.iter().filter(|(at, _)| *at >= begun).collect();
        // The first step began without the requests.
        let [(from, _), whole @ ..] = since.as_slice() else { return Ok(None) };
        let Some((to, _)) = whole.get(steps - 1..).and_then(|enough| enough.last()) else { return Ok(None) };
        let tokens: u64 = whole.iter().map(|(_, tokens)| tokens).sum();
        Ok(Some(tokens as f64 / to.duration_since(*from).as_secs_f64()))
    }

    fn steps(self) -> Result<StepTimes> {
        while self.steps.borrow().ends.len() < WARM_UP_STEPS + STEPS {
            self.hear(LIMIT)?;
        }
        Ok(self.steps.into_inner())
    }

    fn hear(&self, limit: Duration) -> Result<()> {
        self.record(self.heard.recv_timeout(limit).context("a job ended, or says nothing")?)
    }

    fn record(&self, (at, bytes, event): TimedEvent) -> Result<()> {
        match event {
            TrainingEvent::Step(step) => {
                let mut steps = self.steps.borrow_mut();
                steps.ends.push((at, step.tokens));
                steps.bytes = steps.bytes.max(bytes);
            }
            TrainingEvent::Failed { message, .. } => bail!("a job failed: {message}"),
            _ => {}
        }
        Ok(())
    }
}

impl Drop for TrainerProcess {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw)
            && !matches!(self.0.try_wait(), Ok(Some(_)))
        {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

const DATA: &str = "data.jsonl";

/// Writes as many texts as a step has, each of about `tokens` tokens.
fn write_data(folder: &Path, work: StepWork) -> Result<()> {
    let mut lines = String::new();
    for line in 0..work.batch {
        let words: Vec<&str> =
            (0..work.tokens - 2).map(|word| WORDS[(word * 5 + line + word / 7) % WORDS.len()]).collect();
        // Writing to memory cannot fail.
        let _ = writeln!(lines, "{{\"text\":\"{}\"}}", words.join(" "));
    }
    fs::write(folder.join(DATA), lines).context("no data for jobs")
}
