//! A hostile worker writes arbitrary words into its writable memory. The executor neither panics nor waits.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a board that cannot be set up has failed")]

use std::{
    os::fd::OwnedFd,
    sync::atomic::{
        AtomicBool, AtomicU32,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::Duration,
};

use proptest::prelude::*;
use shmproto::board::{
    Board, Consumer, ConsumerFds, ConsumerHandle, Geometry, JoinError, Producer, Slice, SliceState,
    SlotNumber, TakeBack, WakeReason,
};
use shmproto::region::{Access, Region};

const GEOMETRY: Geometry = Geometry { x_elements: 64, sums_elements: 256, slices: 8, seats: 3 };

/// Words of the header and of the seat table, before the slice table.
const SLICES_WORD: usize = (192 + 3 * 128) / 4;

const SLICE_WORDS: usize = 128 / 4;

fn fds(offer: &ConsumerHandle) -> ConsumerFds {
    let [control, x, sums] = offer.fds().unwrap().map(|fd| fd.try_clone_to_owned().unwrap());
    ConsumerFds { control, x, sums }
}

fn join(offer: &ConsumerHandle) -> Result<Consumer, JoinError> {
    Consumer::join(fds(offer), offer.seat, offer.worker)
}

fn map(fd: OwnedFd) -> Region {
    Region::map(fd, 1..=1 << 20, Access::ReadWrite).unwrap()
}

/// The control region, which every seated worker can write.
fn control(offer: &ConsumerHandle) -> Region {
    map(fds(offer).control)
}

/// The state word of a slice: its low and its high half.
fn state_word(control: &Region, index: usize) -> (&AtomicU32, &AtomicU32) {
    let words = &control.words()[SLICES_WORD + index * SLICE_WORDS..];
    (&words[0], &words[1])
}

fn slice(index: u32) -> Slice {
    Slice {
        image: 7,
        module: 3,
        first_row: 0,
        rows: 2,
        width: 3,
        first_rank: 0,
        last_rank: 16,
        x_offset: 0,
        sums_offset: u64::from(index) * 16,
        sums_elements: 8,
    }
}

fn slices() -> Vec<Slice> {
    (0..8).map(slice).collect()
}

/// Runs a job without waiting; returns the number of slices that workers did.
fn pass(producer: &mut Producer) -> usize {
    producer.announce(3);
    producer.post(&[1.0; 64], &slices()).unwrap();
    let mut sums = [0.0; 8];
    let mut done = 0;
    for index in (0..8).rev() {
        if let SliceState::Done(_) = producer.state(index) {
            done += usize::from(producer.done(index).map(|done| done.read(0, &mut sums)).is_ok());
        }
        match producer.take_back(index) {
            TakeBack::AlreadyDone(_) => assert!(matches!(producer.state(index), SliceState::Done(_))),
            TakeBack::Taken => assert_eq!(producer.state(index), SliceState::Taken),
        }
    }
    producer.rest();
    done
}

/// Checks that an honest worker at the same board can still work.
fn an_honest_worker_is_served(board: &Board, producer: &mut Producer) {
    for seat in board.stats().seats {
        board.fence(seat.worker);
    }
    let mut seat = join(&board.seat().unwrap()).unwrap();
    producer.post(&[2.0; 64], &slices()).unwrap();
    assert_eq!(seat.wait(Duration::ZERO), WakeReason::Job);
    let mut done = 0;
    while let Some(claim) = seat.claim(|_, _| true) {
        let mut x = [0.0; 6];
        claim.read_x(&mut x);
        assert_eq!(x, [2.0; 6]);
        assert!(claim.done(&[4.0; 8]));
        done += 1;
    }
    assert_eq!(done, 8);
    for index in 0..8 {
        let mut sums = [0.0; 8];
        producer.done(index).map(|done| done.read(0, &mut sums)).unwrap();
        assert_eq!(sums, [4.0; 8]);
    }
    assert!(board.fence(seat.worker()));
}

#[test]
fn every_word_of_the_control_region_may_be_flipped_at_every_step() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let control = control(&offer);
    for (index, word) in control.words().iter().enumerate() {
        let before = word.load(Relaxed);
        for flipped in [!before, 0, u32::MAX, 1 << 31, before ^ 1, before.wrapping_add(1)] {
            producer.post(&[1.0; 64], &slices()).unwrap();
            word.store(flipped, SeqCst);
            (0..8).for_each(|slice| {
                producer.state(slice);
            });
            word.store(!flipped, SeqCst);
            pass(&mut producer);
        }
        // Only the executor's own memory decides, so restoring the header is enough for the next worker to
        // join.
        if index < SLICES_WORD {
            word.store(before, SeqCst);
        }
    }
    an_honest_worker_is_served(&board, &mut producer);
}

