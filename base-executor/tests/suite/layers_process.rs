//! The layer service of the program itself, at its socket.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use shmproto::{
    channel::{ClientChannel, Geometry, LAYOUT_HASH},
    codec::Wire as _,
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, LAYER_VERSION, RowSource, SiteOp, SitePath,
        control::{
            AdapterDtype, CATALOG, Catalog, ClientEnd, Fetch, FromLayers, KvDtype, RefusalCode, SessionOpen,
            SessionOpened, SessionRefused, ToLayers,
        },
    },
};

use crate::{gateway::WATCHDOG, tiny};

const SLAB: u64 = 1 << 20;

struct LayersExecutor {
    child: Child,
    directory: tempfile::TempDir,
}

impl LayersExecutor {
    fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        tiny::write_model(&directory.path().join("model"));
        let mut executor = Self { child: spawn(directory.path(), arguments), directory };
        let mut line = String::new();
        BufReader::new(executor.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        executor
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("private/layers.sock")
    }

    fn open(&self) -> LayersClient {
        let (connection, answer) = self.try_open(&open());
        match answer {
            FromLayers::Opened(opened) => LayersClient { connection, opened },
            other => panic!("the session is not opened: {other:?}"),
        }
    }

    fn try_open(&self, open: &SessionOpen) -> (ClientEnd, FromLayers) {
        let connection = ClientEnd::to(&self.socket()).unwrap();
        connection.send(&ToLayers::Open(open.clone()), &[]).unwrap();
        let (answer, _) = connection.receive().unwrap().unwrap();
        (connection, answer)
    }
}

impl Drop for LayersExecutor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(directory: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_base-executor"));
    command.arg("--model").arg(directory.join("model"));
    command.arg("--socket").arg(directory.join("private/executor.sock")).args(["--log-format", "human"]);
    command.args(arguments).env("HOLOBIONT_KV_BYTES", "1MiB").env_remove("NOTIFY_SOCKET");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn open() -> SessionOpen {
    SessionOpen {
        version: LAYER_VERSION,
        layout_hash: LAYOUT_HASH,
        key: String::new(),
        name: "test".to_owned(),
        masking: "off".to_owned(),
        session: 0,
    }
}

struct LayersClient {
    connection: ClientEnd,
    opened: SessionOpened,
}

impl LayersClient {
    fn ask(&self, message: &ToLayers) -> FromLayers {
        self.connection.send(message, &[]).unwrap();
        self.connection.receive().unwrap().unwrap().0
    }

    fn catalog(&self) -> Catalog {
        let mut bytes = Vec::new();
        while bytes.len() < self.opened.catalog_bytes as usize {
            let fetch = Fetch { blob: CATALOG, offset: bytes.len() as u64, bytes: 1000 };
            match self.ask(&ToLayers::Fetch(fetch)) {
                FromLayers::Fetched(fetched) => bytes.extend(fetched.bytes),
                other => panic!("the catalog is not there: {other:?}"),
            }
        }
        Catalog::from_bytes(&bytes).unwrap()
    }

    fn channel(&self) -> ClientChannel {
        self.connection.send(&ToLayers::Channel(SLAB), &[]).unwrap();
        let (answer, mut fds) = self.connection.receive().unwrap().unwrap();
        let FromLayers::ChannelReady(ready) = answer else { panic!("there is no channel: {answer:?}") };
        let geometry = Geometry { slab_bytes: ready.slab_bytes, depth: ready.depth };
        ClientChannel::join(fds.remove(0), ready.region_bytes, geometry).unwrap()
    }
}

/// Sends a row of ones through site 0 and returns the output.
fn call(channel: &mut ClientChannel, sequence: u64, columns: usize, outputs: usize) -> Vec<f32> {
    let header = CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 0,
        part: None,
        source: RowSource::Rows,
        sequence,
        rows: 1,
        input: 0,
        output: SLAB / 2,
    };
    channel.write_rows(0, Dtype::F32, &vec![1.0; columns]).unwrap();
    channel.submit(&header).unwrap();
    let reply = channel.wait(Duration::from_micros(50), WATCHDOG).unwrap().expect("an answer comes");
    assert_eq!((reply.status, reply.sequence), (CallStatus::Done, sequence));
    let mut out = vec![0.0; outputs];
    channel.read_rows(SLAB / 2, Dtype::F32, &mut out).unwrap();
    out
}

#[test]
fn a_client_opens_a_session_fetches_the_catalog_and_calls() {
    let executor = LayersExecutor::start(&[]);
    let client = executor.open();
    let catalog = client.catalog();
    assert_eq!((catalog.sites.len(), &*catalog.architecture), (9, "llama"));
    assert_eq!((catalog.kv_dtype, catalog.adapter_dtype), (KvDtype::F32, AdapterDtype::Exact));
    assert!(!catalog.files.is_empty(), "embedding and norms are given out");
    let mut channel = client.channel();
    let first = call(&mut channel, 1, 64, 128);
    assert!(first.iter().any(|value| *value != 0.0));
    assert_eq!(call(&mut channel, 2, 64, 128), first);
    let FromLayers::Stats(stats) = client.ask(&ToLayers::GetStats) else { panic!("no figures") };
    assert_eq!((stats.calls, stats.rows[0], stats.refused), (2, 2, 0));
}

