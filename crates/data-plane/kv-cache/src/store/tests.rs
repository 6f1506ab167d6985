//! Tests with damaged files, byte by byte: a read returns what was written or an error.

use std::fs;

use tempfile::TempDir;
use types::{AdapterId, TenantId};

use super::*;
use crate::namespace::{Chain, Namespace};

const LAYOUT: StoreLayout = StoreLayout { fingerprint: [7; 32], block_bytes: 40, block_tokens: 2, slots: 3 };
const PATH: &str = "private/blocks";

fn record(number: u32) -> BlockRecord {
    let adapter = (!number.is_multiple_of(2)).then_some(AdapterId([number as u8; 32]));
    let namespace = Namespace { adapter, sharing: [3; 32], owner: TenantId([4; 32]) };
    let tokens = [number, u32::MAX - number].into();
    BlockRecord {
        parent: Chain::root(&namespace),
        namespace,
        tokens,
        used_at_s: 1_700_000_000 + u64::from(number),
    }
}

fn bytes(number: u32) -> Vec<u8> {
    (0..LAYOUT.block_bytes).map(|index| (number as usize * 31 + index) as u8 + 1).collect()
}

/// Directory for a store, in memory if the system has such a place.
struct StoreDirectory {
    _directory: TempDir,
    path: PathBuf,
}

impl StoreDirectory {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Self { path: directory.path().join(PATH), _directory: directory }
    }

    fn open(&self) -> OpenedStore {
        BlockStore::open(&self.path, &LAYOUT).unwrap()
    }

    /// Creates a store whose slot `n` holds block `n`.
    fn filled() -> Self {
        let bench = Self::new();
        let store = bench.open().store;
        (0..LAYOUT.slots).for_each(|n| store.write(StoreSlot(n), &record(n), &bytes(n)).unwrap());
        bench
    }

    /// Replaces the file by `image`, and checks that only written blocks come back; returns their numbers.
    fn survives(&self, image: &[u8], what: &str) -> Vec<u32> {
        fs::write(&self.path, image).unwrap();
        let opened = match BlockStore::open(&self.path, &LAYOUT) {
            Ok(opened) => opened,
            Err(OpenError::NotAStore(_)) => return Vec::new(),
            Err(error) => panic!("{what}: {error}"),
        };
        for n in 0..LAYOUT.slots {
            // A block that was not reported cannot be read either.
            let is_told = opened.blocks.iter().any(|(slot, _)| slot.0 == n);
            let read = opened.store.read(StoreSlot(n), &record(n), &mut [0; LAYOUT.block_bytes]);
            assert!(is_told || read.is_err(), "{what}: slot {n}");
        }
        let readable = |(slot, found): &(StoreSlot, BlockRecord)| {
            let n = found.tokens[0];
            let mut into = [0; LAYOUT.block_bytes];
            assert_eq!(*found, record(n), "{what}");
            match opened.store.read(*slot, found, &mut into) {
                Ok(()) => assert_eq!(into.as_slice(), bytes(n), "{what}"),
                Err(StoreError::Damaged(_)) => return None,
                Err(error) => panic!("{what}: {error}"),
            }
            Some(n)
        };
        opened.blocks.iter().filter_map(readable).collect()
    }
}

#[test]
fn entries_lie_apart_from_each_other_and_from_all_bytes() {
    let format = StoreFormat::new(&StoreLayout { block_bytes: 5000, slots: 3000, ..LAYOUT });
    let slots = [0, 1, 1023, 1024, 1025, 2047, 2048, 2999].map(StoreSlot);
    let entry = |slot| (format.entry_at(slot), format.entry_bytes() as u64);
    let payload = |slot| (format.payload_at(slot), 5000);
    let mut ranges: Vec<(u64, u64)> =
        slots.into_iter().flat_map(|slot| [entry(slot), payload(slot)]).collect();
    ranges.push((0, HEADER_BYTES as u64));
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{ranges:?}");
    assert!(slots.iter().all(|&slot| format.payload_at(slot).is_multiple_of(4096)));
    assert_eq!(format.end(3000), format.payload_at(StoreSlot(2999)) + 8192);
}

#[test]
fn a_flipped_bit_costs_at_most_the_block_it_is_in() {
    let bench = StoreDirectory::filled();
    let intact = fs::read(&bench.path).unwrap();
    let format = StoreFormat::new(&LAYOUT);
    let (table, payloads) =
        (format.entry_at(StoreSlot(0)) as usize, format.payload_at(StoreSlot(0)) as usize);
    assert_eq!(bench.survives(&intact, "nothing"), [0, 1, 2]);
    let mut image = intact.clone();
    let entries = table..table + 4 * format.entry_bytes();
    let bytes = (0..HEADER_BYTES + 64).chain(entries.clone()).chain((payloads..intact.len()).step_by(7));
    for (at, bit) in bytes.flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        image[at] ^= 1 << bit;
        let left = bench.survives(&image, &format!("bit {bit} of byte {at}"));
        let least = if at < HEADER_BYTES { 0 } else { 2 };
        assert!(left.len() >= least, "bit {bit} of byte {at} leaves {left:?}");
        let is_covered = at < HEADER_BYTES || (table..table + 3 * format.entry_bytes()).contains(&at);
        assert!(!is_covered || left.len() < 3, "bit {bit} of byte {at} went unnoticed");
        image[at] ^= 1 << bit;
    }
}

