//! Executes a training run from plan to end. Every check that can refuse the run happens before anything
//! starts.

use std::{
    fs::{self, File},
    io::{self, PipeReader},
    path::{Path, PathBuf},
    process::Stdio,
};

use control_protocol::training::{LearningRateCurve, RunResult, TrainingEvent};
use serde_json::json;
use settings::exit::in_one_line;

use super::{
    errors::TuneError,
    evaluation::{ComparedModels, EvaluatedModel, Evaluation},
    format, gateway, plot,
    progress::ProgressView,
    record::{EventLog, RunDirectory, RunLock, RunRecord, RunState, now},
    request::{RunArguments, requested},
    rollouts::{RolloutWorker, reward::RewardSource},
    teacher_prompts::TeacherPrompts,
    trainer::{self, TRAINER, TrainerCommandSpec, TrainerExit, TrainerListener},
};
use crate::{
    client::GatewayClient,
    deployment::{paths::layer_socket, program_paths, running::ProcessId, selection::GatewayArguments},
    exit::Exit,
    home::HomeDirectory,
    terminal::{PrintFormat, Terminal, quoted, table::short_generation},
};

/// Exit codes of a program stopped by SIGINT or SIGTERM, as shells number them.
const STOPPED: [i32; 2] = [130, 143];

/// Trains an adapter and publishes it.
pub(super) fn run(
    arguments: RunArguments,
    gateway: &GatewayArguments,
    home: &HomeDirectory,
    terminal: Terminal,
) -> Result<(), TuneError> {
    let program = program_paths::find(TRAINER).ok_or(TuneError::NoTrainer)?;
    let state = gateway.state()?;
    let executor = layer_socket(&state);
    if executor.symlink_metadata().is_err() {
        return Err(TuneError::NoLayers(state));
    }
    let evaluation = arguments.evaluation.clone().prepared()?;
    let client = GatewayClient::new(&gateway.url()?, terminal);
    let directory = RunDirectory::of(home, &arguments.name());
    let (is_resumed, is_dry, plot) = (arguments.resume, arguments.dry_run, arguments.plot.clone());
    let finds_rate = arguments.find_learning_rate;
    let earlier = directory.record().map_err(keep(directory.path()))?;
    let place = gateway::find_target(&client, &arguments.name())?;
    let record = requested(arguments, earlier, place)?;
    let questions = TeacherPrompts::of(&record, &program, &client, terminal)?;
    let rewards = record.reward.as_deref().map(RewardSource::open).transpose()?;
    let mut command = command(&record, &directory, &executor, questions.as_ref());
    command.extend(is_resumed.then(|| "--resume".into()));
    if is_dry {
        command.push("--dry-run".into());
        if questions.is_some_and(|questions| !questions.rehearse(&directory, terminal)) {
            return Ok(());
        }
        return rehearse(program, command, &record, terminal).map(drop);
    }
    if finds_rate {
        command.push("--find-learning-rate".into());
        return find_learning_rate(program, command, &record, terminal, plot.as_deref());
    }
    let claim = claimed(&directory, &record, is_resumed, terminal)?;
    let mut run = ActiveRun::new(record, claim, terminal).map_err(keep(directory.path()))?;
    let log = File::options().append(true).read(true).create(true).open(directory.trainer_log());
    let log = log.map_err(keep(&directory.trainer_log()))?;
    let before = evaluation.as_ref().map(|evaluation| run.evaluate_before(evaluation, &client)).transpose();
    let result = before.and_then(|before| {
        questions.map_or(Ok(()), |questions| run.ask(&questions, &client))?;
        let replies = rewards.map(|rewards| run.start_rollouts(rewards, &client)).transpose()?;
        let outcome = run.train(program, command, log, replies)?;
        run.serve(&client, &outcome).map(|()| before)
    });
    let (before, result) = result.map_or_else(|error| (None, Err(error)), |before| (before, Ok(())));
    let closed = run.close(&result).map_err(keep(directory.path()));
    let result = match evaluation.zip(before) {
        Some((evaluation, before)) => run.evaluate_after(&evaluation, before, &client),
        None => result,
    };
    let drawn = plot.map_or(Ok(()), |path| {
        let events = directory.events().map_err(keep(directory.path()))?;
        plot::draw(&path, run.record.name.as_str(), &events)
    });
    result.and(closed).and(drawn)
}

