//! Workers are killed, stopped and restarted under load: no token is wrong, no request is lost, nothing
//! leaks.
//!
//! `HOLOBIONT_WORKER_FAULTS` sets the number of faults, `HOLOBIONT_SEED` their times, `HOLOBIONT_LEDGER` the
//! file for the counters.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan, DeploymentProcess, SharedMemory, StateDirectory,
    chaos::{AdapterVariants, ChaosReport, ChaosRng, Traffic},
    eventually, fixtures, repeats, watched,
};
use rustix::process::Signal;
use serde_json::Value;

const WORKERS: usize = 2;
/// Number of adapters, of up to 48 ranks, which are copied in up to three blocks per layer.
const ADAPTERS: u32 = 4;
const TIMES: usize = 6;
/// Memory for one or two adapters, and a link on which each takes at least a fifth of a second.
const DEVICE_KIB: u64 = 16 << 10;
const LINK_GBPS: f64 = 0.2;
const CLIENTS: u64 = 4;

fn count(figure: &Value) -> u64 {
    figure.as_u64().unwrap_or_else(|| panic!("{figure} is no count"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerFault {
    Kill,
    /// SIGTERM, after which the supervisor starts a new worker.
    Restart,
    /// SIGSTOP, and SIGCONT after this time.
    Pause(Duration),
}

impl WorkerFault {
    /// Draws pauses that are mostly about the executor's timeout of a slice, and sometimes much longer.
    fn draw(random: &mut ChaosRng) -> Self {
        match random.below(16) {
            0..=5 => Self::Kill,
            6 | 7 => Self::Restart,
            8..=14 => Self::Pause(Duration::from_millis(1 + random.below(300) as u64)),
            _ => Self::Pause(Duration::from_millis(1200 + random.below(1300) as u64)),
        }
    }

    fn figure(self) -> &'static str {
        match self {
            Self::Kill => "killed",
            Self::Restart => "restarted",
            Self::Pause(time) if time < Duration::from_secs(1) => "stopped for up to 300 ms",
            Self::Pause(_) => "stopped for more than 1.2 s",
        }
    }
}

struct WorkerFaultTest {
    deployment: Deployment,
    variants: Arc<AdapterVariants>,
    names: Vec<String>,
    random: ChaosRng,
    ledger: ChaosReport,
}

impl WorkerFaultTest {
    fn open(seed: u64) -> Self {
        let place = Arc::new(StateDirectory::new());
        let variants = Arc::new(learn(&place));
        let deployment =
            DeploymentPlan::bare().restless().workers(WORKERS).cold(DEVICE_KIB, LINK_GBPS).start_in(place);
        let names = (0..).zip(&variants.adapters).map(|(index, (path, _))| {
            let name = format!("wide-{index}");
            deployment.client.load(&name, path);
            name
        });
        let names = names.collect();
        let arena = Self {
            deployment,
            variants,
            names,
            random: ChaosRng::new(seed),
            ledger: ChaosReport::new("workers", seed),
        };
        arena.probe();
        arena
    }

    fn client(&self) -> &Client {
        &self.deployment.client
    }

    fn harm(&mut self) {
        thread::sleep(Duration::from_millis(self.random.below(150) as u64));
        let harm = WorkerFault::draw(&mut self.random);
        let mut victims = self.deployment.processes(DeploymentProcess::Worker);
        if self.random.below(4) != 0 && !victims.is_empty() {
            victims = vec![*self.random.pick(&victims)];
        }
        self.ledger.count(harm.figure(), victims.len() as u64);
        self.ledger.hit(DeploymentProcess::Worker.program());
        let all = |signal| victims.iter().for_each(|id| e2e_tests::signal(*id, signal));
        match harm {
            WorkerFault::Kill => all(Signal::KILL),
            WorkerFault::Restart => all(Signal::TERM),
            WorkerFault::Pause(time) => {
                all(Signal::STOP);
                thread::sleep(time);
                all(Signal::CONT);
            }
        }
    }

    /// Rank rows per seated worker, by process id.
    fn seated(&self) -> Vec<(u64, u64)> {
        let status = self.client().status();
        let seated = status["workers"]["seated"].as_array().expect("a list");
        let mut figures: Vec<_> =
            seated.iter().map(|worker| (count(&worker["pid"]), count(&worker["rank_rows"]))).collect();
        figures.sort_unstable();
        figures
    }

    /// Waits until all workers compute; every answer meanwhile must be golden.
    fn probe(&self) {
        let mut ids = Vec::new();
        eventually("all workers have a seat", || {
            ids = self.deployment.processes(DeploymentProcess::Worker).into_iter().map(u64::from).collect();
            ids.len() == WORKERS && self.seated().iter().map(|worker| worker.0).eq(ids.iter().copied())
        });
        let before = self.seated();
        eventually("every worker computes", || {
            self.ask_everything();
            let now = self.seated();
            now.iter().map(|worker| worker.0).eq(ids.iter().copied())
                && now.iter().zip(&before).all(|(now, before)| now.1 > before.1)
        });
    }

    fn ask_everything(&self) {
        for name in &self.names {
            for index in 0..self.variants.questions() {
                let reply = self.client().ask(&self.variants.ask(name, index));
                self.variants.check(index, reply.generation.as_deref(), &reply.answer);
            }
        }
    }

    fn shared_memory(&self) -> [Vec<SharedMemory>; 2] {
        [DeploymentProcess::Executor, DeploymentProcess::Worker]
            .map(|process| self.deployment.shared_memory(process))
    }

    /// Checks the invariants of an idle deployment.
    fn inspect(&mut self, harms: u64) {
        let client = self.client();
        for figure in [
            "holobiont_requests_in_flight",
            "holobiont_requests_running",
            "holobiont_requests_waiting",
            "holobiont_kv_blocks{state=\"used\"}",
        ] {
            eventually(&format!("{figure} is zero"), || client.metric(figure) == 0.0);
        }
        let adapters = || self.names.iter().map(|name| client.adapter(name));
        let sum = |field: fn(&Value) -> u64| adapters().map(|adapter| field(&adapter)).sum::<u64>();
        let status = client.status();
        assert_eq!(count(&status["cold_starts"]["count"]), sum(|adapter| count(&adapter["cold_starts"])));
        assert!(count(&status["device"]["bytes"]) <= count(&status["device"]["budget_bytes"]), "{status}");
        let by_workers = sum(|adapter| count(&adapter["rank_rows"]["workers"]));
        let by_seated: u64 = self.seated().iter().map(|worker| worker.1).sum();
        assert!(by_workers > 0 && by_seated > 0, "workers have computed: {status}");
        let by_executor = sum(|adapter| count(&adapter["rank_rows"]["executor"]));
        let by_device = sum(|adapter| count(&adapter["rank_rows"]["device"]));
        let lost = count(&status["workers"]["lost"]);
        assert!(lost > 0 && lost <= harms * WORKERS as u64, "{lost} workers were lost by {harms} faults");
        let cold_starts = count(&status["cold_starts"]["count"]);
        for (figure, value) in [
            ("rank rows by workers", by_workers),
            ("rank rows by the executor", by_executor),
            ("rank rows by the device", by_device),
            ("seats lost", lost),
            ("cold starts", cold_starts),
        ] {
            self.ledger.count(figure, value);
        }
    }
}

/// Records golden answers of a deployment with all adapters loaded and no worker.
fn learn(place: &Arc<StateDirectory>) -> AdapterVariants {
    let calm = DeploymentPlan::bare().workers(0).set("COLD_START", "cached").start_in(Arc::clone(place));
    let variants = AdapterVariants::learn_stacked(&calm.client, &place.adapters(), ADAPTERS, TIMES);
    assert!(calm.stop().success());
    variants
}

#[test]
fn workers_may_die_or_stop_at_any_moment_and_no_token_request_or_memory_is_lost() {
    let (faults, seed) = (repeats::WORKER_FAULTS.number(), repeats::SEED.number());
    watched(move || {
        let mut arena = WorkerFaultTest::open(seed);
        let held = arena.shared_memory();
        let (executor, gateway) = (DeploymentProcess::Executor, DeploymentProcess::Gateway);
        let others = [executor, gateway].map(|process| arena.deployment.process(process));
        let models: Vec<_> = arena.names.iter().cloned().chain([BASE.to_owned()]).collect();
        let mut traffic = Traffic::begin(arena.client(), &arena.variants, &models, CLIENTS);
        let seen = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        for fault in 0..faults {
            arena.harm();
            eventually("requests are answered between the faults", || {
                traffic.check();
                seen(&traffic.tally.answered) > fault / 2
            });
        }
        let tally = traffic.finish();
        arena.probe();
        arena.inspect(faults);
        eventually("executor and workers hold as much shared memory as at the start", || {
            arena.shared_memory() == held
        });
        assert_eq!(others, [executor, gateway].map(|process| arena.deployment.process(process)));
        tally.nobody_asked_again();
        arena.ledger.count("golden answers", seen(&tally.answered));
        arena.ledger.write();
        assert!(arena.deployment.stop().success());
    });
}

#[test]
fn adapters_that_come_and_go_leave_no_shared_memory_in_executor_or_workers() {
    watched(|| {
        let deployment = DeploymentPlan::bare().workers(WORKERS).cold(2 << 10, 0.05).start();
        let client = &deployment.client;
        let seated = || client.status()["workers"]["seated"].as_array().map(Vec::len);
        eventually("all workers have a seat", || seated() == Some(WORKERS));
        let held = || {
            [DeploymentProcess::Executor, DeploymentProcess::Worker]
                .map(|process| deployment.shared_memory(process))
        };
        let before = held();
        assert!(before.iter().flatten().all(|held| held.maps > 0), "the board is found: {before:?}");
        let path = deployment.place().adapters().join("guest");
        for alpha in 20..40 {
            fixtures::variant("pirate", alpha, &path);
            client.load("guest", &path);
            client.ask(&e2e_tests::CompletionRequest::new("guest", fixtures::prompt(alpha, 30), 4));
            assert!(client.unload("guest") > 0);
        }
        eventually("all of it is given back", || held() == before);
        assert!(deployment.stop().success());
    });
}
