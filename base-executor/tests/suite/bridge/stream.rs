//! A thread that acts as a device's stream: it runs enqueued work in order and independently.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base_executor::workers::gpu_bridge::BridgeMemory;
use kernels::cuda::board::has_reached;
use shmproto::board::ActivationSlab;

use crate::worker::WATCHDOG;

/// Memory that a device and the bridge share, here ordinary memory. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct HostBridgeMemory(Arc<SharedBridgeMemory>);

#[derive(Debug)]
struct SharedBridgeMemory {
    slab: ActivationSlab,
    asked: AtomicU32,
    answered: AtomicU32,
    sums: Vec<AtomicU32>,
    /// Writes of sums until one panics; 0 disables the panic.
    writes_left: AtomicU32,
}

impl HostBridgeMemory {
    pub(super) fn new(slab: ActivationSlab, sums_elements: usize, number: u32) -> Self {
        Self(Arc::new(SharedBridgeMemory {
            slab,
            asked: AtomicU32::new(number),
            answered: AtomicU32::new(number),
            sums: (0..sums_elements).map(|_| AtomicU32::new(u32::MAX)).collect(),
            writes_left: AtomicU32::new(0),
        }))
    }

    pub(super) fn answered_at(&self) -> u32 {
        self.0.answered.load(Ordering::Acquire)
    }

    /// Makes the bridge panic at its `write`th write of sums from now on; 0 disables the panic.
    pub(super) fn panic_at_write(&self, write: u32) {
        self.0.writes_left.store(write, Ordering::Relaxed);
    }

    pub(super) fn is_to_panic(&self) -> bool {
        self.0.writes_left.load(Ordering::Relaxed) > 0
    }
}

impl BridgeMemory for HostBridgeMemory {
    fn asked(&self) -> u32 {
        self.0.asked.load(Ordering::Acquire)
    }

    fn answered(&self) -> u32 {
        self.answered_at()
    }

    fn answer(&self, number: u32) {
        let before = self.0.answered.swap(number, Ordering::AcqRel);
        assert!(has_reached(number, before), "answers go forward: {before}, then {number}");
    }

    fn write_sums(&self, at: usize, sums: &[f32]) {
        let left = self.0.writes_left.load(Ordering::Relaxed);
        if left > 0 {
            self.0.writes_left.store(left - 1, Ordering::Relaxed);
            assert!(left > 1, "the test has it panic here");
        }
        for (to, sum) in self.0.sums[at..].iter().zip(sums) {
            to.store(sum.to_bits(), Ordering::Relaxed);
        }
    }

    fn sums_elements(&self) -> usize {
        self.0.sums.len()
    }
}

pub(super) enum StreamOp {
    /// Writes rows into the slab and signals the bridge.
    Ask {
        number: u32,
        x: Vec<f32>,
    },
    /// Waits for an answer, reads the sums and overwrites them.
    Add {
        number: u32,
        elements: usize,
    },
    Sleep(Duration),
    Report,
}

pub(super) struct FakeStream {
    pieces: Option<Sender<StreamOp>>,
    sums: Receiver<Vec<Vec<f32>>>,
    thread: Option<JoinHandle<()>>,
}

impl FakeStream {
    pub(super) fn new(words: HostBridgeMemory) -> Self {
        let (pieces, work) = channel();
        let (report, sums) = channel();
        let thread = thread::spawn(move || run(&words.0, &work, &report));
        Self { pieces: Some(pieces), sums, thread: Some(thread) }
    }

    pub(super) fn enqueue(&self, piece: StreamOp) {
        self.pieces.as_ref().unwrap().send(piece).unwrap();
    }

    /// Waits for the stream and returns the sums since the last call.
    pub(super) fn synchronize(&self) -> Vec<Vec<f32>> {
        self.enqueue(StreamOp::Report);
        self.sums.recv_timeout(2 * WATCHDOG).unwrap()
    }
}

impl Drop for FakeStream {
    fn drop(&mut self) {
        self.pieces = None;
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || thread::panicking(), "the stream waited for ever");
    }
}

fn run(words: &SharedBridgeMemory, work: &Receiver<StreamOp>, report: &Sender<Vec<Vec<f32>>>) {
    let mut found = Vec::new();
    for piece in work {
        match piece {
            StreamOp::Ask { number, x } => {
                words.slab.write(0, &x);
                words.asked.store(number, Ordering::Release);
            }
            StreamOp::Add { number, elements } => {
                wait(words, number);
                let take = |word: &AtomicU32| f32::from_bits(word.swap(u32::MAX, Ordering::Relaxed));
                found.push(words.sums[..elements].iter().map(take).collect());
                // A later read would find another job's sums, or none.
            }
            StreamOp::Sleep(time) => thread::sleep(time),
            StreamOp::Report => {
                let _ = report.send(std::mem::take(&mut found));
            }
        }
    }
}

fn wait(words: &SharedBridgeMemory, number: u32) {
    let end = Instant::now() + WATCHDOG;
    while !has_reached(words.answered.load(Ordering::Acquire), number) {
        assert!(Instant::now() < end, "nobody answers {number}");
        thread::yield_now();
    }
}
