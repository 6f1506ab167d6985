//! Workers of a GPU are killed, stop, fail or answer too late: the waiting stream continues, and every answer
//! is complete.
//!
//! Adapters never reach the GPU here unless a test says so, so every pass waits for workers' partial sums.
//! Tests that need failpoints are skipped in release builds, which have none.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, CompletionStream, Deployment, DeploymentPlan,
    DeploymentProcess, RequestFault, StateDirectory, StreamEnd, WATCHDOG,
    chaos::{ChaosRng, FailpointDirectory},
    eventually,
    gpu::{NEVER_GBPS, adapter, assert_alike, copy_adapter, has_device, plan, question, small_model},
    watched,
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const WORKERS: usize = 2;
const ADAPTERS: [(&str, u32); 2] = [("narrow", 4), ("wide", 24)];
const QUESTIONS: u32 = 2;
const HARMS: usize = 12;
const CLIENTS: usize = 3;

struct TestFiles {
    model: TempDir,
    adapters: TempDir,
}

impl TestFiles {
    fn new() -> Self {
        let adapters = tempfile::tempdir().expect("a temporary directory");
        for (name, rank) in ADAPTERS {
            adapter(rank, rank as usize, &adapters.path().join(name));
        }
        Self { model: small_model(), adapters }
    }

    /// Plan of a GPU that no adapter reaches, with unlimited restarts of workers.
    fn plan(&self) -> DeploymentPlan {
        plan(self.model.path(), "cuda:0").workers(WORKERS).cold_by("1MiB", NEVER_GBPS).restless()
    }

    fn start(&self, plan: &DeploymentPlan) -> Deployment {
        let deployment = plan.start_in(Arc::new(StateDirectory::new()));
        for (name, _) in ADAPTERS {
            let to = deployment.place().adapters().join(name);
            copy_adapter(&self.adapters.path().join(name), &to);
            deployment.client.load(name, &to);
        }
        deployment
    }

    fn learn_on_the_cpu(&self) -> GoldenPairs {
        let deployment = self.start(&plan(self.model.path(), "cpu"));
        let golden = GoldenPairs::learn(&deployment.client);
        assert!(deployment.stop().success());
        golden
    }

    /// Deployment with failpoints at `places`, and its answers without faults.
    fn mortal(&self, places: &FailpointDirectory) -> (Deployment, GoldenPairs) {
        let deployment = self.start(&self.plan().mortal(places));
        let golden = GoldenPairs::learn(&deployment.client);
        (deployment, golden)
    }
}

/// Prompts of more than one chunk, so that there are prefills of some rows and decodes.
fn questions() -> Vec<CompletionRequest> {
    let of = |name| (0..QUESTIONS).map(move |seed| question(name, seed, 48, 6));
    ADAPTERS.into_iter().flat_map(|(name, _)| of(name)).collect()
}

struct GoldenPairs(Vec<(CompletionRequest, CompletionAnswer)>);

impl GoldenPairs {
    /// Records the answers of `client` without faults. The second answer counts, since from then on the same
    /// part of each prompt is cached.
    fn learn(client: &Client) -> Self {
        let answer = |ask: CompletionRequest| client.ask(&ask).answer;
        questions().into_iter().for_each(|ask| drop(answer(ask)));
        Self(questions().into_iter().map(|ask| (ask.clone(), answer(ask))).collect())
    }

    fn assert_alike(&self, cpu: &Self) {
        cpu.0.iter().zip(&self.0).for_each(|(cpu, gpu)| assert_alike(&cpu.1, &gpu.1));
        assert_ne!(self.0[0].1.text, self.0[QUESTIONS as usize].1.text, "adapters answer differently");
    }

    /// Sends all questions in sequence and compares answers bit by bit.
    fn ask_all_alone(&self, client: &Client) {
        (0..self.0.len()).for_each(|index| self.ask_alone(client, index));
    }

    fn ask_alone(&self, client: &Client, index: usize) {
        let (ask, golden) = &self.0[index % self.0.len()];
        assert_eq!(golden, &client.ask(ask).answer);
    }

    fn ask_all(&self, client: &Client) {
        (0..self.0.len()).for_each(|index| self.ask(client, index));
    }

    fn ask(&self, client: &Client, index: usize) {
        let (ask, golden) = &self.0[index % self.0.len()];
        assert_alike(golden, &client.ask(ask).answer);
    }
}

fn count(figure: &Value) -> u64 {
    figure.as_u64().unwrap_or_else(|| panic!("{figure} is no count"))
}

fn rank_rows(client: &Client, place: &str) -> u64 {
    ADAPTERS.iter().map(|(name, _)| count(&client.adapter(name)["rank_rows"][place])).sum()
}

