use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use super::*;
use crate::manager::CacheSettings;

/// Number of blocks on the device.
const LIMIT: u32 = 100;

/// Progress of a fake copy.
#[derive(Debug, Default)]
struct FakeCopyState {
    is_complete: Cell<bool>,
    is_over: Cell<bool>,
    is_discarded: Cell<bool>,
}

#[derive(Debug, Clone)]
struct FakeCopy(Rc<FakeCopyState>);

impl DeviceTransfer for FakeCopy {
    fn missing_bytes(&self) -> u64 {
        u64::from(!self.is_complete())
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete.get()
    }

    fn is_over(&self) -> bool {
        self.0.is_over.get()
    }

    fn raise(&self, _: CopyPriority) {}

    fn discard(self) {
        assert!(!self.0.is_discarded.replace(true), "once");
    }
}

/// Adapters by number, their blocks, and the copies that were started.
struct ResidencyHarness {
    all: Residency<usize, FakeCopy>,
    pool: Cache,
    sent: RefCell<Vec<Rc<FakeCopyState>>>,
    /// Whether too many copies are in progress.
    is_full: bool,
}

fn id(key: usize) -> AdapterId {
    AdapterId([u8::try_from(key).unwrap(); 32])
}

impl ResidencyHarness {
    fn new() -> Self {
        let pool = Cache::new(CacheSettings::device_alone(LIMIT, 1));
        Self { all: Residency::default(), pool, sent: RefCell::default(), is_full: false }
    }

    fn load(&mut self, key: usize, blocks: u32) -> TransferStatus {
        let way = self.board(key, blocks);
        self.start_copies();
        way
    }

    fn board(&mut self, key: usize, blocks: u32) -> TransferStatus {
        self.all.load(&mut self.pool, id(key), &key, AdapterSize { blocks, bytes: 1 }, CopyPriority::Demand)
    }

    fn start_copies(&mut self) {
        let Self { all, pool, sent, is_full } = self;
        all.start_copies(pool, |key, &adapter, blocks, _| {
            assert_eq!(key, id(adapter));
            assert!(!blocks.is_empty(), "it has a place");
            (!*is_full).then(|| {
                let progress = Rc::new(FakeCopyState::default());
                sent.borrow_mut().push(Rc::clone(&progress));
                FakeCopy(progress)
            })
        });
    }

    fn add_user(&mut self, key: usize) {
        self.all.add_user(&mut self.pool, id(key));
    }

    fn arrived(&mut self, key: usize) {
        self.all.arrived(&mut self.pool, id(key));
    }

    fn await_arrival(&mut self, key: usize) {
        self.all.await_arrival(&mut self.pool, id(key));
    }

    fn remove(&mut self, key: usize) {
        self.all.remove(&mut self.pool, id(key));
    }

    /// Returns the number of blocks that adapters hold, and the pinned part.
    fn blocks(&self) -> [usize; 2] {
        let held = self.pool.counts().adapters;
        [held, held - (self.pool.available() - self.pool.counts().free)]
    }

    /// Ends the last started copy.
    fn ends(&self, is_complete: bool) {
        let sent = self.sent.borrow();
        let last = sent.last().unwrap();
        last.is_complete.set(is_complete);
        last.is_over.set(true);
    }
}

#[test]
fn who_found_too_much_on_its_way_keeps_its_place_and_sets_out_later() {
    let mut bench = ResidencyHarness { is_full: true, ..ResidencyHarness::new() };
    assert_eq!(bench.load(1, 10), TransferStatus::Missing { bytes: 1 });
    assert_eq!(bench.load(2, 10), TransferStatus::Missing { bytes: 1 });
    assert_eq!((bench.blocks()[0], bench.sent.borrow().len()), (20, 0));
    assert_eq!(bench.all.on_the_way_bytes(), 2);
    // One adapter is removed before its copy starts, and is loaded again.
    bench.remove(1);
    assert_eq!(bench.board(1, 10), TransferStatus::Missing { bytes: 1 });
    bench.is_full = false;
    bench.start_copies();
    assert_eq!(bench.sent.borrow().len(), 2, "each sets out once");
    bench.start_copies();
    assert_eq!(bench.sent.borrow().len(), 2);
}

