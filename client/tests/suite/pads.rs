//! Pads on disk: each is used at most once, even after a kill, and damaged ones are rejected.

use std::{
    collections::BTreeSet,
    fs,
    io::{Seek as _, SeekFrom, Write as _},
    path::Path,
};

use crate::support::{
    ring::{maker, pool},
    tiny,
};
use client::{
    error::CallError,
    masking::{
        Direction::{self, Backward, Forward},
        one_time_pads::pool::{PadPool, PoolError, TakenPads},
    },
};
use model::linear_sites::SiteId;

const MODEL: &str = "llama-tied";
const SITE: SiteId = SiteId(0);
/// Bytes of a pad's key and its check in a file.
const KEY_BYTES: usize = 32 + 16;

fn prepared(directory: &Path, tokens: u64, directions: &[Direction]) -> PadPool {
    let mut pool = pool(&tiny(MODEL), directory);
    maker(&tiny(MODEL), 1 << 30).prepare(&mut pool, tokens, directions, &mut |_, _| {}).unwrap();
    pool
}

fn take(pool: &mut PadPool, site: SiteId, direction: Direction, rows: u64) -> Result<TakenPads, PoolError> {
    let taken = pool.take(site, direction, rows)?;
    let mut effects = Vec::new();
    pool.effects(&taken, &mut effects)?;
    assert!(effects.iter().any(|&word| word.to_bits() != 0));
    Ok(taken)
}

#[derive(Default)]
struct Auditor(BTreeSet<[u8; 32]>);

impl Auditor {
    fn used(&mut self, pads: &TakenPads) {
        for key in pads.keys() {
            assert!(self.0.insert(*key.bytes()), "a pad was used twice");
        }
    }
}

/// Sequence number and bytes of the journal's newer half.
fn newest(journal: &Path) -> (u64, Vec<u8>) {
    let bytes = fs::read(journal).unwrap();
    let half = bytes.len().next_multiple_of(8192) / 2;
    let generation = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let at = if generation(0) > generation(half) { 0 } else { half };
    (at as u64, bytes)
}

fn spoil(path: &Path, at: u64) {
    let mut file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let byte = fs::read(path).unwrap()[usize::try_from(at).unwrap()];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte ^ 0x40]).unwrap();
}

#[test]
fn a_process_that_ends_in_order_loses_no_pad_and_uses_none_twice() {
    let directory = tempfile::tempdir().unwrap();
    drop(prepared(directory.path(), 400, &[Forward]));
    let (mut auditor, mut rows) = (Auditor::default(), 0);
    let left = |pool: &PadPool| [SITE, SiteId(3)].map(|site| pool.left(site, Forward));
    let mut before = [400; 2];
    for round in 0..12 {
        let mut pool = PadPool::open(directory.path()).unwrap();
        assert_eq!(left(&pool), before);
        for _ in 0..=round {
            rows = rows % 9 + 1;
            auditor.used(&take(&mut pool, SITE, Forward, rows).unwrap());
            auditor.used(&take(&mut pool, SiteId(3), Forward, 1).unwrap());
        }
        before = left(&pool);
    }
    assert_eq!(auditor.0.len() as u64, 800 - before[0] - before[1]);
}

#[test]
fn a_journal_that_was_torn_or_has_decayed_gives_up_what_may_have_been_burnt() {
    let directory = tempfile::tempdir().unwrap();
    let journal = directory.path().join("journal");
    let mut pool = prepared(directory.path(), 1200, &[Forward, Backward]);
    let mut auditor = Auditor::default();
    auditor.used(&take(&mut pool, SITE, Forward, 40).unwrap());
    for at in [0, 9, 296] {
        // The next burn, whose pads are used; then its half of the journal is damaged.
        auditor.used(&take(&mut pool, SITE, Forward, 50).unwrap());
        auditor.used(&take(&mut pool, SITE, Backward, 7).unwrap());
        drop(pool);
        spoil(&journal, newest(&journal).0 + at);
        pool = PadPool::open(directory.path()).unwrap();
        auditor.used(&take(&mut pool, SITE, Forward, 3).unwrap());
        auditor.used(&take(&mut pool, SITE, Backward, 3).unwrap());
    }
    drop(pool);
    let (_, bytes) = newest(&journal);
    spoil(&journal, 20);
    spoil(&journal, bytes.len().next_multiple_of(8192) as u64 / 2 + 20);
    let error = PadPool::open(directory.path()).unwrap_err();
    assert!(matches!(&error, PoolError::Corrupt { path, .. } if *path == journal), "{error}");
}

