//! The cache manager against recorded contents: every block and every slot, after any copies, losses and
//! restarts.

mod observer;

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use kv_cache::{
    Cache, CacheSettings, Chain, Cursor, Namespace, NodeId, Tier,
    manager::{AdapterUnit, CopyOutcome, PlacementOutcome, RemoveOutcome, TierCopy},
    replacement::Variant,
    store::{BlockRecord, StoreSlot},
};
use proptest::prelude::*;
use types::{AdapterId, BlockId, TenantId};

use self::observer::Observer;

const BLOCK_TOKENS: usize = 2;
const ADAPTERS: u8 = 3;
const ADAPTER_BLOCKS: u32 = 3;

#[derive(Debug, Clone)]
enum TieredStep {
    /// A sequence begins with the cached blocks of its tokens in all tiers.
    Begin {
        adapter: u8,
        tokens: Vec<u32>,
    },
    /// A sequence checks whether its awaited blocks have arrived.
    Look {
        sequence: usize,
    },
    /// A sequence offers its next full block.
    Insert {
        sequence: usize,
    },
    End {
        sequence: usize,
    },
    Copy {
        room: usize,
        spills: usize,
        prefetches: usize,
    },
    EndCopy {
        which: usize,
        is_good: bool,
    },
    Unload {
        adapter: u8,
    },
    Wait {
        ms: u64,
    },
    /// The process is killed, and another starts with the content of the disk.
    Restart,
}

fn step() -> impl Strategy<Value = TieredStep> {
    let tokens = prop::collection::vec(0..2u32, 1..14);
    prop_oneof![
        6 => (0..ADAPTERS, tokens).prop_map(|(adapter, tokens)| TieredStep::Begin { adapter, tokens }),
        6 => (0..8usize).prop_map(|sequence| TieredStep::Look { sequence }),
        12 => (0..8usize).prop_map(|sequence| TieredStep::Insert { sequence }),
        5 => (0..8usize).prop_map(|sequence| TieredStep::End { sequence }),
        5 => (0..6usize, 0..4usize, 0..3usize)
            .prop_map(|(room, spills, prefetches)| TieredStep::Copy { room, spills, prefetches }),
        12 => (0..8usize, prop::bool::weighted(0.9)).prop_map(|(which, is_good)| TieredStep::EndCopy { which, is_good }),
        1 => (0..ADAPTERS).prop_map(|adapter| TieredStep::Unload { adapter }),
        2 => (0..20_000u64).prop_map(|ms| TieredStep::Wait { ms }),
        1 => Just(TieredStep::Restart),
    ]
}

/// Adapter 0 is the base.
fn adapter(number: u8) -> Option<AdapterId> {
    (number > 0).then_some(AdapterId([number; 32]))
}

fn namespace(number: u8) -> Namespace {
    Namespace { adapter: adapter(number), sharing: [number; 32], owner: TenantId([number % 2; 32]) }
}

fn chain(number: u8, tokens: &[u32]) -> Chain {
    tokens
        .chunks_exact(BLOCK_TOKENS)
        .fold(Chain::root(&namespace(number)), |chain, tokens| chain.then(tokens))
}

struct TieredSequence {
    adapter: u8,
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
    /// Blocks on the device at the start; the others of `awaited` follow.
    found: usize,
    awaited: Vec<NodeId>,
    cursor: Cursor,
    inserted: usize,
    is_pinned: bool,
}

/// A copy in flight; outgoing data has been read from its block already.
enum CopyInFlight {
    Out { node: NodeId, tier: Tier, slot: u32, record: BlockRecord },
    In { node: NodeId, block: BlockId, tier: Tier, slot: u32 },
}

struct TieredModel {
    settings: CacheSettings,
    cache: Cache,
    observer: Observer,
    on_device: HashMap<BlockId, Chain>,
    below: HashMap<(Tier, u32), BlockRecord>,
    copies: Vec<CopyInFlight>,
    sequences: Vec<TieredSequence>,
    now: Duration,
}

