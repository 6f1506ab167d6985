//! Tiers below the device: blocks come back unchanged, from any tier and after any event.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, channel},
};

use base_executor::kv_offload::{CopyNotifier, FileCopy, KvOffload};
use kv_cache::{
    Cache, CacheSettings,
    ledger::MemoryAccount,
    replacement::Variant,
    store::{BlockStore, StoreLayout},
};
use model::forward::BLOCK_TOKENS;

use super::*;

/// Timeout of a copy of a few bytes.
const WATCHDOG: Duration = Duration::from_secs(20);
const BLOCK_BYTES: usize = BLOCK_TOKENS * 8;

#[derive(Debug, Clone, Copy)]
struct Tiers {
    device: u32,
    host: u32,
    disk: u32,
}

/// Engine over tiers, the last of which is a file.
struct Tiered {
    bench: EngineHarness,
    copies: Receiver<FileCopy>,
    path: PathBuf,
    tiers: Tiers,
}

impl Tiered {
    fn open(path: &Path, tiers: Tiers, variant: Variant) -> Self {
        Self::within(&MemoryAccount::default(), path, tiers, variant)
    }

    /// Creates tiers whose memory below the device is charged to `account`.
    fn within(account: &MemoryAccount, path: &Path, tiers: Tiers, variant: Variant) -> Self {
        let Tiers { device, host, disk } = tiers;
        let mut bench = EngineHarness::new(EngineLimits { kv_blocks: device, ..ROOMY });
        let mut cache = Cache::new(CacheSettings {
            host,
            disk,
            variant,
            max_adapter_blocks: 0,
            ..CacheSettings::device_alone(device, BLOCK_TOKENS)
        });
        let (on_copied, copies) = channel();
        let mut offload = KvOffload::new(BLOCK_BYTES, host, account);
        if disk > 0 {
            let (fingerprint, block_tokens) = ([1; 32], BLOCK_TOKENS);
            let layout = StoreLayout { fingerprint, block_bytes: BLOCK_BYTES, block_tokens, slots: disk };
            let opened = BlockStore::open(&path.join("private/blocks"), &layout).unwrap();
            cache.restore(opened.blocks);
            let on_copied = CopyNotifier::new(move |copy| _ = on_copied.send(copy));
            offload = offload.with_store(opened.store, on_copied, None).unwrap();
        }
        bench.engine = bench.engine.with_memory(cache, offload);
        Self { bench, copies, path: path.to_owned(), tiers }
    }

    /// Steps until all requests are answered and the file is complete.
    fn drain(&mut self) {
        self.finish();
        while let Ok(copy) = self.copies.recv_timeout(Duration::from_millis(20)) {
            self.bench.engine.handle(EngineEvent::FileCopied(copy));
            self.bench.step();
        }
    }

    fn finish(&mut self) {
        while !self.bench.engine.is_idle() {
            self.bench.step();
            if self.is_stuck() {
                let copy =
                    self.copies.recv_timeout(WATCHDOG).expect("what is waited for comes, or its failure");
                self.bench.engine.handle(EngineEvent::FileCopied(copy));
            }
            self.copies.try_iter().for_each(|copy| self.bench.engine.handle(EngineEvent::FileCopied(copy)));
        }
        self.bench.step();
    }

    /// Whether all requests wait for a copy: waits for a slot or for blocks in memory end within a few steps.
    fn is_stuck(&mut self) -> bool {
        let waiting = |bench: &EngineHarness| (bench.stats().running == 0).then(|| bench.stats().waiting);
        let before = waiting(&self.bench).filter(|waiting| *waiting > 0);
        before.is_some()
            && (0..3).all(|_| {
                self.bench.step();
                waiting(&self.bench) == before
            })
    }

    /// Restarts as after `kill -9`: memory is lost.
    fn restart(self) -> Self {
        let Self { bench, copies, path, tiers } = self;
        drop((bench, copies));
        Self::open(&path, tiers, Variant::default())
    }

    fn ask(&mut self, request: Generate) -> RequestTranscript {
        let id = request.request;
        self.bench.send(request);
        self.finish();
        self.bench.answers.remove(&id).unwrap()
    }
}

fn long(id: u64) -> Generate {
    request(id, prompt(id, 10 * BLOCK_TOKENS + 3), 4)
}

#[test]
fn a_prefix_that_left_the_device_comes_back_from_below_with_the_same_bits() {
    for (host, disk) in [(64, 0), (0, 64), (64, 64)] {
        let directory = tempfile::tempdir().unwrap();
        let mut tiered = Tiered::open(directory.path(), Tiers { device: 12, host, disk }, Variant::default());
        let first = tiered.ask(long(1));
        tiered.drain();
        // Another prompt takes the whole device.
        tiered.ask(long(2));
        tiered.drain();
        let again = tiered.ask(Generate { request: 3, ..long(1) });
        assert_eq!(again.content(), first.content());
        assert_eq!(
            (first.cached_tokens, again.cached_tokens as usize),
            (0, 10 * BLOCK_TOKENS),
            "{host} {disk}"
        );
        let memory = tiered.bench.stats().memory;
        assert!(memory.fetched_host_blocks + memory.fetched_disk_blocks >= 9, "{memory:?}");
        assert_eq!(memory.lost_blocks, 0, "{memory:?}");
    }
}

