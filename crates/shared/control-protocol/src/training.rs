//! What trainers are asked to do, and what they say: lines of JSON, on a pipe or a Unix socket.
//!
//! The first line of a connection to the trainer service is a [`TrainerRequest`]; what follows belongs to the trainer that it starts.
//! A trainer that runs a job says an [`TrainingEvent`] a line; one that is given orders answers them ([`session`]). Readers leave out what they do not know, so that a later trainer may say more.

pub mod session;

use serde::{Deserialize, Serialize};

/// Longest request, in bytes.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;

/// What the file is called that a trainer keeps in its directory of checkpoints, and replaces at one stroke.
pub const CHECKPOINT_FILE: &str = "checkpoint.safetensors";

/// What a trainer is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerRequest {
    /// Its command line, without what the service adds of its own.
    pub arguments: Vec<String>,
}

/// A line of a trainer, or of a command about its run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TrainingEvent {
    /// What will be done.
    Plan(TrainingPlan),
    /// What a model is to be asked.
    Prompt(TeacherPrompt),
    /// The data are what a model said: nothing needs to be asked.
    Answered {},
    /// How far a model is that was asked.
    Asked {
        /// Prompts that it has answered.
        prompts: u64,
        /// Of how many.
        of: u64,
    },
    /// What is wrong with the data.
    Problem {
        /// Where, from 1.
        line: u64,
        /// For a person.
        message: String,
    },
    /// The optimizer has moved.
    Step(StepReport),
    /// The loss of what is held out.
    Evaluation {
        /// After this step.
        step: u64,
        /// Its mean.
        loss: f64,
    },
    /// How often a draft is right about what is held out.
    Drafted {
        /// After this step.
        step: u64,
        /// By kind of text.
        kinds: Vec<Correctness>,
    },
    /// What is needed to go on is on disk.
    Checkpoint {
        /// After this step.
        step: u64,
    },
    /// The adapter is written.
    Done(RunResult),
    /// The adapter is served.
    Published {
        /// Its content hash, in hexadecimal.
        generation: String,
    },
    /// There will be no adapter.
    Failed {
        /// Why, for a person.
        message: String,
        /// What kind of failure, as exit codes are called: `usage`, `unavailable` ...
        exit: String,
    },
    /// Something else.
    #[serde(other)]
    Other,
}

/// What will be done.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainingPlan {
    /// Examples to train on.
    pub examples: u64,
    /// Examples to judge by.
    pub held_out: u64,
    /// Tokens of the examples to train on.
    pub tokens: u64,
    /// The form of the data, as `conversations`.
    pub kind: String,
    /// Steps in all.
    pub steps: u64,
    /// How often every example is seen.
    pub epochs: u64,
    /// The kind of adapter, as `lora`.
    pub method: String,
    /// Of a LoRA alone.
    pub rank: Option<u64>,
    /// Of a LoRA alone.
    pub alpha: Option<f64>,
    /// Of a LoRA alone: the share that is dropped of what it is given, if any is.
    pub dropout: Option<f64>,
    /// Linear layers that get a part.
    pub targets: Vec<String>,
    /// Length of the longest step.
    pub learning_rate: f64,
    /// How steps become shorter.
    pub schedule: String,
    /// Steps until they are the longest.
    pub warmup_steps: u64,
    /// Examples of a step.
    pub batch_size: u64,
    /// Decides order and first numbers.
    pub seed: u64,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Where it goes on.
    pub resumed_step: Option<u64>,
    /// Of a draft alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftSummary>,
}

/// A conversation that somebody is to answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeacherPrompt {
    /// The kind of text, as `code`.
    pub kind: String,
    /// As OpenAI has them.
    pub messages: Vec<ConversationMessage>,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConversationMessage {
    /// Who said it, as `user`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// How large a draft is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftSummary {
    /// The blocks of the base that it has.
    pub layers: u64,
    /// The tokens that it may guess.
    pub tokens: u64,
}

/// How often a draft is right: its likeliest token is the one that was said greedily.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Correctness {
    /// The kind of text, as `code`.
    pub kind: String,
    /// Tokens that it guesses.
    pub right: u64,
    /// Of how many.
    pub tokens: u64,
}

/// A step that is done.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// Of how many.
    pub steps: u64,
    /// Mean over the tokens of its batch, before the step.
    pub loss: f64,
    /// Length of its gradient, before it was shortened.
    #[serde(default)]
    pub grad_norm: f64,
    /// Length of the step.
    #[serde(default)]
    pub learning_rate: f64,
    /// Tokens of its batch.
    #[serde(default)]
    pub tokens: u64,
    /// Lines of the data that its batch is from, in the order in which they are learned.
    #[serde(default)]
    pub lines: Vec<u64>,
    /// Since the job began, or went on.
    pub tokens_per_second: Option<f64>,
    /// Until the last step.
    pub seconds_left: Option<f64>,
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Steps that were made.
    pub steps: u64,
    /// Of the last step; none if the run only had to be ended.
    pub loss: Option<f64>,
    /// Of what is held out, if anything is.
    pub held_out_loss: Option<f64>,
    /// Content hash of the adapter, in hexadecimal.
    pub generation: String,
    /// How long it took.
    pub seconds: f64,
}

/// The event of a line; one that is no event is something else.
#[must_use]
pub fn parse(line: &str) -> TrainingEvent {
    serde_json::from_str(line).unwrap_or(TrainingEvent::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_understood_and_what_nobody_knows_is_no_error() {
        let step = r#"{"event":"step","step":1,"steps":9,"loss":2.31,"grad_norm":1.2,"learning_rate":1e-4,"tokens":512,"tokens_per_second":480.0,"seconds_left":120.0}"#;
        let TrainingEvent::Step(step) = parse(step) else { panic!() };
        assert_eq!((step.step, step.steps, step.seconds_left), (1, 9, Some(120.0)));
        let plan = r#"{"event":"plan","examples":10,"method":"ia3","rank":null,"later":true}"#;
        let TrainingEvent::Plan(plan) = parse(plan) else { panic!() };
        assert_eq!((plan.examples, plan.rank, plan.method.as_str()), (10, None, "ia3"));
        let done = r#"{"event":"done","steps":9,"loss":1.5,"held_out_loss":null,"generation":"ab","output":"d","seconds":3.0}"#;
        assert!(matches!(parse(done), TrainingEvent::Done(RunResult { held_out_loss: None, .. })));
        for line in [r#"{"event":"coffee"}"#, r#"{"event":"step"}"#, "text", ""] {
            assert_eq!(parse(line), TrainingEvent::Other, "{line:?}");
        }
    }

    #[test]
    fn what_is_said_is_understood() {
        let said = [
            TrainingEvent::Plan(TrainingPlan {
                rank: Some(8),
                targets: vec!["q_proj".to_owned()],
                ..TrainingPlan::default()
            }),
            TrainingEvent::Failed { message: "no".to_owned(), exit: "usage".to_owned() },
            TrainingEvent::Checkpoint { step: 3 },
        ];
        for event in said {
            assert_eq!(parse(&serde_json::to_string(&event).unwrap()), event);
        }
    }
}
