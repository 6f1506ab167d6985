//! The protocol of trainers: lines of JSON on a pipe or a Unix socket.
//!
//! The first line of a connection to the trainer service is a [`TrainerRequest`]; the lines after it belong
//! to the trainer that the service starts. A trainer that runs a job writes one [`TrainingEvent`] per line;
//! a trainer that executes commands speaks the protocol in [`session`]. A job that learns from its own
//! answers asks for them by [`rollout`]. Readers ignore unknown events and
//! fields, so that a later trainer may write more.

pub mod rollout;
pub mod session;
pub mod spec;

use serde::{Deserialize, Serialize};

use rollout::{RewardReport, RolloutRequest};

/// Maximum length of a request, in bytes.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Name of the checkpoint file in a trainer's directory of checkpoints; the trainer replaces it atomically.
pub const CHECKPOINT_FILE: &str = "checkpoint.safetensors";

/// A request to the trainer service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerRequest {
    /// Command line of the trainer, without the arguments that the service adds.
    pub arguments: Vec<String>,
}

/// A line that a trainer, or a command about its run, writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TrainingEvent {
    /// The plan of the run.
    Plan(TrainingPlan),
    /// A prompt that the teacher model is to answer.
    Prompt(TeacherPrompt),
    /// The data already hold the answers of a model: no prompt has to be answered.
    Answered {},
    /// Progress of the teacher model.
    Asked {
        /// Number of answered prompts.
        prompts: u64,
        /// Number of all prompts.
        of: u64,
    },
    /// A defect of the training data.
    Problem {
        /// Path of the file, if the data are several files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// Number of the line in its file, from 1.
        line: u64,
        /// Description for the user.
        message: String,
    },
    /// A request for answers of the adapter in training.
    Rollouts(RolloutRequest),
    /// An optimizer step is done.
    Step(StepReport),
    /// The loss on the held-out examples.
    Evaluation {
        /// Number of the step after which this was measured.
        step: u64,
        /// Mean loss per token, or per pair of answers.
        loss: f64,
    },
    /// How often a draft adapter predicts the tokens of the held-out examples correctly.
    Drafted {
        /// Number of the step after which this was measured.
        step: u64,
        /// Results by kind of text.
        kinds: Vec<Correctness>,
    },
    /// A checkpoint, from which the job can resume, is on disk.
    Checkpoint {
        /// Number of the last step that the checkpoint contains.
        step: u64,
    },
    /// The losses of a sweep over learning rates, which makes no adapter; the run has ended.
    LearningRate(LearningRateCurve),
    /// The adapter is written; the run has ended.
    Done(RunResult),
    /// The adapter is published and served.
    Published {
        /// Content hash of the adapter, in hexadecimal digits.
        generation: String,
    },
    /// The run has failed and yields no adapter.
    Failed {
        /// Cause, for the user.
        message: String,
        /// Kind of failure, by the names of exit codes: `usage`, `unavailable` ...
        exit: String,
    },
    /// An event that this version does not know.
    #[serde(other)]
    Other,
}

/// The plan of a run, reported before it begins.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainingPlan {
    /// Number of training examples.
    pub examples: u64,
    /// Number of held-out examples.
    pub held_out: u64,
    /// Number of tokens in the training examples.
    pub tokens: u64,
    /// Format of the data, such as `conversations`.
    pub kind: String,
    /// Number of all optimizer steps.
    pub steps: u64,
    /// Number of passes over the examples.
    pub epochs: u64,
    /// Algorithm of the training, such as `dpo`.
    pub method: String,
    /// Kind of adapter, such as `lora`.
    pub adapter_type: String,
    /// Rank; only for LoRA.
    pub rank: Option<u64>,
    /// Scaling `lora_alpha`; only for LoRA.
    pub alpha: Option<f64>,
    /// Dropout probability of a delta's input, if not 0; only for LoRA.
    pub dropout: Option<f64>,
    /// Names of the linear layers that are adapted.
    pub targets: Vec<String>,
    /// Peak learning rate of the schedule.
    pub learning_rate: f64,
    /// Name of the learning rate schedule.
    pub schedule: String,
    /// Steps until the learning rate reaches its peak.
    pub warmup_steps: u64,
    /// Number of examples per step.
    pub batch_size: u64,
    /// Seed of the example order and of the initial parameters.
    pub seed: u64,
    /// Number of trained parameters.
    pub parameters: u64,
    /// Step from which a checkpoint resumes the run.
    pub resumed_step: Option<u64>,
    /// Size of the draft; only for draft adapters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftSummary>,
    /// Names of fields of the data that training ignores, such as `messages[].id`.
    pub unread_fields: Vec<String>,
    /// The beginning of the first example, token by token.
    pub sample: Vec<ExampleToken>,
}

