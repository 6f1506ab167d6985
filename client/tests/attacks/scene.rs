//! The victim: a client of the real model with a real adapter; and the public base.

use client::{
    masking::{Mask, Masking},
    session::{ClientSettings, Session},
    split_model::{ClientAdapter, SplitModel, SplitOptions},
};
use model::{
    client_weights::client_base::ClientBase,
    forward::{LinearGroup, LogitRows, SequenceSlice},
    linear_sites::SiteId,
    resident::KvPrecision,
};
use types::BlockId;

use crate::{
    executor::{CallEnd, CuriousExecutor, FloatRows},
    support::{executor, real_model, settings, tokens},
};

pub(crate) fn base() -> ClientBase {
    ClientBase::open(&real_model()).unwrap()
}

pub(crate) fn site(base: &ClientBase, layer: usize, group: LinearGroup) -> SiteId {
    SiteId::of(base.config(), layer, group)
}

pub(crate) fn block_sites(base: &ClientBase) -> impl Iterator<Item = SiteId> + use<> {
    (0..u32::try_from(4 * base.config().layers).unwrap()).map(SiteId)
}

/// Executor of the real model that records the rows of the sites `kept`.
pub(crate) fn curious(kept: impl IntoIterator<Item = SiteId>) -> CuriousExecutor {
    CuriousExecutor::new(executor(&real_model()), kept)
}

pub(crate) fn client(
    curious: &CuriousExecutor,
    masking: Masking,
    kv_dtype: Option<KvPrecision>,
) -> SplitModel {
    client_with(curious, kv_dtype, |session| masking.prepare(session, &mut |_, _| {}).unwrap())
}

pub(crate) fn client_with(
    curious: &CuriousExecutor,
    kv_dtype: Option<KvPrecision>,
    mask: impl FnOnce(&mut Session) -> Box<dyn Mask>,
) -> SplitModel {
    let mut session = Session::open(Box::new(curious.clone()), ClientSettings { ..settings() }).unwrap();
    let mask = mask(&mut session);
    let options = SplitOptions { kv_bytes: 96 << 20, kv_dtype, ..SplitOptions::default() };
    SplitModel::new(base(), session, mask, &options).unwrap()
}

pub(crate) fn pass(model: &mut SplitModel, prompt: &[u32], adapter: Option<&ClientAdapter>) {
    let blocks: Vec<BlockId> = (0..128).map(BlockId).collect();
    let adapter = adapter.map(ClientAdapter::prepared);
    let slice = SequenceSlice {
        trunk: &[],
        tokens: prompt,
        start: 0,
        blocks: &blocks,
        adapter,
        logits: LogitRows::Last,
    };
    model.forward(&[slice], &mut Vec::new()).unwrap();
}

/// Runs many prompts of one token, up to their first passes.
pub(crate) fn first_tokens(model: &mut SplitModel, prompts: &[u32], adapter: Option<&ClientAdapter>) {
    let adapter = adapter.map(ClientAdapter::prepared);
    for prompts in prompts.chunks(32) {
        let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
        let slice = |(token, block)| SequenceSlice {
            trunk: &[],
            tokens: std::slice::from_ref(token),
            start: 0,
            blocks: std::slice::from_ref(block),
            adapter,
            logits: LogitRows::None,
        };
        let batch: Vec<_> = prompts.iter().zip(&blocks).map(slice).collect();
        model.forward(&batch, &mut Vec::new()).unwrap();
    }
}

/// Different tokens in a mixed order.
pub(crate) fn distinct_tokens(base: &ClientBase, count: usize) -> Vec<u32> {
    let mut seen = std::collections::HashSet::new();
    let candidates = tokens(u32::try_from(4 * count).unwrap(), base.config().vocab_size);
    let distinct: Vec<u32> = candidates.into_iter().filter(|token| seen.insert(*token)).take(count).collect();
    assert_eq!(distinct.len(), count);
    distinct
}

/// True inputs of the sites: the prompt without masking, on the path of the masking mode. Only the tests use
/// them, not the attacks.
pub(crate) fn truth(prompt: &[u32], adapter: Option<&str>, kept: &[SiteId]) -> Vec<FloatRows> {
    use shmproto::layer::SitePath::Linear;
    let curious = curious(kept.iter().copied());
    let mut model = client(&curious, Masking::Off { path: Linear }, None);
    let adapter = adapter.map(|name| model.load_adapter(&crate::support::example_adapter(name)).unwrap());
    pass(&mut model, prompt, adapter.as_ref());
    kept.iter().map(|&site| curious.forward(site, CallEnd::Sent)).collect()
}
