//! Drafts that are models: the base's own first layers with a draft adapter, or a smaller model beside it.

use std::{path::Path, sync::Arc};

use anyhow::Context as _;
use draft_model::load::{DraftError, DraftOptions, by_itself, by_model};
use kv_cache::ledger::{MemoryAccount, MemoryReservation, OutOfBudget};
use model::{
    adapter::DraftAdapter, deltas::prepared::PreparedAdapter, resident::SharedBase,
    weights::first::FirstLayersError,
};
use model_files::{model_files::ModelFiles, token_list::TokenList};
use settings::DraftChoice;
use shmproto::message::DraftKind;

use super::kv_dtype;
use crate::{config::ExecutorConfig, drafter::DrafterFactory, loader::PrepareError};

/// What the operator is told to do about a draft that there is no memory for.
const REMEDY: &str = "lower --draft-bytes, or take a smaller draft";

/// What draft adapters are computed with.
#[derive(Debug, Clone)]
pub(super) struct Drafting {
    base: SharedBase,
    options: DraftOptions,
    account: MemoryAccount,
}

/// What drafts may use, computing on `cores`.
fn options(config: &ExecutorConfig, cores: &[usize]) -> DraftOptions {
    DraftOptions { cores: cores.to_vec(), bytes: config.draft_bytes.0, kv_dtype: kv_dtype(config.kv_dtype) }
}

impl Drafting {
    /// Over this base, if draft adapters may draft.
    pub(super) fn new(
        config: &ExecutorConfig,
        base: SharedBase,
        cores: &[usize],
        account: &MemoryAccount,
    ) -> Option<Self> {
        let options = options(config, cores);
        let may = matches!(config.draft, DraftChoice::Auto | DraftChoice::EarlyExit);
        may.then(|| Self { base, options, account: account.clone() })
    }

    /// Has the base draft for itself: what is charged of it, and who does so.
    pub(super) fn by_itself(
        &self,
        adapter: &DraftAdapter,
    ) -> Result<(Arc<PreparedAdapter>, DrafterFactory), PrepareError> {
        let opened = by_itself(&self.base, adapter, &self.options).map_err(|error| match error {
            DraftError::Resident(_) | DraftError::Layers(FirstLayersError::Memory(_)) => {
                PrepareError::NoRoom(error.into())
            }
            other => PrepareError::Invalid(other.into()),
        })?;
        let no_room = |full: OutOfBudget| PrepareError::NoRoom(anyhow::Error::new(full).context(REMEDY));
        let held = self.account.charge(opened.bytes).map_err(no_room)?;
        let adapter = Arc::clone(&opened.adapter);
        Ok((adapter, DrafterFactory::combined(DraftKind::Itself, opened.drafter, held)))
    }
}

/// The smaller model that `config` names, if it does, as a draft for the base at `base` with so many tokens.
pub(super) fn model_of(
    config: &ExecutorConfig,
    (base, vocab_size): (&Path, usize),
    cores: &[usize],
    account: &MemoryAccount,
) -> anyhow::Result<Option<DrafterFactory>> {
    let DraftChoice::Model(path) = &config.draft else { return Ok(None) };
    let failed = || format!("--draft {} cannot draft", path.display());
    let tokens = TokenList::of(&ModelFiles::text_at(base)?).with_context(failed)?;
    let opened = by_model(path, (&tokens, vocab_size), &options(config, cores)).with_context(failed)?;
    tracing::info!(draft = %path.display(), bytes = opened.bytes, "a model drafts");
    let held: Result<MemoryReservation, OutOfBudget> = account.charge(opened.bytes);
    let held = held.map_err(|full| anyhow::anyhow!("no memory for a draft: {full}; {REMEDY}"))?;
    Ok(Some(DrafterFactory::combined(DraftKind::Model, opened.drafter, held)))
}
