//! Life of a worker: start, service and end, and the executor's loss at its end.

use std::{process::Command, time::Duration};

use rustix::{
    fs::{Mode, OFlags},
    process::Signal,
    pty::{OpenptFlags, openpt, ptsname, unlockpt},
};
use shmproto::{board::SliceState, fd_passing::ToWorker, image::Image};

use crate::{
    executor::{BoardExecutor, ModuleShape, SliceWork, adapter, bits},
    worker::{WorkerChild, WorkerDirectory, a_core, until},
};

const SHAPE: ModuleShape = ModuleShape {
    module: 0,
    rank: 32,
    columns: 128,
    rows: 128,
    precision: kernels::lora::LoraPrecision::Exact,
};

fn image() -> Image {
    adapter(1, &[SHAPE])
}

/// Offers the adapter and computes a slice as a health check.
fn works(executor: &mut BoardExecutor, peer: &crate::executor::AttachedPeer) {
    let (image, work) = (image(), SliceWork::of(&SHAPE, 4));
    peer.offer(1, &image).unwrap();
    assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&image)));
}

#[test]
fn a_worker_waits_for_an_executor_and_says_when_it_is_seated() {
    let place = WorkerDirectory::new();
    let mut worker = place.start_undisturbed(&[]);
    // The worker sleeps after a first try.
    until("it has tried", || worker.threads().contains("control") && worker.is_in_state('S'));
    std::thread::sleep(Duration::from_millis(300));
    let mut executor = BoardExecutor::new(&place);
    let peer = executor.seat();
    assert_eq!(peer.pid, worker.pid());
    worker.ready();
    works(&mut executor, &peer);
}

#[test]
fn a_worker_outlives_its_executor_and_forgets_all_of_it() {
    let place = WorkerDirectory::new();
    let mut first = BoardExecutor::new(&place);
    let worker = place.start_undisturbed(&[]);
    let peer = first.seat();
    works(&mut first, &peer);
    drop((first, peer));
    until("it has let go of the board", || worker.shared_maps() == 0);
    let mut second = BoardExecutor::new(&place);
    let peer = second.seat();
    assert_eq!(peer.pid, worker.pid());
    // The number belongs to the former executor; here it is unknown until it is offered.
    let work = SliceWork::of(&SHAPE, 4);
    second.post(&work.x, &[work.slice(1, 0, 0)]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(second.producer.state(0), SliceState::Open);
    second.take_back(0);
    works(&mut second, &peer);
}

#[test]
fn a_worker_whose_executor_says_farewell_asks_anew() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    peer.connection.send(&ToWorker::Closing, &[]).unwrap();
    peer.until_gone();
    executor.board.fence(peer.worker);
    let peer = executor.seat();
    works(&mut executor, &peer);
}

#[test]
fn a_healthy_start_and_end_are_no_warnings() {
    let place = WorkerDirectory::new();
    let mut worker = place.start_undisturbed(&[]);
    // Long enough for a warning: the worker retries ever less often, down to once per second.
    std::thread::sleep(Duration::from_secs(3));
    let executor = BoardExecutor::new(&place);
    let peer = executor.seat();
    worker.ready();
    peer.connection.send(&ToWorker::Closing, &[]).unwrap();
    peer.until_gone();
    drop((executor, peer));
    // The worker has tried again by then.
    std::thread::sleep(Duration::from_millis(300));
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(0));
    let log = worker.log();
    assert!(log.contains("no executor listens on") && log.contains("the executor has ended"), "{log}");
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}

#[test]
fn a_fenced_worker_asks_for_a_new_seat() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let worker = place.start_undisturbed(&[]);
    let first = executor.seat();
    works(&mut executor, &first);
    assert!(executor.board.fence(first.worker));
    first.until_gone();
    let second = executor.seat();
    assert_ne!(second.worker, first.worker);
    assert_eq!(second.pid, worker.pid());
    works(&mut executor, &second);
}

#[test]
fn a_slice_of_a_worker_that_is_killed_is_computed_by_another() {
    for moment in ["worker.after_claim", "worker.mid_slice", "worker.before_done"] {
        let place = WorkerDirectory::new();
        let mut executor = BoardExecutor::new(&place);
        let mut doomed = place.start();
        let peer = executor.seat();
        works(&mut executor, &peer);
        place.arm(moment, "kill");
        let (image, work) = (image(), SliceWork::of(&SHAPE, 4));
        executor.post(&work.x, &[work.slice(1, 0, 0)]);
        assert_eq!(doomed.code(), None, "{moment}");
        assert!(place.has_fired(moment));
        peer.until_gone();
        assert!(matches!(executor.producer.state(0), SliceState::Claimed(worker) if worker == peer.worker));
        executor.take_back(0);
        executor.board.fence(peer.worker);

        let _other = place.start();
        let other = executor.seat();
        other.offer(1, &image).unwrap();
        assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&image)), "{moment}");
    }
}

