//! One set of tests for every transport of the board: the heap of one process, and regions mapped twice.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a board that cannot be set up has failed")]

use std::{
    os::fd::BorrowedFd,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use shmproto::board::{
    ActivationSlab, Board, BoardError, Consumer, ConsumerFds, ConsumerHandle, Geometry, PostError, Producer,
    Slice, SliceError, SliceState, SlotNumber, TakeBack, WakeReason,
};

mod child_process;

const GEOMETRY: Geometry = Geometry { x_elements: 64, sums_elements: 256, slices: 8, seats: 3 };

/// Access of a worker to the executor's memory.
trait WorkerTransport {
    fn board(geometry: Geometry) -> (Board, Producer);
    fn join(offer: ConsumerHandle) -> Consumer;
}

struct InProcess;

impl WorkerTransport for InProcess {
    fn board(geometry: Geometry) -> (Board, Producer) {
        Board::in_process(geometry).unwrap()
    }

    fn join(offer: ConsumerHandle) -> Consumer {
        offer.join_in_process()
    }
}

struct Mapped;

impl WorkerTransport for Mapped {
    fn board(geometry: Geometry) -> (Board, Producer) {
        Board::new(geometry).unwrap()
    }

    fn join(offer: ConsumerHandle) -> Consumer {
        let (seat, worker) = (offer.seat, offer.worker);
        let [control, x, sums] = offer.fds().unwrap().map(|fd: BorrowedFd| fd.try_clone_to_owned().unwrap());
        Consumer::join(ConsumerFds { control, x, sums }, seat, worker).unwrap()
    }
}

fn seat<T: WorkerTransport>(board: &Board) -> Consumer {
    T::join(board.seat().unwrap())
}

/// Two rows of three values, four sums per row.
fn slice(index: u32) -> Slice {
    Slice {
        image: 7,
        module: 3,
        first_row: index,
        rows: 2,
        width: 3,
        first_rank: 0,
        last_rank: 16,
        x_offset: 1,
        sums_offset: u64::from(index) * 16,
        sums_elements: 8,
    }
}

fn slices(count: u32) -> Vec<Slice> {
    (0..count).map(slice).collect()
}

fn x(job: f32) -> Vec<f32> {
    (0..64_u8).map(|number| job + f32::from(number)).collect()
}

/// Expected sums of a slice for the x of a job: the row's sum, times 1, 2, 3 and 4.
fn expected(job: f32, slice: &Slice) -> Vec<f32> {
    let rows = slice.first_row..slice.first_row + slice.rows;
    let start = |row: u32| (slice.x_offset + row * slice.width) as usize;
    let sums = rows.map(|row| x(job)[start(row)..][..slice.width as usize].iter().sum::<f32>());
    sums.flat_map(|sum| [1.0, 2.0, 3.0, 4.0].map(|factor| factor * sum)).collect()
}

/// Does one slice as an honest worker would; returns whether it was in time, or `None` without a slice.
fn work(seat: &mut Consumer) -> Option<bool> {
    let claim = seat.claim(|image, module| (image, module) == (7, 3))?;
    let slice = *claim.slice();
    let mut rows = vec![0.0; slice.x_elements()];
    claim.read_x(&mut rows);
    let sums = rows.chunks(slice.width as usize).map(|row| row.iter().sum::<f32>());
    let sums: Vec<f32> = sums.flat_map(|sum| [1.0, 2.0, 3.0, 4.0].map(|factor| factor * sum)).collect();
    Some(claim.done(&sums))
}

fn work_on(mut seat: Consumer) -> u64 {
    let mut in_time = 0;
    loop {
        match seat.wait(Duration::from_micros(50)) {
            WakeReason::Job => {
                while let Some(done) = work(&mut seat) {
                    in_time += u64::from(done);
                }
            }
            WakeReason::Rest => {}
            WakeReason::Fenced => return in_time,
        }
    }
}

fn sums(producer: &mut Producer, index: usize) -> Option<Vec<f32>> {
    let mut sums = vec![0.0; 8];
    producer.done(index).map(|done| done.read(0, &mut sums)).ok().map(|()| sums)
}

fn a_workers_sums_reach_the_executor<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    producer.post(&x(0.0), &slices(3)).unwrap();
    assert_eq!(seat.wait(Duration::ZERO), WakeReason::Job);
    assert_eq!(
        [work(&mut seat), work(&mut seat), work(&mut seat), work(&mut seat)],
        [Some(true), Some(true), Some(true), None]
    );
    for (index, slice) in slices(3).iter().enumerate() {
        assert_eq!(producer.state(index), SliceState::Done(seat.worker()));
        assert_eq!(sums(&mut producer, index), Some(expected(0.0, slice)));
    }
    let stats = board.stats().seats[0];
    assert_eq!((stats.slices, stats.rank_rows, stats.taken_back), (3, 96, 0));
}

