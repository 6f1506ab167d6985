//! The store at its public interface: against a simple model, over restarts, with concurrent users, and
//! without disk space.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::HashMap,
    env, fs,
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use kv_cache::{
    Chain, Namespace,
    store::{
        BlockRecord, BlockStore, OpenError, OpenedStore, StoreContents, StoreError, StoreLayout, StoreSlot,
    },
};
use proptest::prelude::*;
use tempfile::TempDir;
use types::{AdapterId, TenantId};

const LAYOUT: StoreLayout =
    StoreLayout { fingerprint: [7; 32], block_bytes: 5000, block_tokens: 16, slots: 4 };

fn record(number: u32) -> BlockRecord {
    let adapter = number.is_multiple_of(3).then_some(AdapterId([5; 32]));
    let namespace = Namespace { adapter, sharing: [9; 32], owner: TenantId([4; 32]) };
    let tokens = (number..number + 16).collect();
    BlockRecord { parent: Chain::root(&namespace).then(&[1]), namespace, tokens, used_at_s: number.into() }
}

fn bytes(number: u32) -> Vec<u8> {
    let mut bytes = vec![0; LAYOUT.block_bytes];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

struct StoreHarness {
    directory: TempDir,
}

impl StoreHarness {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("a/private/blocks")
    }

    fn open(&self) -> OpenedStore {
        self.open_as(&LAYOUT)
    }

    fn open_as(&self, layout: &StoreLayout) -> OpenedStore {
        BlockStore::open(&self.path(), layout).unwrap()
    }

    fn refused(&self) -> OpenError {
        BlockStore::open(&self.path(), &LAYOUT).unwrap_err()
    }

    fn filled(layout: &StoreLayout) -> Self {
        let bench = Self::new();
        let store = bench.open_as(layout).store;
        (0..layout.slots).for_each(|n| store.write(StoreSlot(n), &record(n), &bytes(n)).unwrap());
        bench
    }
}

fn read(store: &BlockStore, slot: u32, number: u32) -> Result<Vec<u8>, StoreError> {
    let mut into = vec![0; LAYOUT.block_bytes];
    store.read(StoreSlot(slot), &record(number), &mut into).map(|()| into)
}

fn slots(opened: &OpenedStore) -> Vec<u32> {
    opened.blocks.iter().map(|(slot, _)| slot.0).collect()
}

#[derive(Debug, Clone)]
enum StoreStep {
    Write { slot: u32, number: u32 },
    Read { slot: u32, number: u32 },
    Forget { slot: u32 },
    Reopen { slots: u32 },
}

