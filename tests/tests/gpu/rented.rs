//! A layers-only executor on a GPU or its stand-in: split clients on every route get the bits of the resident
//! engine on the same GPU, and the CPU's logits within 16-bit precision.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use client::{
    address::Address,
    session::{ClientSettings, Session, calls::LayerCall},
    transport::{Connect, local::LocalConnector, remote::RemoteConnector},
};
use e2e_tests::{
    WATCHDOG, eventually, eventually_some,
    fixtures::{program, prompt},
    gpu::{VOCABULARY, adapter, has_device, is_stand_in, real_model, small_model},
    signal,
    split::{
        SplitEndpoints, SplitRoute, SplitTenant,
        tenant::{LINEAR, OPEN},
    },
    watched,
};
use model::linear_sites::SiteId;
use rustix::process::Signal;
use serde_json::Value;
use shmproto::layer::{CallClass, SiteOp, SitePath};
use tempfile::TempDir;

/// Prompt tokens: so few that, with those of all clients together, a row's bits do not depend on its batch.
const PROMPT: usize = 6;
/// Answer tokens of the small and of the real model: the stand-in needs seconds for each.
const ANSWER: usize = 6;
const REAL_ANSWER: usize = 2;
const WORDS: &str = "abaabbab";
const QUESTION: &str = "The capital of France is";
/// Maximum difference of logits between the CPU and a device that rounds to bf16.
const TOLERANCE: f32 = 0.2;

/// A `base-executor` process without a supervisor, killed when dropped.
struct LayersOnlyExecutor {
    child: Child,
    command: Vec<String>,
    directory: PathBuf,
}

impl LayersOnlyExecutor {
    /// Starts an executor of `model` on `device`, with or without an engine, in `directory`; remote clients
    /// need a certificate of `endpoints`.
    fn start(
        directory: &Path,
        model: &Path,
        (engine, device): (&str, &str),
        endpoints: Option<&SplitEndpoints>,
    ) -> Self {
        let socket = directory.join("private/executor.sock");
        let mut command =
            vec!["--engine".to_owned(), engine.to_owned(), "--device".to_owned(), device.to_owned()];
        command.extend(["--model".to_owned(), model.display().to_string()]);
        command.extend(["--socket".to_owned(), socket.display().to_string()]);
        if let Some(endpoints) = endpoints {
            let file = |name| endpoints.ca().with_file_name(name).display().to_string();
            command.extend(["--layer-listen".to_owned(), endpoints.address().to_string()]);
            command.extend(["--layer-cert".to_owned(), file("server.pem")]);
            command.extend(["--layer-cert-key".to_owned(), file("server-key.pem")]);
            command.extend(["--layer-client-ca".to_owned(), file("ca.pem")]);
        }
        let mut executor = Self { child: spawn(&command, &[]), command, directory: directory.to_owned() };
        executor.await_ready();
        executor
    }

    fn await_ready(&mut self) {
        let mut line = String::new();
        let stdout = self.child.stdout.take().expect("its stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("its stdout can be read");
        assert_eq!(line, "ready\n", "{}", self.complaint());
    }

    fn complaint(&mut self) -> String {
        let mut text = String::new();
        let _ = self.child.kill();
        let read = self.child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut text));
        read.and_then(Result::ok).map_or_else(String::new, |_| text)
    }

    fn address(&self, endpoints: Option<&SplitEndpoints>, route: SplitRoute) -> String {
        let private = self.directory.join("private");
        match route {
            SplitRoute::SharedMemory => private.join("layers.sock").display().to_string(),
            SplitRoute::Ipc => format!("ipc://{}", private.join("layers.zmq").display()),
            SplitRoute::Tls => format!("tls://{}", endpoints.expect("TLS has endpoints").address()),
        }
    }

    fn connector(&self, endpoints: Option<&SplitEndpoints>, route: SplitRoute) -> Box<dyn Connect> {
        match self.address(endpoints, route).parse().expect("an address") {
            Address::Local(socket) => Box::new(LocalConnector::new(socket, Duration::ZERO, WATCHDOG)),
            address => {
                let files = endpoints.map(|endpoints| endpoints.tls_files(None)).unwrap_or_default();
                let connector = RemoteConnector::new(address, None, &files, WATCHDOG);
                Box::new(connector.expect("the certificates can be read"))
            }
        }
    }

    fn tenant(&self, model: &Path, endpoints: Option<&SplitEndpoints>, route: SplitRoute) -> SplitTenant {
        let rented = SplitTenant::rent(model, self.connector(endpoints, route), OPEN, None, WATCHDOG);
        rented.expect("the executor takes a client in")
    }

    fn replace(&mut self, environment: &[(&str, &str)]) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = spawn(&self.command, environment);
        self.await_ready();
    }

    /// Sends SIGTERM; the process must end in order.
    fn stop(mut self) {
        signal(self.child.id(), Signal::TERM);
        assert!(self.child.wait().expect("a child").success());
    }
}

