//! The prefixes that this host has cached, with the number of their copies.
//!
//! Executors name a block by tenant, adapter version and tokens. Routers know neither tenants nor versions,
//! so a prefix is named here by the adapter's name in requests and the tokens. A block counts for each name
//! that its adapter had when the block came.

use std::{collections::HashMap, sync::Arc};

use shmproto::message::{AdapterIdBytes, AddedBlock, BlockTier, BlockUpdate, ChainBytes, RemovedBlock};

use crate::executor::block_feed::FeedSource;

/// Event of the host's prefixes, with its blocks in the order of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PrefixEvent {
    Stored(StoredPrefix),
    Removed {
        hashes: Vec<u64>,
        tier: BlockTier,
    },
    /// The host has no prefix any more.
    Cleared,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StoredPrefix {
    /// Hashes of the blocks, each of which covers all tokens before it.
    pub(crate) hashes: Vec<u64>,
    /// Hash of the block before the first one; `None` at the beginning of a prompt.
    pub(crate) parent: Option<u64>,
    /// Token ids of all blocks.
    pub(crate) tokens: Vec<u32>,
    /// Name of the adapter; `None` for the base.
    pub(crate) adapter: Option<Arc<str>>,
    pub(crate) tier: BlockTier,
}

/// Names of adapters in requests, by adapter id.
pub(crate) type NamesById = HashMap<AdapterIdBytes, Vec<Arc<str>>>;

/// A prefix under one adapter name.
#[derive(Debug, Clone)]
struct NamedPrefix {
    adapter: Option<Arc<str>>,
    hash: u64,
}

impl NamedPrefix {
    fn root(adapter: Option<Arc<str>>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv event root v1");
        if let Some(name) = &adapter {
            hasher.update(name.as_bytes());
        }
        Self { adapter, hash: public_hash(&hasher) }
    }

    fn then(&self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv event block v1");
        hasher.update(&self.hash.to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self { adapter: self.adapter.clone(), hash: public_hash(&hasher) }
    }
}

/// Returns a hash of 64 bits. The highest bit is set, because readers in Go take integers of 64 bits alone,
/// and MessagePack shortens smaller ones.
fn public_hash(hasher: &blake3::Hasher) -> u64 {
    let mut bytes = [0; 8];
    hasher.finalize_xof().fill(&mut bytes);
    u64::from_le_bytes(bytes) | 1 << 63
}

/// A block as one executor holds it.
#[derive(Debug)]
struct HeldBlock {
    prefixes: Vec<NamedPrefix>,
    tiers: Vec<BlockTier>,
}

/// All prefixes of the host.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    sources: HashMap<FeedSource, HashMap<ChainBytes, HeldBlock>>,
    copies: HashMap<(u64, BlockTier), u32>,
}

impl PrefixIndex {
    /// Applies the updates of an executor; returns the events that follow from them.
    pub(crate) fn apply(
        &mut self,
        source: FeedSource,
        updates: Vec<BlockUpdate>,
        names: &NamesById,
    ) -> Vec<PrefixEvent> {
        let mut events = Vec::new();
        for update in updates {
            match update {
                BlockUpdate::Added(block) => self.add(source, &block, names, &mut events),
                BlockUpdate::Removed(block) => self.remove(source, &block, &mut events),
                BlockUpdate::Cleared => self.clear(source, &mut events),
            }
        }
        events
    }