#[test]
fn a_file_cut_anywhere_keeps_what_lies_before_the_cut() {
    let bench = StoreDirectory::filled();
    let intact = fs::read(&bench.path).unwrap();
    let format = StoreFormat::new(&LAYOUT);
    let table_end = format.entry_at(StoreSlot(3)) as usize;
    let payloads = format.payload_at(StoreSlot(0)) as usize;
    for length in (0..table_end + 2).chain(payloads - 1..=intact.len()) {
        let left = bench.survives(&intact[..length], &format!("{length} bytes"));
        let whole =
            (0..3).filter(|&n| length >= format.payload_at(StoreSlot(n)) as usize + LAYOUT.block_bytes);
        assert_eq!(left, whole.collect::<Vec<_>>(), "{length} bytes");
    }
}

/// Returns the file operations of a write of block 5 to slot 1, in order.
fn steps(format: &StoreFormat) -> [(u64, Vec<u8>); 3] {
    let (slot, new) = (StoreSlot(1), bytes(5));
    let entry = format.seal(slot, &record(5), &blake3::hash(&new));
    [
        (format.entry_at(slot), NO_SEAL.to_vec()),
        (format.payload_at(slot), new),
        (format.entry_at(slot), entry),
    ]
}

fn apply(image: &mut [u8], (at, bytes): &(u64, Vec<u8>), length: usize) {
    image[*at as usize..][..length].copy_from_slice(&bytes[..length]);
}

#[test]
fn a_write_torn_anywhere_leaves_the_old_block_the_new_one_or_none() {
    let bench = StoreDirectory::filled();
    let mut image = fs::read(&bench.path).unwrap();
    let format = StoreFormat::new(&LAYOUT);
    let steps = steps(&format);
    let mut done = image.clone();
    steps.iter().for_each(|step| apply(&mut done, step, step.1.len()));
    for (number, step) in steps.iter().enumerate() {
        for length in 0..=step.1.len() {
            let mut torn = image.clone();
            apply(&mut torn, step, length);
            let left = bench.survives(&torn, &format!("{length} bytes of step {number}"));
            let expected = match (number, length) {
                (0, 0) => vec![0, 1, 2],
                // The missing bytes may equal the earlier ones.
                _ if torn == done => vec![0, 5, 2],
                _ => vec![0, 2],
            };
            assert_eq!(left, expected, "{length} bytes of step {number}");
        }
        apply(&mut image, step, step.1.len());
    }
    let store = bench.open().store;
    store.write(StoreSlot(1), &record(5), &bytes(5)).unwrap();
    assert!(fs::read(&bench.path).unwrap() == done, "these are the steps");
}

#[test]
fn a_write_that_reached_the_disk_in_another_order_leaves_the_old_block_the_new_one_or_none() {
    let bench = StoreDirectory::filled();
    let intact = fs::read(&bench.path).unwrap();
    let steps = steps(&StoreFormat::new(&LAYOUT));
    for reached in 0..8 {
        for torn in 0..=LAYOUT.block_bytes {
            let mut image = intact.clone();
            for (number, step) in steps.iter().enumerate().filter(|(number, _)| reached >> number & 1 == 1) {
                apply(&mut image, step, if number == 1 { torn } else { step.1.len() });
            }
            let left = bench.survives(&image, &format!("steps {reached:03b}, {torn} bytes"));
            let other = left.iter().find(|n| ![0, 2].contains(*n));
            assert!(left.len() >= 2 && other.is_none_or(|n| [1, 5].contains(n)), "{left:?}");
        }
    }
}

#[test]
fn entries_of_an_earlier_store_are_not_those_of_a_later_one() {
    let bench = StoreDirectory::filled();
    let old = fs::read(&bench.path).unwrap();
    let other = StoreLayout { fingerprint: [8; 32], ..LAYOUT };
    // The header was written, and the machine stopped before the file was emptied.
    let header = *StoreFormat::new(&other).header();
    fs::write(&bench.path, [&header[..], &old[HEADER_BYTES..]].concat()).unwrap();
    let opened = BlockStore::open(&bench.path, &other).unwrap();
    assert_eq!((opened.found, opened.blocks.len(), opened.damaged), (StoreContents::Same, 0, 3));
}

#[test]
fn an_entry_that_was_written_to_the_wrong_place_is_noticed() {
    let bench = StoreDirectory::filled();
    let mut image = fs::read(&bench.path).unwrap();
    let format = StoreFormat::new(&LAYOUT);
    let at = |slot| format.entry_at(StoreSlot(slot)) as usize;
    image.copy_within(at(0)..at(1), at(1));
    assert_eq!(bench.survives(&image, "a moved entry"), [0, 2]);
}