/// Rank rows per seated worker, by process id.
fn seated(client: &Client) -> Vec<(u64, u64)> {
    let status = client.status();
    let seated = status["workers"]["seated"].as_array().expect("a list");
    let mut figures: Vec<_> =
        seated.iter().map(|worker| (count(&worker["pid"]), count(&worker["rank_rows"]))).collect();
    figures.sort_unstable();
    figures
}

fn await_workers(deployment: &Deployment) {
    eventually("all workers have a seat", || {
        let ids: Vec<u64> =
            deployment.processes(DeploymentProcess::Worker).into_iter().map(u64::from).collect();
        ids.len() == WORKERS && seated(&deployment.client).into_iter().map(|worker| worker.0).eq(ids)
    });
}

fn signal_workers(deployment: &Deployment, signal: Signal) -> Vec<u64> {
    let ids = deployment.processes(DeploymentProcess::Worker);
    ids.iter().for_each(|id| e2e_tests::signal(*id, signal));
    ids.into_iter().map(u64::from).collect()
}

fn await_idle(client: &Client) {
    for figure in ["holobiont_requests_running", "holobiont_kv_blocks{state=\"used\"}"] {
        eventually(&format!("{figure} is zero"), || client.metric(figure) == 0.0);
    }
}

/// Arms `place` and runs `what` until a process reaches it.
fn until_fired(places: &FailpointDirectory, place: &str, action: &str, mut what: impl FnMut(usize)) {
    places.arm(place, action);
    let begin = Instant::now();
    for round in 0.. {
        what(round);
        if places.has_fired(place) {
            break;
        }
        assert!(begin.elapsed() < WATCHDOG, "nobody got to {place}");
    }
    places.clear(place);
}

/// Whether the build has failpoints; prints a message if not.
fn can_fail() -> bool {
    if !cfg!(debug_assertions) {
        eprintln!("skipped: release builds have no failpoints");
    }
    cfg!(debug_assertions) && has_device()
}

#[test]
fn a_worker_that_dies_or_stops_in_a_slice_a_gpu_waits_for_costs_no_answer() {
    if !can_fail() {
        return;
    }
    watched(|| {
        let (material, places) = (TestFiles::new(), FailpointDirectory::new());
        let (deployment, golden) = material.mortal(&places);
        let (client, executor) = (&deployment.client, deployment.process(DeploymentProcess::Executor));
        for (place, action) in [
            ("worker.after_claim", "kill"),
            ("worker.mid_slice", "kill"),
            ("worker.before_done", "kill"),
            ("worker.after_done", "kill"),
            ("worker.after_claim", "stop"),
            ("worker.before_done", "stop"),
        ] {
            await_workers(&deployment);
            until_fired(&places, place, action, |round| golden.ask_alone(client, round));
            // The worker is gone, or holds a slice and is stopped.
            golden.ask_all_alone(client);
            signal_workers(&deployment, Signal::CONT);
        }
        await_workers(&deployment);
        golden.ask_all_alone(client);
        await_idle(client);
        eventually("it is told who has computed", || {
            rank_rows(client, "workers") > 0 && rank_rows(client, "executor") > 0
        });
        assert_eq!(rank_rows(client, "device"), 0, "nothing has reached the GPU");
        assert_eq!(deployment.process(DeploymentProcess::Executor), executor, "it has stayed");
        assert!(deployment.stop().success());
    });
}

