//! The protocol of a trainer that was started as `session`, which executes commands one by one.
//!
//! The trainer first writes [`CommandReply::Ready`]. Then each command is a line, followed directly by its
//! values, 32 bits each and little-endian. Replies have the same form; an exported weight file takes the
//! place of the values.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Maximum length of a line, in bytes.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Kind of failure that may pass, so that a retry can succeed.
pub const BUSY: &str = "unavailable";
/// Maximum number of 32-bit values after a line.
pub const MAX_NUMBERS: usize = 16 << 20;

/// A command to the trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum TrainingCommand {
    /// Starts a new adapter.
    Create {
        /// Size of the adapter.
        lora: Lora,
        /// Seed of its initial parameters.
        seed: u64,
    },
    /// Loads an adapter that [`TrainingCommand::SaveState`] or [`TrainingCommand::Suspend`] saved. The state
    /// of `Suspend` includes the accumulated gradients.
    Load {
        /// Directory of the saved state.
        directory: PathBuf,
        /// Whether the optimizer state is restored; else the optimizer starts anew.
        optimizer: bool,
    },
    /// Evaluates sequences and accumulates gradients. Each sequence has tokens, targets, and each of
    /// `inputs`.
    ForwardBackward {
        /// Name of the loss function.
        loss: String,
        /// Options of the loss function.
        options: BTreeMap<String, f64>,
        /// Whether no gradients are computed.
        forward_only: bool,
        /// Number of tokens of each sequence.
        lengths: Vec<usize>,
        /// Names of the per-token inputs besides the token and its target.
        inputs: Vec<String>,
    },
    /// Makes an optimizer step from the accumulated gradients.
    OptimStep(Adam),
    /// Saves adapter and optimizer state.
    SaveState {
        /// Directory to write; a checkpoint in it is replaced.
        directory: PathBuf,
    },
    /// Saves adapter, optimizer state and accumulated gradients, for another trainer to resume exactly here.
    Suspend {
        /// Directory to write, which must be a new one; the trainer would replace a checkpoint in it.
        directory: PathBuf,
    },
    /// Sends the adapter in PEFT's format: [`CommandDone::adapter`], and the weight file after the reply.
    ExportWeights {},
}

impl TrainingCommand {
    /// Returns the number of 32-bit values after the line; `None` if there are more than [`MAX_NUMBERS`].
    #[must_use]
    pub fn numbers(&self) -> Option<usize> {
        let Self::ForwardBackward { lengths, inputs, .. } = self else { return Some(0) };
        let tokens = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length))?;
        tokens.checked_mul(2 + inputs.len()).filter(|&numbers| numbers <= MAX_NUMBERS)
    }

    /// Returns the line of the command, with the newline at its end.
    ///
    /// # Errors
    /// Fails if the line is longer than [`MAX_LINE_BYTES`], because a trainer that reads it would exit.
    pub fn line(&self) -> Result<Vec<u8>, CommandRefusal> {
        let mut line = serde_json::to_vec(self)
            .map_err(|error| CommandRefusal::server(format!("cannot write the command as JSON: {error}")))?;
        line.push(b'\n');
        if line.len() <= MAX_LINE_BYTES {
            return Ok(line);
        }
        Err(CommandRefusal::user(format!(
            "the request needs {} bytes in one command for the trainer, and the limit is \
             {MAX_LINE_BYTES}; send fewer sequences at once",
            line.len()
        )))
    }
}

/// The size of a LoRA adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lora {
    /// Rank of every delta.
    pub rank: usize,
    /// PEFT's scaling parameter `lora_alpha`.
    pub alpha: f64,
    /// Names of the adapted linear layers.
    pub targets: Vec<String>,
}

/// Hyperparameters of an AdamW step, by torch's names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Decay rate of the moving mean of gradients.
    pub beta1: f64,
    /// Decay rate of the moving mean of squared gradients.
    pub beta2: f64,
    /// Term added to the denominator, the root of the second mean.
    pub eps: f64,
    /// Weight decay: a step multiplies the parameters by `1 - learning_rate * weight_decay` first.
    pub weight_decay: f64,
    /// Norm to which larger gradients are clipped; 0 means no limit.
    pub grad_clip_norm: f64,
}

/// Reply to a command, or the trainer's state before the first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CommandReply {
    /// The trainer accepts commands.
    Ready {},
    /// The command was executed successfully.
    Done(CommandDone),
    /// The command was refused, and no state changed.
    Refused(CommandRefusal),
    /// The trainer has failed and sends no more replies.
    Failed {
        /// Cause, for the user.
        message: String,
        /// Kind of failure, by the names of exit codes; [`BUSY`] may pass.
        #[serde(default)]
        exit: String,
    },
}

