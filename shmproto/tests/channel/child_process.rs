//! The channel across a real process boundary: this test binary starts itself again as the client.

use std::{
    env, fs,
    os::fd::{AsRawFd, OwnedFd},
    process::{Child, Command},
    time::{Duration, Instant},
};

use rustix::process::{Signal, set_parent_process_death_signal};
use shmproto::{
    channel::{ClientChannel, Doorbell, ExecutorChannel, WakeCause},
    layer::Dtype,
};

use super::{GEOMETRY, LONG, WATCHDOG, call, reply, wait_one};

/// Variable in the client: the path of the executor's descriptor.
const REGION: &str = "SHMPROTO_TEST_CHANNEL";

/// Name of this test, for the second start.
const TEST: &str =
    "child_process::a_client_in_another_process_calls_until_it_is_killed_and_the_next_one_goes_on";

fn client(path: &str) {
    // The process must not outlive the test.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let fd: OwnedFd = fs::OpenOptions::new().read(true).write(true).open(path).expect(path).into();
    let mut client = ClientChannel::join(fd, GEOMETRY.region_bytes(), GEOMETRY).unwrap();
    for sequence in 1..u64::MAX {
        let row = [(sequence % 1000) as f32; 6];
        client.write_rows(128, Dtype::Bf16, &row).unwrap();
        client.submit(&call(sequence)).unwrap();
        // The executor may be slow, but it has not ended.
        while client.wait(Duration::from_micros(50), LONG).unwrap().is_none() {}
        let mut found = [0.0; 6];
        client.read_rows(1024, Dtype::F32, &mut found).unwrap();
        assert_eq!(found[0], found[5]);
    }
}

fn start(executor: &ExecutorChannel) -> Child {
    let fd = executor.fd().unwrap().as_raw_fd();
    let path = format!("/proc/{}/fd/{fd}", std::process::id());
    Command::new(env::current_exe().unwrap()).args(["--exact", TEST]).env(REGION, path).spawn().unwrap()
}

#[test]
fn a_client_in_another_process_calls_until_it_is_killed_and_the_next_one_goes_on() {
    if let Ok(path) = env::var(REGION) {
        return client(&path);
    }
    let bell = Doorbell::default();
    for _ in 0..3 {
        let mut executor = ExecutorChannel::create(GEOMETRY).unwrap();
        let mut child = start(&executor);
        let end = Instant::now() + WATCHDOG;
        let mut wanted = 1;
        while wanted <= 100 {
            assert!(Instant::now() < end, "no call {wanted}");
            let Some(taken) = executor.take().unwrap() else {
                wait_one(&bell, &executor, Duration::from_micros(20), Duration::from_secs(1));
                continue;
            };
            assert_eq!(taken, call(wanted));
            let mut row = [0.0; 6];
            executor.read_rows(taken.input, Dtype::Bf16, &mut row).unwrap();
            executor.write_rows(taken.output, Dtype::F32, &row).unwrap();
            executor.reply(&reply(&taken)).unwrap();
            wanted += 1;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // The killed client leaves at most one call; then the channel is silent, without a violation.
        while executor.take().unwrap().is_some() {}
        assert_eq!(wait_one(&bell, &executor, Duration::ZERO, Duration::from_millis(10)), WakeCause::Late);
    }
}