impl Drop for LayersOnlyExecutor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Command without settings of the developer's environment.
fn bare(name: &str) -> Command {
    let mut command = Command::new(program(name));
    let ours = |name: &std::ffi::OsString| name.as_encoded_bytes().starts_with(b"HOLOBIONT_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| ours(name)) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn spawn(arguments: &[String], environment: &[(&str, &str)]) -> Child {
    let mut command = bare("base-executor");
    command.args(arguments).args(["--log-format", "human"]).env("HOLOBIONT_KV_BYTES", "4MiB");
    command.envs(environment.iter().copied()).env_remove("NOTIFY_SOCKET");
    command.spawn().expect("base-executor starts")
}

fn client(
    executor: &LayersOnlyExecutor,
    model: &Path,
    endpoints: &SplitEndpoints,
    route: SplitRoute,
    (question, tokens): (&str, usize),
) -> Command {
    let mut client = bare("holobiont-client");
    client.args(["--json", "--quiet", "generate", "--executor", &executor.address(Some(endpoints), route)]);
    client.arg("--model").arg(model).args(["--patience-s", "90"]);
    if route == SplitRoute::Tls {
        let (certificate, key) = endpoints.identity();
        client.arg("--ca").arg(endpoints.ca()).arg("--cert").arg(certificate).arg("--cert-key").arg(key);
    }
    client.args(["--temperature", "0", "--max-tokens", &tokens.to_string(), "--raw", "--", question]);
    client
}

fn text(client: Child) -> String {
    let output = client.wait_with_output().expect("its output can be read");
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{complaint}");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("the answer is JSON");
    answer["text"].as_str().expect("it has text").to_owned()
}

/// Answers of simultaneous clients on every route.
fn answers(
    executor: &LayersOnlyExecutor,
    model: &Path,
    endpoints: &SplitEndpoints,
    asked: (&str, usize),
) -> Vec<String> {
    let start =
        |route| client(executor, model, endpoints, route, asked).spawn().expect("holobiont-client starts");
    SplitRoute::ALL.map(start).map(text).to_vec()
}

fn place() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn tokens(seed: u32, length: usize) -> Vec<u32> {
    prompt(seed, length).into_iter().map(|token| token % VOCABULARY as u32).collect()
}

#[test]
fn the_real_models_rented_layers_answer_over_every_route_as_a_resident_gpu_and_the_cpu_do() {
    let Some(model) = real_model().filter(|_| has_device()) else { return };
    watched(move || {
        let asked = (QUESTION, REAL_ANSWER);
        let [rented, resident, cpu] =
            [("none", "cuda:0"), ("resident", "cuda:0"), ("none", "cpu")].map(|kind| {
                let (place, endpoints) = (place(), SplitEndpoints::new());
                let executor = LayersOnlyExecutor::start(place.path(), &model, kind, Some(&endpoints));
                let answers = answers(&executor, &model, &endpoints, asked);
                executor.stop();
                answers
            });
        eprintln!("{rented:?} {resident:?} {cpu:?}");
        assert!(!rented[0].is_empty());
        for answer in rented.iter().chain(&resident).chain(&cpu) {
            assert_eq!(answer, &rented[0], "the likeliest tokens are far likelier than the next");
        }
    });
}

/// Maximum difference; NaN if any value is NaN.
fn difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    let difference = |(one, other): (&f32, &f32)| (one - other).abs();
    one.iter().zip(other).map(difference).fold(0.0, |most, next| if next <= most { most } else { next })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Logits of some prompts and adapters on every route, all clients at once.
fn logits(
    executor: &LayersOnlyExecutor,
    model: &Path,
    endpoints: &SplitEndpoints,
    adapter: &Path,
) -> Vec<Vec<f32>> {
    thread::scope(|scope| {
        let routes = SplitRoute::ALL.map(|route| {
            scope.spawn(move || {
                let mut tenant = executor.tenant(model, Some(endpoints), route);
                let mut logits = Vec::new();
                for wearing in [None, Some(adapter)] {
                    tenant.wear(wearing);
                    (0..3).for_each(|seed| logits.push(tenant.logits(&tokens(seed, PROMPT))));
                }
                logits
            })
        });
        let routes =
            routes.map(|route| route.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        for route in &routes[1..] {
            for (one, other) in routes[0].iter().zip(route) {
                assert_eq!(bits(one), bits(other), "the same bits by every route, alone and in company");
            }
        }
        routes.into_iter().next().unwrap_or_default()
    })
}

#[test]
fn rented_layers_of_a_gpu_give_the_bits_that_a_resident_engines_gpu_gives() {
    if !has_device() {
        return;
    }
    watched(|| {
        let (model, own) = (small_model(), place());
        adapter(5, 12, own.path());
        let [rented, resident, cpu] =
            [("none", "cuda:0"), ("resident", "cuda:0"), ("none", "cpu")].map(|kind| {
                let (place, endpoints) = (place(), SplitEndpoints::new());
                let executor = LayersOnlyExecutor::start(place.path(), model.path(), kind, Some(&endpoints));
                let logits = logits(&executor, model.path(), &endpoints, own.path());
                executor.stop();
                logits
            });
        assert_ne!(bits(&rented[0]), bits(&rented[3]), "the adapter changes something");
        for ((rented, resident), cpu) in rented.iter().zip(&resident).zip(&cpu) {
            assert_eq!(bits(rented), bits(resident), "one model, any route, the same bits");
            let difference = difference(rented, cpu);
            assert!(difference < TOLERANCE, "{difference} beside the CPU");
        }
    });
}

/// Outputs of every site, forward and backward, for meaningless rows.
fn every_site(
    executor: &LayersOnlyExecutor,
    route: SplitRoute,
    endpoints: &SplitEndpoints,
    rows: usize,
) -> Vec<Vec<f32>> {
    let settings = ClientSettings {
        masking: LINEAR.as_str().to_owned(),
        patience: WATCHDOG,
        ..ClientSettings::default()
    };
    let mut session =
        Session::open(executor.connector(Some(endpoints), route), settings).expect("a session is opened");
    let sites = session.catalog().sites.clone();
    let mut all = Vec::new();
    for (site, shape) in (0..).map(SiteId).zip(&sites) {
        let outputs: usize = shape.parts.iter().map(|part| part.rows as usize).sum();
        let inputs = shape.columns as usize;
        for (op, input, output) in [(SiteOp::Forward, inputs, outputs), (SiteOp::Backward, outputs, inputs)] {
            let x: Vec<f32> = (0..rows * input).map(|i| (i * 7919 % 1013) as f32 / 1013.0 - 0.5).collect();
            let mut out = vec![f32::NAN; rows * output];
            let ask = LayerCall { site, part: None, op, path: SitePath::Linear, class: CallClass::Prefill };
            session.call(ask, &x, &mut out).expect("the executor answers");
            all.push(out);
        }
    }
    all
}

#[test]
fn gradients_through_a_gpus_rented_layers_are_those_of_the_cpu() {
    if !has_device() {
        return;
    }
    watched(|| {
        let model = small_model();
        let all = ["cuda:0", "cpu"].map(|device| {
            let (place, endpoints) = (place(), SplitEndpoints::new());
            let executor =
                LayersOnlyExecutor::start(place.path(), model.path(), ("none", device), Some(&endpoints));
            let all = [1, 40].map(|rows| {
                // All routes run at once, so that some calls are batched together.
                thread::scope(|scope| {
                    let (executor, endpoints) = (&executor, &endpoints);
                    let of = |route| scope.spawn(move || every_site(executor, route, endpoints, rows));
                    let all = SplitRoute::ALL.map(of).map(|one| one.join().expect("a session"));
                    for other in &all[1..] {
                        let most = all[0].iter().zip(other).map(|(a, b)| difference(a, b));
                        assert!(most.fold(0.0, f32::max) < 1e-4, "every route gives the same");
                    }
                    all.into_iter().next().unwrap_or_default()
                })
            });
            executor.stop();
            all.concat()
        });
        assert_eq!(all[0].len(), all[1].len());
        for (gpu, cpu) in all[0].iter().zip(&all[1]) {
            let (difference, largest) = (difference(gpu, cpu), cpu.iter().copied().fold(1.0, f32::max));
            assert!(difference < 1e-4 * largest, "{difference} of {largest}");
        }
    });
}

#[test]
fn rented_layers_of_a_gpu_outlive_clients_that_die_and_serve_whoever_is_left() {
    if !has_device() {
        return;
    }
    watched(|| {
        let (model, place, endpoints) = (small_model(), place(), SplitEndpoints::new());
        let executor =
            LayersOnlyExecutor::start(place.path(), model.path(), ("none", "cuda:0"), Some(&endpoints));
        let golden = answers(&executor, model.path(), &endpoints, (WORDS, ANSWER));
        let files = |id: u32| std::fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count);
        let before = files(executor.child.id());
        for round in 0..9 {
            let route = SplitRoute::ALL[round % 3];
            // Without the kill this answer would take long.
            let mut victim = client(&executor, model.path(), &endpoints, route, (WORDS, 200));
            let mut victim = victim.spawn().expect("holobiont-client starts");
            thread::sleep(Duration::from_millis(100 + 60 * round as u64));
            let asked = client(&executor, model.path(), &endpoints, route, (WORDS, ANSWER)).spawn();
            let _ = victim.kill();
            let _ = victim.wait();
            assert_eq!(text(asked.expect("holobiont-client starts")), golden[0]);
        }
        eventually("nothing of the dead is left", || files(executor.child.id()) <= before);
        assert_eq!(answers(&executor, model.path(), &endpoints, (WORDS, ANSWER)), golden);
        executor.stop();
    });
}

/// Clients during their answers on every route, and the text that each will give.
fn under_way(
    executor: &LayersOnlyExecutor,
    model: &Path,
    endpoints: &SplitEndpoints,
    length: usize,
) -> Vec<Child> {
    let begin = |route| {
        let mut client = client(executor, model, endpoints, route, (WORDS, length));
        client.spawn().expect("holobiont-client starts")
    };
    let children = SplitRoute::ALL.map(begin);
    thread::sleep(Duration::from_millis(400));
    children.into()
}

#[test]
fn clients_of_a_gpus_rented_layers_go_on_with_the_executor_that_comes_after_a_dead_one() {
    if !has_device() {
        return;
    }
    watched(|| {
        let (model, place, endpoints) = (small_model(), place(), SplitEndpoints::new());
        let mut executor =
            LayersOnlyExecutor::start(place.path(), model.path(), ("none", "cuda:0"), Some(&endpoints));
        let length = 40;
        let golden = answers(&executor, model.path(), &endpoints, (WORDS, length));
        for _ in 0..3 {
            let clients = under_way(&executor, model.path(), &endpoints, length);
            executor.replace(&[]);
            assert_eq!(clients.into_iter().map(text).collect::<Vec<_>>(), golden);
        }
        if is_stand_in() {
            // The device is lost after this number of launches: the process ends with a reason, and its
            // successor serves.
            executor.replace(&[("CUDA_ON_CPU_FAIL_AFTER", "400")]);
            let clients = under_way(&executor, model.path(), &endpoints, length);
            let ended = || executor.child.try_wait().expect("a child");
            let status = eventually_some("the end of an executor without a device", ended);
            assert!(!status.success());
            let complaint = executor.complaint();
            assert!(complaint.contains("the device of the base is lost"), "{complaint}");
            executor.replace(&[]);
            assert_eq!(clients.into_iter().map(text).collect::<Vec<_>>(), golden);
        }
        executor.stop();
    });
}

#[test]
fn a_gpu_that_rents_layers_of_an_unknown_architecture_says_that_the_cpu_does() {
    if !has_device() {
        return;
    }
    let (model, place) = (small_model(), place());
    let path = model.path().join("config.json");
    let config = std::fs::read_to_string(&path).expect("it has a configuration");
    std::fs::write(
        &path,
        config.replace("\"LlamaForCausalLM\"]", "\"StarfishForCausalLM\"], \"model_type\": \"starfish\""),
    )
    .expect("it is written");
    let arguments = ["--engine", "none", "--device", "cuda:0", "--model"].map(str::to_owned);
    let socket = place.path().join("private/executor.sock").display().to_string();
    let others = [model.path().display().to_string(), "--socket".to_owned(), socket];
    let output = spawn(&[&arguments[..], &others].concat(), &[]).wait_with_output().expect("it ends");
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(complaint.contains("use --device cpu"), "{complaint}");
}
