//! A running channel allocates nothing at either end, counted by this test's own allocator.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a channel that cannot be set up has failed")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::{Duration, Instant},
};

use shmproto::{
    channel::{Doorbell, ExecutorChannel, Geometry, WakeCause, wait_any},
    layer::{CallClass, CallHeader, CallStatus, Dtype, ReplyHeader, RowSource, SiteOp, SitePath},
};

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

fn call(sequence: u64, dtype: Dtype) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype,
        site: 0,
        part: None,
        source: RowSource::Rows,
        sequence,
        rows: 1,
        input: 0,
        output: 8192,
    }
}

#[test]
fn calling_answering_and_waiting_take_no_memory() {
    let (mut executor, mut client) =
        ExecutorChannel::in_process(Geometry { slab_bytes: 1 << 14, depth: 4 }).unwrap();
    let (bell, mut rows) = (Doorbell::default(), [1.0; 1024]);
    let before = ALLOCATIONS.get();
    for sequence in 0..1000 {
        let dtype = Dtype::ALL[(sequence % 2) as usize];
        client.write_rows(0, dtype, &rows).unwrap();
        client.submit(&call(sequence, dtype)).unwrap();
        let until = Some(Instant::now() + Duration::from_micros(10));
        assert_eq!(wait_any(&bell, std::iter::once(&executor), Duration::ZERO, until), WakeCause::Called);
        let call = executor.take().unwrap().unwrap();
        executor.read_rows(call.input, dtype, &mut rows).unwrap();
        executor.write_rows(call.output, dtype, &rows).unwrap();
        executor.reply(&ReplyHeader::refusal(&call, CallStatus::Done, 0)).unwrap();
        assert!(client.wait(Duration::from_micros(1), Duration::from_micros(10)).unwrap().is_some());
        client.read_rows(call.output, dtype, &mut rows).unwrap();
        bell.ring();
        assert_eq!(wait_any(&bell, std::iter::once(&executor), Duration::ZERO, None), WakeCause::Rung);
        let until = Some(Instant::now() + Duration::from_micros(10));
        assert_eq!(wait_any(&bell, std::iter::once(&executor), Duration::ZERO, until), WakeCause::Late);
        assert_eq!(client.wait(Duration::ZERO, Duration::from_micros(10)), Ok(None));
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