#[test]
fn what_a_worker_has_done_counts_though_it_is_killed_in_the_same_moment() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut doomed = place.start();
    let peer = executor.seat();
    works(&mut executor, &peer);
    place.arm("worker.after_done", "kill");
    let (image, work) = (image(), SliceWork::of(&SHAPE, 4));
    executor.post(&work.x, &[work.slice(1, 0, 0)]);
    assert_eq!(doomed.code(), None);
    assert_eq!(bits(&executor.read(0, 4 * 128)), bits(&work.expected(&image)));
}

#[test]
fn a_worker_that_dies_anywhere_else_leaves_the_executor_in_peace() {
    let places =
        ["connected", "hello", "seated", "image_received", "image_mapped", "image_withdrawn", "parked"];
    for moment in places {
        let (place, name) = (WorkerDirectory::new(), format!("worker.{moment}"));
        let mut executor = BoardExecutor::new(&place);
        place.arm(&name, "kill");
        let mut doomed = place.start();
        let watchdog = std::thread::scope(|scope| {
            let dies = scope.spawn(|| doomed.code());
            let accepted = executor.try_seat(|| place.has_fired(&name));
            if let Some(peer) = accepted {
                let _ = peer.try_offer(1, &image());
                let _ = peer.connection.send(&ToWorker::AdapterWithdrawn(1), &[]);
            }
            dies.join().unwrap()
        });
        assert_eq!(watchdog, None, "{moment}");
        assert!(place.has_fired(&name), "{moment}");
        let _next = place.start();
        let peer = executor.seat();
        works(&mut executor, &peer);
    }
}

#[test]
fn a_stopped_worker_that_was_fenced_changes_nothing_when_it_goes_on() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let worker = place.start();
    let peer = executor.seat();
    works(&mut executor, &peer);
    place.arm("worker.before_done", "stop");
    let (image, work) = (image(), SliceWork::of(&SHAPE, 4));
    executor.post(&work.x, &[work.slice(1, 0, 0)]);
    until("it stops in the middle", || place.has_fired("worker.before_done") && worker.is_in_state('T'));
    executor.take_back(0);
    executor.board.fence(peer.worker);
    // The next job has the same slice, which no worker can claim meanwhile.
    executor.post(&work.x, &[work.slice(1, 0, 0)]);
    worker.signal(Signal::CONT);
    peer.until_gone();
    assert_eq!(executor.producer.state(0), SliceState::Open, "the late end counts for nothing");
    executor.take_back(0);
    let again = executor.seat();
    assert_eq!(again.pid, worker.pid());
    again.offer(1, &image).unwrap();
    assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&image)));
}

#[test]
fn workers_that_are_killed_in_turn_while_there_is_work_lose_no_slice() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let (image, work) = (image(), SliceWork::of(&SHAPE, 4));
    let expected = bits(&work.expected(&image));
    let slices: Vec<_> = (0..16).map(|index| work.slice(1, 0, index * 512)).collect();
    for round in 0..12u64 {
        let mut doomed = place.start_undisturbed(&[]);
        let peer = executor.seat();
        peer.offer(1, &image).unwrap();
        executor.post(&work.x, &slices);
        std::thread::sleep(Duration::from_micros(round * 50));
        doomed.kill();
        executor.board.fence(peer.worker);
        for index in 0..slices.len() {
            let mut sums = vec![f32::NAN; 512];
            match executor.producer.take_back(index) {
                shmproto::board::TakeBack::Taken => continue,
                shmproto::board::TakeBack::AlreadyDone(_) => {}
            }
            // A done slice is complete.
            if executor.producer.done(index).map(|done| done.read(0, &mut sums)).is_ok() {
                assert_eq!(bits(&sums), expected);
            }
        }
    }
}