#[test]
fn an_impossible_word_is_counted_once_and_whom_it_names_is_fenced() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let (offer, bystander) = (board.seat().unwrap(), board.seat().unwrap());
    let control = control(&offer);
    producer.post(&[1.0; 64], &slices()).unwrap();
    let (low, _) = state_word(&control, 2);
    // An undefined state.
    low.store(offer.worker.get() << 8 | 77, SeqCst);
    assert_eq!((producer.state(2), producer.state(2)), (SliceState::Lost, SliceState::Lost));
    assert_eq!((board.stats().violations, board.is_admitted(offer.worker)), (1, false));
    assert!(board.is_admitted(bystander.worker));
    assert_eq!(producer.take_back(2), TakeBack::Taken);
    an_honest_worker_is_served(&board, &mut producer);
}

#[test]
fn words_of_another_job_of_nobody_and_of_the_executor_are_violations() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let control = control(&offer);
    producer.post(&[1.0; 64], &slices()).unwrap();
    let (_, job) = state_word(&control, 0);
    let job = job.load(SeqCst);
    let me = offer.worker.get() << 8;
    let words = [
        (3 | 0x00ff_ffff << 8, job), // done by a worker that never was
        (3 | me, job - 1),           // done, for the job before
        (1, job + 1),                // open, for a job that is not posted
        (5, job),                    // taken back, by somebody else than the executor
        (0, 0),                      // nothing at all
    ];
    for (count, (low, high)) in (1..).zip(words) {
        let index = count as usize;
        let (low_word, high_word) = state_word(&control, index);
        low_word.store(low, SeqCst);
        high_word.store(high, SeqCst);
        assert_eq!(producer.state(index), SliceState::Lost, "{low:#x} {high}");
        assert_eq!(board.stats().violations, count, "{low:#x} {high}");
        assert_eq!(producer.take_back(index), TakeBack::Taken);
    }
    an_honest_worker_is_served(&board, &mut producer);
}

#[test]
fn slices_that_are_claimed_for_ever_are_taken_back() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let control = control(&offer);
    for _ in 0..100 {
        producer.post(&[1.0; 64], &slices()).unwrap();
        for index in 0..8 {
            state_word(&control, index).0.store(offer.worker.get() << 8 | 2, SeqCst);
        }
        assert!((0..8).all(|index| producer.state(index) == SliceState::Claimed(offer.worker)));
        assert!((0..8).rev().all(|index| producer.take_back(index) == TakeBack::Taken));
    }
    assert_eq!((board.stats().violations, board.stats().seats[0].taken_back), (0, 800));
    an_honest_worker_is_served(&board, &mut producer);
}

#[test]
fn sums_nobody_worked_for_are_only_wrong_numbers_and_a_replayed_word_is_not_believed() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let (control, sums) = (control(&offer), map(fds(&offer).sums));
    sums.words().iter().for_each(|word| word.store(f32::NAN.to_bits(), Relaxed));
    producer.post(&[1.0; 64], &slices()).unwrap();
    let (low, high) = state_word(&control, 0);
    low.store(offer.worker.get() << 8 | 3, SeqCst);
    let replayed = (low.load(SeqCst), high.load(SeqCst));
    assert_eq!(producer.state(0), SliceState::Done(offer.worker));
    let mut numbers = [0.0; 8];
    producer.done(0).map(|done| done.read(0, &mut numbers)).unwrap();
    assert!(numbers.iter().all(|number| number.is_nan()));

    producer.post(&[1.0; 64], &slices()).unwrap();
    low.store(replayed.0, SeqCst);
    high.store(replayed.1, SeqCst);
    assert_eq!(producer.state(0), SliceState::Lost);
    assert_eq!((board.stats().violations, board.is_admitted(offer.worker)), (1, false));
}

#[test]
fn two_storms_of_garbage_beside_an_honest_worker_stop_nobody() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let over = AtomicBool::new(false);
    let offers = [board.seat().unwrap(), board.seat().unwrap()];
    let honest = board.seat().unwrap();
    let mut seat = join(&honest).unwrap();
    thread::scope(|scope| {
        for (salt, offer) in (1_u32..).zip(&offers) {
            let (over, control) = (&over, control(offer));
            scope.spawn(move || {
                let mut random = salt;
                while !over.load(Relaxed) {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let words = &control.words()[16..];
                    words[random as usize / 7 % words.len()].store(random, Relaxed);
                }
            });
        }
        scope.spawn(|| {
            // With any input the worker neither panics nor writes outside of its own sums.
            while !over.load(Relaxed) {
                while let Some(claim) = seat.claim(|_, _| true) {
                    let mut x = vec![0.0; claim.slice().x_elements()];
                    claim.read_x(&mut x);
                    let sums = vec![1.0; claim.slice().sums_elements as usize];
                    claim.done(&sums);
                }
                seat.wait(Duration::from_micros(10));
            }
        });
        // On a busy machine the storms may begin late.
        let mut passes = 0;
        while passes < 20_000 || board.stats().violations == 0 {
            pass(&mut producer);
            passes += 1;
        }
        over.store(true, Relaxed);
    });
    an_honest_worker_is_served(&board, &mut producer);
}

