//! Command line of a job's trainer, and file names in the job's directory.

use std::path::Path;

use super::records::{JobHyperparameters, JobRecord};

/// Training data within a job's directory.
pub(super) const DATA: &str = "data.jsonl";
pub(super) const VALIDATION: &str = "validation.jsonl";
/// Adapter that is trained further.
pub(super) const FROM: &str = "from";
/// Directory of the trainer's checkpoint.
pub(super) const CHECKPOINT: &str = "checkpoint";
pub(super) const CHECKPOINT_NAME: &str = "checkpoint/checkpoint.safetensors";
pub(super) const ADAPTER: &str = "adapter";

impl JobRecord {
    /// Returns the command-line arguments of the job's trainer.
    #[must_use]
    pub fn arguments(&self, directory: &Path, checkpoint_steps: u32) -> Vec<String> {
        let path = |name: &str| directory.join(name).display().to_string();
        let mut arguments = vec!["run".to_owned()];
        let mut say = |option: &str, value: Option<String>| {
            arguments.extend(value.into_iter().flat_map(|value| [format!("--{option}"), value]));
        };
        let JobHyperparameters {
            n_epochs,
            batch_size,
            learning_rate_multiplier,
            beta,
            desirable_weight,
            undesirable_weight,
            rank,
            alpha,
            dropout,
            seed,
            ..
        } = self.order.choices;
        say("data", Some(path(DATA)));
        say("validation", self.order.validation_file.as_ref().map(|_| path(VALIDATION)));
        say("from", directory.join(FROM).exists().then(|| path(FROM)));
        say("checkpoints", Some(path(CHECKPOINT)));
        say("checkpoint-steps", Some(checkpoint_steps.to_string()));
        say("output", Some(path(ADAPTER)));
        say("epochs", n_epochs.map(|number| number.to_string()));
        say("batch-size", batch_size.map(|number| number.to_string()));
        say("learning-rate-multiplier", learning_rate_multiplier.map(|number| number.to_string()));
        say("beta", beta.map(|number| number.to_string()));
        say("desirable-weight", desirable_weight.map(|number| number.to_string()));
        say("undesirable-weight", undesirable_weight.map(|number| number.to_string()));
        say("rank", rank.map(|number| number.to_string()));
        say("alpha", alpha.map(|number| number.to_string()));
        say("dropout", dropout.map(|share| share.to_string()));
        say("seed", seed.map(|number| number.to_string()));
        let targets = &self.order.choices.target_modules;
        say("targets", (!targets.is_empty()).then(|| targets.join(",")));
        let switches =
            [("exit-with-stdin", true), ("resume", true), ("rslora", self.order.choices.use_rslora)];
        arguments
            .extend(switches.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| format!("--{name}")));
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::records::JobSpec;

    #[test]
    fn what_a_job_of_kto_chooses_is_said_to_the_trainer() {
        let order = serde_json::json!({
            "model": "base", "training_file": "file-1",
            "method": { "type": "kto", "kto": { "hyperparameters": { "beta": 0.2, "undesirable_weight": 1.5 } } },
        });
        let order = JobSpec::read(order.to_string().as_bytes()).unwrap();
        let job = JobRecord::new("ftjob-1".to_owned(), "tenant", order, "name".to_owned(), None);
        let said = job.arguments(Path::new("/job"), 50).join(" ");
        assert!(said.contains("--beta 0.2 --undesirable-weight 1.5"), "{said}");
        assert!(!said.contains("--desirable-weight"), "{said}");
    }

    #[test]
    fn the_checkpoint_is_called_as_the_trainer_calls_it() {
        assert_eq!(CHECKPOINT_NAME, format!("{CHECKPOINT}/{}", control_protocol::training::CHECKPOINT_FILE));
    }
}