#[test]
fn a_worker_that_is_refused_says_why_and_tries_again() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut worker = place.start_undisturbed(&[]);
    for _ in 0..2 {
        let (connection, _) = executor.hear();
        let reason = "all 16 seats are taken; raise --max-workers".to_owned();
        connection.send(&ToWorker::Refused(reason), &[]).unwrap();
    }
    let peer = executor.seat();
    works(&mut executor, &peer);
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(0));
    let log = worker.log();
    let said = "the executor refuses this worker: all 16 seats are taken; raise --max-workers";
    assert_eq!(log.matches(said).count(), 1, "said once, not with each try: {log}");
}

#[test]
fn an_executor_that_speaks_out_of_turn_is_left_and_asked_again() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut worker = place.start_undisturbed(&[]);
    let (connection, _) = executor.hear();
    connection.send(&ToWorker::AdapterWithdrawn(7), &[]).unwrap();
    let peer = executor.seat();
    works(&mut executor, &peer);
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(0));
    assert!(worker.log().contains("the executor sent a withdrawal at the wrong time"));
}

/// Ends a worker in each supported way, and expects exit code 0.
fn ends_when_asked(make: impl Fn() -> WorkerChild) {
    for signal in [Signal::TERM, Signal::INT] {
        let mut worker = make();
        worker.signal(signal);
        assert_eq!(worker.code(), Some(0), "{signal:?}");
    }
    let mut worker = make();
    drop(worker.close_stdin());
    assert_eq!(worker.code(), Some(0), "end of standard input");
}

#[test]
fn a_worker_ends_when_asked_while_it_waits_for_an_executor() {
    let place = WorkerDirectory::new();
    ends_when_asked(|| {
        let worker = place.start_undisturbed(&["--exit-with-stdin"]);
        until("it watches and tries", || worker.threads().len() == 3);
        worker
    });
}

#[test]
fn a_worker_ends_when_asked_while_it_is_parked() {
    let place = WorkerDirectory::new();
    let executor = BoardExecutor::new(&place);
    ends_when_asked(|| {
        let mut worker = place.start_undisturbed(&["--exit-with-stdin"]);
        let peer = executor.seat();
        worker.ready();
        until("it sleeps", || worker.is_in_state('S'));
        // The worker keeps its seat until its end.
        std::mem::forget(peer);
        worker
    });
}

#[test]
fn a_worker_ends_when_asked_in_the_middle_of_a_slice() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut worker = place.start();
    let peer = executor.seat();
    works(&mut executor, &peer);
    // Longer than any test, so the end must not wait for it.
    place.arm("worker.after_claim", "wait 600000");
    let work = SliceWork::of(&SHAPE, 4);
    executor.post(&work.x, &[work.slice(1, 0, 0)]);
    until("it is in the middle", || place.has_fired("worker.after_claim"));
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(0));
    executor.take_back(0);
}

#[test]
fn a_worker_ends_when_either_end_of_the_terminal_on_its_standard_input_is_closed() {
    let place = WorkerDirectory::new();
    for is_given_the_master in [false, true] {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(&*name, slave, Mode::empty()).unwrap();
        let (given, kept) = if is_given_the_master { (master, slave) } else { (slave, master) };
        let mut command = Command::new(env!("CARGO_BIN_EXE_lora-worker"));
        command.args(place.arguments(a_core())).arg("--exit-with-stdin");
        let mut worker = WorkerChild::spawn_with_stdin(command, given.into());
        until("it watches and tries", || worker.threads().len() == 3);
        rustix::io::write(&kept, b"not the end\n").unwrap();
        drop(kept);
        assert_eq!(worker.code(), Some(0), "given the master: {is_given_the_master}");
    }
}

#[test]
fn standard_input_does_not_matter_unless_it_is_said_to() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut worker = place.start_undisturbed(&[]);
    drop(worker.close_stdin());
    let peer = executor.seat();
    works(&mut executor, &peer);
}

#[test]
fn a_setting_that_cannot_be_meant_is_named_and_exits_with_usage() {
    let place = WorkerDirectory::new();
    let failed = |arguments: &[String]| {
        let output = Command::new(env!("CARGO_BIN_EXE_lora-worker")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = failed(&place.arguments(1023));
    assert!(said.contains("--core names core 1023, but this process may only run on ["), "{said}");
    let said = failed(&[place.arguments(a_core()), vec!["--spin-us=1000001".to_owned()]].concat());
    assert!(said.contains("--spin-us is 1000001"), "{said}");
    let mut arguments = place.arguments(a_core());
    arguments[1] = "x".repeat(200);
    let said = failed(&arguments);
    assert!(said.contains("error: ") && said.contains("--executor"), "{said}");
}
