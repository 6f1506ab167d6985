//! Status of training jobs and runs.

use control_protocol::status::training::{JobSummary, RunSummary, TrainingStatus};

use crate::terminal::{TextStyle, printable, table::table};

/// Formats the number of jobs and runs.
pub(super) fn text(training: &TrainingStatus) -> String {
    let count = |count: usize, what: &str| match count {
        0 => None,
        1 => Some(format!("1 {what}")),
        _ => Some(format!("{count} {what}s")),
    };
    let runs = count(training.runs.len(), "model").map(|models| format!("{models} step by step"));
    let counts: Vec<String> = [count(training.jobs.len(), "job"), runs].into_iter().flatten().collect();
    match (training.trains, counts.is_empty()) {
        (false, true) => "not here".to_owned(),
        (true, true) => "none".to_owned(),
        (_, false) => counts.join(", "),
    }
}

/// Formats the table of everything in training.
pub(super) fn under_way(ink: TextStyle, training: &TrainingStatus) -> Option<String> {
    let rows: Vec<_> = training.jobs.iter().map(job_row).chain(training.runs.iter().map(run_row)).collect();
    (!rows.is_empty()).then(|| table(ink, ["TRAINED", "TENANT", "STATE", "STEP", "TOKENS/S", "LOSS"], &rows))
}

fn job_row(job: &JobSummary) -> [String; 6] {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        printable(&job.name),
        printable(&job.tenant),
        printable(&job.status),
        or_none(job.steps.map(|steps| format!("{} of {steps}", job.step))),
        or_none(job.tokens_per_s.map(|rate| format!("{rate:.0}"))),
        or_none(job.loss.map(|loss| format!("{loss:.3}"))),
    ]
}

/// Formats the row of a run. Only its client knows the number of steps; its losses are sums.
fn run_row(run: &RunSummary) -> [String; 6] {
    [
        printable(&run.name),
        printable(&run.tenant),
        printable(&run.status),
        run.step.to_string(),
        "-".to_owned(),
        run.loss_sum.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3} in all")),
    ]
}