#[test]
fn a_slice_that_makes_no_sense_is_failed_by_the_worker_and_counted() {
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let (control, mut seat) = (control(&offer), join(&offer).unwrap());
    for word in 16..28 {
        producer.post(&[1.0; 64], &[slice(0)]).unwrap();
        let refused = seat.refused().map_or(0, |refused| refused.slices);
        control.words()[SLICES_WORD + word].store(u32::MAX - 7, SeqCst);
        // Image and module may be any numbers; the worker's adapters decide there.
        let claimed = seat.claim(|_, _| true).map(|claim| *claim.slice());
        if let Some(slice) = claimed {
            assert!(slice.image != 7 || slice.module != 3, "word {word}");
        } else {
            assert_eq!(seat.refused().unwrap().slices, refused + 1, "word {word}");
            assert_eq!(producer.state(0), SliceState::Lost);
        }
    }
    assert_eq!(seat.refused().unwrap().slices, 9, "all words but image and module");
}

#[test]
fn a_worker_does_not_sit_down_at_what_is_no_board() {
    let (board, _producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let control = control(&offer);
    let with = |word: usize, value: u32| {
        let word = &control.words()[word];
        let before = word.swap(value, SeqCst);
        let error = join(&offer).unwrap_err();
        word.store(before, SeqCst);
        error
    };
    assert!(matches!(with(0, 0), JoinError::Magic { .. }));
    assert!(matches!(with(2, 0), JoinError::Layout { .. }));
    assert!(matches!(with(4, 0), JoinError::Geometry(_)));
    assert!(matches!(with(5, 1), JoinError::Geometry(_)));
    assert!(matches!(with(8, 4096), JoinError::TooSmall { what: "control", .. }));
    assert!(matches!(with(9, 65), JoinError::Geometry(_)));
    assert!(matches!(with(4, 65), JoinError::TooSmall { what: "x", .. }));
    assert!(matches!(with(6, 257), JoinError::TooSmall { what: "sums", .. }));
    let seat = Consumer::join(fds(&offer), SlotNumber(3), offer.worker);
    assert!(matches!(seat, Err(JoinError::Seat { seats: 3, .. })));
    let swapped = ConsumerFds { control: fds(&offer).x, ..fds(&offer) };
    assert!(matches!(Consumer::join(swapped, offer.seat, offer.worker), Err(JoinError::Region(_))));
    assert!(join(&offer).is_ok());
}

#[test]
fn a_worker_cannot_map_x_to_write_it() {
    let (board, _producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    assert!(Region::map(fds(&offer).x, 1..=1 << 20, Access::ReadWrite).is_err());
}

#[test]
fn a_storm_on_the_bell_does_not_keep_a_worker_from_its_other_business() {
    let (board, producer) = Board::new(GEOMETRY).unwrap();
    let offer = board.seat().unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                producer.announce(1);
            }
        });
        let mut seat = join(&offer).unwrap();
        for _ in 0..200 {
            assert_eq!(seat.wait(Duration::from_micros(10)), WakeReason::Rest);
        }
        over.store(true, Relaxed);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any words anywhere, between any two steps of the executor.
    #[test]
    fn any_garbage_at_any_time_is_survived(
        writes in prop::collection::vec((0_usize..1 << 10, any::<u32>(), 0_u8..4), 1..64)
    ) {
        let (board, mut producer) = Board::new(GEOMETRY).unwrap();
        let offer = board.seat().unwrap();
        let control = control(&offer);
        let words = &control.words()[16..];
        for (index, value, step) in writes {
            words[index % words.len()].store(value, SeqCst);
            match step {
                0 => { pass(&mut producer); }
                1 => producer.post(&[1.0; 64], &slices()).unwrap(),
                2 => (0..producer.slices()).for_each(|index| { producer.state(index); }),
                _ => producer.finish(),
            }
        }
        an_honest_worker_is_served(&board, &mut producer);
    }
}
