//! Subcommands about recorded training runs: list, show, print the log, cancel.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use control_protocol::training::{Correctness, StepReport, TrainingEvent};
use serde_json::json;

use super::{
    errors::TuneError,
    evaluation::ComparedModels,
    format,
    name::RunName,
    plot,
    record::{RunDirectory, RunRecord, now},
};
use crate::{
    home::HomeDirectory,
    terminal::{
        PrintFormat, Terminal, printable, quoted,
        sparkline::sparkline,
        table::{pairs, short_generation, table},
    },
};

/// Width of the curve of a run.
const CURVE_COLUMNS: usize = 40;

/// Longest wait for a cancelled run to end, which covers the step under way and a checkpoint.
const STOP_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Subcommand)]
pub(super) enum RunHistoryCommand {
    /// Lists the training runs of this user, latest first
    Ls,
    /// Shows options, progress and results of a run
    Show(ShowArguments),
    /// Shows the trainer's log of a run
    Logs(NameArgument),
    /// Stops a run, which keeps a checkpoint
    Cancel(NameArgument),
}

/// Argument that names the run.
#[derive(Debug, clap::Args)]
pub(super) struct NameArgument {
    /// Name of the run
    name: RunName,
}

/// Arguments of the subcommand `tune show`.
#[derive(Debug, clap::Args)]
pub(super) struct ShowArguments {
    #[command(flatten)]
    run: NameArgument,
    /// Writes a plot of the losses to FILE
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

pub(super) fn run(
    command: &RunHistoryCommand,
    home: &HomeDirectory,
    terminal: Terminal,
) -> Result<(), TuneError> {
    match command {
        RunHistoryCommand::Ls => {
            list(home, terminal);
            Ok(())
        }
        RunHistoryCommand::Show(arguments) => show(arguments, home, terminal),
        RunHistoryCommand::Logs(NameArgument { name }) => logs(name, home, terminal),
        RunHistoryCommand::Cancel(NameArgument { name }) => cancel(name, home, terminal),
    }
}

/// Returns the run's directory and record.
fn kept(name: &RunName, home: &HomeDirectory) -> Result<(RunDirectory, RunRecord), TuneError> {
    let directory = RunDirectory::of(home, name);
    let record = directory.record().map_err(keep(&directory))?;
    Ok((directory, record.ok_or_else(|| TuneError::NoRun(name.clone()))?))
}

fn keep(directory: &RunDirectory) -> impl Fn(std::io::Error) -> TuneError {
    |source| TuneError::Keep { path: directory.path().to_owned(), source }
}

fn list(home: &HomeDirectory, terminal: Terminal) {
    let records = RunDirectory::records(home);
    match (terminal.format, records.is_empty()) {
        (PrintFormat::Json, _) => terminal.print(json!({"runs": records})),
        (PrintFormat::Human, true) => terminal.note("no runs yet; try: holobiont tune DATA --name NAME"),
        (PrintFormat::Human, false) => {
            let rows: Vec<_> = records.iter().map(|record| row(record, home)).collect();
            terminal.print(table(
                terminal.ink(),
                ["RUN", "STATE", "STEPS", "LOSS OR REWARD", "HELD OUT", "STARTED"],
                &rows,
            ));
        }
    }
}

fn row(record: &RunRecord, home: &HomeDirectory) -> [String; 6] {
    let progress = RunProgress::of(&RunDirectory::of(home, &record.name).events().unwrap_or_default());
    let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3}"));
    [
        record.name.to_string(),
        record.state.as_str().to_owned(),
        progress.step.as_ref().map_or_else(|| "-".to_owned(), format::share),
        loss(progress.step.as_ref().map(format::goal)),
        loss(progress.held_out_loss),
        ago(record.started_at),
    ]
}

/// Progress of a run, from its last events.
#[derive(Debug, Clone, Default, PartialEq)]
struct RunProgress {
    step: Option<StepReport>,
    held_out_loss: Option<f64>,
    /// Correctness of the draft tokens at the last evaluation.
    drafted: Option<Vec<Correctness>>,
}

impl RunProgress {
    fn of(events: &[TrainingEvent]) -> Self {
        let mut progress = Self::default();
        for event in events {
            match event {
                TrainingEvent::Step(step) => progress.step = Some(step.clone()),
                TrainingEvent::Evaluation { loss, .. } => progress.held_out_loss = Some(*loss),
                TrainingEvent::Drafted { kinds, .. } => progress.drafted = Some(kinds.clone()),
                _ => {}
            }
        }
        progress
    }
}

fn show(arguments: &ShowArguments, home: &HomeDirectory, terminal: Terminal) -> Result<(), TuneError> {
    let name = &arguments.run.name;
    let (directory, record) = kept(name, home)?;
    let events = directory.events().map_err(keep(&directory))?;
    match terminal.format {
        PrintFormat::Json => terminal.print(json!(record)),
        PrintFormat::Human => terminal.print(pairs(terminal.ink(), &rows(&record, &events, &directory))),
    }
    match &arguments.plot {
        Some(path) => plot::draw(path, name.as_str(), &events),
        None => Ok(()),
    }
}