/// Returns the trainer's arguments for a new run.
fn command(
    record: &RunRecord,
    directory: &RunDirectory,
    executor: &Path,
    questions: Option<&TeacherPrompts>,
) -> Vec<std::ffi::OsString> {
    let (checkpoints, answers) = (directory.checkpoints(), directory.answers());
    let data = if questions.is_some() { std::slice::from_ref(&answers) } else { &record.data };
    let paths = [("--executor", executor), ("--output", &record.output), ("--checkpoints", &checkpoints)];
    let paths = paths.into_iter().chain(data.iter().map(|path| ("--data", path.as_path())));
    let mut arguments = vec!["run".into()];
    arguments.extend(paths.flat_map(|(flag, path)| [flag.into(), path.as_os_str().to_owned()]));
    arguments.extend(record.options.arguments());
    arguments
}

/// Locks the run's directory and, unless the run is resumed, clears the files of an earlier run.
fn claimed(
    directory: &RunDirectory,
    record: &RunRecord,
    is_resumed: bool,
    terminal: Terminal,
) -> Result<RunLock, TuneError> {
    let keep = || keep(directory.path());
    let claim = directory.claim().map_err(keep())?;
    let claim = claim.ok_or_else(|| TuneError::UnderWay(record.name.clone()))?;
    if !is_resumed {
        if let Some(step) = directory.checkpoint().map_err(keep())?
            && !terminal.confirm(&format!(
                "delete the checkpoint of step {step} and start over? (--resume continues from it)"
            ))
        {
            return Err(TuneError::Declined);
        }
        claim.clear().map_err(keep())?;
    }
    let tuned = record.output.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(tuned).map_err(self::keep(tuned))?;
    Ok(claim)
}

fn keep(path: &Path) -> impl Fn(io::Error) -> TuneError + use<> {
    let path = path.to_owned();
    move |source| TuneError::Keep { path: path.clone(), source }
}

/// Tries rising learning rates, and draws the losses into `plot`.
fn find_learning_rate(
    program: PathBuf,
    arguments: Vec<std::ffi::OsString>,
    record: &RunRecord,
    terminal: Terminal,
    plot: Option<&Path>,
) -> Result<(), TuneError> {
    let heard = rehearse(program, arguments, record, terminal)?;
    let curve = heard.curve.ok_or_else(|| TuneError::Trainer {
        said: format!("{TRAINER} ended without the losses by learning rate"),
        exit: Exit::Failed,
        resume: None,
    })?;
    plot.map_or(Ok(()), |path| plot::draw_by_rate(path, record.name.as_str(), &curve))
}

/// Runs the trainer in a mode that makes no adapter and keeps no record.
fn rehearse(
    program: PathBuf,
    arguments: Vec<std::ffi::OsString>,
    record: &RunRecord,
    terminal: Terminal,
) -> Result<EventSummary, TuneError> {
    let log = tempfile::tempfile().map_err(TuneError::Run)?;
    let mut ears = EventReader { watch: ProgressView::new(terminal), heard: EventSummary::default() };
    let recipe = TrainerCommandSpec { program, arguments, stdin: Stdio::null(), log };
    let ending = trainer::run(recipe, &mut ears).map_err(TuneError::Run);
    ears.watch.end();
    check_exit(&ending?, &ears.heard, record)?;
    Ok(ears.heard)
}

/// Trainer events that decide how the run ends.
#[derive(Debug, Default)]
struct EventSummary {
    faults: usize,
    checkpoint: Option<u64>,
    outcome: Option<RunResult>,
    curve: Option<LearningRateCurve>,
}

/// Listener that shows and summarizes the trainer's events.
#[derive(Debug)]
struct EventReader {
    watch: ProgressView,
    heard: EventSummary,
}

impl TrainerListener for EventReader {
    fn started(&mut self, _: ProcessId) -> io::Result<()> {
        Ok(())
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        let event = control_protocol::training::parse(line);
        self.watch.show(&event, line);
        match event {
            TrainingEvent::Problem { .. } => self.heard.faults += 1,
            TrainingEvent::Checkpoint { step } => self.heard.checkpoint = Some(step),
            TrainingEvent::LearningRate(curve) => self.heard.curve = Some(curve),
            TrainingEvent::Done(outcome) => self.heard.outcome = Some(outcome),
            _ => {}
        }
        Ok(())
    }
}