fn what_is_taken_back_is_done_by_nobody_else<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    producer.post(&x(0.0), &slices(2)).unwrap();
    assert_eq!(producer.take_back(1), TakeBack::Taken);
    let claim = seat.claim(|_, _| true).unwrap();
    assert!(claim.is_wanted());
    assert_eq!(producer.take_back(0), TakeBack::Taken);
    assert!(!claim.is_wanted());
    assert!(!claim.done(&[9.0; 8]), "too late");
    assert_eq!((producer.state(0), producer.state(1)), (SliceState::Taken, SliceState::Taken));
    assert_eq!((sums(&mut producer, 0), work(&mut seat)), (None, None));
    assert_eq!((board.stats().seats[0].taken_back, board.stats().violations), (1, 0));
}

fn what_is_done_cannot_be_taken_back<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    producer.post(&x(0.0), &slices(1)).unwrap();
    assert_eq!(work(&mut seat), Some(true));
    assert_eq!(producer.take_back(0), TakeBack::AlreadyDone(seat.worker()));
    producer.finish();
    assert_eq!(sums(&mut producer, 0), Some(expected(0.0, &slice(0))));
}

fn a_claim_that_is_dropped_is_lost_and_the_worker_goes_on<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    producer.post(&x(0.0), &slices(2)).unwrap();
    seat.claim(|_, _| true).unwrap().fail();
    assert_eq!((work(&mut seat), work(&mut seat)), (Some(true), None));
    assert_eq!(producer.state(0), SliceState::Lost);
    assert_eq!((producer.take_back(0), producer.state(0)), (TakeBack::Taken, SliceState::Taken));
}

fn an_unknown_adapter_is_left_for_others<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    producer.post(&x(0.0), &[Slice { image: 8, ..slice(0) }, slice(1)]).unwrap();
    assert_eq!((work(&mut seat), work(&mut seat)), (Some(true), None));
    assert_eq!(producer.state(0), SliceState::Open);
}

fn a_fenced_worker_leaves_and_its_seat_is_somebody_elses<T: WorkerTransport>() {
    let (board, mut producer) = T::board(Geometry { seats: 1, ..GEOMETRY });
    let mut former = seat::<T>(&board);
    producer.post(&x(0.0), &slices(2)).unwrap();
    assert_eq!(work(&mut former), Some(true));
    let claim = former.claim(|_, _| true).unwrap();
    assert!(matches!(board.seat(), Err(BoardError::Full { seats: 1 })));
    let worker = producer_sees(&mut producer, 1);
    assert!(board.fence(worker) && !board.fence(worker) && !board.is_admitted(worker));

    let mut next = seat::<T>(&board);
    assert!(next.worker() > worker);
    claim.done(&[9.0; 8]);
    assert_eq!(producer.state(1), SliceState::Lost, "the late word is not the next worker's");
    assert_eq!((sums(&mut producer, 0), sums(&mut producer, 1)), (None, None), "its sums are gone");
    assert_eq!(
        (former.wait(Duration::ZERO), former.claim(|_, _| true).is_none()),
        (WakeReason::Fenced, true)
    );
    assert_eq!((board.stats().violations, board.stats().late_words), (0, 2));

    producer.post(&x(5.0), &slices(1)).unwrap();
    assert_eq!(work(&mut next), Some(true));
    assert_eq!(sums(&mut producer, 0), Some(expected(5.0, &slice(0))));
}

