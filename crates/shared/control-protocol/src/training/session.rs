//! Training order by order: what a trainer that was started as `session` is told, and what it answers.
//!
//! It says [`CommandReply::Ready`] first. Then each order is a line, with the numbers that belong to it right behind, 32 bits each and
//! little-endian; so is each answer.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Longest line, in bytes.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// The kind of failure that it helps to wait for.
pub const BUSY: &str = "unavailable";
/// Most numbers behind a line.
pub const MAX_NUMBERS: usize = 16 << 20;

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum TrainingCommand {
    /// Begin with a new adapter.
    Create {
        /// How large it is.
        lora: Lora,
        /// Decides its first numbers.
        seed: u64,
    },
    /// Begin, or go on, with one that [`TrainingCommand::SaveState`] or [`TrainingCommand::Suspend`] kept; of the latter with the gradients that were
    /// gathered, too.
    Load {
        /// Where it is.
        directory: PathBuf,
        /// The optimizer's numbers too; else it begins anew.
        optimizer: bool,
    },
    /// Evaluate sequences, and gather gradients. The numbers of each are its tokens, its targets, and each of `inputs`.
    ForwardBackward {
        /// The loss' name.
        loss: String,
        /// Its options.
        options: BTreeMap<String, f64>,
        /// Gathers none.
        forward_only: bool,
        /// Tokens of each sequence.
        lengths: Vec<usize>,
        /// What there is of each token besides itself and its target.
        inputs: Vec<String>,
    },
    /// Make a step of what was gathered.
    OptimStep(Adam),
    /// Keep adapter and optimizer.
    SaveState {
        /// Where; what is there is replaced.
        directory: PathBuf,
    },
    /// Keep adapter, optimizer and gathered gradients, so that another trainer goes on as if it were this one.
    Suspend {
        /// Where; it must not exist.
        directory: PathBuf,
    },
    /// Write the adapter in PEFT's format.
    SaveWeights {
        /// Where; it must not exist.
        directory: PathBuf,
    },
}

impl TrainingCommand {
    /// How many numbers follow the line; `None` if more than are taken.
    #[must_use]
    pub fn numbers(&self) -> Option<usize> {
        let Self::ForwardBackward { lengths, inputs, .. } = self else { return Some(0) };
        let tokens = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length))?;
        tokens.checked_mul(2 + inputs.len()).filter(|&numbers| numbers <= MAX_NUMBERS)
    }

    /// The order's line, with the newline at its end.
    ///
    /// # Errors
    /// The line is longer than [`MAX_LINE_BYTES`]: a trainer that reads it would end.
    pub fn line(&self) -> Result<Vec<u8>, CommandRefusal> {
        let mut line = serde_json::to_vec(self).map_err(|error| {
            CommandRefusal::server(format!("the order cannot be written as JSON: {error}"))
        })?;
        line.push(b'\n');
        if line.len() <= MAX_LINE_BYTES {
            return Ok(line);
        }
        Err(CommandRefusal::user(format!(
            "the request makes an order of {} bytes for the trainer, which takes {MAX_LINE_BYTES}: send fewer sequences at once",
            line.len()
        )))
    }
}

/// The size of a LoRA.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lora {
    /// Of every delta.
    pub rank: usize,
    /// `lora_alpha`.
    pub alpha: f64,
    /// Names of the linear layers that get one.
    pub targets: Vec<String>,
}

/// What a step of AdamW depends on, by torch's names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Length of the step.
    pub learning_rate: f64,
    /// How much of the mean of gradients stays.
    pub beta1: f64,
    /// How much of the mean of their squares stays.
    pub beta2: f64,
    /// Added to the root of that mean.
    pub eps: f64,
    /// How much of the parameters a step of length 1 takes away.
    pub weight_decay: f64,
    /// Longer gradients are shortened to this; 0 is no limit.
    pub grad_clip_norm: f64,
}

/// What came of an order, or how things are before the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CommandReply {
    /// Orders can come.
    Ready {},
    /// It is done.
    Done(CommandDone),
    /// It is not, and nothing has changed.
    Refused(CommandRefusal),
    /// There will be no more answers.
    Failed {
        /// Why, for a person.
        message: String,
        /// What kind of failure, as exit codes are called; [`BUSY`] may pass.
        #[serde(default)]
        exit: String,
    },
}

/// What came of an order that was carried out.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CommandDone {
    /// How many numbers follow: the log-probabilities of all targets, one sequence after the other.
    pub numbers: usize,
    /// By name.
    pub metrics: BTreeMap<String, f64>,
    /// What the adapter is, if the order began with one.
    pub lora: Option<Lora>,
}

/// Why an order was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRefusal {
    /// Why, and what to do, for a person.
    pub message: String,
    /// Whose fault it is.
    pub category: Category,
}

/// Whose fault it is, in Tinker's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Of whoever gave the order: the same again would fail again.
    User,
    /// Of this side.
    Server,
}

impl CommandRefusal {
    /// By a fault of whoever gave the order.
    pub fn user(message: impl Into<String>) -> Self {
        Self { message: message.into(), category: Category::User }
    }

    /// By a fault of this side.
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
            }),
            CommandReply::Refused(CommandRefusal::user("no")),
        ];
        for answer in answers {
            assert_eq!(through(&answer), answer);
        }
        // The trainer service, and a trainer that ends, say more than is of interest here.
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