#[test]
fn history_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let tiers = Tiers { device: 64, host: 0, disk: 64 };
    let mut tiered = Tiered::open(directory.path(), tiers, Variant::default());
    tiered.bench.load(5);
    let with = |request: Generate| Generate { adapter: Some([5; 32]), ..request };
    let (first, adapted) = (tiered.ask(long(1)), tiered.ask(with(long(2))));
    tiered.drain();
    let mut tiered = tiered.restart();
    tiered.bench.load(5);
    assert_eq!(tiered.bench.stats().memory.disk_blocks_used, 20);
    let again = tiered.ask(Generate { request: 11, ..long(1) });
    let adapted_again = tiered.ask(with(Generate { request: 12, ..long(2) }));
    assert_eq!((again.content(), adapted_again.content()), (first.content(), adapted.content()));
    assert_eq!([again.cached_tokens, adapted_again.cached_tokens], [160, 160]);
    // Another tenant or adapter shares no blocks on disk.
    let other = tiered.ask(Generate { request: 13, namespace: [9; 32], ..long(1) });
    assert_eq!((other.content(), other.cached_tokens), (first.content(), 0));
}

#[test]
fn a_damaged_block_is_computed_again_and_what_is_before_it_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let tiers = Tiers { device: 64, host: 0, disk: 64 };
    let mut tiered = Tiered::open(directory.path(), tiers, Variant::default());
    let first = tiered.ask(long(1));
    tiered.drain();
    let path = directory.path().join("private/blocks");
    let block = {
        let bytes = fs::read(&path).unwrap();
        // The file holds the fifth block's bytes exactly once.
        let mut pass = FakePass::new(64).0;
        let mut logits = Vec::new();
        let blocks: Vec<_> = (0..11).map(types::BlockId).collect();
        let tokens = &long(1).prompt;
        let slice = model::forward::SequenceSlice {
            trunk: &[],
            tokens,
            start: 0,
            blocks: &blocks,
            adapter: None,
            logits: LogitRows::None,
        };
        model::forward::ForwardPass::forward(&mut pass, &[slice], &mut logits).unwrap();
        let mut wanted = [0; BLOCK_BYTES];
        model::forward::ForwardPass::read_block(&mut pass, blocks[4], &mut wanted).unwrap();
        bytes.windows(BLOCK_BYTES).position(|window| window == wanted).expect("it was written")
    };
    let mut tiered = {
        let Tiered { bench, copies, .. } = tiered;
        drop((bench, copies));
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, block as u64 + 7).unwrap();
        file.write_all_at(&[byte[0] ^ 4], block as u64 + 7).unwrap();
        Tiered::open(directory.path(), tiers, Variant::default())
    };
    let again = tiered.ask(Generate { request: 11, ..long(1) });
    assert_eq!(again.content(), first.content());
    assert_eq!(again.cached_tokens as usize, 4 * BLOCK_TOKENS, "up to the damaged one");
    assert_eq!(tiered.bench.stats().memory.failed_copies, 1);
}

#[test]
fn a_tenant_who_scans_distinct_prompts_pushes_nobody_else_out() {
    let directory = tempfile::tempdir().unwrap();
    let mut tiered =
        Tiered::open(directory.path(), Tiers { device: 64, host: 0, disk: 0 }, Variant::default());
    let of = |tenant: u8, id: u64| Generate {
        namespace: [tenant; 32],
        owner: [tenant; 32],
        ..request(id, prompt(id, 4 * BLOCK_TOKENS + 1), 1)
    };
    let guests: Vec<_> = (1..=7).map(|tenant| of(tenant, tenant.into())).collect();
    guests.iter().for_each(|guest| _ = tiered.ask(guest.clone()));
    for scan in 100..200 {
        tiered.ask(of(99, scan));
    }
    let shares = tiered.bench.stats().memory.shares;
    assert_eq!((shares.len(), shares[0].owner), (8, [99; 32]), "{shares:?}");
    for guest in guests {
        let id = guest.request + 1000;
        let again = tiered.ask(Generate { request: id, ..guest });
        assert_eq!(again.cached_tokens as usize, 4 * BLOCK_TOKENS, "tenant {}", id - 1000);
    }
}

#[derive(Debug, Clone)]
enum MemoryAction {
    Ask { turns: Vec<u8>, adapter: bool, tokens: u32 },
    Cancel { back: u64 },
    Steps(u8),
    Wait { ms: u16 },
    Restart,
}

