//! Every interleaving of a board's operations, with tables of one or two entries.
//!
//! `scripts/sanitize loom` runs these tests; without `--cfg loom` the file is empty. A lost wake-up is a
//! deadlock, which loom reports, because its futex has no timeout.
#![cfg(loom)]

use std::time::Duration;

use loom::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};
use shmproto::board::{Board, Consumer, Geometry, Producer, Slice, SliceState, TakeBack, WakeReason};

const IMAGE: u64 = 7;

fn board(slices: usize, seats: usize) -> (Board, Producer) {
    Board::in_process(Geometry { x_elements: 2, sums_elements: 16 * slices, slices, seats }).unwrap()
}

fn join(board: &Board) -> Consumer {
    board.seat().unwrap().join_in_process()
}

fn slice(index: u32) -> Slice {
    Slice {
        image: IMAGE,
        module: 0,
        first_row: 0,
        rows: 1,
        width: 2,
        first_rank: 0,
        last_rank: 1,
        x_offset: 0,
        sums_offset: u64::from(index) * 16,
        sums_elements: 2,
    }
}

/// Tries every schedule with at most `preemptions` preemptions.
fn check(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(test);
}

/// Does one claim as an honest worker: the sums are x, doubled. Returns whether they were in time.
fn work(seat: &mut Consumer) -> Option<bool> {
    let claim = seat.claim(|image, _| image == IMAGE)?;
    let mut x = [0.0; 2];
    claim.read_x(&mut x);
    Some(claim.done(&x.map(|x| 2.0 * x)))
}

/// The sums of a slice if a worker did it in time.
fn resolve(producer: &mut Producer, index: usize) -> Option<[f32; 2]> {
    match producer.take_back(index) {
        TakeBack::Taken => None,
        TakeBack::AlreadyDone(_) => {
            let mut sums = [0.0; 2];
            producer.done(index).map(|done| done.read(0, &mut sums)).ok().map(|()| sums)
        }
    }
}

#[test]
fn a_slice_is_either_taken_back_or_done_in_time_with_the_sums_of_its_x() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        let worker = thread::spawn(move || work(&mut seat));
        let sums = resolve(&mut producer, 0);
        let in_time = worker.join().unwrap();
        assert_eq!(sums.is_some(), in_time == Some(true));
        assert!(sums.is_none_or(|sums| sums == [2.0, 6.0]));
        assert_eq!(board.stats().violations, 0);
    });
}

#[test]
fn a_slice_that_is_seen_to_be_done_has_its_sums() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        let worker = thread::spawn(move || work(&mut seat));
        if let SliceState::Done(_) = producer.state(0) {
            let mut sums = [0.0; 2];
            producer.done(0).map(|done| done.read(0, &mut sums)).unwrap();
            assert_eq!(sums, [2.0, 6.0]);
        }
        worker.join().unwrap();
    });
}

#[test]
fn two_workers_share_two_slices_and_do_each_once() {
    check(3, || {
        let (board, mut producer) = board(2, 2);
        let (mut one, mut two) = (join(&board), join(&board));
        producer.post(&[1.0, 3.0], &[slice(0), slice(1)]).unwrap();
        let other = thread::spawn(move || [work(&mut one), work(&mut one)]);
        let mine = [work(&mut two), work(&mut two)];
        let all = [mine, other.join().unwrap()].concat();
        assert_eq!(all.iter().filter(|done| **done == Some(true)).count(), 2, "{all:?}");
        assert_eq!(resolve(&mut producer, 0), Some([2.0, 6.0]));
        assert_eq!(resolve(&mut producer, 1), Some([2.0, 6.0]));
    });
}

#[test]
fn two_workers_never_both_do_one_slice() {
    check(3, || {
        let (board, mut producer) = board(1, 2);
        let (mut one, mut two) = (join(&board), join(&board));
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        let other = thread::spawn(move || work(&mut one));
        let both = [work(&mut two), other.join().unwrap()];
        assert_eq!(both.iter().filter(|done| **done == Some(true)).count(), 1, "{both:?}");
        assert_eq!(resolve(&mut producer, 0), Some([2.0, 6.0]));
    });
}

#[test]
fn a_late_worker_spoils_nothing_of_the_next_job() {
    check(2, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        // The worker may claim either job, or both; timely sums of the second must belong to the second.
        let worker = thread::spawn(move || (work(&mut seat), work(&mut seat)));
        producer.post(&[5.0, 7.0], &[slice(0)]).unwrap();
        let sums = resolve(&mut producer, 0);
        assert!(sums.is_none_or(|sums| sums == [10.0, 14.0]), "{sums:?}");
        worker.join().unwrap();
        assert_eq!(board.stats().violations, 0);
    });
}

