//! Costs and system calls of a worker.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    executor::{BoardExecutor, ModuleShape, SliceWork, adapter, bits, job},
    worker::{WorkerChild, WorkerDirectory, a_core, until},
};

const SHAPE: ModuleShape = ModuleShape {
    module: 0,
    rank: 16,
    columns: 64,
    rows: 64,
    precision: kernels::lora::LoraPrecision::Exact,
};

/// Names of one thread's system calls in the record of `strace`.
fn calls(record: &Path, thread: u32) -> Vec<String> {
    let text = fs::read_to_string(record).unwrap_or_default();
    let mine =
        text.lines().filter_map(|line| line.split_once(' ')).filter(|(pid, _)| *pid == thread.to_string());
    let names = mine.map(|(_, call)| call.trim_start().split('(').next().unwrap_or_default());
    // Signals, and the second halves of counted calls.
    names.filter(|name| !name.starts_with(['-', '+', '<'])).map(str::to_owned).collect()
}

/// A worker under `strace`, and its record; `None` with a message if `strace` is not installed.
fn recorded(place: &WorkerDirectory, prepare: impl FnOnce(&mut Command)) -> Option<(WorkerChild, PathBuf)> {
    if Command::new("strace").arg("-V").output().is_err() {
        println!("skipped: strace is not installed; apt install strace");
        return None;
    }
    let (mut command, record) = (Command::new("strace"), place.path("calls"));
    command.args(["-f", "-o"]).arg(&record).arg(env!("CARGO_BIN_EXE_lora-worker"));
    // The worker must end even if strace is killed.
    command.args(place.arguments(a_core())).arg("--exit-with-stdin");
    prepare(&mut command);
    Some((WorkerChild::spawn(command), record))
}

#[test]
fn ten_thousand_slices_take_no_system_call() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    // A spin time longer than the pause between two jobs, so that the worker does not sleep.
    let Some((_strace, record)) = recorded(&place, |command| _ = command.args(["--spin-us", "1000000"]))
    else {
        return;
    };
    let peer = executor.seat();
    let image = adapter(1, &[SHAPE]);
    peer.offer(1, &image).unwrap();
    let work = SliceWork::of(&SHAPE, 1);
    let expected = bits(&work.expected(&image));
    let (x, slices) = job(1, &(0..50).map(|_| SliceWork::of(&SHAPE, 1)).collect::<Vec<_>>());
    // Warm-up: the first job still makes system calls.
    executor.post(&x, &slices);
    executor.read(49, 64);
    let before = calls(&record, peer.pid).len();
    for _ in 0..200 {
        executor.post(&x, &slices);
        for index in 0..slices.len() {
            assert_eq!(bits(&executor.read(index, 64)), expected);
        }
    }
    let during = calls(&record, peer.pid).split_off(before);
    assert!(before > 20, "the record is one of this thread: {before} calls");
    // A pause of this test for a second, on a busy machine, puts the worker to sleep, which is one call.
    assert!(during.len() <= 10 && during.iter().all(|call| call == "futex"), "{during:?}");
}