fn producer_sees(producer: &mut Producer, index: usize) -> shmproto::board::WorkerNumber {
    match producer.state(index) {
        SliceState::Claimed(worker) | SliceState::Done(worker) => worker,
        state => panic!("{state:?}"),
    }
}

fn a_late_workers_sums_are_not_those_of_the_next_job<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut late = seat::<T>(&board);
    let mut prompt = seat::<T>(&board);
    producer.post(&x(0.0), &slices(1)).unwrap();
    let claim = late.claim(|_, _| true).unwrap();
    producer.post(&x(5.0), &slices(1)).unwrap();
    assert_eq!(work(&mut prompt), Some(true));
    assert!(!claim.done(&[9.0; 8]));
    assert_eq!(sums(&mut producer, 0), Some(expected(5.0, &slice(0))));
}

fn several_workers_do_all_of_many_jobs<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let workers: Vec<_> =
        (0..3).map(|_| seat::<T>(&board)).map(|seat| thread::spawn(|| work_on(seat))).collect();
    let (mut done, mut here) = (0, 0);
    for job in 0..400_u16 {
        producer.announce(3);
        producer.post(&x(job.into()), &slices(8)).unwrap();
        let patience = Instant::now() + Duration::from_micros(300);
        for (index, slice) in slices(8).iter().enumerate().rev() {
            while !matches!(producer.state(index), SliceState::Done(_)) && Instant::now() < patience {
                thread::yield_now();
            }
            match producer.take_back(index) {
                TakeBack::AlreadyDone(_) => {
                    assert_eq!(sums(&mut producer, index), Some(expected(job.into(), slice)), "job {job}");
                    done += 1;
                }
                TakeBack::Taken => here += 1,
            }
        }
        producer.rest();
    }
    let stats = board.stats();
    stats.seats.iter().for_each(|seat| assert!(board.fence(seat.worker)));
    let in_time: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
    assert_eq!((in_time, stats.violations, stats.late_words), (done, 0, 0));
    assert_eq!((done + here, stats.seats.iter().map(|seat| seat.slices).sum()), (3200, done));
}

/// Acts as a device: writes x, signals it, and writes the next job's x after the answer.
fn play_device(slab: &ActivationSlab, asked: &AtomicU32, answered: &AtomicU32, jobs: u16) {
    for job in 1..=jobs {
        slab.write(0, &x(job.into()));
        asked.store(job.into(), Ordering::Release);
        while answered.load(Ordering::Acquire) < job.into() {
            thread::yield_now();
        }
    }
}

fn rows_that_somebody_else_puts_into_the_slab_are_what_workers_sum<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let workers: Vec<_> =
        (0..2).map(|_| seat::<T>(&board)).map(|seat| thread::spawn(|| work_on(seat))).collect();
    let (slab, jobs) = (board.x_slab(), 400);
    let (asked, answered) = (AtomicU32::new(0), AtomicU32::new(0));
    let mut done = 0;
    thread::scope(|scope| {
        scope.spawn(|| play_device(&slab, &asked, &answered, jobs));
        for job in 1..=jobs {
            producer.announce(2);
            while asked.load(Ordering::Acquire) < job.into() {
                thread::yield_now();
            }
            producer.post_in_place(64, &slices(8)).unwrap();
            let patience = Instant::now() + Duration::from_micros(300);
            for (index, slice) in slices(8).iter().enumerate().rev() {
                while !matches!(producer.state(index), SliceState::Done(_)) && Instant::now() < patience {
                    thread::yield_now();
                }
                if let TakeBack::AlreadyDone(_) = producer.take_back(index) {
                    assert_eq!(sums(&mut producer, index), Some(expected(job.into(), slice)), "job {job}");
                    done += 1;
                }
            }
            let mut rows = vec![0.0; 64];
            slab.read(0, &mut rows);
            assert_eq!(rows, x(job.into()), "whoever takes slices back reads the same rows");
            answered.store(job.into(), Ordering::Release);
        }
    });
    assert!(done > 0, "no worker was ever in time");
    board.stats().seats.iter().for_each(|worker| assert!(board.fence(worker.worker)));
    for worker in workers {
        worker.join().unwrap();
    }
    assert_eq!(board.stats().violations, 0);
}