#[test]
fn pads_are_erased_before_they_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let mut pool = prepared(directory.path(), 9, &[Forward]);
    let file = directory.path().join("00000.forward");
    let before = fs::read(&file).unwrap();
    // Keys lie before effects, with sixteen bytes after each.
    let (effects, effect_bytes) = (64 * KEY_BYTES, (before.len() - 64 * KEY_BYTES) / 9);
    let taken = pool.take(SITE, Forward, 4).unwrap();
    let after = fs::read(&file).unwrap();
    let keys = before.chunks(KEY_BYTES).zip(taken.keys());
    assert_eq!(keys.filter(|(bytes, key)| bytes[..32] == *key.bytes()).count(), 4);
    assert!(after[..4 * KEY_BYTES].iter().all(|&byte| byte == 0), "keys, before a row is covered");
    assert_eq!(after[4 * KEY_BYTES..], before[4 * KEY_BYTES..]);
    pool.effects(&taken, &mut Vec::new()).unwrap();
    let after = fs::read(&file).unwrap();
    assert!(
        after[effects..][..4 * effect_bytes].iter().all(|&byte| byte == 0),
        "effects, before they are used"
    );
    assert_eq!(after[effects + 4 * effect_bytes..], before[effects + 4 * effect_bytes..]);
}

#[test]
fn a_pool_is_one_processs_and_a_copy_of_it_nobodys() {
    let (directory, copies) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pool = prepared(directory.path(), 2, &[Forward]);
    assert!(matches!(PadPool::open(directory.path()), Err(PoolError::Held { .. })));
    drop(pool);
    for entry in fs::read_dir(directory.path()).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), copies.path().join(entry.file_name())).unwrap();
    }
    assert!(matches!(PadPool::open(copies.path()), Err(PoolError::Copied { .. })));
    assert!(PadPool::open(directory.path()).is_ok());
    let nothing = tempfile::tempdir().unwrap();
    assert!(matches!(PadPool::open(nothing.path()), Err(PoolError::Absent { .. })));
}

#[test]
fn what_is_broken_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let mut pool = prepared(directory.path(), 5, &[Forward]);
    let file = directory.path().join("00000.forward");
    let (effects, length) = (64 * KEY_BYTES as u64, fs::metadata(&file).unwrap().len());
    let effect_bytes = (length - effects) / 5;
    // The key of the second, and the effect of the fourth.
    for at in [KEY_BYTES as u64 + 7, effects + 3 * effect_bytes + 40] {
        spoil(&file, at);
        assert!(take(&mut pool, SITE, Forward, 1).is_ok());
        let error = take(&mut pool, SITE, Forward, 1).unwrap_err();
        assert!(matches!(&error, PoolError::Corrupt { path, .. } if *path == file), "{error}");
    }
    assert!(take(&mut pool, SITE, Forward, 1).is_ok(), "the one behind it is whole");
    drop(pool);
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 1).unwrap();
    assert!(matches!(PadPool::open(directory.path()), Err(PoolError::Corrupt { .. })));
    let manifest = directory.path().join("manifest");
    spoil(&manifest, 7);
    let error = PadPool::open(directory.path()).unwrap_err();
    assert!(error.to_string().contains("of another version"), "{error}");
    spoil(&manifest, 7);
    spoil(&manifest, 50);
    let error = PadPool::open(directory.path()).unwrap_err();
    assert!(matches!(&error, PoolError::Corrupt { path, .. } if path.ends_with("manifest")), "{error}");
}

#[test]
fn pads_that_were_being_written_when_the_process_ended_are_written_again() {
    let directory = tempfile::tempdir().unwrap();
    drop(prepared(directory.path(), 2, &[Forward]));
    let file = directory.path().join("00000.forward");
    let mut torn = fs::OpenOptions::new().append(true).open(&file).unwrap();
    torn.write_all(&[9; 700]).unwrap();
    let mut pool = PadPool::open(directory.path()).unwrap();
    assert_eq!(pool.left(SITE, Forward), 2);
    maker(&tiny(MODEL), 1 << 30).prepare(&mut pool, 3, &[Forward], &mut |_, _| {}).unwrap();
    assert_eq!(take(&mut pool, SITE, Forward, 5).unwrap().keys().len(), 5);
    assert!(matches!(take(&mut pool, SITE, Forward, 1), Err(PoolError::Empty { left: 0, wanted: 1, .. })));
}

#[test]
fn no_more_is_kept_than_may_be() {
    let directory = tempfile::tempdir().unwrap();
    let mut pool = pool(&tiny(MODEL), directory.path());
    let token = pool.token_bytes(Forward);
    let mut maker = maker(&tiny(MODEL), 10 * token);
    maker.prepare(&mut pool, 6, &[Forward], &mut |_, _| {}).unwrap();
    assert_eq!(pool.bytes(), 6 * token);
    let error = maker.prepare(&mut pool, 5, &[Forward], &mut |_, _| {}).unwrap_err();
    let CallError::Pads(error) = error else { panic!("{error}") };
    assert!(matches!(*error, PoolError::Budget { tokens: 5, fit: 4, .. }), "{error}");
    println!("{token} bytes for each token of {MODEL}");
}