impl TieredModel {
    fn new(settings: CacheSettings) -> Self {
        let mut cache = Cache::new(settings);
        Self {
            settings,
            observer: Observer::new(&mut cache),
            cache,
            on_device: HashMap::new(),
            below: HashMap::new(),
            copies: Vec::new(),
            sequences: Vec::new(),
            now: Duration::ZERO,
        }
    }

    fn apply(&mut self, step: TieredStep) {
        let sequences = self.sequences.len();
        match step {
            TieredStep::Begin { adapter, tokens } => self.begin(adapter, tokens),
            TieredStep::Look { sequence } if sequence < sequences => self.check_arrivals(sequence),
            TieredStep::Insert { sequence } if sequence < sequences => self.insert(sequence),
            TieredStep::End { sequence } if sequence < sequences => self.end(sequence),
            TieredStep::Look { .. } | TieredStep::Insert { .. } | TieredStep::End { .. } => {}
            TieredStep::Copy { room, spills, prefetches } => {
                self.cache.set_spill_capacity(room);
                self.cache.spill(spills);
                self.cache.prefetch(prefetches);
            }
            TieredStep::EndCopy { which, is_good } if which < self.copies.len() => {
                self.end_copy(which, is_good)
            }
            TieredStep::EndCopy { .. } => {}
            TieredStep::Unload { adapter: number } => {
                if let Some(id) = adapter(number)
                    && self.sequences.iter().all(|sequence| sequence.adapter != number)
                {
                    assert_ne!(self.cache.remove_adapter_place(id), RemoveOutcome::Pinned);
                    self.cache.remove_adapter(id);
                    let found = self.cache.lookup(namespace(number), &[0; BLOCK_TOKENS]);
                    assert!(found.blocks.is_empty(), "an adapter that is unloaded has nothing on the device");
                }
            }
            TieredStep::Wait { ms } => {
                self.now += Duration::from_millis(ms);
                self.cache.advance(self.now, self.sequences.len());
            }
            TieredStep::Restart => self.restart(),
        }
        self.take_copies();
        self.observer.follow(&mut self.cache);
        self.check();
    }

    fn begin(&mut self, number: u8, tokens: Vec<u32>) {
        self.cache.note_request(adapter(number));
        let is_pinned = adapter(number).is_some_and(|id| {
            let had = self.cache.adapter_blocks(id).to_vec();
            let place = self.cache.place_adapter(id, ADAPTER_BLOCKS);
            let has = self.cache.adapter_blocks(id);
            assert!(has.starts_with(&had), "what arrived first stays where it is");
            match place {
                PlacementOutcome::NoRoom | PlacementOutcome::TooLarge => assert_eq!(has, had),
                PlacementOutcome::AlreadyThere => assert_eq!(has.len(), ADAPTER_BLOCKS as usize),
                PlacementOutcome::Placed => assert!(has.len() > had.len()),
            }
            let is_whole = has.is_empty() || has.len() == ADAPTER_BLOCKS as usize;
            assert!(is_whole || self.settings.adapter_unit != AdapterUnit::Whole);
            // Earlier sequences pin the adapter's placement too.
            for other in self.sequences.iter_mut().filter(|other| other.adapter == number && !other.is_pinned)
            {
                other.is_pinned = self.cache.pin_adapter(id);
            }
            self.cache.pin_adapter(id)
        });
        self.take_copies();
        let mut found = self.cache.lookup(namespace(number), &tokens);
        let (at_once, below) = (found.blocks.len(), self.cache.below(&found, &tokens));
        let awaited = self.cache.fetch(&mut found, &tokens);
        assert!(awaited.len() <= below);
        self.sequences.push(TieredSequence {
            adapter: number,
            tokens,
            blocks: found.blocks,
            found: at_once,
            awaited,
            cursor: found.cursor,
            inserted: 0,
            is_pinned,
        });
        self.take_copies();
        self.check_arrivals(self.sequences.len() - 1);
    }