/// Returns the error of a run that was stopped or failed.
fn check_exit(ending: &TrainerExit, heard: &EventSummary, record: &RunRecord) -> Result<(), TuneError> {
    let code = ending.status.code();
    let resume = record.name.resume();
    if ending.asked || code.is_some_and(|code| STOPPED.contains(&code)) {
        return Err(TuneError::Stopped { checkpoint: heard.checkpoint, resume });
    }
    if ending.status.success() {
        return Ok(());
    }
    if heard.faults > 0 {
        return Err(TuneError::Data { data: record.data_text(), faults: heard.faults });
    }
    // A trainer that a signal ended has not reported a reason.
    let said = ending.last_words.clone().filter(|_| code.is_some());
    Err(TuneError::Trainer {
        said: said.unwrap_or_else(|| format!("{TRAINER} ended: {}", ending.status)),
        exit: Exit::of_code(code),
        resume: heard.checkpoint.map(|_| resume),
    })
}

/// A run under way, whose record is updated as it proceeds.
#[derive(Debug)]
struct ActiveRun {
    record: RunRecord,
    claim: RunLock,
    log: EventLog,
    ears: EventReader,
    /// Thread that answers the trainer's requests, in a run of GRPO.
    rollouts: Option<RolloutWorker>,
    terminal: Terminal,
}

impl ActiveRun {
    fn new(record: RunRecord, claim: RunLock, terminal: Terminal) -> io::Result<Self> {
        claim.write(&record)?;
        let heard = EventSummary { checkpoint: claim.directory().checkpoint()?, ..EventSummary::default() };
        Ok(Self {
            log: claim.events()?,
            ears: EventReader { watch: ProgressView::new(terminal), heard },
            record,
            claim,
            rollouts: None,
            terminal,
        })
    }

    /// Starts the thread that answers the trainer's requests; returns the trainer's end of the replies.
    fn start_rollouts(
        &mut self,
        rewards: RewardSource,
        client: &GatewayClient,
    ) -> Result<PipeReader, TuneError> {
        let (read, write) = io::pipe().map_err(TuneError::Run)?;
        let log = self.claim.directory().rollouts();
        let worker = RolloutWorker::start(client.clone(), &self.record.name, rewards, write, &log);
        self.rollouts = Some(worker.map_err(keep(&log))?);
        Ok(read)
    }

    /// Collects the target model's answers that a draft adapter learns from.
    fn ask(&mut self, questions: &TeacherPrompts, client: &GatewayClient) -> Result<(), TuneError> {
        let directory = self.claim.directory().clone();
        questions.ask(&directory, &self.record.name.clone(), client, &mut |event| {
            self.line(&serde_json::to_string(event)?)
        })
    }

    fn train(
        &mut self,
        program: PathBuf,
        arguments: Vec<std::ffi::OsString>,
        log: File,
        replies: Option<PipeReader>,
    ) -> Result<RunResult, TuneError> {
        let stdin = match replies {
            Some(replies) => replies.into(),
            None => self.claim.shared().map_err(TuneError::Run)?.into(),
        };
        let recipe = TrainerCommandSpec { program, arguments, stdin, log };
        let ending = trainer::run(recipe, self).map_err(TuneError::Run);
        self.ears.watch.end();
        if let Some(Err(source)) = self.rollouts.take().map(RolloutWorker::end) {
            return Err(TuneError::Rollouts { source, resume: self.record.name.resume() });
        }
        check_exit(&ending?, &self.ears.heard, &self.record)?;
        let outcome = self.ears.heard.outcome.clone();
        outcome.ok_or_else(|| TuneError::Trainer {
            said: format!("{TRAINER} ended without an adapter"),
            exit: Exit::Failed,
            resume: None,
        })
    }

    /// Publishes the adapter under its name.
    fn serve(&mut self, client: &GatewayClient, outcome: &RunResult) -> Result<(), TuneError> {
        self.record.result = Some(outcome.clone());
        let RunRecord { name, output, replaces, .. } = &self.record;
        let answer = gateway::publish(client, name, output, replaces.as_deref())?;
        let generation = answer["generation"].as_str().unwrap_or_default();
        let line = json!({"event": "published", "name": name, "generation": generation, "output": output});
        let spoken = format!(
            "{name} is served: generation {}, {}",
            short_generation(generation),
            format::outcome(outcome)
        );
        self.line(&line.to_string()).map_err(TuneError::Run)?;
        if self.terminal.format == PrintFormat::Human {
            self.terminal.print(spoken);
            // A draft adapter cannot be requested in a chat.
            let next = match self.record.options.are_of_draft() {
                true => "the executor drafts with it if `[speculation] draft` is \"early-exit\", and \
                         with \"auto\" \
                     where this is faster"
                    .to_owned(),
                false => format!("try: holobiont chat {}", quoted(&format!(":{}", self.record.name))),
            };
            self.terminal.note(next);
        }
        Ok(())
    }

