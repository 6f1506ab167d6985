//! Drafters, as the command line selects them.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    str::FromStr,
};

use draft_model::{
    draft::ModelDraft,
    load::{DraftError, DraftOptions, by_model},
};
use model_files::{model_files::ModelFiles, token_list::TokenList};
use serde_json::{Value, json};
use settings::ByteCount;
use speculation::{
    baselines::BaselineRule,
    calibration::Calibration,
    ngram::{AcceptanceTable, Ngram},
};

use super::exit::CliError;
use crate::{
    speculative::{ClientDrafter, DraftPolicy, DraftingStats},
    split_model::SplitModel,
};

#[derive(Debug, Clone, PartialEq, Eq)]
enum DrafterChoice {
    /// An n-gram table of the text so far.
    Ngram,
    /// A smaller model, at this path.
    Model(PathBuf),
}

impl FromStr for DrafterChoice {
    type Err = Infallible;

    fn from_str(said: &str) -> Result<Self, Infallible> {
        Ok(if said == "ngram" { Self::Ngram } else { Self::Model(said.into()) })
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct DraftArguments {
    /// Drafts tokens on this machine and verifies them together, so that the same answer takes fewer round
    /// trips: `ngram` predicts from the text so far, PATH names a smaller model with the same tokenizer
    #[arg(long, value_name = "ngram|PATH")]
    draft: Option<DrafterChoice>,
    /// Verifies exactly this many draft tokens at once; else as many as are worthwhile
    #[arg(long, value_name = "N", requires = "draft")]
    draft_nodes: Option<usize>,
    /// Memory for the KV cache of the draft model
    #[arg(long, value_name = "SIZE", default_value = "128MiB", requires = "draft")]
    draft_kv_bytes: ByteCount,
}

/// A drafter that is used for all answers of a conversation.
#[derive(Debug)]
pub(super) enum AnyDrafter {
    Ngram(Box<Ngram>),
    Model(Box<ModelDraft>),
}

impl DraftArguments {
    pub(super) fn effort(&self) -> DraftPolicy {
        self.draft_nodes.map_or(DraftPolicy::Worth, |nodes| DraftPolicy::Compared(BaselineRule::Nodes(nodes)))
    }

    /// Returns the drafter for `model` with `files`, if one is selected; a draft model computes on `cores`.
    pub(super) fn guesses(
        &self,
        model: &SplitModel,
        files: &ModelFiles,
        cores: &[usize],
    ) -> Result<Option<AnyDrafter>, CliError> {
        let load = |path: &Path| -> Result<AnyDrafter, DraftError> {
            let cores = cores.to_vec();
            let options = DraftOptions { cores, bytes: self.draft_kv_bytes.0, kv_dtype: None };
            let tokens = TokenList::of(files)?;
            let opened = by_model(path, (&tokens, model.config().vocab_size), &options)?;
            Ok(AnyDrafter::Model(Box::new(opened.drafter.text(&[], Calibration::default()))))
        };
        match &self.draft {
            None => Ok(None),
            Some(DrafterChoice::Ngram) => {
                Ok(Some(AnyDrafter::Ngram(Box::new(Ngram::new(&[], AcceptanceTable::default())))))
            }
            Some(DrafterChoice::Model(path)) => Ok(Some(load(path)?)),
        }
    }
}

impl AnyDrafter {
    /// Starts an answer to `prompt`. The acceptance probabilities learned before are kept.
    pub(super) fn begin(&mut self, prompt: &[u32]) -> ClientDrafter<'_> {
        match self {
            Self::Ngram(ngram) => {
                **ngram = Ngram::new(prompt, ngram.survival().clone());
                &mut **ngram
            }
            Self::Model(model) => {
                model.begin(prompt);
                &mut **model
            }
        }
    }
}

pub(super) fn report(drafted: &DraftingStats) -> Value {
    json!({
        "sweeps": drafted.trees,
        "drafted_tokens": drafted.nodes,
        "accepted_tokens": drafted.accepted,
        "accepted_per_sweep": per_sweep(drafted),
        "threshold": drafted.threshold,
        "drafting_s": drafted.drafting.as_secs_f64(),
        "ahead_tokens": drafted.ahead,
        "kept_tokens": drafted.kept,
        "hidden_s": drafted.hidden.as_secs_f64(),
    })
}

/// Returns the stats as text for a user, to be appended to a line; empty if no tree was verified.
pub(super) fn summary(drafted: &DraftingStats) -> String {
    let Some(accepted) = per_sweep(drafted) else { return String::new() };
    let hidden = match drafted.ahead {
        0 => String::new(),
        ahead => format!(
            ", {} of {ahead} tokens drafted during calls kept, {:.2} s of drafting hidden",
            drafted.kept,
            drafted.hidden.as_secs_f64()
        ),
    };
    format!("; {accepted:.1} draft tokens accepted per sweep{hidden}")
}

/// Returns the mean number of accepted tokens per verified tree; `None` if no tree was verified.
fn per_sweep(drafted: &DraftingStats) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "counts of one answer")]
    (drafted.trees > 0).then(|| drafted.accepted as f64 / drafted.trees as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_person_is_told_what_drafting_brought() {
        let some = DraftingStats { trees: 4, nodes: 20, accepted: 10, ..DraftingStats::default() };
        assert_eq!(summary(&DraftingStats::default()), "");
        assert_eq!(summary(&some), "; 2.5 draft tokens accepted per sweep");
        let ahead = DraftingStats { ahead: 9, kept: 3, hidden: Duration::from_millis(250), ..some };
        assert_eq!(
            summary(&ahead),
            "; 2.5 draft tokens accepted per sweep, 3 of 9 tokens drafted during calls kept, 0.25 s of drafting hidden"
        );
    }

    #[test]
    fn what_is_not_ngram_is_a_path() {
        assert_eq!("ngram".parse(), Ok(DrafterChoice::Ngram));
        assert_eq!("./ngram".parse(), Ok(DrafterChoice::Model("./ngram".into())));
    }
}
