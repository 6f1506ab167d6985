//! The cache against a simple model: the content of each block is recorded, and every answer checked against
//! it.

use std::collections::{HashMap, HashSet};

use kv_cache::{Cache, CacheSettings, Cursor, Namespace};
use proptest::prelude::*;
use types::{AdapterId, BlockId, TenantId};

const BLOCKS: u32 = 12;
const BLOCK_TOKENS: usize = 2;

/// Adapter and all tokens up to a block's end, which determine its KV cache.
type Content = (u8, Vec<u32>);

#[derive(Debug, Clone)]
enum PropertyStep {
    /// A sequence begins: it looks its tokens up and allocates the rest.
    Begin {
        adapter: u8,
        tokens: Vec<u32>,
    },
    /// A sequence offers its next full block.
    Insert {
        sequence: usize,
    },
    End {
        sequence: usize,
    },
    Forget {
        adapter: u8,
    },
}

fn step() -> impl Strategy<Value = PropertyStep> {
    let tokens = prop::collection::vec(0..2u32, 1..14);
    prop_oneof![
        4 => (0..2u8, tokens).prop_map(|(adapter, tokens)| PropertyStep::Begin { adapter, tokens }),
        8 => (0..8usize).prop_map(|sequence| PropertyStep::Insert { sequence }),
        3 => (0..8usize).prop_map(|sequence| PropertyStep::End { sequence }),
        1 => (0..2u8).prop_map(|adapter| PropertyStep::Forget { adapter }),
    ]
}

fn namespace(adapter: u8) -> Namespace {
    Namespace { adapter: Some(AdapterId([adapter; 32])), sharing: [9; 32], owner: TenantId([adapter; 32]) }
}

struct ModelSequence {
    adapter: u8,
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
    cursor: Cursor,
    inserted: usize,
}

struct CacheModel {
    cache: Cache,
    content: HashMap<BlockId, Content>,
    sequences: Vec<ModelSequence>,
}

impl CacheModel {
    fn new() -> Self {
        Self {
            cache: Cache::new(CacheSettings::device_alone(BLOCKS, BLOCK_TOKENS)),
            content: HashMap::new(),
            sequences: Vec::new(),
        }
    }

    fn apply(&mut self, step: PropertyStep) {
        match step {
            PropertyStep::Begin { adapter, tokens } => self.begin(adapter, tokens),
            PropertyStep::Insert { sequence } if sequence < self.sequences.len() => self.insert(sequence),
            PropertyStep::End { sequence } if sequence < self.sequences.len() => {
                let ended = self.sequences.swap_remove(sequence);
                self.cache.release(&ended.blocks);
            }
            PropertyStep::Forget { adapter } => {
                self.cache.remove_adapter(AdapterId([adapter; 32]));
                let found = self.cache.lookup(namespace(adapter), &[0; BLOCK_TOKENS]);
                assert!(found.blocks.is_empty(), "a forgotten adapter answers nothing");
            }
            PropertyStep::Insert { .. } | PropertyStep::End { .. } => {}
        }
        self.check();
    }

    fn begin(&mut self, adapter: u8, tokens: Vec<u32>) {
        let found = self.cache.lookup(namespace(adapter), &tokens);
        for (index, block) in found.blocks.iter().enumerate() {
            let expected = (adapter, tokens[..(index + 1) * BLOCK_TOKENS].to_vec());
            assert_eq!(self.content.get(block), Some(&expected), "a hit holds exactly the asked prefix");
        }
        let missing = self.cache.blocks_for(tokens.len()) - found.blocks.len();
        let available = self.cache.available();
        let fresh = self.cache.allocate(missing);
        assert_eq!(fresh.is_some(), available >= missing, "available() says what allocate() can give");
        let Some(fresh) = fresh else {
            self.cache.release(&found.blocks);
            return;
        };
        let held = self.held();
        let inserted = found.blocks.len();
        let mut blocks = found.blocks;
        for block in fresh {
            assert!(!held.contains(&block) && !blocks.contains(&block), "nobody else holds a fresh block");
            blocks.push(block);
        }
        for (index, block) in blocks.iter().enumerate() {
            let end = ((index + 1) * BLOCK_TOKENS).min(tokens.len());
            self.content.insert(*block, (adapter, tokens[..end].to_vec()));
        }
        self.sequences.push(ModelSequence { adapter, tokens, blocks, cursor: found.cursor, inserted });
    }