    /// Evaluates the model that requests of the run's name would have used before, or the base.
    fn evaluate_before(
        &self,
        evaluation: &Evaluation,
        client: &GatewayClient,
    ) -> Result<EvaluatedModel, TuneError> {
        let name = self.record.replaces.as_ref().map(|_| self.record.name.as_str());
        let (model, _) = gateway::target(client, name)?;
        evaluation.run(client, &model, self.claim.directory(), "before", self.terminal)
    }

    /// Evaluates the adapter, and shows both results.
    fn evaluate_after(
        &mut self,
        evaluation: &Evaluation,
        before: EvaluatedModel,
        client: &GatewayClient,
    ) -> Result<(), TuneError> {
        let name = self.record.name.as_str();
        let after = evaluation.run(client, name, self.claim.directory(), "after", self.terminal)?;
        let compared = ComparedModels { before, after };
        self.line(&compared.event().to_string()).map_err(TuneError::Run)?;
        if self.terminal.format == PrintFormat::Human {
            self.terminal.print(compared.table(self.terminal));
        }
        Ok(())
    }

    /// Records how the run ended.
    fn close(&mut self, result: &Result<(), TuneError>) -> io::Result<()> {
        self.record.state = match result {
            Ok(()) => RunState::Done,
            Err(
                TuneError::Stopped { .. } | TuneError::AskingStopped { .. } | TuneError::EvaluationStopped,
            ) => RunState::Stopped,
            Err(_) => RunState::Failed,
        };
        self.record.error = result.as_ref().err().map(|error| in_one_line(error));
        self.record.ended_at = Some(now());
        self.claim.write(&self.record)?;
        match result {
            Ok(()) => self.claim.forget_checkpoints(),
            Err(_) => Ok(()),
        }
    }
}

impl TrainerListener for ActiveRun {
    fn started(&mut self, process: ProcessId) -> io::Result<()> {
        self.record.trainer = Some(process);
        self.claim.write(&self.record)
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        if let (Some(rollouts), TrainingEvent::Rollouts(request)) =
            (&self.rollouts, control_protocol::training::parse(line))
        {
            rollouts.request(request);
            return Ok(());
        }
        self.log.add(line)?;
        self.ears.line(line)
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

    use super::{
        super::{options::TrainingOptions, record::TeacherOptions},
        *,
    };

    #[test]
    fn how_a_trainer_ended_says_how_its_run_did() {
        let record = RunRecord {
            name: "a/b".parse().unwrap(),
            state: RunState::Running,
            data: vec!["data.jsonl".into()],
            asks: TeacherOptions::default(),
            reward: None,
            options: TrainingOptions::default(),
            output: "out".into(),
            replaces: None,
            process: ProcessId::this(),
            trainer: None,
            started_at: now(),
            ended_at: None,
            result: None,
            error: None,
        };
        let end = |status, asked, heard: &EventSummary| {
            let status = ExitStatus::from_raw(status);
            check_exit(&TrainerExit { status, asked, last_words: Some("no memory".into()) }, heard, &record)
        };
        let (silent, faulty) =
            (EventSummary::default(), EventSummary { faults: 2, ..EventSummary::default() });
        let kept = EventSummary { checkpoint: Some(5), ..EventSummary::default() };
        end(0, false, &kept).unwrap();
        for (status, asked) in [(130 << 8, false), (143 << 8, false), (9, true), (0, true)] {
            let error = end(status, asked, &kept).unwrap_err();
            assert!(matches!(error, TuneError::Stopped { checkpoint: Some(5), .. }), "{status}: {error}");
        }
        assert!(matches!(end(2 << 8, false, &faulty), Err(TuneError::Data { faults: 2, .. })));
        let failed = end(5 << 8, false, &silent).unwrap_err();
        assert!(
            matches!(failed, TuneError::Trainer { exit: Exit::Unavailable, resume: None, .. }),
            "{failed}"
        );
        assert_eq!(failed.to_string(), "no memory");
        let killed = end(9, false, &kept).unwrap_err();
        assert!(killed.to_string().contains("SIGKILL"), "{killed}");
    }
}
