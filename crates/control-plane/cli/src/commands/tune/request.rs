//! Builds the record of a training run from the command's arguments and an earlier record.

use std::{
    io,
    path::{self, Path, PathBuf},
};

use super::{
    errors::TuneError,
    evaluation::EvaluationArguments,
    gateway::PublishTarget,
    name::RunName,
    options::TrainerOptions,
    record::{RunRecord, RunState, TeacherOptions, now},
};
use crate::deployment::running::ProcessId;

/// Subdirectory of the adapter root for trained adapters.
const TUNED: &str = "tuned";

/// Arguments of a training run.
#[derive(Debug, clap::Args)]
pub(super) struct RunArguments {
    /// Training data: files (.jsonl, .json, .jsonl.gz, .parquet, .arrow), directories of files, or patterns;
    /// for --draft, conversations whose prompts the model answers [default: built-in prompts]
    #[arg(value_name = "DATA", required_unless_present_any = ["resume", "draft"])]
    pub(super) data: Vec<PathBuf>,
    /// Name of the adapter in requests, and of the run in `tune show`
    #[arg(long, value_name = "NAME", required = true)]
    name: Option<RunName>,
    /// Replaces the adapter that has the name when the run begins
    #[arg(long)]
    pub(super) replace: bool,
    /// Continues from the last checkpoint of the run, with its data and options; new options override old
    /// ones
    #[arg(long)]
    pub(super) resume: bool,
    /// Checks the data, prints the plan, and trains nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Tries rising learning rates on the data, shows the loss by rate, and trains and serves no adapter
    #[arg(long, conflicts_with_all = ["dry_run", "resume", "draft", "learning_rate"])]
    pub(super) find_learning_rate: bool,
    /// Writes a plot of the losses to FILE when the run ends
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    /// For --draft: model whose answers the draft adapter learns, the base or an adapter [default: the base]
    #[arg(long, value_name = "NAME", requires = "draft")]
    model: Option<String>,
    /// For --draft: maximum number of tokens of an answer [default: 256]
    #[arg(long, value_name = "N", requires = "draft", value_parser = clap::value_parser!(u32).range(1..))]
    answer_tokens: Option<u32>,
    /// For --method grpo: Python file with a function reward(prompt, answer, row), or URL that answers a
    /// posted {"prompt", "answer", "row"} with {"reward": NUMBER}
    #[arg(long, value_name = "FILE.py|URL")]
    reward: Option<String>,
    #[command(flatten)]
    pub(super) evaluation: EvaluationArguments,
    #[command(flatten)]
    pub(super) training: TrainerOptions,
}

impl RunArguments {
    pub(super) fn name(&self) -> RunName {
        self.name.clone().expect("clap requires a name where there is no subcommand")
    }
}

/// Returns the record of the requested run, merged with the `earlier` record on resume.
pub(super) fn requested(
    arguments: RunArguments,
    earlier: Option<RunRecord>,
    place: PublishTarget,
) -> Result<RunRecord, TuneError> {
    let name = arguments.name();
    let input = |(path, source)| TuneError::Input { path, source };
    let options = arguments.training.given().map_err(input)?;
    let data = arguments.data.into_iter().map(|path| absolute(&path).map_err(|source| input((path, source))));
    let data = data.collect::<Result<Vec<_>, _>>()?;
    let earlier = match (arguments.resume, earlier) {
        (false, _) => None,
        (true, None) => return Err(TuneError::NoRun(name)),
        (true, Some(RunRecord { state: RunState::Done, output, .. })) => {
            return Err(TuneError::AlreadyDone { name, output });
        }
        (true, earlier) => earlier,
    };
    let replaces = match arguments.replace {
        true => place.taken_by,
        false => unchanged(&name, earlier.as_ref().and_then(|it| it.replaces.clone()), place.taken_by)?,
    };
    let tuned = place.adapter_root.join(TUNED);
    let fresh = || tuned.join(format!("{}-{:08x}", name.file_name(), rand::random::<u32>()));
    let output = earlier.as_ref().map(|it| it.output.clone()).filter(|it| it.starts_with(&tuned));
    let (old, old_options) = earlier.map(|it| ((it.data, it.asks, it.reward), it.options)).unzip();
    let (old_data, old_asks, old_reward): (Vec<PathBuf>, TeacherOptions, Option<String>) =
        old.unwrap_or_default();
    let options = options.over(old_options.unwrap_or_default());
    let reward = arguments.reward.map(|reward| absolute_reward(reward).map_err(input)).transpose()?;
    let reward = reward.or(old_reward);
    match (options.are_of_grpo(), &reward) {
        (true, None) => return Err(TuneError::NoRewards),
        (false, Some(_)) => return Err(TuneError::UnusedRewards),
        _ => {}
    }
    let asks = TeacherOptions {
        model: arguments.model.or(old_asks.model),
        answer_tokens: arguments.answer_tokens.or(old_asks.answer_tokens),
    };
    Ok(RunRecord {
        state: RunState::Running,
        data: if data.is_empty() { old_data } else { data },
        asks,
        options,
        reward,
        output: output.unwrap_or_else(fresh),
        replaces,
        process: ProcessId::this(),
        trainer: None,
        started_at: now(),
        ended_at: None,
        result: None,
        error: None,
        name,
    })
}