fn rows(record: &RunRecord, events: &[TrainingEvent], directory: &RunDirectory) -> Vec<(String, String)> {
    let progress = RunProgress::of(events);
    let mut rows = vec![("run", record.name.to_string()), ("state", record.state.as_str().to_owned())];
    rows.extend(record.error.as_deref().map(|error| ("why", printable(error))));
    rows.push(("started", ago(record.started_at)));
    rows.extend(record.ended_at.map(|ended_at| ("ended", ago(ended_at))));
    rows.push(("data", record.data_text()));
    rows.extend(progress.drafted.iter().map(|kinds| ("right", format::drafted(kinds))));
    let options: Vec<_> = record.options.arguments().map(|it| quoted(&it.to_string_lossy())).collect();
    rows.push(("options", if options.is_empty() { "none".to_owned() } else { options.join(" ") }));
    rows.extend(progress.step.iter().map(|step| ("steps", format::share(step))));
    rows.extend(progress.step.iter().map(|step| ("last step", format::step(step, progress.held_out_loss))));
    rows.push(("curve", sparkline(&goals(events), CURVE_COLUMNS)));
    rows.push(("adapter", record.output.display().to_string()));
    rows.extend(record.result.as_ref().map(|it| ("generation", short_generation(&it.generation))));
    rows.push(("kept in", directory.path().display().to_string()));
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns the losses, or the rewards of GRPO, by step. A resumed run repeats steps; the last value counts.
fn goals(events: &[TrainingEvent]) -> Vec<f64> {
    let of = |event: &TrainingEvent| match event {
        TrainingEvent::Step(step) => Some((step.step, format::goal(step))),
        _ => None,
    };
    events.iter().filter_map(of).collect::<BTreeMap<_, _>>().into_values().collect()
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn ago(then: u64) -> String {
    format!("{} ago", format::time(now().saturating_sub(then) as f64))
}

/// Prints the run's events and other lines of the trainer.
fn logs(name: &RunName, home: &HomeDirectory, terminal: Terminal) -> Result<(), TuneError> {
    let (directory, _) = kept(name, home)?;
    for line in directory.lines().map_err(keep(&directory))? {
        match (terminal.format, control_protocol::training::parse(&line)) {
            (PrintFormat::Json, _) if serde_json::from_str::<serde_json::Value>(&line).is_err() => {}
            (PrintFormat::Json, _) => terminal.print(line),
            (PrintFormat::Human, event) => match ComparedModels::of_line(&line) {
                Some(compared) => terminal.print(compared.table(terminal)),
                None => format::event(&event).into_iter().for_each(|text| terminal.print(text)),
            },
        }
    }
    let said = fs::read(directory.trainer_log()).unwrap_or_default();
    if terminal.format == PrintFormat::Human && !said.is_empty() {
        terminal.print(printable(String::from_utf8_lossy(&said).trim_end()));
    }
    Ok(())
}

fn cancel(name: &RunName, home: &HomeDirectory, terminal: Terminal) -> Result<(), TuneError> {
    let (directory, record) = kept(name, home)?;
    let process = record.under_way().ok_or_else(|| TuneError::NotUnderWay(name.clone()))?;
    process.terminate().map_err(keep(&directory))?;
    let spinner = terminal.spinner(format!("waiting until {name} has finished its step"));
    let ended = process.wait(STOP_LIMIT);
    spinner.finish_and_clear();
    if !ended.map_err(keep(&directory))? {
        return Err(TuneError::StillRunning(name.clone()));
    }
    let (_, record) = kept(name, home)?;
    let checkpoint = directory.checkpoint().map_err(keep(&directory))?;
    match (terminal.format, checkpoint) {
        (PrintFormat::Json, _) => {
            terminal.print(json!({"name": name, "state": record.state, "checkpoint": checkpoint}))
        }
        (PrintFormat::Human, Some(step)) => {
            terminal.print(format_args!(
                "{name} is {}; the checkpoint of step {step} is kept",
                record.state.as_str()
            ));
            terminal.note(format_args!("try: holobiont tune --name {} --resume", quoted(name.as_str())));
        }
        (PrintFormat::Human, None) => terminal.print(format_args!("{name} is {}", record.state.as_str())),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_what_was_said_last() {
        let lines = [
            r#"{"event":"step","step":1,"steps":4,"loss":3.0}"#,
            r#"{"event":"evaluation","step":1,"loss":2.5}"#,
            r#"{"event":"step","step":2,"steps":4,"loss":2.0}"#,
        ];
        let progress = RunProgress::of(&lines.map(control_protocol::training::parse));
        assert_eq!(progress.held_out_loss, Some(2.5));
        assert_eq!(format::share(&progress.step.unwrap()), "2 of 4 (50 %)");
    }
}
