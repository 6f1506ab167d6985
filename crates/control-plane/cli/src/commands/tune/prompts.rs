//! Prompts whose answers a draft adapter learns to predict: those of the training data, or the set shipped
//! with the command.

use std::{
    fs::File,
    io::{self, Seek as _, Write as _},
    path::PathBuf,
    process::Stdio,
};

use control_protocol::training::{TeacherPrompt, TrainingEvent};

use super::{
    errors::TuneError,
    progress::ProgressView,
    record::RunRecord,
    trainer::{self, TRAINER, TrainerCommandSpec, TrainerListener},
};
use crate::{deployment::running::ProcessId, exit::Exit, terminal::Terminal};

/// Shipped prompts of several kinds, for users without training data.
const SHIPPED: &str = include_str!("../../../../../../examples/drafts/prompts.jsonl");

/// Content of the training data of a draft adapter.
#[derive(Debug)]
pub(super) enum DataPrompts {
    /// Prompts that the target model must answer first.
    Prompts(Vec<TeacherPrompt>),
    /// Complete answers, so there is nothing to ask.
    Answered,
}

/// Reads the prompts of the run's data through the trainer, or the shipped prompts without data.
pub(super) fn read(
    program: PathBuf,
    record: &RunRecord,
    terminal: Terminal,
) -> Result<DataPrompts, TuneError> {
    let stdin = match record.data.as_slice() {
        [] => Stdio::from(shipped().map_err(TuneError::Run)?),
        _ => Stdio::null(),
    };
    let mut arguments = vec!["prompts".into()];
    arguments.extend(record.data.iter().flat_map(|path| ["--data".into(), path.as_os_str().to_owned()]));
    let log = tempfile::tempfile().map_err(TuneError::Run)?;
    let recipe = TrainerCommandSpec { program, arguments, stdin, log };
    let mut ears = PromptReader {
        watch: ProgressView::new(terminal),
        faults: 0,
        prompts: Vec::new(),
        is_answered: false,
    };
    let ending = trainer::run(recipe, &mut ears).map_err(TuneError::Run)?;
    if ending.status.success() {
        return Ok(if ears.is_answered { DataPrompts::Answered } else { DataPrompts::Prompts(ears.prompts) });
    }
    if ears.faults > 0 {
        return Err(TuneError::Data { data: record.data_text(), faults: ears.faults });
    }
    Err(TuneError::Trainer {
        said: ending.last_words.unwrap_or_else(|| format!("{TRAINER} ended: {}", ending.status)),
        exit: Exit::of_code(ending.status.code()),
        resume: None,
    })
}

/// Returns a temporary file with the shipped prompts.
fn shipped() -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(SHIPPED.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// Listener that collects the prompts the trainer reports.
struct PromptReader {
    watch: ProgressView,
    faults: usize,
    prompts: Vec<TeacherPrompt>,
    is_answered: bool,
}

impl TrainerListener for PromptReader {
    fn started(&mut self, _: ProcessId) -> io::Result<()> {
        Ok(())
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        match control_protocol::training::parse(line) {
            TrainingEvent::Prompt(prompt) => self.prompts.push(prompt),
            TrainingEvent::Answered {} => self.is_answered = true,
            event @ TrainingEvent::Problem { .. } => {
                self.faults += 1;
                self.watch.show(&event, line);
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    #[test]
    fn the_prompts_that_come_with_the_command_are_of_several_kinds_and_no_two_are_the_same() {
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        let mut asked: Vec<String> = Vec::new();
        for line in SHIPPED.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            *kinds.entry(line["kind"].as_str().unwrap().to_owned()).or_default() += 1;
            asked.push(line["messages"][0]["content"].as_str().unwrap().to_owned());
        }
        assert!(["chat", "code", "json", "summary"].iter().all(|kind| kinds[*kind] >= 30), "{kinds:?}");
        asked.sort_unstable();
        assert!(asked.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