    /// Resumes the sequence once all its awaited blocks have arrived or failed.
    fn check_arrivals(&mut self, sequence: usize) {
        let Self { cache, sequences, on_device, .. } = self;
        let TieredSequence { adapter, tokens, blocks, found, awaited, cursor, inserted, .. } =
            &mut sequences[sequence];
        if *inserted > 0 || blocks.len() > *found + awaited.len() {
            return;
        }
        let Some(arrived) = cache.arrived(awaited) else { return };
        cache.release(&blocks.split_off(*found + arrived));
        if let Some(last) = awaited[..arrived].last() {
            *cursor = cache.cursor_at(*last).expect("it is held");
        }
        awaited.truncate(arrived);
        for (index, block) in blocks.iter().enumerate() {
            let expected = chain(*adapter, &tokens[..(index + 1) * BLOCK_TOKENS]);
            assert_eq!(on_device.get(block), Some(&expected), "a hit holds exactly the asked prefix");
        }
        *inserted = blocks.len();
        let missing = tokens.len().div_ceil(BLOCK_TOKENS) - blocks.len();
        let available = cache.available();
        let fresh = cache.allocate(missing);
        assert_eq!(fresh.is_some(), available >= missing, "available() says what allocate() can give");
        match fresh {
            Some(fresh) => {
                self.take_copies();
                let TieredSequence { adapter, tokens, blocks, inserted, .. } = &mut self.sequences[sequence];
                for (index, block) in fresh.iter().enumerate() {
                    let end = ((*inserted + index + 1) * BLOCK_TOKENS).min(tokens.len());
                    self.on_device.insert(*block, chain(*adapter, &tokens[..end]));
                }
                blocks.extend(fresh);
            }
            None => self.end(sequence),
        }
    }

    fn insert(&mut self, sequence: usize) {
        let sequence = &mut self.sequences[sequence];
        let start = sequence.inserted * BLOCK_TOKENS;
        if sequence.inserted >= sequence.blocks.len()
            || sequence.inserted < sequence.found + sequence.awaited.len()
        {
            return;
        }
        let Some(tokens) = sequence.tokens.get(start..start + BLOCK_TOKENS) else { return };
        let mine = &mut sequence.blocks[sequence.inserted];
        *mine = self.cache.insert(&mut sequence.cursor, tokens, *mine);
        sequence.inserted += 1;
        let expected = chain(sequence.adapter, &sequence.tokens[..start + BLOCK_TOKENS]);
        assert_eq!(self.on_device.get(mine), Some(&expected), "an exchanged block holds the same prefix");
    }

    fn end(&mut self, sequence: usize) {
        let ended = self.sequences.swap_remove(sequence);
        self.cache.release(&ended.blocks);
        if ended.is_pinned
            && let Some(id) = adapter(ended.adapter)
        {
            self.cache.unpin_adapter(id);
        }
    }

    /// Outgoing data is read from its block at once.
    fn take_copies(&mut self) {
        let gave_up = [self.cache.take_evicted_adapters(), self.cache.take_shrunk_adapters()];
        for id in gave_up.into_iter().flatten() {
            let users = self
                .sequences
                .iter()
                .filter(|sequence| sequence.is_pinned && adapter(sequence.adapter) == Some(id));
            assert_eq!(users.count(), 0, "an adapter that is used has left, or a part of it");
        }
        for copy in self.cache.take_copies() {
            match copy {
                TierCopy::Out { node, block, slots } => {
                    let Some(record) = self.cache.record(node, 7) else { continue };
                    assert_eq!(
                        self.on_device.get(&block),
                        Some(&record.chain()),
                        "what is copied is what it is said to be"
                    );
                    for (tier, slot) in Tier::LOWER.into_iter().zip(slots) {
                        if let Some(slot) = slot {
                            self.copies.push(CopyInFlight::Out { node, tier, slot, record: record.clone() });
                        }
                    }
                }
                TierCopy::In { node, block, tier, slot, .. } => {
                    self.copies.push(CopyInFlight::In { node, block, tier, slot })
                }
                TierCopy::Hasten { node } => {
                    let is_coming = |under: &CopyInFlight| matches!(under, CopyInFlight::In { node: coming, .. } if *coming == node);
                    assert!(self.copies.iter().any(is_coming), "what is hastened is on its way");
                }
            }
        }
    }

