//! The program itself: its start, its notifications, its end.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use base_executor::{FAILPOINTS, GROUP_FAILPOINTS, WEIGHT_FAILPOINTS};
use rustix::process::{Pid, Signal, kill_process};
use shmproto::{
    fd_passing::{FromWorker, ToWorker, WorkerHello},
    message::{
        ErrorCode, Generate, Hello, LoadAdapter, PROTOCOL_VERSION, Stats, ToExecutor, ToGateway,
        UnloadAdapter,
    },
};

use crate::{
    common::{prompt, request},
    gateway::{EVERYBODY, Gateway, WATCHDOG},
    tiny,
};

/// Directory with a model, a socket, failpoints and a fake systemd.
pub(crate) struct ProcessFixture {
    directory: tempfile::TempDir,
    systemd: UnixDatagram,
}

impl ProcessFixture {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        tiny::write_model(&directory.path().join("model"));
        fs::create_dir(directory.path().join("failpoints")).unwrap();
        let systemd = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        systemd.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        Self { directory, systemd }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("private/executor.sock")
    }

    pub(crate) fn arm(&self, place: &str, what: &str) {
        assert!([FAILPOINTS, GROUP_FAILPOINTS, WEIGHT_FAILPOINTS].concat().contains(&place), "{place}");
        fs::write(self.path("failpoints").join(place), what).unwrap();
    }

    pub(crate) fn has_fired(&self, place: &str) -> bool {
        self.path("failpoints").join(format!("{place}.fired")).exists()
    }

    /// The program behind `limits`, a shell command.
    fn command(&self, limits: &str, arguments: &[&str]) -> Command {
        self.command_for(&self.path("model"), limits, arguments)
    }

    pub(crate) fn command_for(&self, model: &Path, limits: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        let run = format!("{limits} exec \"$0\" \"$@\"");
        command.args(["-c", &run, env!("CARGO_BIN_EXE_base-executor"), "--model"]).arg(model);
        command.arg("--socket").arg(self.socket()).args(["--log-format", "human"]);
        command
            .args(arguments)
            .env("HOLOBIONT_KV_BYTES", "1MiB")
            .env("HOLOBIONT_FAILPOINTS", self.path("failpoints"));
        command.env_remove("NOTIFY_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self) -> ChildProcess {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, arguments: &[&str]) -> ChildProcess {
        let mut command = self.command("", arguments);
        command.env("NOTIFY_SOCKET", self.path("notify")).env("WATCHDOG_USEC", "200000");
        ChildProcess(command.spawn().unwrap())
    }

    fn notifications(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count) = self.systemd.recv(&mut buffer) {
            lines.extend(String::from_utf8_lossy(&buffer[..count]).lines().map(str::to_owned));
        }
        lines
    }

    /// Waits until systemd receives a line that begins with `beginning`; returns all lines up to it.
    fn told_until(&self, beginning: &str) -> Vec<String> {
        let (mut lines, begin) = (Vec::new(), Instant::now());
        while !lines.iter().any(|line: &String| line.starts_with(beginning)) {
            lines.extend(self.notifications());
            assert!(begin.elapsed() < WATCHDOG, "`{beginning}` is never said");
        }
        lines
    }
}

pub(crate) struct ChildProcess(pub(crate) Child);

impl ChildProcess {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    pub(crate) fn ready(&mut self) {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn dies(mut self) {
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(self.0.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    }

    fn ends_well(mut self) {
        assert!(self.0.wait().unwrap().success());
    }