    fn add(
        &mut self,
        source: FeedSource,
        block: &AddedBlock,
        names: &NamesById,
        events: &mut Vec<PrefixEvent>,
    ) {
        let blocks = self.sources.entry(source).or_default();
        let parents = match block.parent {
            None => roots(block.adapter, names),
            // A block whose beginning is unknown names no prefix.
            Some(parent) => blocks.get(&parent).map(|parent| parent.prefixes.clone()).unwrap_or_default(),
        };
        if parents.is_empty() {
            return;
        }
        let prefixes = || parents.iter().map(|parent| parent.then(&block.tokens)).collect();
        let held = blocks
            .entry(block.chain)
            .or_insert_with(|| HeldBlock { prefixes: prefixes(), tiers: Vec::new() });
        if held.tiers.contains(&block.tier) {
            return;
        }
        held.tiers.push(block.tier);
        for (prefix, parent) in held.prefixes.iter().zip(&parents) {
            let copies = self.copies.entry((prefix.hash, block.tier)).or_default();
            *copies += 1;
            if *copies == 1 {
                let parent = block.parent.map(|_| parent.hash);
                push_stored(events, prefix, parent, block);
            }
        }
    }

    fn remove(&mut self, source: FeedSource, block: &RemovedBlock, events: &mut Vec<PrefixEvent>) {
        let Some(blocks) = self.sources.get_mut(&source) else { return };
        let Some(held) = blocks.get_mut(&block.chain) else { return };
        let Some(at) = held.tiers.iter().position(|tier| *tier == block.tier) else { return };
        held.tiers.swap_remove(at);
        for prefix in &held.prefixes {
            end_copy(&mut self.copies, prefix.hash, block.tier, events);
        }
        if held.tiers.is_empty() {
            blocks.remove(&block.chain);
        }
    }

    /// Drops all blocks of an executor.
    fn clear(&mut self, source: FeedSource, events: &mut Vec<PrefixEvent>) {
        let held = self.sources.remove(&source).unwrap_or_default();
        if held.is_empty() {
            return;
        }
        if self.sources.values().all(HashMap::is_empty) {
            self.copies.clear();
            return events.push(PrefixEvent::Cleared);
        }
        for HeldBlock { prefixes, tiers } in held.into_values() {
            for (prefix, tier) in
                prefixes.iter().flat_map(|prefix| tiers.iter().map(move |tier| (prefix, tier)))
            {
                end_copy(&mut self.copies, prefix.hash, *tier, events);
            }
        }
    }
}

/// Returns the empty prefixes of a block at the beginning of a prompt: one for each name of its adapter.
fn roots(adapter: Option<AdapterIdBytes>, names: &NamesById) -> Vec<NamedPrefix> {
    match adapter {
        None => vec![NamedPrefix::root(None)],
        Some(id) => names.get(&id).into_iter().flatten().cloned().map(Some).map(NamedPrefix::root).collect(),
    }
}

/// Adds a stored block to the last event if it continues that one.
fn push_stored(events: &mut Vec<PrefixEvent>, prefix: &NamedPrefix, parent: Option<u64>, block: &AddedBlock) {
    if let Some(PrefixEvent::Stored(last)) = events.last_mut()
        && last.tier == block.tier
        && last.adapter == prefix.adapter
        && parent.is_some()
        && parent == last.hashes.last().copied()
    {
        last.hashes.push(prefix.hash);
        return last.tokens.extend(&block.tokens);
    }
    events.push(PrefixEvent::Stored(StoredPrefix {
        hashes: vec![prefix.hash],
        parent,
        tokens: block.tokens.clone(),
        adapter: prefix.adapter.clone(),
        tier: block.tier,
    }));
}

/// Counts a copy less, and reports the last one.
fn end_copy(
    copies: &mut HashMap<(u64, BlockTier), u32>,
    hash: u64,
    tier: BlockTier,
    events: &mut Vec<PrefixEvent>,
) {
    let Some(left) = copies.get_mut(&(hash, tier)) else { return };
    *left -= 1;
    if *left > 0 {
        return;
    }
    copies.remove(&(hash, tier));
    match events.last_mut() {
        Some(PrefixEvent::Removed { hashes, tier: last }) if *last == tier => hashes.push(hash),
        _ => events.push(PrefixEvent::Removed { hashes: vec![hash], tier }),
    }
}

#[cfg(test)]
mod tests;
