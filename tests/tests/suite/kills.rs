//! Kills at failpoints under load: every answer golden, the registry exact, no resource leaked.
//!
//! Adapters come over a slow emulated link to a device with memory for one of them. Two workers compute
//! meanwhile, so every way of computing an adapter is in use during the kills.
//!
//! `HOLOBIONT_KILLS` sets the number of kills, `HOLOBIONT_PLACES` a part of the failpoints' names (default:
//! all), `HOLOBIONT_SEED` the choice, `HOLOBIONT_LEDGER` the file for the counters.

use std::{
    env,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    Client, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess, RequestFault, StateDirectory,
    chaos::{AdapterVariants, ChaosReport, ChaosRng, FailpointDirectory, PossibleNames, Traffic},
    eventually, fixtures, repeats, watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Adapter contents: more than the executor's memory holds.
const VARIANTS: u32 = 6;
const CLIENTS: u64 = 4;
/// Names that are loaded, replaced and unloaded all the time.
const NAMES: [&str; 5] = ["ash", "birch", "cedar", "elm", "fir"];
/// Time for a process to reach a failpoint before the next one's turn; at the end all repeat until reached.
const REACH: Duration = Duration::from_secs(6);
/// Device memory for one adapter, and a link on which one takes a third of a second.
const DEVICE_KIB: u64 = 2 << 10;
const LINK_GBPS: f64 = 0.05;
/// Failpoint that is reached only if requests wait for their adapters.
const ON_DEMAND: [&str; 1] = ["executor.cold_waits"];
/// Failpoint of fetches by URI, at which the gateway's own tests of crashes kill it.
const OF_FETCHES: [&str; 1] = ["gateway.fetched_before_load"];
/// Further failpoints on the path of an awaited adapter.
const ON_THE_WAY: [&str; 5] = [
    "executor.cold_start",
    "executor.block_arrived",
    "executor.adapter_arrived",
    "executor.adapter_evicted",
    "forward.after_qkv",
];

fn set_pin(client: &Client, name: &str, pinned: bool) -> Result<Value, RequestFault> {
    client.try_post("/v1/pin_lora_adapter", &json!({ "lora_name": name, "pinned": pinned }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailpointTrigger {
    Traffic,
    Change,
    Unload,
    Pin,
    /// A request for an adapter that is only on disk.
    Cold,
    Leave,
    /// A start of the process, which is killed first.
    Start(DeploymentProcess),
    /// An orderly end of the process.
    Stop(DeploymentProcess),
    /// An orderly end of the gateway during an endless stream.
    Cut,
    /// A kill of the executor under load.
    Loss,
}

impl FailpointTrigger {
    /// True if the failpoint is reached some time after the action.
    fn takes_a_moment(self) -> bool {
        matches!(self, Self::Start(_) | Self::Stop(_) | Self::Cut | Self::Loss)
    }
}

type FailpointTarget = (&'static str, FailpointTrigger);

/// Failpoints of the mode without waiting, from the processes' own tables.
fn places() -> Vec<FailpointTarget> {
    let [executor, worker] =
        [base_executor::FAILPOINTS, lora_worker::FAILPOINTS].map(|table| table.iter().copied());
    let all = gateway::failpoints().into_iter().chain(executor).chain(worker);
    let meant = env::var("HOLOBIONT_PLACES").unwrap_or_default();
    // The tests of bases, batches and jobs cover these.
    let of_others =
        [gateway::bases::FAILPOINTS, gateway::batches::FAILPOINTS, gateway::training::FAILPOINTS].concat();
    let elsewhere = [&ON_DEMAND[..], &OF_FETCHES, &of_others].concat();
    let here =
        |place: &&str| !place.ends_with("_fails") && !elsewhere.contains(place) && place.contains(&meant);
    all.filter(here).map(target).collect()
}

fn target(place: &'static str) -> FailpointTarget {
    (place, provocation(place))
}

fn provocation(place: &str) -> FailpointTrigger {
    use FailpointTrigger::{Change, Cold, Cut, Leave, Loss, Pin, Start, Stop, Traffic, Unload};
    let has = |words: &[&str]| words.iter().any(|word| place.contains(word));
    let process = match place.split_once('.') {
        Some(("gateway", _)) => DeploymentProcess::Gateway,
        Some(("worker", _)) => DeploymentProcess::Worker,
        _ => DeploymentProcess::Executor,
    };
    match place {
        "worker.leaving" => Stop(process),
        "worker.left" => Loss,
        "worker.image_withdrawn" => Unload,
        _ if has(&["worker.connected", "worker.hello", "worker.seated", "worker.image"]) => Start(process),
        // Worker failpoints of the executor need a worker that comes or goes.
        _ if has(&["worker_", "image_offered"]) => Start(DeploymentProcess::Worker),
        _ if has(&["cold_", "block_arrived", "adapter_arrived", "adapter_evicted"]) => Cold,
        _ if has(&["unload"]) => Unload,
        _ if has(&["drain_cut"]) => Cut,
        _ if has(&["drain"]) => Stop(process),
        // Gateway failpoints of the executor need a gateway that comes or goes.
        _ if has(&["hello", "welcome", "gateway_gone"]) => Start(DeploymentProcess::Gateway),
        _ if has(&["weights", "bind", "restore", "ready", "swept"]) => Start(process),
        _ if has(&["redo"]) => Loss,
        _ if has(&["pin"]) => Pin,
        _ if has(&["cop", "sync", "rename", "load", "commit", "adapter"]) => Change,
        "gateway.evict" => Cold,
        _ if has(&["cancel"]) => Leave,
        _ => Traffic,
    }
}

struct KillTest {
    deployment: Deployment,
    variants: Arc<AdapterVariants>,
    names: PossibleNames,
    random: ChaosRng,
    ledger: ChaosReport,
    places: FailpointDirectory,
}

impl KillTest {
    /// Deployment with `cold_start` as its mode of cold starts.
    fn open(test: &'static str, seed: u64, cold_start: &str) -> Self {
        let (places, place) = (FailpointDirectory::new(), Arc::new(StateDirectory::new()));
        // Golden answers come from a deployment with all adapters loaded.
        let calm = DeploymentPlan::bare().workers(0).start_in(Arc::clone(&place));
        let variants = Arc::new(AdapterVariants::learn(&calm.client, &place.adapters(), VARIANTS));
        assert!(calm.stop().success());
        // Memory for two or three adapters of six, and for hardly two long requests, so that everything
        // moves.
        let plan =
            DeploymentPlan::bare().mortal(&places).bytes("KV_BYTES", 4800).bytes("DISK_BYTES", 16 << 10);
        let plan = plan.bytes("ADAPTER_BYTES", 4 << 10).set("GRACE_MS", "300");
        let plan = plan.cores(2).workers(2).cold(DEVICE_KIB, LINK_GBPS).set("COLD_START", cold_start);
        Self {
            deployment: plan.start_in(place),
            variants,
            names: PossibleNames::default(),
            random: ChaosRng::new(seed),
            ledger: ChaosReport::new(test, seed),
            places,
        }
    }

    fn client(&self) -> &Client {
        &self.deployment.client
    }

    /// Kills a process at `place`; false if it was not reached in time.
    fn kill_at(&mut self, place: &'static str, provocation: FailpointTrigger) -> bool {
        let hits = if place.starts_with("forward.") { 1 + self.random.below(300) } else { 1 };
        eprintln!("{} {place}", self.ledger.total());
        self.places.arm(place, &format!("kill {hits}"));
        let started = Instant::now();
        while !self.places.has_fired(place) && started.elapsed() < REACH {
            self.provoke(provocation);
            // A start or an end takes a while.
            if provocation.takes_a_moment() {
                let waiting = Instant::now();
                while !self.places.has_fired(place) && waiting.elapsed() < REACH {
                    thread::sleep(Duration::from_millis(10));
                }
            }
        }
        let fired = self.places.has_fired(place);
        self.places.clear(place);
        if fired {
            self.ledger.hit(place);
        } else {
            self.ledger.count("not reached", 1);
        }
        self.wait_until_recovered();
        fired
    }

    /// Kills a process, or one of each kind, at a random time.
    fn kill_anywhere(&mut self) {
        let all = self.random.below(2) == 0;
        thread::sleep(Duration::from_millis(self.random.below(200) as u64));
        let first = *self.random.pick(&DeploymentProcess::ALL);
        for process in DeploymentProcess::ALL.into_iter().filter(|process| all || *process == first) {
            self.deployment.signal(process, Signal::KILL);
        }
        self.ledger.hit(if all { "all" } else { first.program() });
        self.wait_until_recovered();
    }

    fn provoke(&mut self, provocation: FailpointTrigger) {
        match provocation {
            FailpointTrigger::Traffic => thread::sleep(Duration::from_millis(20)),
            FailpointTrigger::Change => self.change(),
            FailpointTrigger::Unload => self.unload(),
            FailpointTrigger::Pin => self.pin(),
            FailpointTrigger::Cold => {
                // All of them exceed the memory; the change makes sure that they exist.
                self.change();
                for name in NAMES {
                    let _ = self
                        .client()
                        .try_ask(&CompletionRequest { max_tokens: 1, ..self.variants.ask(name, 0) });
                }
            }
            FailpointTrigger::Leave => drop(self.client().try_stream(&self.variants.ask(e2e_tests::BASE, 2))),
            FailpointTrigger::Start(process) => self.deployment.signal(process, Signal::KILL),
            FailpointTrigger::Stop(process) => self.deployment.signal(process, Signal::TERM),
            FailpointTrigger::Cut => {
                let endless = CompletionRequest::new(e2e_tests::BASE, fixtures::prompt(9, 8), 200);
                let stream = self.client().try_stream(&endless);
                // The stream continues during the end of the gateway.
                self.deployment.signal(DeploymentProcess::Gateway, Signal::TERM);
                thread::spawn(move || drop(stream.map(|mut stream| stream.read_to_end())));
            }
            FailpointTrigger::Loss => self.deployment.kill_executor(),
        }
    }

    fn change(&mut self) {
        let name = *self.random.pick(&NAMES);
        let (path, generation) = self.random.pick(&self.variants.adapters).clone();
        let body = json!({ "lora_name": name, "lora_path": path, "load_inplace": true });
        let outcome = self.client().try_post("/v1/load_lora_adapter", &body);
        if let Ok(answer) = &outcome {
            assert_eq!(answer["generation"], generation.as_str(), "{name}");
        }
        self.note("changes", name, Some(generation), &outcome);
    }

    fn unload(&mut self) {
        let name = *self.random.pick(&NAMES);
        if self.names.certain(name).is_none() {
            return self.change();
        }
        let outcome = self.client().try_post("/v1/unload_lora_adapter", &json!({ "lora_name": name }));
        self.note("unloads", name, None, &outcome);
    }

    fn pin(&mut self) {
        let name = *self.random.pick(&NAMES);
        if self.names.certain(name).is_none() {
            return self.change();
        }
        for pinned in [true, false] {
            let outcome = set_pin(self.client(), name, pinned);
            if outcome.is_err() {
                self.wait_until_recovered();
                // A remaining pin would block memory for all others.
                let freed = || set_pin(self.client(), name, false).is_ok();
                return eventually("the pin is taken away", freed);
            }
        }
    }

    fn note<T>(
        &mut self,
        figure: &'static str,
        name: &str,
        wanted: Option<String>,
        outcome: &Result<T, RequestFault>,
    ) {
        if let Err(fault) = outcome {
            eprintln!("{figure} of {name} to {:.12}: {fault}", wanted.as_deref().unwrap_or("nothing"));
        }
        self.names.change(name, wanted, outcome);
        match outcome {
            Ok(_) => self.ledger.count(figure, 1),
            Err(RequestFault::Refused { .. }) => self.ledger.count("refused changes", 1),
            Err(RequestFault::Silence(_)) => {
                self.ledger.count("unanswered changes", 1);
                self.wait_until_recovered();
            }
        }
    }

    /// Waits until requests are served again, and compares the registry with its acknowledgements.
    fn wait_until_recovered(&mut self) {
        let client = &self.deployment.client;
        // A gateway that has not noticed its executor's end still reports health, so only an answer counts.
        eventually("requests are served again", || {
            let asked = client.try_ask(&self.variants.ask(e2e_tests::BASE, 0));
            asked.is_ok_and(|reply| {
                self.variants.check(0, None, &reply.answer);
                true
            })
        });
        let mut registry = None;
        eventually("the registry answers", || {
            registry = client.registered();
            registry.is_some()
        });
        self.names.reconcile(&registry.expect("it has answered"));
    }

    /// Kills processes at `targets` in turn, equally often, until there were `kills` kills; the seed decides
    /// the rest.
    fn attack(&mut self, targets: &[FailpointTarget], kills: u64, traffic: &mut Traffic) {
        for (place, provocation) in targets.iter().cycle() {
            traffic.check();
            if self.random.below(8) == 0 {
                self.kill_anywhere();
            }
            self.kill_at(place, *provocation);
            self.change();
            if self.ledger.total() >= kills {
                break;
            }
        }
        for (place, provocation) in targets.iter().filter(|_| kills >= targets.len() as u64) {
            let what = format!("a death at {place}");
            eventually(&what, || self.ledger.hits(place) > 0 || self.kill_at(place, *provocation));
        }
    }

    /// Checks the invariants of an idle deployment.
    fn inspect(&self) {
        let client = self.client();
        for figure in [
            "holobiont_requests_in_flight",
            "holobiont_requests_running",
            "holobiont_requests_waiting",
            "holobiont_kv_blocks{state=\"used\"}",
        ] {
            eventually(&format!("{figure} is zero"), || client.metric(figure) == 0.0);
        }
        for name in NAMES {
            let generation = self.names.certain(name);
            for index in 0..self.variants.questions() {
                match (&generation, client.try_ask(&self.variants.ask(name, index))) {
                    (Some(_), Ok(reply)) => {
                        assert_eq!(reply.generation, generation, "{name}");
                        self.variants.check(index, generation.as_deref(), &reply.answer);
                    }
                    (None, Err(RequestFault::Refused { status: 404, .. })) => {}
                    (_, outcome) => panic!("{name}, which is {generation:?}: {outcome:?}"),
                }
            }
        }
    }

    /// Checks that the registry's files are exactly those of its entries.
    fn no_orphans(&self) {
        let stored = std::fs::read_dir(self.deployment.place().state().join("adapters"));
        let stored = stored.expect("the store").count();
        let mut generations: Vec<_> = NAMES.iter().filter_map(|name| self.names.certain(name)).collect();
        generations.sort();
        generations.dedup();
        assert_eq!(stored, generations.len(), "directories in the store, generations in the registry");
    }
}

/// Kills processes of a deployment under load, and checks for leaks.
fn survive(mut arena: KillTest, targets: &[FailpointTarget], kills: u64) {
    let open_files = DeploymentProcess::ALL.map(|process| arena.deployment.open_files(process));
    let models: Vec<String> = NAMES.iter().copied().chain([e2e_tests::BASE]).map(str::to_owned).collect();
    let mut traffic = Traffic::begin(arena.client(), &arena.variants, &models, CLIENTS);
    for _ in 0..NAMES.len() {
        arena.change();
    }
    arena.attack(targets, kills, &mut traffic);
    let seen = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    eventually("there are more answers than deaths", || {
        traffic.check();
        seen(&traffic.tally.answered) > kills
    });
    let tally = traffic.finish();
    arena.inspect();
    for (process, before) in DeploymentProcess::ALL.into_iter().zip(open_files) {
        eventually(&format!("a {} runs", process.program()), || arena.deployment.process(process).is_some());
        let now = arena.deployment.open_files(process);
        // An adapter is a file of shared memory; none is loaded at the start.
        let (adapters, others): (Vec<_>, Vec<_>) =
            now.iter().partition(|file| file.contains("holobiont-adapter"));
        let is_bounded = adapters.len() <= NAMES.len() && others.len() <= before.len() + 8;
        assert!(is_bounded, "{process:?} has {now:#?} open; at the start it had {before:#?}");
    }
    arena.ledger.count("golden answers", seen(&tally.answered));
    arena.ledger.count("requests sent again", seen(&tally.retried));
    arena.ledger.count("streams given up", seen(&tally.given_up));
    arena.ledger.write();
    // The next start removes the remains of crashes.
    arena.deployment.signal(DeploymentProcess::Gateway, Signal::KILL);
    eventually("the gateway is back", || arena.deployment.client.is_healthy());
    arena.wait_until_recovered();
    arena.no_orphans();
    assert!(arena.deployment.stop().success());
}

#[test]
fn processes_may_die_anywhere_and_no_token_adapter_or_request_is_lost() {
    let (kills, seed) = (repeats::KILLS.number(), repeats::SEED.number());
    watched(move || {
        survive(KillTest::open("kills", seed, "cpu-assist"), &places(), kills);
    });
}

#[test]
fn processes_may_die_while_requests_wait_for_their_adapters_and_none_is_lost() {
    let (kills, seed) = (repeats::KILLS.number() / 15, repeats::SEED.number());
    watched(move || {
        let targets: Vec<FailpointTarget> = ON_DEMAND.into_iter().chain(ON_THE_WAY).map(target).collect();
        survive(KillTest::open("kills on demand", seed, "on-demand"), &targets, kills);
    });
}