    fn insert(&mut self, sequence: usize) {
        let sequence = &mut self.sequences[sequence];
        let start = sequence.inserted * BLOCK_TOKENS;
        let Some(tokens) = sequence.tokens.get(start..start + BLOCK_TOKENS) else { return };
        let mine = &mut sequence.blocks[sequence.inserted];
        *mine = self.cache.insert(&mut sequence.cursor, tokens, *mine);
        sequence.inserted += 1;
        let expected = (sequence.adapter, sequence.tokens[..start + BLOCK_TOKENS].to_vec());
        assert_eq!(self.content.get(mine), Some(&expected), "an exchanged block holds the same prefix");
    }

    fn held(&self) -> HashSet<BlockId> {
        self.sequences.iter().flat_map(|sequence| sequence.blocks.iter().copied()).collect()
    }

    fn check(&self) {
        let counts = self.cache.counts();
        assert_eq!(counts.free + counts.used + counts.cached, counts.total);
        assert_eq!(counts.used, self.held().len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_block_is_accounted_for_and_every_hit_is_true(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = CacheModel::new();
        for step in steps {
            world.apply(step);
        }
        for sequence in std::mem::take(&mut world.sequences) {
            world.cache.release(&sequence.blocks);
        }
        world.check();
        let all = world.cache.allocate(BLOCKS as usize);
        prop_assert_eq!(all.map(|blocks| blocks.len()), Some(BLOCKS as usize), "nothing has leaked");
    }
}

/// Computes `tokens` as a lone sequence that inserts all its blocks; returns the number of cached blocks.
fn serve(cache: &mut Cache, adapter: u8, tokens: &[u32]) -> usize {
    let mut prefix = cache.lookup(namespace(adapter), tokens);
    let found = prefix.blocks.len();
    let missing = cache.blocks_for(tokens.len()) - found;
    prefix.blocks.extend(cache.allocate(missing).expect("the pool is large enough"));
    for (index, tokens) in tokens.chunks_exact(BLOCK_TOKENS).enumerate().skip(found) {
        prefix.blocks[index] = cache.insert(&mut prefix.cursor, tokens, prefix.blocks[index]);
    }
    cache.release(&prefix.blocks);
    found
}

#[test]
fn a_prefix_is_found_again_up_to_its_last_full_block() {
    let mut cache = Cache::new(CacheSettings::device_alone(BLOCKS, BLOCK_TOKENS));
    assert_eq!(serve(&mut cache, 0, &[1, 2, 3, 4, 5]), 0);
    assert_eq!(serve(&mut cache, 0, &[1, 2, 3, 4, 9, 9]), 2);
    assert_eq!(serve(&mut cache, 0, &[1, 2, 9, 9, 3, 4]), 1);
    assert_eq!(serve(&mut cache, 1, &[1, 2, 3, 4]), 0, "another namespace shares nothing");
}

#[test]
fn the_prefix_used_least_recently_makes_room() {
    let mut cache = Cache::new(CacheSettings::device_alone(4, BLOCK_TOKENS));
    serve(&mut cache, 0, &[1, 1]);
    serve(&mut cache, 0, &[2, 2]);
    serve(&mut cache, 0, &[3, 3]);
    serve(&mut cache, 0, &[1, 1]);
    serve(&mut cache, 0, &[4, 4, 5, 5]);
    assert_eq!(cache.statistics().evicted_blocks, 1);
    assert_eq!(serve(&mut cache, 0, &[1, 1]), 1, "used again, so kept");
    assert_eq!(serve(&mut cache, 0, &[2, 2]), 0, "the oldest");
}

#[test]
fn forgetting_an_adapter_frees_what_nobody_holds_at_once() {
    let mut cache = Cache::new(CacheSettings::device_alone(4, BLOCK_TOKENS));
    serve(&mut cache, 0, &[1, 1, 2, 2]);
    serve(&mut cache, 1, &[1, 1]);
    let held = cache.lookup(namespace(0), &[1, 1]);
    assert_eq!(cache.remove_adapter(AdapterId([0; 32])), 2);
    let counts = cache.counts();
    assert_eq!((counts.free, counts.used, counts.cached), (2, 1, 1));
    cache.release(&held.blocks);
    assert_eq!(cache.counts().free, 3);
}
