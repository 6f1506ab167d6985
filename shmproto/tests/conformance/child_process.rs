//! The board across a real process boundary: this test binary starts itself again as the worker.

use std::{
    env, fs, io,
    os::fd::{AsRawFd, OwnedFd},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Signal, set_parent_process_death_signal};
use shmproto::board::{Board, Consumer, ConsumerFds, ConsumerHandle, SliceState, SlotNumber, WorkerNumber};
use testkit::WATCHDOG;

use super::{GEOMETRY, expected, slice, slices, sums, work_on, x};

/// Variable in the worker: paths of the executor's descriptors, its seat, and its number.
const OFFER: &str = "SHMPROTO_TEST_OFFER";

/// Name of this test, for the second start.
const TEST: &str =
    "child_process::a_worker_in_another_process_does_jobs_until_it_is_killed_and_the_next_one_goes_on";

fn worker(offer: &str) {
    // The process must not outlive the test.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let fields: Vec<&str> = offer.split(' ').collect();
    let [control, x, sums, seat, worker] = fields[..] else { panic!("{offer:?}") };
    let open = |path: &str, write| -> OwnedFd {
        fs::OpenOptions::new().read(true).write(write).open(path).expect(path).into()
    };
    let fds = ConsumerFds { control: open(control, true), x: open(x, false), sums: open(sums, true) };
    let worker = WorkerNumber::new(worker.parse().unwrap()).unwrap();
    work_on(Consumer::join(fds, SlotNumber(seat.parse().unwrap()), worker).unwrap());
}

fn start(offer: &ConsumerHandle) -> Child {
    let paths = offer.fds().unwrap().map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()));
    let offer = format!("{} {} {}", paths.join(" "), offer.seat, offer.worker);
    Command::new(env::current_exe().unwrap()).args(["--exact", TEST]).env(OFFER, offer).spawn().unwrap()
}

fn wait_for(mut done: impl FnMut() -> bool) -> io::Result<()> {
    let deadline = Instant::now() + WATCHDOG;
    while !done() {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

#[test]
fn a_worker_in_another_process_does_jobs_until_it_is_killed_and_the_next_one_goes_on() {
    if let Ok(offer) = env::var(OFFER) {
        return worker(&offer);
    }
    let (board, mut producer) = Board::new(GEOMETRY).unwrap();
    for round in 0..3_u16 {
        let offer = board.seat().unwrap();
        let worker = offer.worker;
        let mut child = start(&offer);
        for job in 0..50_u16 {
            let job = f32::from(round * 100 + job);
            producer.post(&x(job), &slices(4)).unwrap();
            for index in 0..4 {
                wait_for(|| producer.state(index) == SliceState::Done(worker)).unwrap();
                assert_eq!(sums(&mut producer, index), Some(expected(job, &slice(index as u32))));
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        producer.post(&x(0.0), &slices(4)).unwrap();
        assert_eq!(producer.state(0), SliceState::Open, "nobody is there");
        assert!(board.fence(worker));
    }
    // A fenced worker ends by itself.
    let offer = board.seat().unwrap();
    let mut child = start(&offer);
    assert!(board.fence(offer.worker));
    wait_for(|| child.try_wait().unwrap().is_some()).unwrap();
    assert!(child.wait().unwrap().success());
}
