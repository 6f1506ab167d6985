//! The method of a training: the data decide it, and `--method` refuses data of another kind.

use std::io::{self, IsTerminal as _};

use control_protocol::training::spec::{TrainingMethod, TrainingSpec};

use super::{arguments::RunArguments, error::TunerError};
use crate::data::DataKind;

/// Refuses GRPO at a terminal, where no program answers the requests for samples.
pub(super) fn check_asked(arguments: &RunArguments) -> Result<(), TunerError> {
    if arguments.is_grpo() && !arguments.dry_run && io::stdin().is_terminal() {
        let problem = "grpo draws samples from a deployment: use holobiont tune --method grpo";
        return Err(TunerError::Usage(problem.to_owned()));
    }
    Ok(())
}

/// Returns the name of the method that learns from the data.
pub(super) fn of_data(
    arguments: &RunArguments,
    data: DataKind,
    validation: Option<DataKind>,
) -> Result<&'static str, TunerError> {
    let found = data.method();
    if let Some(other) = validation.filter(|other| other.method() != found) {
        let problem = format!("the data have {data}, and --validation has {other}; use lines of one kind");
        return Err(TunerError::Usage(problem));
    }
    if let Some(asked) = arguments.spec.method.filter(|asked| Some(*asked) != found) {
        return Err(TunerError::Usage(other_method(asked, data)));
    }
    check_options(&arguments.spec, found)?;
    Ok(found.map_or("distillation", TrainingMethod::as_str))
}

/// Describes data that the method `asked` does not learn from.
fn other_method(asked: TrainingMethod, data: DataKind) -> String {
    let needs = match asked {
        TrainingMethod::Sft => "answers to learn, such as 'messages' or 'prompt' and 'completion'",
        TrainingMethod::Dpo => "preferences, lines with 'chosen' and 'rejected'",
        TrainingMethod::Kto => "single ratings, lines with 'prompt', 'completion' and 'label'",
        TrainingMethod::Grpo => "prompts",
    };
    let remedy = match data.method() {
        Some(found) => format!("use --method {}", found.as_str()),
        None => "use --draft without --method".to_owned(),
    };
    format!(
        "--method {} needs {needs}, and the lines have {data}; change the data, or {remedy}",
        asked.as_str()
    )
}

/// Refuses options that have no effect with the method.
fn check_options(spec: &TrainingSpec, method: Option<TrainingMethod>) -> Result<(), TunerError> {
    let is_kto = method == Some(TrainingMethod::Kto);
    let weights = [
        ("--desirable-weight", spec.desirable_weight.is_some()),
        ("--undesirable-weight", spec.undesirable_weight.is_some()),
    ];
    if let Some((flag, _)) = weights.iter().find(|(_, is_given)| *is_given && !is_kto) {
        let problem = format!("{flag} has no effect without single ratings as data; remove it");
        return Err(TunerError::Usage(problem));
    }
    if is_kto && spec.batch_size == Some(1) {
        let problem = "kto compares the answers of a step with each other; use a --batch-size of 2 or more";
        return Err(TunerError::Usage(problem.to_owned()));
    }
    Ok(())
}
