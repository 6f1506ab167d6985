//! Order of eviction from a full tier: what is cheap to restore goes first.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use kv_cache::{
    Cache, CacheSettings, Cursor, Namespace, Prefix, Tier,
    copy::CopyPriority,
    manager::{AdapterUnit, CopyOutcome, PlacementOutcome, TierCopy},
};
use types::{AdapterId, TenantId};

const BLOCK_TOKENS: usize = 2;
const OLD: [u32; 2] = [1, 1];
const RECENT: [u32; 2] = [2, 2];
const NEW: [u32; 2] = [3, 3];

fn namespace() -> Namespace {
    Namespace { adapter: None, sharing: [0; 32], owner: TenantId([0; 32]) }
}

fn cache(device: u32, host: u32) -> Cache {
    let mut cache = Cache::new(CacheSettings { host, ..CacheSettings::device_alone(device, BLOCK_TOKENS) });
    cache.set_spill_capacity(8);
    cache
}

fn compute(cache: &mut Cache, tokens: [u32; 2], at_s: u64) {
    cache.advance(Duration::from_secs(at_s), 1);
    let block = cache.allocate(1).unwrap()[0];
    let block = cache.insert(&mut Cursor::root(namespace()), &tokens, block);
    cache.release(&[block]);
}

fn spill(cache: &mut Cache) {
    cache.spill(1);
    for copy in cache.take_copies() {
        let TierCopy::Out { node, slots, .. } = copy else { continue };
        assert!(slots[0].is_some(), "the host had room");
        cache.copied_out(node, Tier::Host, CopyOutcome::Done);
    }
}

fn is_on_device(cache: &mut Cache, tokens: [u32; 2]) -> bool {
    let found = cache.lookup(namespace(), &tokens);
    cache.release(&found.blocks);
    !found.blocks.is_empty()
}

fn is_known(cache: &Cache, tokens: [u32; 2]) -> bool {
    let nothing = Prefix { blocks: Vec::new(), cursor: Cursor::root(namespace()) };
    cache.below(&nothing, &tokens) == 1
}

#[test]
fn what_the_host_has_leaves_the_device_before_what_nobody_else_has() {
    let mut cache = cache(2, 2);
    compute(&mut cache, RECENT, 1);
    spill(&mut cache);
    compute(&mut cache, OLD, 2);
    cache.advance(Duration::from_secs(3), 1);
    assert!(is_on_device(&mut cache, RECENT), "it is used again");
    let held = cache.allocate(1).unwrap();
    assert!(is_on_device(&mut cache, OLD) && !is_on_device(&mut cache, RECENT));
    cache.release(&held);
}

#[test]
fn what_the_device_has_leaves_the_host_before_what_nobody_else_has() {
    let mut cache = cache(2, 2);
    compute(&mut cache, OLD, 1);
    spill(&mut cache);
    compute(&mut cache, RECENT, 2);
    spill(&mut cache);
    // The old block leaves the device, and the host has it.
    compute(&mut cache, NEW, 3);
    assert!(!is_on_device(&mut cache, OLD) && is_known(&cache, OLD));
    // The host is full: OLD stays there, although it is the least recently used, since it has no other copy.
    spill(&mut cache);
    assert!(is_known(&cache, OLD) && is_on_device(&mut cache, RECENT));
    let held = cache.allocate(1).unwrap();
    assert!(is_known(&cache, NEW) && !is_on_device(&mut cache, NEW), "it was copied, so it can go");
    cache.release(&held);
}

#[test]
fn the_favourite_that_has_no_room_or_needs_none_keeps_no_other_from_coming() {
    let mut cache = cache(8, 0);
    let [favourite, large, small] = [1, 2, 3].map(|number| AdapterId([number; 32]));
    for (adapter, requests) in [(favourite, 3), (large, 2), (small, 1)] {
        (0..requests).for_each(|_| cache.note_request(Some(adapter)));
    }
    cache.advance(Duration::from_secs(1), 1);
    let blocks = |id| if id == favourite { None } else { Some(if id == large { 9 } else { 2 }) };
    assert_eq!(cache.wanted_adapter(blocks), Some(small));
    assert_eq!(cache.place_adapter(small, 2), PlacementOutcome::Placed);
    assert_eq!(cache.wanted_adapter(blocks), None);
}

#[test]
fn an_adapter_gives_up_the_blocks_that_came_last_and_before_its_history_does() {
    let id = AdapterId([1; 32]);
    let unit = AdapterUnit::Block { cost: 0.5 };
    let mut cache = Cache::new(CacheSettings { adapter_unit: unit, ..CacheSettings::device_alone(6, 1) });
    assert_eq!(cache.place_adapter(id, 4), PlacementOutcome::Placed);
    let place = cache.adapter_blocks(id).to_vec();
    let namespace = Namespace { adapter: Some(id), sharing: [0; 32], owner: TenantId([0; 32]) };
    let mut prefix = cache.lookup(namespace, &[7]);
    let block = cache.allocate(1).unwrap()[0];
    let block = cache.insert(&mut prefix.cursor, &[7], block);
    cache.release(&[block]);
    // One block is free; the adapter gives up its two least valuable ones.
    let held = cache.allocate(3).unwrap();
    assert_eq!(cache.take_shrunk_adapters(), [id, id]);
    assert_eq!(cache.adapter_blocks(id), &place[..2]);
    let found = cache.lookup(namespace, &[7]);
    assert_eq!(found.blocks.len(), 1, "its history is there, and can be used");
    cache.release(&found.blocks);
    // A request places the adapter in the available blocks, which its history frees.
    assert!(cache.pin_adapter(id));
    assert_eq!(cache.place_adapter(id, 4), PlacementOutcome::Placed);
    assert_eq!(cache.adapter_blocks(id).len(), 3);
    assert_eq!(cache.place_adapter(id, 4), PlacementOutcome::NoRoom);
    cache.release(&held);
    assert_eq!(cache.place_adapter(id, 4), PlacementOutcome::Placed);
    assert!(cache.adapter_blocks(id).starts_with(&place[..2]));
    assert_eq!((cache.counts().adapters, cache.statistics().shed_adapter_blocks), (4, 2));
    assert_eq!(cache.place_adapter(id, 4), PlacementOutcome::AlreadyThere);
    cache.unpin_adapter(id);
    cache.audit().unwrap();
}

#[test]
fn what_comes_without_haste_is_hastened_as_soon_as_somebody_asks_for_it() {
    let mut cache = cache(8, 2);
    compute(&mut cache, OLD, 1);
    spill(&mut cache);
    let held = cache.allocate(8).unwrap();
    cache.release(&held);
    cache.advance(Duration::from_secs(2), 0);
    cache.prefetch(1);
    let coming: Vec<_> = cache.take_copies();
    let [TierCopy::In { node, class: CopyPriority::SwapIn, .. }] = coming[..] else { panic!("{coming:?}") };
    let mut prefix = cache.lookup(namespace(), &OLD);
    assert_eq!((cache.fetch(&mut prefix, &OLD), cache.arrived(&[node])), (vec![node], None));
    let copies = cache.take_copies();
    assert!(matches!(copies[..], [TierCopy::Hasten { node: wanted }] if wanted == node), "{copies:?}");
    cache.release(&prefix.blocks);
}