#[test]
fn who_waits_for_one_that_has_not_set_out_keeps_its_place() {
    let mut bench = ResidencyHarness::new();
    assert_eq!(bench.board(1, 60), TransferStatus::Missing { bytes: 1 });
    bench.await_arrival(1);
    assert_eq!((bench.blocks()[1], bench.board(2, 60)), (60, TransferStatus::NoRoom));
    bench.start_copies();
    bench.ends(true);
    bench.arrived(1);
    assert_eq!((bench.blocks()[1], bench.board(2, 60)), (0, TransferStatus::Missing { bytes: 1 }));
    // An adapter that is evicted before its copy starts never starts.
    assert_eq!(bench.board(3, 60), TransferStatus::Missing { bytes: 1 });
    bench.start_copies();
    assert_eq!(bench.sent.borrow().len(), 2);
}

#[test]
fn who_failed_is_not_sent_again_until_it_was_unloaded() {
    let mut bench = ResidencyHarness::new();
    assert_eq!(bench.load(1, 10), TransferStatus::Missing { bytes: 1 });
    bench.await_arrival(1);
    bench.arrived(1);
    assert_eq!(bench.blocks()[1], 10, "that was news of another copy");
    bench.ends(false);
    bench.arrived(1);
    assert!(bench.all.has_failed(id(1)));
    assert_eq!((bench.blocks()[1], bench.load(1, 10)), (0, TransferStatus::NoRoom));
    // Arrived bytes of the failed copy give way to another adapter.
    assert_eq!(bench.load(2, 95), TransferStatus::Missing { bytes: 1 });
    assert!(bench.sent.borrow()[0].is_discarded.get() && bench.all.has_failed(id(1)));
    bench.remove(1);
    bench.remove(2);
    assert_eq!(bench.load(1, 10), TransferStatus::Missing { bytes: 1 });
}

#[test]
fn any_order_of_asking_holding_and_unloading_keeps_the_books() {
    const SIZES: [u32; 6] = [30, 60, 30, 90, 110, 10];
    let (mut bench, mut users, mut state) = (ResidencyHarness::new(), [0u32; 6], 1u64);
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (key, action) = ((state >> 33) as usize % 6, (state >> 40) % 10);
        bench.is_full = (state >> 50).is_multiple_of(2);
        match action {
            0..3 => match bench.load(key, SIZES[key]) {
                TransferStatus::Missing { .. } if state >> 60 == 0 => bench.await_arrival(key),
                way => {
                    if way == TransferStatus::NoRoom {
                        bench.all.leave_out(id(key), &key);
                    }
                    bench.add_user(key);
                    users[key] += 1;
                }
            },
            3..6 if users[key] > 0 => {
                bench.all.release(&mut bench.pool, id(key));
                users[key] -= 1;
            }
            6 if users[key] == 0 => bench.remove(key),
            7..9 if !bench.sent.borrow().is_empty() => {
                bench.ends(state >> 61 != 0);
                bench.arrived(key);
            }
            _ => {
                for (_, key) in bench.all.left_out() {
                    bench.load(key, SIZES[key]);
                }
            }
        }
        bench.all.apply_evictions(&mut bench.pool);
        check(&bench, &users, &SIZES);
    }
    for (key, &users) in users.iter().enumerate() {
        (0..users).for_each(|_| _ = bench.all.release(&mut bench.pool, id(key)));
    }
    (0..6).for_each(|key| bench.remove(key));
    assert_eq!((bench.blocks()[0], bench.all.adapters.len()), (0, 0));
    assert!(bench.sent.borrow().iter().all(|copy| copy.is_discarded.get()), "no copy is forgotten");
}

/// Checks that exactly placed adapters have copies, and exactly used and awaited ones are pinned.
fn check(bench: &ResidencyHarness, users: &[u32], sizes: &[u32]) {
    bench.pool.audit().unwrap();
    let (mut held, mut pinned) = (0, 0);
    for (key, &size) in sizes.iter().enumerate() {
        let entry = bench.all.adapters.get(&id(key));
        let is_placed = entry.is_some_and(|entry| {
            entry.copy().is_some() || matches!(entry.state, ResidencyState::Boarding { .. })
        });
        assert_eq!(bench.pool.has_adapter_place(id(key)), is_placed, "{key}");
        if let Some(entry) = entry.filter(|_| is_placed) {
            let is_awaited = matches!(
                entry.state,
                ResidencyState::Placed { is_awaited: true, .. }
                    | ResidencyState::Boarding { is_awaited: true, .. }
            );
            held += size as usize;
            pinned += if users[key] > 0 || is_awaited { size as usize } else { 0 };
        }
    }
    assert_eq!(bench.blocks(), [held, pinned]);
}
