//! Evaluates what a run changed with lm-eval: the model that has the run's place before, and the adapter.
//!
//! lm-eval is a program of its own (PyPI), which asks this gateway as any client does. The results of lm-eval
//! stay in the run's directory, below `lm-eval/`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{errors::TuneError, record::RunDirectory};
use crate::{
    client::GatewayClient,
    deployment::program_paths,
    terminal::{Terminal, printable, stop_signals::StopSignals, table::table},
};

/// Program of PyPI's lm-eval, and its module where the program is not on PATH.
const PROGRAM: &str = "lm_eval";
/// Requests that lm-eval sends at once.
const CONCURRENT: usize = 4;

/// Arguments of the evaluation of a run.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct EvaluationArguments {
    /// Tasks of lm-eval, separated by commas, to run on the base (or the replaced adapter) before the
    /// training, and on the adapter after it
    #[arg(long, value_name = "TASKS", conflicts_with = "draft")]
    lm_eval: Option<String>,
    /// Directory of task files (YAML) and their data, for --lm-eval
    #[arg(long, value_name = "DIR", requires = "lm_eval")]
    lm_eval_path: Option<PathBuf>,
}

/// lm-eval with the tasks of a run.
#[derive(Debug)]
pub(super) struct Evaluation {
    program: PathBuf,
    /// First arguments of the program.
    module: &'static [&'static str],
    tasks: String,
    /// Directory of task files, which lm-eval runs in.
    path: Option<PathBuf>,
}

/// Values of metrics, by task and metric.
type Scores = BTreeMap<(String, String), f64>;

impl EvaluationArguments {
    /// Finds lm-eval, if tasks are given.
    pub(super) fn prepared(self) -> Result<Option<Evaluation>, TuneError> {
        let Some(tasks) = self.lm_eval else { return Ok(None) };
        let path = self.lm_eval_path.map(|path| match path.canonicalize() {
            Ok(path) => Ok(path),
            Err(source) => Err(TuneError::Input { path, source }),
        });
        let path = path.transpose()?;
        if let Some(program) = program_paths::find(PROGRAM) {
            return Ok(Some(Evaluation { program, module: &[], tasks, path }));
        }
        let mut python = std::process::Command::new("python3");
        python.args(["-c", "import lm_eval"]).stdin(Stdio::null());
        match python.stdout(Stdio::null()).stderr(Stdio::null()).status() {
            Ok(status) if status.success() => {
                Ok(Some(Evaluation { program: "python3".into(), module: &["-m", PROGRAM], tasks, path }))
            }
            _ => Err(TuneError::NoLmEval),
        }
    }
}

/// Results of one model.
#[derive(Debug)]
pub(super) struct EvaluatedModel {
    model: String,
    scores: Scores,
}

/// Results of both evaluations of a run.
#[derive(Debug)]
pub(super) struct ComparedModels {
    pub(super) before: EvaluatedModel,
    pub(super) after: EvaluatedModel,
}

impl Evaluation {
    /// Runs the tasks on `model`. The results are kept as `when`.
    pub(super) fn run(
        &self,
        client: &GatewayClient,
        model: &str,
        directory: &RunDirectory,
        when: &str,
        terminal: Terminal,
    ) -> Result<EvaluatedModel, TuneError> {
        terminal.note(format!("evaluating {}: {}", printable(model), printable(&self.tasks)));
        let output = directory.evaluation().join(when);
        let keep = |source| TuneError::Keep { path: output.clone(), source };
        match fs::remove_dir_all(&output) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(keep(error)),
            _ => fs::create_dir_all(&output).map_err(keep)?,
        }
        let log = output.join("log");
        let command = self.command(client, model, &output, File::create(&log).map_err(keep)?);
        match command.and_then(run).map_err(TuneError::RunLmEval)? {
            Some(status) if status.success() => {}
            Some(_) => return Err(TuneError::LmEval { said: last_words(&log), log }),
            None => return Err(TuneError::EvaluationStopped),
        }
        match scores(&output).map_err(keep)? {
            found if found.is_empty() => {
                Err(TuneError::LmEval { said: "lm_eval wrote no results".to_owned(), log })
            }
            scores => Ok(EvaluatedModel { model: model.to_owned(), scores }),
        }
    }

    fn command(&self, client: &GatewayClient, model: &str, output: &Path, log: File) -> io::Result<Command> {
        let url = client.url();
        let arguments = format!(
            "model={model},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent={CONCURRENT}"
        );
        let mut command = Command::new(&self.program);
        command.args(self.module).args(["--model", "local-completions", "--model_args", &arguments]);
        command.args(["--tasks", &self.tasks, "--output_path"]).arg(output);
        if let Some(path) = &self.path {
            // Data files of the tasks are named relative to the task files.
            command.arg("--include_path").arg(path).current_dir(path);
        }
        if let Some(key) = client.key() {
            command.env("OPENAI_API_KEY", key);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C must reach only this process, which then ends lm-eval.
        command.process_group(0).kill_on_drop(true);
        Ok(command)
    }
}

