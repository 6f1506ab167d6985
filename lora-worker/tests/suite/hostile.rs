//! An executor that writes garbage: a worker survives any input, and serves the next executor.

use std::sync::atomic::{AtomicU32, Ordering};

use shmproto::{
    fd_passing::{SlotGranted, ToWorker},
    region::{PeerAccess, Region},
};

use crate::{
    executor::{BoardExecutor, GEOMETRY, ModuleShape, SliceWork, adapter, bits, numbers},
    worker::{WorkerDirectory, until},
};

const SHAPE: ModuleShape = ModuleShape {
    module: 3,
    rank: 16,
    columns: 64,
    rows: 64,
    precision: kernels::lora::LoraPrecision::Exact,
};

/// Checks that the worker serves another executor.
fn serves_another(place: &WorkerDirectory, pid: u32) {
    let mut executor = BoardExecutor::new(place);
    let peer = executor.seat();
    assert_eq!(peer.pid, pid, "it is the same process");
    let (image, work) = (adapter(1, &[SHAPE]), SliceWork::of(&SHAPE, 2));
    peer.offer(1, &image).unwrap();
    assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&image)));
}

/// Offsets in the control region, in words; docs/PROTOCOL.md has the layout.
const JOB: usize = 16;
const ANNOUNCED: usize = 18;
const SLICES: usize = 48 + 32 * GEOMETRY.seats;
const SLICE: usize = 32;

/// Gives the first slices all states, with this worker and its adapter, so that the worker tries them.
fn invite(words: &[AtomicU32], step: u32) {
    let store = |word: usize, value| words[word].store(value, Ordering::Release);
    store(ANNOUNCED, 1);
    store(JOB, step | 1);
    for slice in [SLICES, SLICES + SLICE] {
        // Image 1, module 3.
        store(slice + 16, 1);
        store(slice + 17, 0);
        store(slice + 20, SHAPE.module);
        store(slice + 1, step | 1);
        store(slice, step / 4 % 6);
    }
}

#[test]
fn garbage_on_the_board_does_not_end_a_worker() {
    for seed in 1..=4 {
        let place = WorkerDirectory::new();
        let mut executor = BoardExecutor::new(&place);
        let worker = place.start_undisturbed(&["--spin-us", "1000"]);
        let (peer, control) = executor.seat_and_control();
        let (image, work) = (adapter(1, &[SHAPE]), SliceWork::of(&SHAPE, 2));
        peer.offer(1, &image).unwrap();
        executor.post(&work.x, &[work.slice(1, 0, 0), work.slice(1, 0, 128)]);
        let words = control.words();
        // All words except the first line, which is only read at the beginning, with repeated writes.
        for (step, pair) in (0u32..).zip(numbers(seed, 20_000).chunks(2)) {
            let [place, value] = [pair[0], pair[1]].map(f32::to_bits);
            let word = &words[JOB + (place >> 4) as usize % (SLICES + 2 * SLICE - JOB)];
            let old = word.load(Ordering::Relaxed);
            let wild = match step % 4 {
                0 => old ^ (1 << (value % 32)),
                1 => old.wrapping_add(1),
                2 => u32::MAX,
                _ => value,
            };
            word.store(wild, Ordering::Relaxed);
            if step % 4 == 0 {
                invite(words, step);
            }
        }
        let pid = peer.pid;
        drop((executor, peer, control));
        serves_another(&place, pid);
        assert_eq!(pid, worker.pid());
    }
}

#[test]
fn a_board_that_is_none_is_left_and_the_next_executor_asked() {
    let place = WorkerDirectory::new();
    let executor = BoardExecutor::new(&place);
    let worker = place.start_undisturbed(&[]);
    let region = |bytes| Region::create("none", bytes, PeerAccess::ReadWrite).unwrap();
    let seated = |seat, number, [control, x, sums]: &[Region; 3]| {
        let (connection, pid) = executor.hear();
        let bytes = |region: &Region| region.bytes() as u64;
        let [control_bytes, x_bytes, sums_bytes] = [bytes(control), bytes(x), bytes(sums)];
        let seated = SlotGranted { seat, worker: number, control_bytes, x_bytes, sums_bytes };
        connection.send(&ToWorker::Seated(seated), &[control.fd(), x.fd(), sums.fd()]).unwrap();
        pid
    };
    let blank = [region(4096), region(4096), region(4096)];
    let garbage = [region(4096), region(64), region(64)];
    for (word, value) in garbage[0].words().iter().zip(numbers(9, 1024)) {
        word.store(value.to_bits(), Ordering::Relaxed);
    }
    for (seat, number, regions) in
        [(0, 1, &blank), (0, 1, &garbage), (u16::MAX, 1, &blank), (0, 0, &blank), (0, u32::MAX, &blank)]
    {
        assert_eq!(seated(seat, number, regions), worker.pid());
    }
    drop(executor);
    until("nothing of them is left", || worker.shared_maps() == 0);
    serves_another(&place, worker.pid());
}