/// Result of a command that succeeded.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CommandDone {
    /// Number of values that follow: the log-probabilities of all targets, sequence by sequence.
    pub numbers: usize,
    /// Metrics, by their names.
    pub metrics: BTreeMap<String, f64>,
    /// Size of the adapter, after [`TrainingCommand::Create`] or [`TrainingCommand::Load`].
    pub lora: Option<Lora>,
    /// The adapter that follows, after [`TrainingCommand::ExportWeights`]. No values follow then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<ExportedAdapter>,
}

/// An adapter in PEFT's format whose weight file follows the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedAdapter {
    /// Text of the file `adapter_config.json`.
    pub config: String,
    /// Length of `adapter_model.safetensors` in bytes.
    pub weight_bytes: u64,
}

/// Reason why a command was not executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRefusal {
    /// Cause and next step, for the user.
    pub message: String,
    /// Side that caused the failure.
    pub category: Category,
}

/// Side that caused a failure, in the terms of the Tinker API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// The sender caused it: the same command would fail again.
    User,
    /// The trainer or its host caused it.
    Server,
}

impl CommandRefusal {
    /// Returns a refusal that the sender caused.
    pub fn user(message: impl Into<String>) -> Self {
        Self { message: message.into(), category: Category::User }
    }

    /// Returns a refusal that this side caused.
    pub fn server(message: impl Into<String>) -> Self {
        Self { message: message.into(), category: Category::Server }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through<T: Serialize + for<'de> Deserialize<'de>>(said: &T) -> T {
        serde_json::from_str(&serde_json::to_string(said).unwrap()).unwrap()
    }

    #[test]
    fn orders_and_answers_are_understood() {
        let adam = Adam {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.0,
            grad_clip_norm: 1.0,
        };
        let lora = Lora { rank: 8, alpha: 32.0, targets: vec!["q_proj".to_owned()] };
        let orders = [
            TrainingCommand::Create { lora: lora.clone(), seed: u64::MAX },
            TrainingCommand::OptimStep(adam),
            TrainingCommand::Load { directory: "d".into(), optimizer: true },
            TrainingCommand::ExportWeights {},
        ];
        for order in orders {
            assert_eq!(through(&order), order);
        }
        let answers = [
            CommandReply::Ready {},
            CommandReply::Done(CommandDone {
                numbers: 3,
                metrics: [("loss:sum".to_owned(), 1.5)].into(),
                lora: Some(lora),
                adapter: None,
            }),
            CommandReply::Done(CommandDone {
                adapter: Some(ExportedAdapter { config: "{}".to_owned(), weight_bytes: u64::MAX }),
                ..CommandDone::default()
            }),
            CommandReply::Refused(CommandRefusal::user("no")),
        ];
        for answer in answers {
            assert_eq!(through(&answer), answer);
        }
        // The trainer service, and a trainer that exits, write more fields than the reader needs.
        let failed: CommandReply =
            serde_json::from_str(r#"{"event":"failed","message":"busy","exit":"unavailable"}"#).unwrap();
        assert_eq!(failed, CommandReply::Failed { message: "busy".to_owned(), exit: BUSY.to_owned() });
    }

    #[test]
    fn an_order_whose_line_a_trainer_would_not_take_has_none() {
        let order = |sequences: usize| TrainingCommand::ForwardBackward {
            loss: "ppo".to_owned(),
            options: BTreeMap::new(),
            forward_only: false,
            lengths: vec![1; sequences],
            inputs: Vec::new(),
        };
        let line = order(1000).line().unwrap();
        assert_eq!(serde_json::from_slice::<TrainingCommand>(&line).unwrap(), order(1000));
        assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
        let refused = order(MAX_LINE_BYTES).line().unwrap_err();
        assert_eq!(refused.category, Category::User);
        assert!(refused.message.contains(&MAX_LINE_BYTES.to_string()), "{}", refused.message);
    }

    #[test]
    fn an_orders_numbers_are_bounded() {
        let order = |lengths: Vec<usize>| TrainingCommand::ForwardBackward {
            loss: String::new(),
            options: BTreeMap::new(),
            forward_only: false,
            lengths,
            inputs: vec!["weights".to_owned()],
        };
        assert_eq!(order(vec![3, 4]).numbers(), Some(21));
        assert_eq!(order(vec![]).numbers(), Some(0));
        for lengths in [vec![usize::MAX, 1], vec![usize::MAX / 2], vec![MAX_NUMBERS / 3 + 1]] {
            assert_eq!(order(lengths).numbers(), None);
        }
    }
}