fn step() -> impl Strategy<Value = StoreStep> {
    let (slot, number) = (0..LAYOUT.slots, 0..6u32);
    prop_oneof![
        4 => (slot.clone(), number.clone()).prop_map(|(slot, number)| StoreStep::Write { slot, number }),
        4 => (slot.clone(), number).prop_map(|(slot, number)| StoreStep::Read { slot, number }),
        1 => slot.prop_map(|slot| StoreStep::Forget { slot }),
        2 => (1..=LAYOUT.slots).prop_map(|slots| StoreStep::Reopen { slots }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn a_store_holds_what_was_written_last_over_every_restart(steps in prop::collection::vec(step(), 1..60)) {
        let bench = StoreHarness::new();
        let mut opened = bench.open();
        let mut model: HashMap<u32, u32> = HashMap::new();
        for step in steps {
            match step {
                StoreStep::Write { slot, number } if slot < opened.store.slots() => {
                    opened.store.write(StoreSlot(slot), &record(number), &bytes(number)).unwrap();
                    model.insert(slot, number);
                }
                StoreStep::Read { slot, number } if slot < opened.store.slots() => {
                    match read(&opened.store, slot, number) {
                        Ok(read) => prop_assert!(model[&slot] == number && read == bytes(number)),
                        Err(StoreError::Absent(_)) => prop_assert_ne!(model.get(&slot), Some(&number)),
                        Err(error) => prop_assert!(false, "{}", error),
                    }
                }
                StoreStep::Forget { slot } if slot < opened.store.slots() => {
                    opened.store.forget(StoreSlot(slot)).unwrap();
                    model.remove(&slot);
                }
                StoreStep::Reopen { slots } => {
                    drop(opened);
                    opened = bench.open_as(&StoreLayout { slots, ..LAYOUT });
                    model.retain(|&slot, _| slot < slots);
                    let expected: HashMap<u32, BlockRecord> =
                        model.iter().map(|(&slot, &number)| (slot, record(number))).collect();
                    let found: HashMap<u32, BlockRecord> =
                        opened.blocks.iter().map(|(slot, record)| (slot.0, record.clone())).collect();
                    prop_assert_eq!(found, expected);
                    prop_assert_eq!(opened.damaged, 0);
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_second_opener_is_told_so_until_the_first_is_gone() {
    let bench = StoreHarness::filled(&LAYOUT);
    let first = bench.open();
    assert!(matches!(bench.refused(), OpenError::InUse(_)));
    drop(first);
    assert_eq!(slots(&bench.open()), [0, 1, 2, 3]);
}

#[test]
fn a_file_of_another_model_or_other_blocks_is_begun_anew() {
    let others = [
        StoreLayout { fingerprint: [8; 32], ..LAYOUT },
        StoreLayout { block_bytes: 4999, ..LAYOUT },
        StoreLayout { block_tokens: 8, ..LAYOUT },
    ];
    for other in others {
        let bench = StoreHarness::filled(&LAYOUT);
        let opened = bench.open_as(&other);
        assert_eq!((opened.found, slots(&opened)), (StoreContents::Other, vec![]));
        drop(opened);
        let opened = bench.open();
        assert_eq!((opened.found, slots(&opened)), (StoreContents::Other, vec![]), "nothing is left of it");
        drop(opened);
        assert_eq!(bench.open().found, StoreContents::Same);
    }
}

#[test]
fn what_was_there_is_told() {
    let bench = StoreHarness::new();
    assert_eq!(bench.open().found, StoreContents::Nothing);
    assert_eq!(bench.open().found, StoreContents::Same);
    let change = |at: usize| {
        let mut image = fs::read(bench.path()).unwrap();
        image[at] ^= 4;
        fs::write(bench.path(), image).unwrap();
    };
    change(8);
    assert_eq!(bench.open().found, StoreContents::OtherVersion { version: 5 });
    change(40);
    assert_eq!(bench.open().found, StoreContents::Damaged);
    fs::write(bench.path(), [0; 8192]).unwrap();
    assert_eq!(bench.open().found, StoreContents::Nothing, "a crash can leave zeroes");
}

#[test]
fn fewer_slots_keep_what_fits_and_give_the_room_back() {
    let many = StoreLayout { slots: 1030, ..LAYOUT };
    let bench = StoreHarness::filled(&many);
    let room = || fs::metadata(bench.path()).unwrap().blocks() * 512;
    let before = room();
    for kept in [1025, 1024, 5, 0] {
        let few = bench.open_as(&StoreLayout { slots: kept, ..LAYOUT });
        assert_eq!(slots(&few), (0..kept).collect::<Vec<_>>());
        drop(few);
        let again = bench.open_as(&many);
        assert_eq!((slots(&again), again.damaged), ((0..kept).collect(), 0));
        if kept > 0 {
            assert_eq!(read(&again.store, kept - 1, kept - 1).unwrap(), bytes(kept - 1));
        }
    }
    assert!(room() < before / 10, "{} of {before} bytes are left", room());
}

#[test]
fn a_forgotten_block_gives_its_room_back_and_its_neighbours_stay() {
    let bench = StoreHarness::filled(&LAYOUT);
    let store = bench.open().store;
    store.forget(StoreSlot(1)).unwrap();
    store.forget(StoreSlot(1)).unwrap();
    assert!(matches!(read(&store, 1, 1), Err(StoreError::Absent(StoreSlot(1)))));
    assert_eq!(read(&store, 2, 2).unwrap(), bytes(2));
    drop(store);
    assert_eq!(slots(&bench.open()), [0, 2, 3]);
    let image = fs::read(bench.path()).unwrap();
    let is_there = |number| image.windows(64).any(|window| window == &bytes(number)[..64]);
    assert!(is_there(0) && !is_there(1), "nobody reads it from the file");
}

#[test]
fn only_what_was_asked_for_is_read() {
    let bench = StoreHarness::filled(&LAYOUT);
    let store = bench.open().store;
    assert!(matches!(read(&store, 1, 2), Err(StoreError::Absent(StoreSlot(1)))));
    let mut into = vec![0; LAYOUT.block_bytes];
    let used_later = BlockRecord { used_at_s: 99, ..record(1) };
    store.read(StoreSlot(1), &used_later, &mut into).unwrap();
    assert_eq!(into, bytes(1));
    let foreign = Namespace { sharing: [1; 32], ..record(1).namespace };
    let of_others = BlockRecord { namespace: foreign, ..record(1) };
    assert!(matches!(store.read(StoreSlot(1), &of_others, &mut into), Err(StoreError::Absent(StoreSlot(1)))));
    let elsewhere = BlockRecord { parent: Chain([0; 32]), ..record(1) };
    assert!(matches!(store.read(StoreSlot(1), &elsewhere, &mut into), Err(StoreError::Absent(StoreSlot(1)))));
}

#[test]
fn slots_are_written_and_read_at_once() {
    let bench = StoreHarness::filled(&LAYOUT);
    let store = &bench.open().store;
    thread::scope(|scope| {
        for slot in 0..3 {
            scope.spawn(move || {
                for number in 0..200 {
                    store.write(StoreSlot(slot), &record(number), &bytes(number)).unwrap();
                    assert_eq!(read(store, slot, number).unwrap(), bytes(number));
                }
            });
        }
        scope.spawn(|| {
            for number in 0..200 {
                match read(store, 0, number) {
                    Ok(read) => assert_eq!(read, bytes(number)),
                    Err(error) => assert!(!matches!(error, StoreError::Io { .. }), "{error}"),
                }
            }
        });
        scope.spawn(|| (0..200).for_each(|_| assert_eq!(read(store, 3, 3).unwrap(), bytes(3))));
    });
}

#[test]
fn directory_and_file_are_this_users_alone() {
    let bench = StoreHarness::filled(&LAYOUT);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&bench.path()), mode(bench.path().parent().unwrap())), (0o600, 0o700));
    fs::set_permissions(bench.path().parent().unwrap(), fs::Permissions::from_mode(0o750)).unwrap();
    let refused = bench.refused();
    assert!(matches!(refused, OpenError::DirectoryOpen { mode: 0o750, .. }), "{refused}");
    let message = refused.to_string();
    assert!(message.contains("chmod 700 "), "{message}");
}

#[test]
fn what_is_no_file_of_ours_is_refused_and_left_alone() {
    let bench = StoreHarness::filled(&LAYOUT);
    let (path, other) = (bench.path(), bench.directory.path().join("other"));
    fs::rename(&path, &other).unwrap();
    symlink(&other, &path).unwrap();
    assert!(matches!(bench.refused(), OpenError::NotAFile(_)), "a link");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(bench.refused(), OpenError::NotAFile(_)), "a directory");
    fs::remove_dir(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    assert!(matches!(bench.refused(), OpenError::NotAFile(_)), "a socket");
    drop(listener);
    fs::remove_file(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(matches!(bench.refused(), OpenError::NotAFile(_)), "a pipe");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "GGUF and so on").unwrap();
    assert!(matches!(bench.refused(), OpenError::NotAStore(_)), "a model");
    assert_eq!(fs::read(&path).unwrap(), b"GGUF and so on");
}

/// Variable of the process with a file size limit.
const LIMITED: &str = "TEST_LIMITED_STORE";

/// File size limit of that process, in bytes: the entries, and a block and a half.
const LIMIT_BYTES: u64 = (4096 + 1024 * 320 + 8192) + 4096;

/// A file size limit fails in the middle of a write, as a full file system does, and a test may set limits.
#[test]
fn where_there_is_no_room_the_slot_is_empty_and_the_others_stay() {
    if let Some(path) = env::var_os(LIMITED) {
        return without_room(Path::new(&path));
    }
    let bench = StoreHarness::new();
    let mut shell = Command::new("sh");
    // The signal would end the process. The limit is in blocks of 512 bytes.
    shell.args(["-c", "trap '' XFSZ; ulimit -f $0; exec \"$@\"", &(LIMIT_BYTES / 512).to_string()]);
    shell.arg(env::current_exe().unwrap());
    shell.args(["--exact", "where_there_is_no_room_the_slot_is_empty_and_the_others_stay"]);
    let output = shell.env(LIMITED, bench.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let opened = bench.open();
    assert_eq!((slots(&opened), opened.damaged), (vec![0], 0));
    opened.store.write(StoreSlot(1), &record(1), &bytes(1)).unwrap();
    assert_eq!(read(&opened.store, 1, 1).unwrap(), bytes(1));
}

fn without_room(path: &Path) {
    let store = BlockStore::open(path, &LAYOUT).unwrap().store;
    store.write(StoreSlot(0), &record(0), &bytes(0)).unwrap();
    for _ in 0..2 {
        let full = store.write(StoreSlot(1), &record(1), &bytes(1)).unwrap_err();
        assert!(matches!(full, StoreError::Full { .. }), "{full}");
        assert!(matches!(read(&store, 1, 1), Err(StoreError::Absent(StoreSlot(1)))));
        assert_eq!(read(&store, 0, 0).unwrap(), bytes(0));
    }
    assert_eq!(fs::metadata(path).unwrap().len(), LIMIT_BYTES, "the write broke off in the middle");
}
