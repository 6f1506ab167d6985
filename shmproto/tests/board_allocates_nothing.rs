//! A running board allocates nothing at either end, counted by this test's own allocator.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a board that cannot be set up has failed")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Duration,
};

use shmproto::board::{Board, Geometry, Slice, SliceState, TakeBack, WakeReason};

struct Counting;

thread_local! {
    /// Allocations of this thread, without those of the test runner.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system allocator does all work, under the same conditions.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller; `System` allocated the memory.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn slice(index: u32) -> Slice {
    Slice {
        image: 1,
        module: 0,
        first_row: index,
        rows: 1,
        width: 8,
        first_rank: 0,
        last_rank: 16,
        x_offset: 0,
        sums_offset: u64::from(index) * 16,
        sums_elements: 16,
    }
}

#[test]
fn posting_claiming_and_taking_back_take_no_memory() {
    let geometry = Geometry { x_elements: 64, sums_elements: 128, slices: 8, seats: 2 };
    let (board, mut producer) = Board::in_process(geometry).unwrap();
    let (mut seat, x) = (board.seat().unwrap().join_in_process(), [1.0; 64]);
    let slices: Vec<Slice> = (0..8).map(slice).collect();
    let (mut rows, mut sums) = ([0.0; 8], [0.0; 16]);
    assert_eq!(producer.workers(), 1);

    let before = ALLOCATIONS.get();
    for _ in 0..1000 {
        producer.announce(1);
        producer.post(&x, &slices).unwrap();
        assert_eq!(seat.wait(Duration::from_micros(50)), WakeReason::Job);
        for _ in 0..6 {
            let claim = seat.claim(|_, _| true).unwrap();
            claim.read_x(&mut rows);
            assert!(claim.done(&[rows[0]; 16]));
        }
        for index in (0..8).rev() {
            if let SliceState::Done(_) = producer.state(index) {
                producer.done(index).map(|done| done.read(0, &mut sums)).unwrap();
            } else {
                assert_eq!(producer.take_back(index), TakeBack::Taken);
            }
        }
        producer.rest();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!(board.stats().seats[0].slices, 6000);
}
