//! The process itself: its start and its end.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{WATCHDOG, eventually};

fn gateway(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
    command.current_dir(directory).args([
        "--socket",
        "socket",
        "--state",
        "state",
        "--listen",
        "127.0.0.1:0",
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap()
}

#[tokio::test]
async fn a_signal_ends_it_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let child = gateway(directory.path()).spawn().unwrap();
    eventually("it runs", || directory.path().join("state/gateway.lock").exists()).await;
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.is_empty(), "it never was ready");
}

#[tokio::test]
async fn the_end_of_its_input_ends_it_if_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = gateway(directory.path()).arg("--exit-with-stdin").spawn().unwrap();
    eventually("it runs", || directory.path().join("state/gateway.lock").exists()).await;
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn what_cannot_work_is_one_line_that_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (["--listen", "0.0.0.0:0"], "--api-key-file"),
        (["--adapter-root", "nowhere"], "--adapter-root"),
        (["--api-key-file", "nowhere"], "--api-key-file"),
    ] {
        // A repeated argument would be rejected, so these stand alone.
        let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
        command
            .current_dir(directory.path())
            .args(["--socket", "socket", "--state", "state"])
            .args(arguments);
        let output = run(&mut command);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn the_service_manager_hears_what_is_going_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WATCHDOG)).unwrap();
    let mut command = gateway(directory.path());
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "400000");
    let child = command.spawn().unwrap();
    let hear = |wanted: &str| {
        let mut buffer = [0; 4096];
        loop {
            let length = manager.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}"));
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            assert!(!text.contains("READY=1"), "nothing is served without an executor");
            if text.contains(wanted) {
                return;
            }
        }
    };
    hear("EXTEND_TIMEOUT_USEC=");
    hear("WATCHDOG=1");
    hear("WATCHDOG=1");
    signal(&child, Signal::TERM);
    hear("STOPPING=1");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}

#[test]
fn settings_that_make_no_sense_end_it_with_one_line_and_the_code_of_usage() {
    for (arguments, variable, said) in [
        (["--listen", "0.0.0.0:0"], ("HOLOBIONT_STATE", "s"), "--insecure"),
        (["--listen", "127.0.0.1:0"], ("HOLOBIONT_LISTENS", "x"), "did you mean HOLOBIONT_LISTEN?"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
        command.args(["--socket", "socket", "--state", "state"]).args(arguments).env(variable.0, variable.1);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.starts_with("error: ") && text.contains(said) && text.lines().count() == 1, "{text}");
    }
}

fn processor_s(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}

#[tokio::test]
async fn a_flood_of_connections_beyond_its_descriptors_neither_silences_nor_spins_it() {
    let (directory, address) = (tempfile::tempdir().unwrap(), free_address());
    let mut command = Command::new("sh");
    command.current_dir(directory.path()).args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""]);
    command.arg(env!("CARGO_BIN_EXE_gateway")).args(["--socket", "socket", "--state", "state", "--listen"]);
    let mut child = command.arg(address.to_string()).stderr(Stdio::null()).spawn().unwrap();
    eventually("it listens", || TcpStream::connect(address).is_ok()).await;
    let flood: Vec<TcpStream> = (0..60).map(|_| TcpStream::connect(address).unwrap()).collect();
    // The process may still be busy with its start.
    eventually("a second of doing nothing takes less than 0.3 s of processor time", || {
        let before = processor_s(child.id());
        std::thread::sleep(Duration::from_secs(1));
        processor_s(child.id()) - before < 0.3
    })
    .await;
    let mut probe = TcpStream::connect(address).unwrap();
    probe.set_read_timeout(Some(WATCHDOG)).unwrap();
    probe.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    probe.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("\"status\":\"loading\""), "{answer}");
    drop(flood);
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