    fn end_copy(&mut self, which: usize, is_good: bool) {
        let outcome = |is_good| if is_good { CopyOutcome::Done } else { CopyOutcome::Failed };
        match self.copies.remove(which) {
            CopyInFlight::Out { node, tier, slot, record } => {
                if is_good {
                    self.below.insert((tier, slot), record);
                }
                self.cache.copied_out(node, tier, outcome(is_good));
            }
            CopyInFlight::In { node, block, tier, slot } => {
                if !self.cache.awaits(node, block) {
                    return;
                }
                let wanted = self.cache.record(node, 7).expect("it awaits it");
                // Data on its way down is still available.
                let on_its_way = self.copies.iter().rev().find_map(|copy| match copy {
                    CopyInFlight::Out { tier: to, slot: at, record, .. } if (*to, *at) == (tier, slot) => {
                        Some(record)
                    }
                    _ => None,
                });
                let read = on_its_way.or_else(|| self.below.get(&(tier, slot)));
                let is_it = is_good && read.is_some_and(|record| record.chain() == wanted.chain());
                if is_it {
                    self.on_device.insert(block, wanted.chain());
                }
                self.cache.copied_in(node, block, outcome(is_it));
            }
        }
    }

    fn restart(&mut self) {
        self.cache = Cache::new(self.settings);
        self.copies.clear();
        self.sequences.clear();
        self.on_device.clear();
        self.below.retain(|(tier, _), _| *tier == Tier::Disk);
        let records =
            self.below.iter().map(|((_, slot), record)| (StoreSlot(*slot), record.clone())).collect();
        self.cache.advance(self.now, 0);
        self.cache.restore(records);
        self.observer = Observer::new(&mut self.cache);
    }

    fn check(&self) {
        self.cache.audit().unwrap_or_else(|violation| panic!("{violation}"));
        let held: HashSet<BlockId> =
            self.sequences.iter().flat_map(|sequence| sequence.blocks.iter().copied()).collect();
        assert_eq!(self.cache.counts().used, held.len());
    }

    /// Ends all sequences and copies, and checks that no block has leaked.
    fn finish(mut self) {
        while !self.sequences.is_empty() {
            self.end(0);
        }
        self.take_copies();
        while !self.copies.is_empty() {
            self.end_copy(0, true);
        }
        self.observer.follow(&mut self.cache);
        self.observer.check(&mut self.cache);
        self.check();
        let all = self.settings.max_kv_blocks as usize;
        assert_eq!(self.cache.allocate(all).map(|blocks| blocks.len()), Some(all), "nothing has leaked");
    }
}

fn settings() -> impl Strategy<Value = CacheSettings> {
    let variant = prop::sample::select(Variant::ALL);
    let unit = prop_oneof![Just(AdapterUnit::Whole), Just(AdapterUnit::Block { cost: 0.5 })];
    (8..16u32, 0..8u32, 0..24u32, variant, unit).prop_map(|(device, host, disk, variant, unit)| {
        CacheSettings {
            host,
            disk,
            max_kv_blocks: device - 2,
            max_adapter_blocks: device / 2,
            adapter_unit: unit,
            variant,
            ..CacheSettings::device_alone(device, BLOCK_TOKENS)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_every_block_holds_what_it_is_said_to(
        settings in settings(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = TieredModel::new(settings);
        // A policy may have shares of its own.
        world.settings.max_kv_blocks = world.cache.available() as u32;
        for step in steps {
            world.apply(step);
        }
        world.finish();
    }
}