    pub(crate) fn fails(mut self, code: i32) -> String {
        let mut text = String::new();
        self.0.stderr.as_mut().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(self.0.wait().unwrap().code(), Some(code), "{text}");
        text.lines().last().unwrap_or_default().to_owned()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < WATCHDOG, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_gateway_hears_how_far_the_loading_is_until_it_is_welcome() {
    let place = ProcessFixture::new();
    place.arm("executor.before_weights", "wait 700");
    let mut process = place.start();
    eventually("the socket is there first", || place.socket().exists()).await;
    let mut gateway = Gateway::connect(&place.socket()).await;
    gateway.send(ToExecutor::Hello(Hello { version: PROTOCOL_VERSION, instance: 1 })).await;
    let mut heard = Vec::new();
    let welcome = loop {
        match gateway.receive().await {
            ToGateway::Loading(loading) => heard.push(loading),
            ToGateway::Welcome(welcome) => break welcome,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((welcome.max_running, welcome.max_waiting), (64, 512));
    assert!(heard.iter().any(|loading| loading.stage == "reading weights"), "{heard:?}");
    for pair in heard.windows(2) {
        assert!(pair[0].stage != pair[1].stage || pair[0].percent <= pair[1].percent, "{heard:?}");
    }
    process.ready();
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    assert_eq!(gateway.tokens(1).await.len(), 5);
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_process_with_one_line() {
    let place = ProcessFixture::new();
    let weights = place.path("model/model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let line = place.start().fails(2);
    assert!(line.starts_with("error: "), "{line}");
    assert_eq!(line.matches("model.safetensors").count(), 1, "{line}");
    assert!(!place.socket().exists(), "the socket file is removed");
}

#[tokio::test]
async fn a_model_is_named_as_it_was_written_and_gateways_hear_where_it_is() {
    let place = ProcessFixture::new();
    let start = |model: &str, engine: &str| {
        let mut command = place.command_for(model.as_ref(), "", &["--engine", engine]);
        ChildProcess(command.current_dir(place.directory.path()).spawn().unwrap())
    };
    fs::write(place.path("bad.gguf"), "bad").unwrap();
    fs::create_dir(place.path("empty")).unwrap();
    for engine in ["resident", "none"] {
        for (model, code) in [("./nosuch.gguf", 3), ("./bad.gguf", 2), ("./empty", 2)] {
            let line = start(model, engine).fails(code);
            assert_eq!(line.matches(model).count(), 1, "{line}");
        }
    }
    let mut process = start("./model", "resident");
    process.ready();
    let welcome = Gateway::connect(&place.socket()).await.hello(1).await;
    assert_eq!(PathBuf::from(welcome.model_path), place.path("model"));
}

#[test]
fn memory_that_is_not_to_be_had_is_an_error_that_says_what_to_lower() {
    let place = ProcessFixture::new();
    let limited = |limits, arguments: &[&str]| {
        ChildProcess(place.command(limits, arguments).env("MALLOC_ARENA_MAX", "1").spawn().unwrap()).fails(1)
    };
    let line = limited("ulimit -v 2000000;", &["--kv-bytes", "8GiB"]);
    assert!(line.contains("lower the KV budget"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn systemd_is_told_the_loading_the_readiness_the_life_and_the_end() {
    let place = ProcessFixture::new();
    place.arm("executor.before_weights", "wait 300");
    let process = place.start();
    let told = place.told_until("READY=1");
    assert!(told.iter().any(|line| line.starts_with("STATUS=loading: reading weights, 0 %")), "{told:?}");
    assert!(!told.iter().any(|line| line == "WATCHDOG=1"), "nothing is fed before it serves");
    place.told_until("WATCHDOG=1");
    place.told_until("WATCHDOG=1");
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    place.arm("executor.decode", "wait 300");
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    place.told_until("STATUS=serving 0 adapters; 1 requests run, 0 wait");
    gateway.outputs(1).await;
    process.signal(Signal::TERM);
    place.told_until("STOPPING=1");
    process.ends_well();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_hangs_is_not_said_to_live() {
    let place = ProcessFixture::new();
    let _process = place.start();
    place.told_until("WATCHDOG=1");
    place.arm("executor.before_step", "wait 4000");
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    eventually("the engine hangs", || place.has_fired("executor.before_step")).await;
    // Notifications from before the hang was noticed.
    tokio::time::sleep(Duration::from_millis(150)).await;
    place.notifications();
    tokio::time::sleep(Duration::from_millis(700)).await;
    let told = place.notifications();
    assert!(!told.iter().any(|line| line == "WATCHDOG=1"), "four limits long: {told:?}");
    assert_eq!(gateway.tokens(1).await.len(), 5);
    place.told_until("WATCHDOG=1");
}

#[tokio::test]
async fn a_process_that_was_stopped_goes_on_where_it_was() {
    let place = ProcessFixture::new();
    let mut process = place.start();
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let one = Generate { stop_tokens: Vec::new(), ..request(1, prompt(1, 10), 200) };
    gateway.send(ToExecutor::Generate(one.clone())).await;
    let whole = gateway.tokens(1).await;
    gateway.send(ToExecutor::Generate(Generate { request: 2, ..one })).await;
    gateway.receive().await;
    process.signal(Signal::STOP);
    tokio::time::sleep(Duration::from_millis(300)).await;
    process.signal(Signal::CONT);
    assert_eq!(gateway.tokens(2).await, whole);
}

#[tokio::test]
async fn a_step_that_fails_is_the_error_of_its_requests_alone() {
    let place = ProcessFixture::new();
    let mut process = place.start();
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    place.arm("executor.before_step", "fail");
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    assert_eq!(gateway.error(1).await, Some(ErrorCode::Internal));
    gateway.send(ToExecutor::Generate(request(2, prompt(1, 10), 5))).await;
    assert_eq!(gateway.tokens(2).await.len(), 5);
    process.signal(Signal::TERM);
    process.ends_well();
}

#[tokio::test]
async fn connections_beyond_the_limit_of_files_leave_those_there_are_undisturbed() {
    let place = ProcessFixture::new();
    let mut process = ChildProcess(place.command("ulimit -n 36;", &[]).spawn().unwrap());
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let flood: Vec<_> =
        (0..40).filter_map(|_| std::os::unix::net::UnixStream::connect(place.socket()).ok()).collect();
    gateway.send(ToExecutor::Generate(request(1, prompt(1, 10), 100))).await;
    assert_eq!(gateway.tokens(1).await.len(), 100);
    drop(flood);
    let mut later = Gateway::greet(&place.socket(), 2).await;
    later.send(ToExecutor::Generate(request(1, prompt(1, 10), 5))).await;
    assert_eq!(later.tokens(1).await.len(), 5);
}

#[tokio::test]
async fn an_adapter_that_cannot_fit_is_refused_before_its_file_is_read() {
    let place = ProcessFixture::new();
    let mut process = place.start_with(&["--adapter-bytes", "1MiB"]);
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    tiny::write_adapter(&place.path("large"), &[]);
    // A gigabyte of zeros, which would be no safetensors file if it were read.
    fs::File::create(place.path("large/adapter_model.safetensors")).unwrap().set_len(1 << 30).unwrap();
    let path = place.path("large").display().to_string();
    gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(1, path, EVERYBODY))).await;
    let ToGateway::Failed(failed) = gateway.answer().await else { panic!("it is refused") };
    assert_eq!(failed.error.code, ErrorCode::AdapterBudgetExceeded, "{}", failed.error.message);
    tiny::write_adapter(&place.path("small"), &[]);
    let path = place.path("small").display().to_string();
    gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(2, path, EVERYBODY))).await;
    assert!(matches!(gateway.answer().await, ToGateway::AdapterLoaded(_)));
}

/// Runs an adapter, requests that exceed the blocks, a cancellation and a lost gateway.
async fn exercise(place: &ProcessFixture) {
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    tiny::write_adapter(&place.path("adapter"), &[]);
    let path = place.path("adapter").display().to_string();
    gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(1, path, EVERYBODY))).await;
    let ToGateway::AdapterLoaded(loaded) = gateway.answer().await else { panic!("it is loaded") };
    for id in 1..=4 {
        let adapter = Some(loaded.adapter);
        gateway.send(ToExecutor::Generate(Generate { adapter, ..request(id, prompt(id, 60), 100) })).await;
    }
    for id in 1..=4 {
        assert_eq!(gateway.tokens(id).await.len(), 100);
    }
    gateway.send(ToExecutor::Generate(request(5, prompt(5, 10), 200))).await;
    gateway.send(ToExecutor::Cancel(5)).await;
    gateway.send(ToExecutor::UnloadAdapter(UnloadAdapter { request: 2, adapter: loaded.adapter })).await;
    assert!(matches!(gateway.answer().await, ToGateway::AdapterUnloaded(_)));
}

/// Sends requests until the first is evicted, and then the first again.
async fn live_again(place: &ProcessFixture) {
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    gateway.send(ToExecutor::Generate(request_of(1))).await;
    let first = gateway.tokens(1).await;
    for id in 2..10 {
        gateway.send(ToExecutor::Generate(request_of(id))).await;
        assert_eq!(gateway.tokens(id).await.len(), 20);
    }
    gateway.stats_when(|stats| stats.memory.disk_blocks_used > 20).await;
    gateway.send(ToExecutor::Generate(Generate { request: 10, ..request_of(1) })).await;
    assert_eq!(gateway.tokens(10).await, first, "the same bits");
    let stats = gateway.stats().await;
    assert!(stats.memory.fetched_disk_blocks > 0 && stats.memory.kv_wait_us > 0, "{stats:?}");
}

/// Sends a request, kills the process once its blocks are on disk, and sends another request.
async fn live_twice(place: &ProcessFixture, process: &mut ChildProcess) {
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    gateway.send(ToExecutor::Generate(request_of(1))).await;
    let first = gateway.tokens(1).await;
    let is_kept = |stats: &Stats| {
        stats.kv_blocks_cached > 0 && u64::from(stats.kv_blocks_cached) == stats.memory.spilled_blocks
    };
    let kept = gateway.stats_when(is_kept).await.memory.disk_blocks_used;
    process.signal(Signal::KILL);
    process.0.wait().unwrap();
    *process = place.start_with(&["--disk-bytes", "1MiB"]);
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    assert_eq!(
        gateway.stats().await.memory.disk_blocks_used,
        kept,
        "the next process finds what this one kept"
    );
    gateway.send(ToExecutor::Generate(request_of(1))).await;
    assert_eq!(gateway.tokens(1).await, first, "the same bits");
    let stats = gateway.stats().await;
    assert!(stats.cached_tokens > 0 && stats.memory.failed_copies == 0, "{stats:?}");
}

#[tokio::test]
async fn what_was_computed_is_there_after_a_kill() {
    let place = ProcessFixture::new();
    let mut process = place.start_with(&["--disk-bytes", "1MiB"]);
    process.ready();
    live_twice(&place, &mut process).await;
}

/// Loads one adapter for several owners: as many adapters of the same bytes.
async fn load_adapters(
    place: &ProcessFixture,
    gateway: &mut Gateway,
    owners: std::ops::Range<u8>,
) -> Vec<[u8; 32]> {
    tiny::write_adapter(&place.path("adapter"), &[]);
    let mut adapters = Vec::new();
    for owner in owners {
        let (request, path) = (u64::from(owner) + 1000, place.path("adapter").display().to_string());
        let load = LoadAdapter::of_one(request, path, [owner; 32]);
        gateway.send(ToExecutor::LoadAdapter(load)).await;
        let answer = gateway.answer().await;
        let ToGateway::AdapterLoaded(loaded) = answer else { panic!("{answer:?}") };
        adapters.push(loaded.adapter);
    }
    adapters
}

#[tokio::test]
async fn history_gives_way_to_an_adapter_and_an_idle_adapter_to_keys_and_values() {
    let place = ProcessFixture::new();
    // Blocks of 8 KiB: 40 of them, 10 of which adapters may have.
    let mut process = place.start_with(&["--device-bytes", "320KiB"]);
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    for id in 1..=9 {
        gateway.send(ToExecutor::Generate(request(id, prompt(id, 60), 20))).await;
        gateway.tokens(id).await;
    }
    let stats = gateway.stats().await;
    assert_eq!((stats.kv_blocks_total, stats.memory.adapter_blocks), (40, 0));
    assert!(stats.kv_blocks_cached > 35, "history has the rest: {stats:?}");

    let adapters = load_adapters(&place, &mut gateway, 1..9).await;
    let stats = gateway.stats().await;
    assert!(stats.memory.adapter_blocks <= 4, "nobody asked for them, and history stays: {stats:?}");
    let ask = |id: u64| {
        let adapter = Some(adapters[id as usize % 8]);
        Generate { adapter, ..request(id, prompt(1, 60), 20) }
    };
    gateway.send(ToExecutor::Generate(ask(10))).await;
    let first = gateway.tokens(10).await;
    for id in 11..=17 {
        gateway.send(ToExecutor::Generate(ask(id))).await;
        assert_eq!(gateway.tokens(id).await, first, "the same adapter and the same bits, wherever they are");
    }
    let stats = gateway.stats().await;
    assert!(stats.kv_blocks_cached <= 32 && stats.device_bytes == 8 * 8192, "{stats:?}");

    // Seven requests of 80 tokens take 35 blocks.
    for id in 21..=27 {
        gateway.send(ToExecutor::Generate(request(id, prompt(id, 70), 10))).await;
    }
    for id in 21..=27 {
        assert_eq!(gateway.tokens(id).await.len(), 10);
    }
    let stats = gateway.stats().await;
    assert!(stats.memory.adapter_blocks <= 5, "nobody used them: {stats:?}");
    for id in 30..=37 {
        gateway.send(ToExecutor::Generate(ask(id))).await;
        assert_eq!(gateway.tokens(id).await, first, "the same adapter and the same bits, wherever they are");
    }
    assert!(gateway.stats().await.memory.adapter_blocks <= 10);
}

/// Two adapters on a device with memory for one, over a slow link.
async fn live_cold(place: &ProcessFixture) {
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    for request in 1..=2 {
        let path = place.path(&format!("cold-{request}"));
        tiny::write_adapter(&path, &[]);
        let path = path.display().to_string();
        // Equal bytes are two adapters for two owners.
        let owner = [u8::try_from(request).unwrap(); 32];
        gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(request, path, owner))).await;
        let answer = gateway.answer().await;
        let ToGateway::AdapterLoaded(loaded) = answer else { panic!("{answer:?}") };
        let adapter = Some(loaded.adapter);
        gateway.send(ToExecutor::Generate(Generate { adapter, ..request_of(request) })).await;
        assert_eq!(gateway.tokens(request).await.len(), 20);
    }
}

fn request_of(id: u64) -> Generate {
    request(id, prompt(id, 30), 20)
}

fn idle_worker(place: &ProcessFixture) -> shmproto::fd_passing::WorkerEnd {
    let worker = shmproto::fd_passing::connect(&place.socket().with_file_name("workers.sock")).unwrap();
    worker.send(&FromWorker::Hello(WorkerHello::new(1, 0)), &[]).unwrap();
    let seated = worker.receive().unwrap();
    assert!(matches!(seated, Some((ToWorker::Seated(_), _))), "{seated:?}");
    worker
}

#[tokio::test]
async fn every_failpoint_is_reached() {
    let place = ProcessFixture::new();
    FAILPOINTS.iter().for_each(|name| place.arm(name, "wait 0"));
    let mut process = place.start_with(&["--kv-bytes", "128KiB"]);
    process.ready();
    exercise(&place).await;
    eventually("the gateway's going is noticed", || place.has_fired("executor.gateway_gone")).await;
    process.signal(Signal::TERM);
    process.ends_well();
    for mode in ["cpu-assist", "on-demand"] {
        let cold = ["--cold-start", mode, "--device-adapter-bytes", "3000B", "--link-gbps", "0.0002"];
        let mut process = place.start_with(&cold);
        process.ready();
        let worker = idle_worker(&place);
        live_cold(&place).await;
        drop(worker);
        eventually("the worker's going is noticed", || place.has_fired("executor.worker_lost")).await;
        process.signal(Signal::TERM);
        process.ends_well();
    }
    let mut process = place.start_with(&["--kv-bytes", "64KiB", "--disk-bytes", "1MiB"]);
    process.ready();
    live_again(&place).await;
    process.signal(Signal::TERM);
    process.ends_well();
    let missed: Vec<_> = FAILPOINTS.iter().filter(|name| !place.has_fired(name)).collect();
    assert!(missed.is_empty(), "{missed:?}");
}
