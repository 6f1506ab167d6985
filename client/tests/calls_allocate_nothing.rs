//! A repeated call through shared memory allocates nothing, counted by this test's own
//! allocator.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Duration,
};

use client::{
    session::{Session, calls::LayerCall},
    transport::local::LocalConnector,
};
use model::linear_sites::SiteId;
use shmproto::layer::{CallClass, SiteOp, SitePath};
use support::{
    executor, settings,
    test_endpoint::{MaliciousBehavior, TestEndpoint, private_directory},
    tiny, widths,
};

struct CountingAllocator;

thread_local! {
    /// Allocations of this thread, without those of the executor.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system allocator does all work, under the same conditions.
unsafe impl GlobalAlloc for CountingAllocator {
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
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_call_through_shared_memory_takes_no_memory_after_the_first_of_its_size() {
    let directory = private_directory();
    let executor = executor(&tiny("llama-tied"));
    let widths = widths(&executor);
    let socket = TestEndpoint::new(executor, widths.clone(), MaliciousBehavior::None).local(directory.path());
    let connector = LocalConnector::new(socket, Duration::from_micros(20), Duration::from_secs(20));
    let mut session = Session::open(Box::new(connector), settings()).unwrap();
    let (input, output) = widths[0];
    let (x, mut out) = (vec![0.5; 8 * input], vec![0.0; 8 * output]);
    let (op, path, class) = (SiteOp::Forward, SitePath::Fast, CallClass::Decode);
    let ask = LayerCall { site: SiteId(0), part: None, op, path, class };
    session.call(ask, &x, &mut out).unwrap();
    let before = ALLOCATIONS.get();
    for rows in [8, 1, 8, 3] {
        session.call(ask, &x[..rows * input], &mut out[..rows * output]).unwrap();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
