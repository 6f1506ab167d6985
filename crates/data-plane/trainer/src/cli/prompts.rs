//! The command `prompts`: the prompts of training data, for a teacher model.

use std::{io, path::PathBuf};

use control_protocol::training::{ConversationMessage, TeacherPrompt, TrainingEvent};
use settings::exit::Exit;

use super::{
    ProgramExit,
    error::TunerError,
    event_output::{print, tell_faults},
};
use crate::data::{self, DataLimits, FilePrompts};

#[derive(Debug, clap::Args)]
pub(super) struct PromptArguments {
    /// Training data: a file, a directory, or a pattern; may be given several times [default: stdin]
    #[arg(long, value_name = "PATH")]
    data: Vec<PathBuf>,
}

/// Prints the prompts of the training data, or an event that the data already hold answers.
pub(super) fn prompts(arguments: &PromptArguments) -> Result<ProgramExit, TunerError> {
    let limits = DataLimits::default();
    let asked = if arguments.data.is_empty() {
        data::prompts(io::stdin().lock(), &limits)
    } else {
        data::find_files(&arguments.data).and_then(|files| data::prompts_of_files(&files, &limits))
    };
    if let Err(error) = &asked {
        tell_faults(error)?;
    }
    match asked? {
        FilePrompts::Answered => print(&TrainingEvent::Answered {})?,
        FilePrompts::Prompts(prompts) => {
            prompts.into_iter().try_for_each(|prompt| print(&prompt_event(prompt)))?
        }
    }
    Ok(ProgramExit::Exit(Exit::Ok))
}

fn prompt_event(prompt: data::DataPrompt) -> TrainingEvent {
    let of = |(role, content): &(&str, String)| ConversationMessage {
        role: (*role).to_owned(),
        content: content.clone(),
    };
    let messages = prompt.messages().iter().map(of).collect();
    TrainingEvent::Prompt(TeacherPrompt { kind: prompt.kind, messages })
}
