//! Arguments of GRPO, and the options that it does not have.

use control_protocol::training::{rollout::GrpoOptions, spec::TrainingMethod};
use model::shape::config::ModelConfig;

use super::{arguments::RunArguments, error::TunerError};
use crate::{grpo::GrpoPlan, plan::JobPrecision};

/// Default number of answers to a prompt.
const NUM_GENERATIONS: u32 = 8;
/// Default maximum of an answer's tokens.
const MAX_COMPLETION_LENGTH: u32 = 256;
/// Temperature up to which gateways sample.
const MAX_TEMPERATURE: f64 = 2.0;

impl RunArguments {
    /// Returns true if the adapter learns from rewards of its own answers.
    pub(super) fn is_grpo(&self) -> bool {
        self.spec.method == Some(TrainingMethod::Grpo)
    }

    /// Returns the settings of GRPO; `None` for another method.
    pub(super) fn grpo(&self, config: &ModelConfig) -> Result<Option<GrpoPlan>, TunerError> {
        let options = &self.spec.grpo;
        if !self.is_grpo() {
            return unused(options).map(|()| None);
        }
        self.check_grpo()?;
        let max_completion_length = options.max_completion_length.unwrap_or(MAX_COMPLETION_LENGTH);
        if max_completion_length as usize >= config.context_length {
            let problem = format!(
                "--max-completion-length is {max_completion_length}; it must be below the model's context of \
                 {} tokens",
                config.context_length
            );
            return Err(TunerError::Usage(problem));
        }
        Ok(Some(GrpoPlan {
            num_generations: options.num_generations.unwrap_or(NUM_GENERATIONS),
            max_completion_length,
            temperature: options.temperature.unwrap_or(1.0),
            scale_rewards: options.scale_rewards.unwrap_or_default(),
        }))
    }

    /// Returns the maximum number of tokens of an item of the data: of an example, or of a prompt for GRPO.
    pub(super) fn item_tokens(&self, max_tokens: usize, grpo: Option<&GrpoPlan>, context: usize) -> usize {
        match grpo {
            None => max_tokens.min(context),
            Some(grpo) => max_tokens.min(context - grpo.max_completion_length as usize),
        }
    }

    /// Fails if an option is given that GRPO does not have.
    fn check_grpo(&self) -> Result<(), TunerError> {
        let spec = &self.spec;
        let without = [
            ("--validation", spec.validation.is_some()),
            ("--held-out", spec.held_out.is_some_and(|percent| percent > 0)),
            ("--keep-best", spec.keep_best),
            ("--early-stopping-patience", spec.early_stopping_patience.is_some()),
            ("--beta", spec.beta.is_some()),
            ("--dropout", self.dropout() > 0.0),
            ("--draft", spec.draft),
            ("--find-learning-rate", self.find_learning_rate),
            ("--precision exact", self.precision() == JobPrecision::Exact),
        ];
        if let Some((flag, _)) = without.iter().find(|(_, is_given)| *is_given) {
            let problem = format!("{flag} has no effect with --method grpo; remove it");
            return Err(TunerError::Usage(problem));
        }
        let temperature = spec.grpo.temperature.unwrap_or(1.0);
        if !(temperature > 0.0 && temperature <= MAX_TEMPERATURE) {
            let problem = format!(
                "--temperature is {temperature}; it must be above 0, because equal answers teach nothing, and \
                 at most {MAX_TEMPERATURE}"
            );
            return Err(TunerError::Usage(problem));
        }
        Ok(())
    }
}

/// Fails if an option of GRPO is given for another method.
fn unused(options: &GrpoOptions) -> Result<(), TunerError> {
    let given = [
        ("--num-generations", options.num_generations.is_some()),
        ("--max-completion-length", options.max_completion_length.is_some()),
        ("--temperature", options.temperature.is_some()),
        ("--scale-rewards", options.scale_rewards.is_some()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(TunerError::Usage(format!("{flag} works only with --method grpo; remove it"))),
        None => Ok(()),
    }
}