#[test]
fn a_worker_does_not_miss_the_system_calls_it_has_given_up() {
    let place = WorkerDirectory::new();
    let systemd = Systemd::new(&place);
    let Some((mut strace, record)) =
        recorded(&place, |command| _ = command.env("NOTIFY_SOCKET", &systemd.path))
    else {
        return;
    };
    thread::sleep(Duration::from_millis(300));
    let mut executor = BoardExecutor::new(&place);
    let work = SliceWork::of(&SHAPE, 1);
    for number in 1..=15 {
        let image = adapter(number, &[SHAPE]);
        let peer = executor.seat();
        peer.offer(number.into(), &image).unwrap();
        peer.offer(number.into(), &image).unwrap_err();
        assert_eq!(bits(&executor.compute(number.into(), &work)), bits(&work.expected(&image)));
        peer.withdraw(number.into());
        executor.board.fence(peer.worker);
        peer.until_gone();
    }
    drop(executor);
    systemd.hears("STATUS=waiting for an executor");
    drop(strace.close_stdin());
    assert_eq!(strace.code(), Some(0));
    let record = fs::read_to_string(record).unwrap();
    assert_eq!(record.matches("SECCOMP_SET_MODE_FILTER").count(), 3, "each thread gives up its own");
    let refused: Vec<&str> = record.lines().filter(|line| line.contains("EPERM")).collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn a_worker_without_work_uses_no_cpu() {
    let place = WorkerDirectory::new();
    let lonely = place.start_undisturbed(&[]);
    until("it waits", || lonely.threads().contains("control") && lonely.is_in_state('S'));
    // The worker may still be starting or spinning. The bound is a fiftieth, since the clock ticks a hundred
    // times per second.
    let idles = || {
        let before = lonely.cpu_time();
        thread::sleep(Duration::from_secs(2));
        lonely.cpu_time() - before <= Duration::from_millis(40)
    };
    until("waiting takes no time", idles);
    let mut executor = BoardExecutor::new(&place);
    let peer = executor.seat();
    let image = adapter(1, &[SHAPE]);
    peer.offer(1, &image).unwrap();
    executor.compute(1, &SliceWork::of(&SHAPE, 1));
    until("being parked takes no time", idles);
}

#[test]
fn a_worker_stays_on_its_core_and_gives_up_system_calls() {
    let place = WorkerDirectory::new();
    let executor = BoardExecutor::new(&place);
    let mut worker = place.start_undisturbed(&[]);
    let _peer = executor.seat();
    worker.ready();
    assert_eq!(worker.threads(), ["control", "lora-worker", "watch"].map(str::to_owned).into());
    let threads = fs::read_dir(format!("/proc/{}/task", worker.pid())).unwrap();
    let core = a_core().to_string();
    for thread in threads.map(|thread| thread.unwrap().path()) {
        let says = |key: &str, value: &str| {
            let status = fs::read_to_string(thread.join("status")).unwrap();
            status.lines().any(|line| line.strip_prefix(key).is_some_and(|rest| rest.trim() == value))
        };
        assert!(says("Cpus_allowed_list:", &core), "{thread:?}");
        until("it is filtered", || says("Seccomp:", "2"));
        assert!(says("NoNewPrivs:", "1"), "{thread:?}");
    }
}

struct Systemd {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Systemd {
    fn new(place: &WorkerDirectory) -> Self {
        let path = place.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        Self { socket, path }
    }

    fn hears(&self, line: &str) {
        let mut buffer = [0; 4096];
        until(line, || {
            let heard = self
                .socket
                .recv(&mut buffer)
                .map(|count| String::from_utf8_lossy(&buffer[..count]).into_owned());
            heard.is_ok_and(|heard| heard.lines().any(|heard| heard == line))
        });
    }
}

#[test]
fn systemd_is_told_what_a_worker_does() {
    let place = WorkerDirectory::new();
    let systemd = Systemd::new(&place);
    let mut worker = place.start_with(&[], |command| {
        // systemd names the watched process id in the environment, which is only known at run time.
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "WATCHDOG_PID=$$ exec \"$0\" \"$@\""])
            .arg(command.get_program())
            .args(command.get_args());
        *command = shell;
        command.env("NOTIFY_SOCKET", &systemd.path).env("WATCHDOG_USEC", "400000");
    });
    systemd.hears("READY=1");
    systemd.hears("WATCHDOG=1");
    let executor = BoardExecutor::new(&place);
    let peer = executor.seat();
    systemd.hears("STATUS=ready, with 0 adapters");
    peer.offer(1, &adapter(1, &[SHAPE])).unwrap();
    systemd.hears("STATUS=ready, with 1 adapters");
    systemd.hears("WATCHDOG=1");
    drop((peer, executor));
    systemd.hears("STATUS=waiting for an executor");
    worker.signal(Signal::TERM);
    systemd.hears("STOPPING=1");
    assert_eq!(worker.code(), Some(0));
}