#[test]
fn a_client_that_dies_takes_its_session_along() {
    let executor = LayersExecutor::start(&["--layer-max-sessions", "1"]);
    for phase in 0..3 {
        let client = executor.open();
        let channel = (phase > 0).then(|| client.channel());
        if let (Some(mut channel), 2) = (channel, phase) {
            call(&mut channel, 1, 64, 128);
        }
        drop(client);
        let begin = Instant::now();
        while !matches!(executor.try_open(&open()), (_, FromLayers::Opened(_))) {
            assert!(begin.elapsed() < WATCHDOG, "its place is never free");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Waits until the probing session is closed too.
        while !matches!(executor.try_open(&open()), (_, FromLayers::Opened(_))) {
            assert!(begin.elapsed() < WATCHDOG, "its place is never free");
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn held_bytes(fd: &OwnedFd) -> i64 {
    rustix::fs::fstat(fd).unwrap().st_blocks * 512
}

#[test]
fn slabs_that_were_replaced_cost_nothing_although_the_client_keeps_their_descriptors() {
    let executor = LayersExecutor::start(&[]);
    let client = executor.open();
    // All requests are sent at once: each channel is made in a turn of its own, and dropped when the next
    // exists.
    (0..10).for_each(|_| client.connection.send(&ToLayers::Channel(SLAB), &[]).unwrap());
    let kept: Vec<OwnedFd> =
        std::iter::repeat_with(|| client.connection.receive().unwrap().unwrap().1.remove(0))
            .take(10)
            .collect();
    let (last, replaced) = kept.split_last().unwrap();
    until("the replaced ones are empty", || replaced.iter().map(held_bytes).sum::<i64>() == 0);
    assert!(held_bytes(last) >= SLAB.cast_signed(), "the newest is there");
    drop(client);
    until("that of the session is empty, too", || held_bytes(last) == 0);
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn who_is_not_let_in_is_told_why() {
    let executor = LayersExecutor::start(&[]);
    let code = |open: SessionOpen| match executor.try_open(&open).1 {
        FromLayers::Refused(refused) => refused.code,
        other => panic!("it is let in: {other:?}"),
    };
    assert_eq!(code(SessionOpen { version: 9, ..open() }), RefusalCode::Version);
    assert_eq!(code(SessionOpen { layout_hash: 1, ..open() }), RefusalCode::Version);
    assert_eq!(code(SessionOpen { masking: "perfect".to_owned(), ..open() }), RefusalCode::Masking);
    let early = ClientEnd::to(&executor.socket()).unwrap();
    early.send(&ToLayers::GetStats, &[]).unwrap();
    let (answer, _) = early.receive().unwrap().unwrap();
    assert!(matches!(answer, FromLayers::Refused(refused) if refused.code == RefusalCode::Malformed));
}

#[test]
fn clients_are_told_of_the_end() {
    let mut executor = LayersExecutor::start(&[]);
    let client = executor.open();
    let _channel = client.channel();
    kill_process(Pid::from_child(&executor.child), Signal::TERM).unwrap();
    let heard = || client.connection.receive().unwrap().unwrap().0;
    let message = match heard() {
        // On a busy machine the shutdown arrives before the channel.
        FromLayers::Refused(SessionRefused { code: RefusalCode::Draining, .. }) => heard(),
        message => message,
    };
    assert_eq!(message, FromLayers::Draining);
    assert!(executor.child.wait().unwrap().success());
    assert!(!executor.socket().exists(), "the socket file is removed");
}

#[test]
fn without_an_engine_an_unknown_architecture_is_served_too() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    tiny::write_model(&model);
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(
        model.join("config.json"),
        config.replace("LlamaForCausalLM\"]", "NewForCausalLM\"], \"model_type\": \"new\""),
    )
    .unwrap();

    let mut refused = spawn(directory.path(), &[]);
    let mut said = String::new();
    refused.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
    assert!(!refused.wait().unwrap().success());
    assert!(said.contains("--engine none"), "{said}");

    let mut executor = LayersExecutor { child: spawn(directory.path(), &["--engine", "none"]), directory };
    let mut line = String::new();
    BufReader::new(executor.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let client = executor.open();
    let catalog = client.catalog();
    assert!(catalog.sites.iter().all(|site| site.parts.len() == 1), "every linear layer is a site");
    let site = &catalog.sites[0];
    let mut channel = client.channel();
    call(&mut channel, 1, site.columns as usize, site.parts[0].rows as usize);
    kill_process(Pid::from_child(&executor.child), Signal::TERM).unwrap();
    assert!(executor.child.wait().unwrap().success());
}

#[test]
fn switched_off_there_is_no_door() {
    let executor = LayersExecutor::start(&["--layers", "off"]);
    assert!(!executor.socket().exists() && !executor.socket().with_extension("zmq").exists());
}