struct GoldenClients {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl GoldenClients {
    fn begin(client: &Client, golden: &Arc<GoldenPairs>) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = (0..CLIENTS).map(|first| {
            let (client, golden) = (client.clone(), Arc::clone(golden));
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            thread::spawn(move || {
                for index in (first..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    golden.ask(&client, index);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let threads = threads.collect();
        Self { stop, answered, threads }
    }

    fn wait_for_progress(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        eventually("requests are answered", || self.answered.load(Ordering::Relaxed) > before);
    }

    fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

#[test]
fn workers_of_a_gpu_may_all_die_stop_and_come_back_under_load() {
    if !has_device() {
        return;
    }
    watched(|| {
        let material = TestFiles::new();
        // The delay is long enough that for a while there is no worker at all.
        let deployment = material.start(&material.plan().set("RESTART_DELAY_MS", "1000"));
        let golden = Arc::new(GoldenPairs::learn(&deployment.client));
        golden.assert_alike(&material.learn_on_the_cpu());
        let (client, executor) = (&deployment.client, deployment.process(DeploymentProcess::Executor));
        let (askers, mut random) = (GoldenClients::begin(client, &golden), ChaosRng::new(1));
        for harm in 0..HARMS {
            thread::sleep(Duration::from_millis(random.below(150) as u64));
            if harm % 3 == 2 {
                signal_workers(&deployment, Signal::STOP);
                // The longest pauses make the executor give up on the workers.
                thread::sleep(Duration::from_millis(100 + random.below(1500) as u64));
                askers.wait_for_progress();
                signal_workers(&deployment, Signal::CONT);
            } else if random.below(2) == 0 {
                deployment.signal(DeploymentProcess::Worker, Signal::KILL);
            } else {
                let killed = signal_workers(&deployment, Signal::KILL);
                // Polling may miss the moment without workers; killed ones never return.
                eventually("those that died have no seat", || {
                    seated(client).iter().all(|(id, _)| !killed.contains(id))
                });
                askers.wait_for_progress();
            }
        }
        await_workers(&deployment);
        let before = seated(client);
        eventually("every worker computes again", || {
            askers.wait_for_progress();
            seated(client).iter().zip(&before).all(|(now, before)| now.0 == before.0 && now.1 > before.1)
        });
        askers.finish();
        await_idle(client);
        assert!(rank_rows(client, "workers") > 0 && rank_rows(client, "executor") > 0);
        assert!(count(&client.status()["workers"]["lost"]) > 0);
        assert_eq!(deployment.process(DeploymentProcess::Executor), executor, "it has stayed");
        assert!(deployment.stop().success());
    });
}

#[test]
fn an_executor_that_dies_while_its_gpu_waits_costs_no_answer() {
    if !can_fail() {
        return;
    }
    watched(|| {
        let (material, places) = (TestFiles::new(), FailpointDirectory::new());
        let (deployment, golden) = material.mortal(&places);
        let client = &deployment.client;
        for place in [
            "executor.before_post",
            "executor.after_post",
            "executor.bridge_asked",
            "executor.slices_collected",
            "executor.bridge_before_answer",
        ] {
            let first = deployment.process(DeploymentProcess::Executor);
            // The kill happens during an answer.
            until_fired(&places, place, "kill 15", |round| golden.ask(client, round));
            eventually("another executor serves", || another_serves(&deployment, first));
        }
        golden.ask_all(client);
        assert!(deployment.stop().success());
    });
}

/// Whether an executor other than `first` serves. The health check comes last: without a new executor it may
/// describe the old one.
fn another_serves(deployment: &Deployment, first: Option<u32>) -> bool {
    let now = deployment.process(DeploymentProcess::Executor);
    now.is_some() && now != first && deployment.client.is_healthy()
}

#[test]
fn a_drain_waits_neither_for_stopped_workers_nor_for_ever_for_a_stream() {
    if !can_fail() {
        return;
    }
    watched(|| {
        let (material, places) = (TestFiles::new(), FailpointDirectory::new());
        let (deployment, golden) = material.mortal(&places);
        let first = deployment.process(DeploymentProcess::Executor);
        await_workers(&deployment);
        signal_workers(&deployment, Signal::STOP);
        let (ask, whole) = &golden.0[0];
        places.arm("executor.bridge_before_answer", "wait 1500");
        let stream = thread::spawn({
            let (client, ask) = (deployment.client.clone(), ask.clone());
            move || client.stream(&ask).finish()
        });
        eventually("the GPU waits", || places.has_fired("executor.bridge_before_answer"));
        deployment.signal(DeploymentProcess::Executor, Signal::TERM);
        let (answer, ending) = stream.join().expect("a stream");
        assert_eq!(ending, StreamEnd::Done);
        assert_alike(whole, &answer);
        eventually("another executor serves", || another_serves(&deployment, first));
        golden.ask_all(&deployment.client);
        // The end must also reach stopped workers.
        signal_workers(&deployment, Signal::STOP);
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_fault_between_gpu_and_workers_fails_the_requests_of_one_pass_alone() {
    if !can_fail() {
        return;
    }
    watched(|| {
        let (material, places) = (TestFiles::new(), FailpointDirectory::new());
        let (deployment, golden) = material.mortal(&places);
        let (client, executor) = (&deployment.client, deployment.process(DeploymentProcess::Executor));
        let base = question(BASE, 7, 48, 6);
        let whole = client.ask(&base).answer;
        for hit in [1, 5, 15] {
            places.arm("executor.bridge_asked", &format!("fail {hit}"));
            let failed = client.try_ask(&golden.0[0].0);
            assert!(matches!(failed, Err(RequestFault::Refused { status: 500, .. })), "{failed:?}");
            assert!(places.has_fired("executor.bridge_asked"));
            places.clear("executor.bridge_asked");
            golden.ask_all(client);
            assert_alike(&whole, &client.ask(&base).answer);
        }
        await_idle(client);
        assert_eq!(deployment.process(DeploymentProcess::Executor), executor, "it has stayed");
        assert!(deployment.stop().success());
    });
}

/// Stream during which the GPU waits for a delayed job.
fn waited_for(client: &Client, places: &FailpointDirectory, ask: &CompletionRequest) -> CompletionStream {
    let place = "executor.bridge_asked";
    let mut stream = client.stream(ask);
    assert_eq!(stream.step(), None);
    places.arm(place, "wait 500");
    eventually("the GPU waits", || places.has_fired(place));
    places.clear(place);
    stream
}

#[test]
fn a_caller_may_leave_and_an_adapter_be_unloaded_while_a_gpu_waits_for_its_sums() {
    if !can_fail() {
        return;
    }
    watched(|| {
        let (material, places) = (TestFiles::new(), FailpointDirectory::new());
        let (deployment, golden) = material.mortal(&places);
        let client = &deployment.client;
        let stay = thread::spawn({
            let (client, ask) = (client.clone(), question(ADAPTERS[1].0, 3, 48, 40));
            move || client.ask(&ask).answer
        });
        for _ in 0..3 {
            drop(waited_for(client, &places, &question(ADAPTERS[0].0, 4, 100, 80)));
        }
        assert_eq!(stay.join().expect("who stays is answered").scored.len(), 40);
        await_idle(client);
        // The adapter is unloaded while its copy is awaited.
        let (name, ask) = (ADAPTERS[0].0, question(ADAPTERS[0].0, 5, 48, 80));
        let whole = client.ask(&ask).answer;
        let stream = waited_for(client, &places, &ask);
        assert!(client.unload(name) > 0);
        let (answer, ending) = stream.finish();
        assert_eq!(ending, StreamEnd::Done, "who has begun is answered");
        assert_alike(&whole, &answer);
        assert_eq!(client.refusal(&ask).0, 404);
        client.load(name, &deployment.place().adapters().join(name));
        golden.ask_all(client);
        assert!(deployment.stop().success());
    });
}

/// Link on which an adapter takes about as long as one long answer of the stand-in.
const ON_THE_WAY_GBPS: &str = "0.0003";
/// Maximum number of attempts until the adapter arrives at the right time.
const ROUNDS: u32 = 6;

#[test]
fn an_adapter_that_arrives_in_the_middle_of_an_answer_changes_nothing_in_it() {
    if !has_device() {
        return;
    }
    watched(|| {
        let material = TestFiles::new();
        let name = ADAPTERS[1].0;
        let asks: Vec<CompletionRequest> = (0..ROUNDS).map(|seed| question(name, seed, 150, 40)).collect();
        let cpu = material.start(&plan(material.model.path(), "cpu"));
        let golden: Vec<CompletionAnswer> = asks.iter().map(|ask| cpu.client.ask(ask).answer).collect();
        assert!(cpu.stop().success());
        for invocation in ["fused", "native"] {
            let plan = material.plan().cold_by("1MiB", ON_THE_WAY_GBPS).set("CHUNK_TOKENS", "16");
            let deployment = material.start(&plan.set("WORKER_INVOCATION", invocation));
            let client = &deployment.client;
            await_workers(&deployment);
            // Each attempt loads the adapter again while one request uses it.
            let has_switched = asks.iter().zip(&golden).any(|(ask, golden)| {
                client.unload(name);
                client.load(name, &deployment.place().adapters().join(name));
                assert_alike(golden, &client.ask(ask).answer);
                // Stats are up to a second old.
                thread::sleep(Duration::from_millis(1100));
                // Beside a fast device the executor's own cores suffice for so small a model.
                let rows = |place: &str| count(&client.adapter(name)["rank_rows"][place]);
                rows("device") > 0 && rows("workers") + rows("executor") > 0
            });
            assert!(has_switched, "{invocation}: {}", client.adapter(name));
            assert!(deployment.stop().success());
        }
    });
}

#[test]
fn adapters_that_do_not_fit_on_a_gpu_are_served_from_the_host() {
    if !has_device() {
        return;
    }
    watched(|| {
        let material = TestFiles::new();
        let golden = material.learn_on_the_cpu();
        // Memory for the narrow adapter alone, over a link without a limit.
        let plan = plan(material.model.path(), "cuda:0").workers(WORKERS);
        let deployment = material.start(&plan.set("DEVICE_ADAPTER_BYTES", "20KiB"));
        let client = &deployment.client;
        golden.ask_all(client);
        let rows = |name: &str, place: &str| count(&client.adapter(name)["rank_rows"][place]);
        eventually("each is computed where it is", || {
            golden.ask_all(client);
            let hosts = rows("wide", "workers") + rows("wide", "executor");
            rows("narrow", "device") > 0 && hosts > 0 && rows("wide", "device") == 0
        });
        assert!(deployment.stop().success());
    });
}
