//! What the trainer says, a JSON object a line. What a later trainer says besides is passed on and not looked at.

use serde::{Deserialize, Serialize};

/// A line of the trainer, or of this command about its run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// What will be done.
    Plan(TrainingPlan),
    /// What is wrong with the data.
    Problem {
        /// Where, from 1.
        line: u64,
        /// For a person.
        message: String,
    },
    /// The optimizer has moved.
    Step(Step),
    /// The loss of what is held out.
    Evaluation {
        /// After this step.
        step: u64,
        /// Its mean.
        loss: f64,
    },
    /// What is needed to go on is on disk.
    Checkpoint {
        /// After this step.
        step: u64,
    },
    /// The adapter is written.
    Done(Outcome),
    /// The adapter is served.
    Published {
        /// Its content hash, in hexadecimal.
        generation: String,
    },
    /// Something else.
    #[serde(other)]
    Other,
}

/// What will be done.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub(super) struct TrainingPlan {
    /// Examples to train on, and how many are held out.
    pub(super) examples: u64,
    pub(super) held_out: u64,
    pub(super) tokens: u64,
    /// The form of the data, as `messages`.
    pub(super) kind: String,
    pub(super) steps: u64,
    pub(super) epochs: u64,
    pub(super) method: String,
    /// Of a LoRA alone.
    pub(super) rank: Option<u64>,
    pub(super) alpha: Option<f64>,
    pub(super) targets: Vec<String>,
    pub(super) learning_rate: f64,
    pub(super) schedule: String,
    pub(super) warmup_steps: u64,
    pub(super) batch_size: u64,
    pub(super) seed: u64,
    /// Numbers that are trained.
    pub(super) parameters: u64,
    /// Where it goes on.
    pub(super) resumed_step: Option<u64>,
}

/// A step that is done.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct Step {
    /// From 1.
    pub(super) step: u64,
    /// Of how many.
    pub(super) steps: u64,
    /// Mean over the tokens of its batch.
    pub(super) loss: f64,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) seconds_left: Option<f64>,
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) steps: u64,
    /// Of the last step.
    pub(super) loss: f64,
    pub(super) held_out_loss: Option<f64>,
    /// Content hash of the adapter, in hexadecimal.
    pub(super) generation: String,
    /// How long it took.
    pub(super) seconds: f64,
}

/// The event of a line; one that is no event is something else.
pub(super) fn parse(line: &str) -> Event {
    serde_json::from_str(line).unwrap_or(Event::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_understood_and_what_nobody_knows_is_no_error() {
        let step = r#"{"event":"step","step":1,"steps":9,"loss":2.31,"grad_norm":1.2,"learning_rate":1e-4,"tokens":512,"tokens_per_second":480.0,"seconds_left":120.0}"#;
        let Event::Step(step) = parse(step) else { panic!() };
        assert_eq!((step.step, step.steps, step.seconds_left), (1, 9, Some(120.0)));
        let plan = r#"{"event":"plan","examples":10,"method":"ia3","rank":null,"later":true}"#;
        let Event::Plan(plan) = parse(plan) else { panic!() };
        assert_eq!((plan.examples, plan.rank, plan.method.as_str()), (10, None, "ia3"));
        let done = r#"{"event":"done","steps":9,"loss":1.5,"held_out_loss":null,"generation":"ab","output":"d","seconds":3.0}"#;
        assert!(matches!(parse(done), Event::Done(Outcome { held_out_loss: None, .. })));
        for line in [r#"{"event":"coffee"}"#, r#"{"event":"step"}"#, "text", ""] {
            assert_eq!(parse(line), Event::Other, "{line:?}");
        }
    }
}
