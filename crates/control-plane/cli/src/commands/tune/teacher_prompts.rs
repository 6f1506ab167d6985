//! Prepares the requests to the target model before a draft adapter is trained: model, prompts and
//! settings.

use std::{io, path::Path};

use control_protocol::training::{TeacherPrompt, TrainingEvent};
use serde_json::json;

use super::{
    errors::TuneError,
    gateway,
    name::RunName,
    prompts::{self, DataPrompts},
    record::{RunDirectory, RunRecord, TeacherOptions},
    teacher_outputs::{AskError, CollectionEnd, TeacherOutputs, TeacherSettings},
};
use crate::{
    client::GatewayClient,
    terminal::{PrintFormat, Terminal, printable, table::pairs},
};

/// Default maximum number of tokens per answer.
const USUAL_ANSWER_TOKENS: u32 = 256;

/// Prompts with the settings of the model that answers them.
#[derive(Debug)]
pub(super) struct TeacherPrompts {
    asking: TeacherSettings,
    prompts: Vec<TeacherPrompt>,
}

impl TeacherPrompts {
    /// Returns the prompts of a run; `None` if the run trains no draft adapter or its data already holds
    /// answers.
    pub(super) fn of(
        record: &RunRecord,
        program: &Path,
        client: &GatewayClient,
        terminal: Terminal,
    ) -> Result<Option<Self>, TuneError> {
        if !record.options.are_of_draft() {
            return Ok(None);
        }
        let DataPrompts::Prompts(prompts) = prompts::read(program.to_owned(), record, terminal)? else {
            return Ok(None);
        };
        let TeacherOptions { model, answer_tokens } = &record.asks;
        let (model, weights) = gateway::target(client, model.as_deref())?;
        let max_tokens = answer_tokens.unwrap_or(USUAL_ANSWER_TOKENS);
        let asking = TeacherSettings { model, weights, max_tokens, seed: record.options.seed() };
        Ok(Some(Self { asking, prompts }))
    }

    fn answers<'a>(&'a self, file: &'a Path, asking_file: &'a Path) -> TeacherOutputs<'a> {
        TeacherOutputs { file, asking_file, asking: &self.asking, prompts: &self.prompts }
    }

    /// Prints what would be requested; true if all prompts are answered.
    pub(super) fn rehearse(&self, directory: &RunDirectory, terminal: Terminal) -> bool {
        let (file, asking_file) = (directory.answers(), directory.asking());
        let kept = self.answers(&file, &asking_file).kept().unwrap_or_default();
        let of = self.prompts.len();
        match terminal.format {
            PrintFormat::Json => {
                terminal.print(json!(TrainingEvent::Asked { prompts: kept as u64, of: of as u64 }))
            }
            PrintFormat::Human => terminal.print(pairs(
                terminal.ink(),
                &[
                    ("asked".to_owned(), printable(&self.asking.model)),
                    ("prompts".to_owned(), format!("{of}, {kept} with answers")),
                    ("answers".to_owned(), format!("2 each, {} tokens at most", self.asking.max_tokens)),
                ],
            )),
        }
        kept == of
    }

    /// Collects the answers of all prompts and reports progress to `tell`.
    pub(super) fn ask(
        &self,
        directory: &RunDirectory,
        name: &RunName,
        client: &GatewayClient,
        tell: &mut dyn FnMut(&TrainingEvent) -> io::Result<()>,
    ) -> Result<(), TuneError> {
        let (file, asking_file, of) = (directory.answers(), directory.asking(), self.prompts.len());
        let mut answered = 0;
        let asked = self.answers(&file, &asking_file).ask(client, &mut |prompts| {
            answered = prompts;
            tell(&TrainingEvent::Asked { prompts: prompts as u64, of: of as u64 })
        });
        match asked {
            Ok(CollectionEnd::Done) => Ok(()),
            Ok(CollectionEnd::Stopped) => {
                Err(TuneError::AskingStopped { answered, of, resume: name.resume() })
            }
            Err(AskError::Client(source)) => {
                Err(TuneError::NotAnswered { answered, of, resume: name.resume(), source })
            }
            Err(AskError::Keep(source)) => Err(TuneError::Keep { path: file.clone(), source }),
        }
    }
}