fn rows_past_those_that_were_put_there_are_no_part_of_the_job<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    let too_large = PostError::TooLargeX { elements: 65, limit: 64 };
    assert_eq!(producer.post_in_place(65, &slices(1)), Err(too_large));
    // The slice's rows are the values 1 to 6.
    let outside = PostError::Slice { index: 0, source: SliceError::OutsideX { limit: 6 } };
    assert_eq!(producer.post_in_place(6, &slices(1)), Err(outside));
    assert_eq!((producer.slices(), work(&mut seat)), (0, None));
    board.x_slab().write(0, &x(3.0)[..8]);
    producer.post_in_place(7, &slices(1)).unwrap();
    assert_eq!(work(&mut seat), Some(true));
    assert_eq!(sums(&mut producer, 0), Some(expected(3.0, &slice(0))));
}

fn a_job_in_place_takes_back_what_is_left_of_the_one_before<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut late = seat::<T>(&board);
    producer.post(&x(0.0), &slices(1)).unwrap();
    let claim = late.claim(|_, _| true).unwrap();
    producer.finish();
    board.x_slab().write(0, &x(5.0));
    producer.post_in_place(64, &slices(1)).unwrap();
    assert!(!claim.done(&[9.0; 8]), "a late worker's sums are of rows that are gone");
    assert_eq!(work(&mut late), Some(true));
    assert_eq!(sums(&mut producer, 0), Some(expected(5.0, &slice(0))));
}

fn a_sleeping_worker_is_woken_by_a_job_and_by_its_fence<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let seat = seat::<T>(&board);
    let number = seat.worker();
    let worker = thread::spawn(|| work_on(seat));
    for job in 0..20_u16 {
        // Long enough for the worker to sleep, most of the time.
        thread::sleep(Duration::from_millis(1));
        producer.post(&x(job.into()), &slices(1)).unwrap();
        while producer.state(0) != SliceState::Done(number) {
            thread::yield_now();
        }
        assert_eq!(sums(&mut producer, 0), Some(expected(job.into(), &slice(0))));
    }
    let beats = board.stats().seats[0].heartbeat;
    while board.stats().seats[0].heartbeat == beats {
        thread::yield_now();
    }
    board.fence(number);
    assert_eq!(worker.join().unwrap(), 20);
}

fn a_worker_with_nothing_to_do_comes_back_for_other_business<T: WorkerTransport>() {
    let (board, producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    assert_eq!(seat.wait(Duration::ZERO), WakeReason::Rest);
    producer.announce(1);
    assert_eq!(seat.wait(Duration::from_micros(50)), WakeReason::Rest);
}

fn what_does_not_fit_is_refused_and_nothing_is_on_the_board<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let mut seat = seat::<T>(&board);
    let wrong = |slice, source| (vec![slice], PostError::Slice { index: 0, source });
    let good = slice(0);
    let cases = [
        (slices(9), PostError::TooManySlices { slices: 9, limit: 8 }),
        (vec![slice(1), slice(0)], PostError::Overlap { index: 1 }),
        wrong(Slice { rows: 0, ..good }, SliceError::NoRows),
        wrong(Slice { width: 0, ..good }, SliceError::NoWidth),
        wrong(Slice { first_rank: 16, ..good }, SliceError::Ranks { first: 16, last: 16 }),
        wrong(Slice { last_rank: 1025, ..good }, SliceError::Ranks { first: 0, last: 1025 }),
        wrong(Slice { first_row: 20, ..good }, SliceError::OutsideX { limit: 64 }),
        wrong(Slice { first_row: u32::MAX, width: u32::MAX, ..good }, SliceError::OutsideX { limit: 64 }),
        wrong(Slice { sums_offset: 8, ..good }, SliceError::Unaligned { offset: 8 }),
        wrong(Slice { sums_elements: 7, ..good }, SliceError::Uneven { elements: 7, rows: 2 }),
        wrong(Slice { sums_offset: 256, ..good }, SliceError::OutsideSums { limit: 256 }),
        wrong(Slice { sums_offset: u64::MAX - 15, ..good }, SliceError::OutsideSums { limit: 256 }),
    ];
    for (slices, error) in cases {
        assert_eq!(producer.post(&x(0.0), &slices), Err(error));
        assert_eq!((producer.slices(), work(&mut seat)), (0, None), "{error}");
    }
    assert_eq!(producer.post(&[0.0; 65], &[]), Err(PostError::TooLargeX { elements: 65, limit: 64 }));
    assert_eq!(
        producer.post(&[0.0; 6], &[good]),
        Err(PostError::Slice { index: 0, source: SliceError::OutsideX { limit: 6 } })
    );
}