impl EvaluatedModel {
    fn json(&self) -> Value {
        let mut tasks: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
        for ((task, metric), value) in &self.scores {
            tasks.entry(task).or_default().insert(metric, *value);
        }
        json!({ "model": self.model, "results": tasks })
    }

    fn of_json(json: &Value) -> Option<Self> {
        let mut scores = Scores::new();
        for (task, metrics) in json["results"].as_object()? {
            for (metric, value) in metrics.as_object()? {
                scores.insert((task.clone(), metric.clone()), value.as_f64()?);
            }
        }
        Some(Self { model: json["model"].as_str()?.to_owned(), scores })
    }

    fn value(&self, key: &(String, String)) -> String {
        self.scores.get(key).map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"))
    }
}

impl ComparedModels {
    /// Returns the event of the run's log.
    pub(super) fn event(&self) -> Value {
        json!({ "event": "evaluated", "before": self.before.json(), "after": self.after.json() })
    }

    /// Reads a line of the run's log; `None` if the line is another event.
    pub(super) fn of_line(line: &str) -> Option<Self> {
        let event: Value =
            serde_json::from_str(line).ok().filter(|event: &Value| event["event"] == "evaluated")?;
        Some(Self {
            before: EvaluatedModel::of_json(&event["before"])?,
            after: EvaluatedModel::of_json(&event["after"])?,
        })
    }

    /// Returns a table for people.
    pub(super) fn table(&self, terminal: Terminal) -> String {
        let Self { before, after } = self;
        let row = |key: &(String, String)| {
            [printable(&key.0), printable(&key.1), before.value(key), after.value(key)]
        };
        let rows: Vec<_> = after.scores.keys().map(row).collect();
        let name = match before.model == after.model {
            true => format!("{} (new)", after.model),
            false => after.model.clone(),
        };
        table(terminal.ink(), ["TASK", "METRIC", &before.model, &name], &rows)
    }
}

/// Runs lm-eval to its end; `None` if the user stopped it.
fn run(mut command: Command) -> io::Result<Option<ExitStatus>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = StopSignals::new()?;
        let mut child = command.spawn()?;
        tokio::select! {
            status = child.wait() => status.map(Some),
            _ = signals.next() => child.kill().await.map(|()| None),
        }
    })
}

/// Returns the last line of the log.
fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    line.map_or("lm_eval failed".to_owned(), printable)
}

/// A results file of lm-eval.
#[derive(Deserialize)]
struct ResultsFile {
    results: BTreeMap<String, BTreeMap<String, Value>>,
}

/// Reads the results files below `directory`, without standard errors.
fn scores(directory: &Path) -> io::Result<Scores> {
    let mut found = Scores::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(scores(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "json") {
            let Ok(file) = serde_json::from_slice::<ResultsFile>(&fs::read(&path)?) else { continue };
            for (task, metrics) in file.results {
                let values =
                    metrics.iter().filter_map(|(name, value)| Some((metric(name)?, value.as_f64()?)));
                found.extend(values.map(|(name, value)| ((task.clone(), name), value)));
            }
        }
    }
    Ok(found)
}

/// Returns the name of a metric, from `NAME,FILTER`; `None` for a standard error, and for what is no metric.
fn metric(name: &str) -> Option<String> {
    let (metric, filter) = name.split_once(',')?;
    if metric.ends_with("_stderr") {
        return None;
    }
    Some(if filter == "none" { metric.to_owned() } else { format!("{metric} ({filter})") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runs_log_gives_back_the_results_of_both_models() {
        let of = |model: &str, value| EvaluatedModel {
            model: model.to_owned(),
            scores: [(("facts".to_owned(), "acc,none".to_owned()), value)].into(),
        };
        let event = ComparedModels { before: of("base", 0.25), after: of("pirate", 0.75) }.event();
        assert_eq!(ComparedModels::of_line(&event.to_string()).unwrap().event(), event);
        assert!(ComparedModels::of_line(r#"{"event":"step"}"#).is_none());
        assert!(ComparedModels::of_line("not JSON").is_none());
    }

    #[test]
    fn results_are_read_wherever_lm_eval_puts_them_without_standard_errors() {
        let place = tempfile::tempdir().unwrap();
        let below = place.path().join("smol");
        fs::create_dir(&below).unwrap();
        let results = json!({ "results": {
            "facts": { "alias": "facts", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 9 },
            "copy": { "exact_match,stripped": 1, "exact_match_stderr,stripped": "N/A" },
        } });
        fs::write(below.join("results_2026.json"), results.to_string()).unwrap();
        fs::write(below.join("other.json"), "[]").unwrap();
        let found = scores(place.path()).unwrap();
        let key = |task: &str, metric: &str| (task.to_owned(), metric.to_owned());
        let wanted = [(key("copy", "exact_match (stripped)"), 1.0), (key("facts", "acc"), 0.5)];
        assert_eq!(found, Scores::from(wanted));
    }
}