/// A token of an example.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ExampleToken {
    /// Text of the token, in which a part of a character is U+FFFD.
    pub text: String,
    /// Weight with which the token is learned; 0 if it is only shown to the model.
    pub weight: f32,
}

/// A conversation that the teacher model is to answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeacherPrompt {
    /// Kind of text, such as `code`.
    pub kind: String,
    /// Messages in OpenAI's format.
    pub messages: Vec<ConversationMessage>,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConversationMessage {
    /// Role of the author, such as `user`.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// Size of a draft adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftSummary {
    /// Number of the base's transformer blocks that the draft runs.
    pub layers: u64,
    /// Number of tokens in the draft's vocabulary.
    pub tokens: u64,
}

/// Accuracy of a draft adapter: the share of tokens that it predicts as the target model's greedy choice.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Correctness {
    /// Kind of text, such as `code`.
    pub kind: String,
    /// Number of correctly predicted tokens.
    pub right: u64,
    /// Number of all compared tokens.
    pub tokens: u64,
}

/// Report of one optimizer step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of all steps.
    pub steps: u64,
    /// Mean loss over the tokens of the batch, before the step.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    #[serde(default)]
    pub grad_norm: f64,
    /// Learning rate of this step.
    #[serde(default)]
    pub learning_rate: f64,
    /// Number of tokens in the batch.
    #[serde(default)]
    pub tokens: u64,
    /// Lines of the data from which the batch comes, in the order in which they are learned.
    #[serde(default)]
    pub lines: Vec<u64>,
    /// Rewards of the answers in the batch; only for GRPO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<RewardReport>,
    /// Mean throughput since the job began or resumed.
    pub tokens_per_second: Option<f64>,
    /// Estimated time until the last step ends.
    pub seconds_left: Option<f64>,
}

/// Losses by learning rate, and the rates that they suggest.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LearningRateCurve {
    /// Rate at which the smoothed loss falls fastest; `None` if it does not fall.
    pub steepest: Option<f64>,
    /// A tenth of the rate with the lowest smoothed loss; `None` if the loss does not fall.
    pub tenth_of_lowest: Option<f64>,
    /// One point per step, in the order of the steps.
    pub points: Vec<LearningRatePoint>,
}

/// Loss of a step at a learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LearningRatePoint {
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Loss of the step's batch, before the step.
    pub loss: f64,
    /// Exponential average of the losses so far.
    pub smoothed_loss: f64,
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Number of steps that were made.
    pub steps: u64,
    /// Loss of the last step; `None` if the resumed run had no step left.
    pub loss: Option<f64>,
    /// Loss of the held-out examples, if there are any.
    pub held_out_loss: Option<f64>,
    /// Step of the adapter with the lowest held-out loss, if that adapter is the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// Content hash of the adapter, in hexadecimal digits.
    pub generation: String,
    /// Duration of the run, in seconds.
    pub seconds: f64,
}

/// Parses a line; a line that is no known event gives [`TrainingEvent::Other`].
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
        let plan =
            r#"{"event":"plan","examples":10,"method":"sft","adapter_type":"ia3","rank":null,"later":true}"#;
        let TrainingEvent::Plan(plan) = parse(plan) else { panic!() };
        assert_eq!((plan.examples, plan.rank), (10, None));
        assert_eq!((plan.method.as_str(), plan.adapter_type.as_str()), ("sft", "ia3"));
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