fn every_worker_has_a_seat_and_a_generation_of_its_own<T: WorkerTransport>() {
    let (board, mut producer) = T::board(GEOMETRY);
    let offers: Vec<_> = (0..3).map(|_| board.seat().unwrap()).collect();
    assert_eq!(producer.workers(), 3);
    assert_eq!([0, 1, 2].map(SlotNumber), [offers[0].seat, offers[1].seat, offers[2].seat]);
    assert!(board.fence(offers[1].worker));
    let next = board.seat().unwrap();
    assert_eq!(next.seat, SlotNumber(1));
    assert!(offers.iter().all(|offer| offer.worker < next.worker));
    assert_eq!(producer.workers(), 3);
}

#[test]
fn the_slab_as_words_is_the_slab_and_begins_at_a_page() {
    let (board, producer) = Board::new(GEOMETRY).unwrap();
    let slab = board.x_slab();
    slab.write(0, &x(7.0));
    let words: &[AtomicU32] = slab.as_ref();
    assert!(words.len() >= 64 && words.as_ptr().addr().is_multiple_of(4096));
    let numbers = words.iter().map(|word| f32::from_bits(word.load(Ordering::Relaxed)));
    assert_eq!(numbers.take(64).collect::<Vec<_>>(), x(7.0));
    // A registration keeps the memory mapped.
    drop((board, producer));
    slab.as_ref()[0].store(1.5_f32.to_bits(), Ordering::Relaxed);
    let mut first = [0.0];
    slab.read(0, &mut first);
    assert_eq!(first, [1.5]);
}

macro_rules! conformance {
    ($($test:ident,)*) => {
        mod in_process { $(#[test] fn $test() { testkit::watched(super::$test::<super::InProcess>); })* }
        mod mapped { $(#[test] fn $test() { testkit::watched(super::$test::<super::Mapped>); })* }
    };
}

conformance! {
    a_workers_sums_reach_the_executor,
    what_is_taken_back_is_done_by_nobody_else,
    what_is_done_cannot_be_taken_back,
    a_claim_that_is_dropped_is_lost_and_the_worker_goes_on,
    an_unknown_adapter_is_left_for_others,
    a_fenced_worker_leaves_and_its_seat_is_somebody_elses,
    a_late_workers_sums_are_not_those_of_the_next_job,
    several_workers_do_all_of_many_jobs,
    rows_that_somebody_else_puts_into_the_slab_are_what_workers_sum,
    rows_past_those_that_were_put_there_are_no_part_of_the_job,
    a_job_in_place_takes_back_what_is_left_of_the_one_before,
    a_sleeping_worker_is_woken_by_a_job_and_by_its_fence,
    a_worker_with_nothing_to_do_comes_back_for_other_business,
    what_does_not_fit_is_refused_and_nothing_is_on_the_board,
    every_worker_has_a_seat_and_a_generation_of_its_own,
}