/// Returns the absolute path of data that exist, or of a pattern, which the trainer expands.
fn absolute(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(_) if path.to_string_lossy().contains(['*', '?', '[']) => path::absolute(path),
        found => found,
    }
}

/// Returns the absolute path of a file with rewards, or the URL of an endpoint as it is.
fn absolute_reward(reward: String) -> Result<String, (PathBuf, io::Error)> {
    if reward.contains("://") {
        return Ok(reward);
    }
    let path = PathBuf::from(&reward);
    let absolute = path.canonicalize().map_err(|source| (path, source))?;
    Ok(absolute.to_string_lossy().into_owned())
}

/// Returns the version that the name stands for, if the name is unchanged since the run began.
fn unchanged(
    name: &RunName,
    before: Option<String>,
    now: Option<String>,
) -> Result<Option<String>, TuneError> {
    match (before, now) {
        (before, now) if before == now => Ok(now),
        (_, Some(generation)) => Err(TuneError::NameTaken { name: name.clone(), generation }),
        (_, None) => Err(TuneError::NameGone(name.clone())),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct RunCommandLine {
        #[command(flatten)]
        run: RunArguments,
    }

    fn draft(
        line: &[&str],
        earlier: Option<&RunRecord>,
        taken_by: Option<&str>,
    ) -> Result<RunRecord, TuneError> {
        let arguments = RunCommandLine::parse_from([&["tune", "--name", "a/b"], line].concat()).run;
        let place = PublishTarget { adapter_root: "/root".into(), taken_by: taken_by.map(str::to_owned) };
        requested(arguments, earlier.cloned(), place)
    }

    const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

    #[test]
    fn a_new_run_lies_below_the_adapter_root_and_each_elsewhere() {
        let (one, other) = (draft(&[DATA], None, None).unwrap(), draft(&[DATA], None, None).unwrap());
        assert!(one.output.to_str().unwrap().starts_with("/root/tuned/a%2Fb-"), "{}", one.output.display());
        assert_ne!(one.output, other.output);
        let error = draft(&["/nowhere.jsonl"], None, None).unwrap_err();
        assert!(matches!(error, TuneError::Input { .. }), "{error}");
    }

    #[test]
    fn a_name_that_is_taken_is_replaced_only_if_that_is_said() {
        let error = draft(&[DATA], None, Some("abc")).unwrap_err();
        assert!(matches!(&error, TuneError::NameTaken { generation, .. } if generation == "abc"), "{error}");
        let record = draft(&[DATA, "--replace"], None, Some("abc")).unwrap();
        assert_eq!(record.replaces.as_deref(), Some("abc"));
        assert_eq!(draft(&[DATA, "--replace"], None, None).unwrap().replaces, None);
    }

    #[test]
    fn a_resumed_run_goes_on_where_it_was_and_replaces_what_it_was_to_replace() {
        let first = draft(&[DATA, "--replace", "--rank", "4", "--epochs", "1"], None, Some("abc")).unwrap();
        let stopped = RunRecord { state: RunState::Stopped, error: Some("stopped".into()), ..first.clone() };
        let again = draft(&["--resume", "--epochs", "2"], Some(&stopped), Some("abc")).unwrap();
        assert_eq!(
            (&again.output, &again.data, &again.replaces),
            (&first.output, &first.data, &first.replaces)
        );
        let options: Vec<_> = again.options.arguments().collect();
        assert_eq!(options, ["--rank", "4", "--epochs", "2"]);
        assert_eq!((again.state, again.error), (RunState::Running, None));

        let changed = draft(&["--resume"], Some(&stopped), Some("def")).unwrap_err();
        assert!(matches!(changed, TuneError::NameTaken { .. }), "{changed}");
        let gone = draft(&["--resume"], Some(&stopped), None).unwrap_err();
        assert!(matches!(gone, TuneError::NameGone(_)), "{gone}");
        let meant = draft(&["--resume", "--replace"], Some(&stopped), Some("def")).unwrap();
        assert_eq!(meant.replaces.as_deref(), Some("def"));
    }

    #[test]
    fn there_must_be_something_to_resume() {
        assert!(matches!(draft(&["--resume"], None, None), Err(TuneError::NoRun(_))));
        let done = RunRecord { state: RunState::Done, ..draft(&[DATA], None, None).unwrap() };
        assert!(matches!(draft(&["--resume"], Some(&done), None), Err(TuneError::AlreadyDone { .. })));
    }
}
