//! A thread that plays a device's stream: what is enqueued is done in order, and nobody is asked.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base_executor::workers::bridge::Wire;
use kernels::cuda::board::has_reached;
use shmproto::board::XSlab;

use crate::worker::WATCHDOG;

/// What a device and the bridge share, in ordinary memory. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Words(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    slab: XSlab,
    asked: AtomicU32,
    answered: AtomicU32,
    sums: Vec<AtomicU32>,
    /// Writes of sums until one panics; 0: none does.
    writes_left: AtomicU32,
}

impl Words {
    pub(super) fn new(slab: XSlab, sums_elements: usize, number: u32) -> Self {
        Self(Arc::new(Shared {
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

    /// Has the bridge panic when it writes sums for the `write`th time from now on; 0: never.
    pub(super) fn panic_at_write(&self, write: u32) {
        self.0.writes_left.store(write, Ordering::Relaxed);
    }

    pub(super) fn is_to_panic(&self) -> bool {
        self.0.writes_left.load(Ordering::Relaxed) > 0
    }
}

impl Wire for Words {
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

/// A piece of a stream's work.
pub(super) enum Piece {
    /// Writes rows into the slab, and says so.
    Ask { number: u32, x: Vec<f32> },
    /// Waits for an answer and reads the sums, which are gone from their place then.
    Add { number: u32, elements: usize },
    /// Computes something else.
    Sleep(Duration),
    /// Says that it has come so far, with the sums since the last time.
    Report,
}

/// A queue of work.
pub(super) struct Stream {
    pieces: Option<Sender<Piece>>,
    sums: Receiver<Vec<Vec<f32>>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    pub(super) fn new(words: Words) -> Self {
        let (pieces, work) = channel();
        let (report, sums) = channel();
        let thread = thread::spawn(move || run(&words.0, &work, &report));
        Self { pieces: Some(pieces), sums, thread: Some(thread) }
    }

    pub(super) fn enqueue(&self, piece: Piece) {
        self.pieces.as_ref().unwrap().send(piece).unwrap();
    }

    /// The sums of everything enqueued since the last time, once it is done.
    pub(super) fn synchronize(&self) -> Vec<Vec<f32>> {
        self.enqueue(Piece::Report);
        self.sums.recv_timeout(2 * WATCHDOG).unwrap()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.pieces = None;
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || thread::panicking(), "the stream waited for ever");
    }
}

fn run(words: &Shared, work: &Receiver<Piece>, report: &Sender<Vec<Vec<f32>>>) {
    let mut found = Vec::new();
    for piece in work {
        match piece {
            Piece::Ask { number, x } => {
                words.slab.write(0, &x);
                words.asked.store(number, Ordering::Release);
            }
            Piece::Add { number, elements } => {
                wait(words, number);
                let take = |word: &AtomicU32| f32::from_bits(word.swap(u32::MAX, Ordering::Relaxed));
                found.push(words.sums[..elements].iter().map(take).collect());
                // What is read later is another job's, or nothing.
            }
            Piece::Sleep(time) => thread::sleep(time),
            Piece::Report => {
                let _ = report.send(std::mem::take(&mut found));
            }
        }
    }
}

fn wait(words: &Shared, number: u32) {
    let end = Instant::now() + WATCHDOG;
    while !has_reached(words.answered.load(Ordering::Acquire), number) {
        assert!(Instant::now() < end, "nobody answers {number}");
        thread::yield_now();
    }
}
