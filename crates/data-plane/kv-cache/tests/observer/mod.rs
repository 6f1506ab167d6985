//! An observer that knows the cache by its events alone.

use std::collections::HashSet;

use kv_cache::{Cache, Chain, block_events::BlockEvent};

/// Blocks in tiers, as the events since the start say.
pub(crate) struct Observer {
    held: HashSet<(Chain, usize)>,
}

impl Observer {
    pub(crate) fn new(cache: &mut Cache) -> Self {
        let mut observer = Self { held: HashSet::new() };
        observer.apply(cache.start_events());
        observer
    }

    pub(crate) fn follow(&mut self, cache: &mut Cache) {
        self.apply(cache.take_events());
    }

    /// Checks that a second observer, who begins now, is told exactly the blocks that this one knows.
    pub(crate) fn check(&self, cache: &mut Cache) {
        assert_eq!(Self::new(cache).held, self.held, "the events say what is in the cache");
    }

    fn apply(&mut self, events: Vec<BlockEvent>) {
        for event in events {
            match event {
                BlockEvent::Stored(block) => {
                    let parent = block.parent.unwrap_or_else(|| Chain::root(&block.namespace));
                    assert_eq!(parent.then(&block.tokens), block.chain, "a block follows its parent");
                    assert!(self.held.insert((block.chain, block.tier as usize)), "a block comes once");
                }
                BlockEvent::Removed { chain, tier } => {
                    assert!(self.held.remove(&(chain, tier as usize)), "a known block leaves");
                }
            }
        }
    }
}
