use super::*;

fn added(chain: u8, parent: Option<u8>, adapter: Option<u8>, tokens: &[u32]) -> BlockUpdate {
    BlockUpdate::Added(AddedBlock {
        chain: [chain; 32],
        parent: parent.map(|parent| [parent; 32]),
        adapter: adapter.map(|adapter| [adapter; 32]),
        tokens: tokens.to_vec(),
        tier: BlockTier::Device,
    })
}

fn removed(chain: u8) -> BlockUpdate {
    BlockUpdate::Removed(RemovedBlock { chain: [chain; 32], tier: BlockTier::Device })
}

fn names(known: &[(u8, &[&str])]) -> NamesById {
    let named = |(id, names): &(u8, &[&str])| ([*id; 32], names.iter().map(|&name| name.into()).collect());
    known.iter().map(named).collect()
}

fn stored(event: &PrefixEvent) -> &StoredPrefix {
    match event {
        PrefixEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_that_follow_each_other_are_one_event() {
    let mut index = PrefixIndex::default();
    let updates = vec![added(1, None, None, &[5, 6]), added(2, Some(1), None, &[7, 8])];
    let events = index.apply(1, updates, &names(&[]));
    let [event] = &events[..] else { panic!("{events:?}") };
    let StoredPrefix { hashes, parent, tokens, adapter, tier } = stored(event);
    assert_eq!((hashes.len(), *parent, adapter, *tier), (2, None, &None, BlockTier::Device));
    assert_eq!(tokens, &[5, 6, 7, 8]);
    let last = hashes[1];
    let events = index.apply(1, vec![added(3, Some(2), None, &[9, 9])], &names(&[]));
    assert_eq!(stored(&events[0]).parent, Some(last), "a later block names the one before it");
}

#[test]
fn the_first_copy_of_a_prefix_appears_and_the_last_one_goes() {
    let mut index = PrefixIndex::default();
    let none = names(&[]);
    // Two tenants on one executor, and a second executor.
    let first = index.apply(1, vec![added(1, None, None, &[5])], &none);
    assert_eq!(first.len(), 1);
    assert!(index.apply(1, vec![added(2, None, None, &[5])], &none).is_empty());
    assert!(index.apply(2, vec![added(1, None, None, &[5])], &none).is_empty());
    assert!(index.apply(1, vec![added(1, None, None, &[5])], &none).is_empty(), "a block comes once");
    assert!(index.apply(1, vec![removed(1), removed(2), removed(2), removed(9)], &none).is_empty());
    let last = index.apply(2, vec![removed(1)], &none);
    let hashes = stored(&first[0]).hashes.clone();
    assert_eq!(last, [PrefixEvent::Removed { hashes, tier: BlockTier::Device }]);
    assert!(index.copies.is_empty() && index.sources.values().all(HashMap::is_empty), "nothing is kept");
}

#[test]
fn adapters_and_the_base_have_prefixes_of_their_own() {
    let mut index = PrefixIndex::default();
    let known = names(&[(1, &["pirate", "buccaneer"])]);
    let updates = vec![
        added(1, None, None, &[5]),
        added(2, None, Some(1), &[5]),
        added(3, Some(2), Some(1), &[6]),
        added(4, None, Some(2), &[5]),
    ];
    let events = index.apply(1, updates, &known);
    let mut seen: Vec<_> =
        events.iter().map(stored).map(|event| (event.adapter.as_deref(), event.tokens.clone())).collect();
    seen.sort();
    let expected = [
        (None, vec![5]),
        (Some("buccaneer"), vec![5]),
        (Some("buccaneer"), vec![6]),
        (Some("pirate"), vec![5]),
        (Some("pirate"), vec![6]),
    ];
    assert_eq!(seen, expected, "an adapter without a name is unknown to routers");
    let mut hashes: Vec<u64> = events.iter().flat_map(|event| stored(event).hashes.clone()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 5);
    assert!(hashes.iter().all(|hash| hash >> 63 == 1));
}

#[test]
fn a_lost_executor_takes_its_blocks_along() {
    let mut index = PrefixIndex::default();
    let none = names(&[]);
    index.apply(1, vec![added(1, None, None, &[5]), added(2, Some(1), None, &[6])], &none);
    index.apply(2, vec![added(1, None, None, &[5])], &none);
    let lost = index.apply(1, vec![BlockUpdate::Cleared], &none);
    assert!(matches!(&lost[..], [PrefixEvent::Removed { hashes, .. }] if hashes.len() == 1), "{lost:?}");
    assert_eq!(index.apply(2, vec![BlockUpdate::Cleared], &none), [PrefixEvent::Cleared]);
    assert!(index.apply(2, vec![BlockUpdate::Cleared], &none).is_empty(), "there was nothing left");
}

#[test]
fn a_block_whose_beginning_is_unknown_is_left_out() {
    let mut index = PrefixIndex::default();
    assert!(index.apply(1, vec![added(2, Some(1), None, &[6])], &names(&[])).is_empty());
}