#[test]
fn a_claimed_descriptor_is_never_half_of_one_job_and_half_of_another() {
    check(2, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        let first = Slice { image: 1, module: 1, last_rank: 11, ..slice(0) };
        let second = Slice { image: 2, module: 2, last_rank: 12, ..slice(0) };
        producer.post(&[1.0, 3.0], &[first]).unwrap();
        let worker = thread::spawn(move || {
            if let Some(claim) = seat.claim(|_, _| true) {
                assert!([first, second].contains(claim.slice()), "{:?}", claim.slice());
            }
        });
        producer.post(&[1.0, 3.0], &[second]).unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn a_job_that_is_posted_while_a_worker_goes_to_sleep_wakes_it() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        let worker = thread::spawn(move || {
            while seat.wait(Duration::ZERO) != WakeReason::Job {}
            work(&mut seat)
        });
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        assert_eq!(worker.join().unwrap(), Some(true));
        assert_eq!(resolve(&mut producer, 0), Some([2.0, 6.0]));
    });
}

#[test]
fn an_announcement_wakes_and_the_job_after_it_is_not_missed() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        let worker = thread::spawn(move || {
            while seat.wait(Duration::ZERO) != WakeReason::Job {}
            work(&mut seat)
        });
        producer.announce(1);
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        producer.rest();
        assert_eq!(worker.join().unwrap(), Some(true));
    });
}

#[test]
fn a_worker_that_is_fenced_while_it_goes_to_sleep_learns_of_it() {
    check(3, || {
        let (board, _producer) = board(1, 1);
        let mut seat = join(&board);
        let number = seat.worker();
        let worker = thread::spawn(move || while seat.wait(Duration::ZERO) != WakeReason::Fenced {});
        assert!(board.fence(number));
        worker.join().unwrap();
    });
}

#[test]
fn what_a_fenced_worker_does_counts_for_nothing_and_blames_nobody() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        let number = seat.worker();
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        let worker = thread::spawn(move || work(&mut seat));
        board.fence(number);
        let state = producer.state(0);
        assert!(matches!(state, SliceState::Open | SliceState::Lost), "{state:?}");
        assert_eq!(resolve(&mut producer, 0), None);
        worker.join().unwrap();
        assert_eq!(board.stats().violations, 0);
    });
}

#[test]
fn the_next_worker_on_a_seat_is_not_taken_for_the_one_before() {
    check(3, || {
        let (board, mut producer) = board(1, 1);
        let mut former = join(&board);
        let worker = former.worker();
        producer.post(&[1.0, 3.0], &[slice(0)]).unwrap();
        let late = thread::spawn(move || work(&mut former));
        board.fence(worker);
        let mut next = join(&board);
        let done = work(&mut next) == Some(true);
        let sums = resolve(&mut producer, 0);
        assert_eq!(sums, done.then_some([2.0, 6.0]));
        late.join().unwrap();
        assert_eq!(board.stats().violations, 0);
    });
}

fn until(word: &AtomicU32, number: u32) {
    while word.load(Ordering::Acquire) != number {
        thread::yield_now();
    }
}

#[test]
fn rows_that_a_device_writes_are_those_its_job_is_summed_of_and_no_next_job_spoils_them() {
    check(2, || {
        let (board, mut producer) = board(1, 1);
        let mut seat = join(&board);
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let (slab, shared) = (board.x_slab(), Arc::clone(&words));
        // The worker may claim either job, and be late with the first; then it reads rows of both.
        let worker = thread::spawn(move || work(&mut seat));
        let device = thread::spawn(move || {
            let [asked, answered] = &*shared;
            slab.write(0, &[1.0, 3.0]);
            asked.store(1, Ordering::Release);
            until(answered, 1);
            slab.write(0, &[5.0, 7.0]);
            asked.store(2, Ordering::Release);
        });
        let [asked, answered] = &*words;
        for (number, wanted) in [(1, [2.0, 6.0]), (2, [10.0, 14.0])] {
            until(asked, number);
            producer.post_in_place(2, &[slice(0)]).unwrap();
            let sums = resolve(&mut producer, 0);
            assert!(sums.is_none_or(|sums| sums == wanted), "{sums:?}");
            answered.store(number, Ordering::Release);
        }
        worker.join().unwrap();
        device.join().unwrap();
        assert_eq!(board.stats().violations, 0);
    });
}