fn act() -> impl Strategy<Value = MemoryAction> {
    prop_oneof![
        8 => (prop::collection::vec(0..3_u8, 1..5), any::<bool>(), 1..20_u32)
            .prop_map(|(turns, adapter, tokens)| MemoryAction::Ask { turns, adapter, tokens }),
        1 => (1..4_u64).prop_map(|back| MemoryAction::Cancel { back }),
        6 => (1..30_u8).prop_map(MemoryAction::Steps),
        2 => (0..5000_u16).prop_map(|ms| MemoryAction::Wait { ms }),
        1 => Just(MemoryAction::Restart),
    ]
}

/// A conversation; equal turns give equal prefixes.
fn conversation(id: u64, turns: &[u8], adapter: bool, tokens: u32) -> Generate {
    let tokens_of = |turn: &u8| prompt(100 + u64::from(*turn), 2 * BLOCK_TOKENS + 5);
    let adapter = adapter.then_some([5; 32]);
    Generate { adapter, ..request(id, turns.iter().flat_map(tokens_of).collect(), tokens) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_where_everybody_is_answered_as_if_alone(
        (device, host, disk) in (14..30_u32, 0..20_u32, 0..40_u32),
        variant in prop::sample::select(Variant::ALL),
        acts in prop::collection::vec(act(), 1..30),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let tiers = Tiers { device, host, disk };
        let mut tiered = Tiered::open(directory.path(), tiers, variant);
        tiered.bench.load(5);
        let (mut id, mut asked) = (0, Vec::new());
        for act in acts {
            match act {
                MemoryAction::Ask { turns, adapter, tokens } => {
                    id += 1;
                    let request = conversation(id, &turns, adapter, tokens);
                    asked.push(request.clone());
                    tiered.bench.send(request);
                }
                MemoryAction::Cancel { back } => {
                    if let Some(cancelled) = id.checked_sub(back) {
                        tiered.bench.cancel(cancelled);
                        asked.retain(|request| request.request != cancelled || tiered.bench.answers.contains_key(&cancelled));
                    }
                }
                MemoryAction::Steps(steps) => (0..steps).for_each(|_| {
                    tiered.copies.try_iter().for_each(|copy| tiered.bench.engine.handle(EngineEvent::FileCopied(copy)));
                    tiered.bench.step();
                }),
                MemoryAction::Wait { ms } => *tiered.bench.clock.0.lock().unwrap() += Duration::from_millis(ms.into()),
                MemoryAction::Restart => {
                    // Gateways send unanswered requests again.
                    tiered.finish();
                    check(&tiered.bench, &mut asked);
                    tiered = tiered.restart();
                    tiered.bench.load(5);
                }
            }
        }
        tiered.finish();
        check(&tiered.bench, &mut asked);
        assert_nothing_held(&tiered.bench);
    }
}

fn check(bench: &EngineHarness, asked: &mut Vec<Generate>) {
    for request in asked.drain(..) {
        // A cancelled request may have had some of its tokens.
        let Some(answer) = bench.answers.get(&request.request) else { continue };
        if answer.finish.is_none() && answer.error.is_none() {
            continue;
        }
        let expected = alone(&request);
        if answer.error != Some(ErrorCode::ContextLengthExceeded) {
            assert_eq!(answer.content(), expected.content(), "{request:?}");
        }
    }
}

#[test]
fn the_ledger_holds_what_the_tiers_hold_and_nothing_when_they_are_gone() {
    let (place, account) = (tempfile::tempdir().unwrap(), MemoryAccount::new("history", 1 << 20));
    let tiers = Tiers { device: 12, host: 16, disk: 64 };
    let mut tiered = Tiered::within(&account, place.path(), tiers, Variant::default());
    for id in 1..6 {
        tiered.ask(long(id));
        tiered.drain();
        let used = tiered.bench.stats().memory.host_blocks_used;
        assert!(used > 0 && used <= 16);
        assert_eq!(account.held_bytes(), u64::from(used) * BLOCK_BYTES as u64);
    }
    drop(tiered);
    assert_eq!(account.held_bytes(), 0);
}

#[test]
fn where_there_is_no_memory_for_what_leaves_the_device_it_is_computed_again() {
    let (place, account) =
        (tempfile::tempdir().unwrap(), MemoryAccount::new("history", BLOCK_BYTES as u64 - 1));
    let tiers = Tiers { device: 12, host: 16, disk: 64 };
    let mut tiered = Tiered::within(&account, place.path(), tiers, Variant::default());
    let first = tiered.ask(long(1));
    tiered.drain();
    tiered.ask(long(2));
    tiered.drain();
    let again = tiered.ask(Generate { request: 3, ..long(1) });
    assert_eq!(again.content(), first.content());
    let memory = tiered.bench.stats().memory;
    assert_eq!((memory.host_blocks_used, memory.disk_blocks_used, account.held_bytes()), (0, 0, 0));
    assert!(memory.failed_copies > 0, "{memory:?}");
}
