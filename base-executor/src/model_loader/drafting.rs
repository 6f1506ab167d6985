//! Drafter models: the base's own first layers with a draft adapter, or a separate smaller model.

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

/// Advice to the operator when a draft exceeds its memory.
const REMEDY: &str = "lower --draft-bytes, or use a smaller draft model";

/// Base and limits for draft adapters.
#[derive(Debug, Clone)]
pub(super) struct Drafting {
    base: SharedBase,
    options: DraftOptions,
    account: MemoryAccount,
}

fn options(config: &ExecutorConfig, cores: &[usize]) -> DraftOptions {
    DraftOptions { cores: cores.to_vec(), bytes: config.draft_bytes.0, kv_dtype: kv_dtype(config.kv_dtype) }
}

impl Drafting {
    /// Returns the drafting over `base`, if the settings allow draft adapters.
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

    /// Opens a drafter on the base's first layers; returns the charged adapter and the drafter factory.
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

/// Opens the drafter model that `config` names, if any, for the base at `base`.
pub(super) fn model_of(
    config: &ExecutorConfig,
    (base, vocab_size): (&Path, usize),
    cores: &[usize],
    account: &MemoryAccount,
) -> anyhow::Result<Option<DrafterFactory>> {
    let DraftChoice::Model(path) = &config.draft else { return Ok(None) };
    let failed = || format!("--draft: cannot use {} as a draft model", path.display());
    let tokens = TokenList::of(&ModelFiles::text_at(base)?).with_context(failed)?;
    let opened = by_model(path, (&tokens, vocab_size), &options(config, cores)).with_context(failed)?;
    tracing::info!(draft = %path.display(), bytes = opened.bytes, "draft model loaded");
    let held: Result<MemoryReservation, OutOfBudget> = account.charge(opened.bytes);
    let held = held.map_err(|full| anyhow::anyhow!("no memory for the draft model: {full}; {REMEDY}"))?;
    Ok(Some(DrafterFactory::combined(DraftKind::Model, opened.drafter, held)))
}
