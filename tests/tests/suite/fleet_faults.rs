//! A whole fleet under traffic and changes (Envoy, two pickers, three hosts, PostgreSQL, a bucket) with one
//! fault after another: every answer is golden, the registry exact, and hosts agree again.
//!
//! Each host has a network of its own, whose links are really cut; a machine that forbids this skips the test
//! with a message. `HOLOBIONT_FLEET_FAULTS` sets the number of faults, `HOLOBIONT_SEED` their choice.
//!
//! - [`faults`]: kinds of faults. [`changes`]: adapters that come and go meanwhile.

mod changes;
mod faults;

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client,
    chaos::{AdapterVariants, ChaosReport, ChaosRng, Traffic},
    eventually, eventually_some,
    fleet::shared::SharedFleet,
    repeats, watched,
};

use self::{
    changes::{AdapterChanges, CHANGING, ListedAdapter, STEADY},
    faults::{FleetFault, happen},
};

const HOSTS: u8 = 3;
/// Adapter contents: more than a host's bucket cache holds.
const CONTENTS: u32 = 6;
/// Clients of steady names, and of changing names.
const CLIENTS: [u64; 2] = [2, 1];
const SOON: Duration = Duration::from_secs(5);

struct FleetFaultTest {
    fleet: SharedFleet,
    variants: Arc<AdapterVariants>,
    changes: AdapterChanges,
    traffic: [Traffic; 2],
    random: ChaosRng,
    ledger: ChaosReport,
    healed: BTreeMap<FleetFault, Vec<Duration>>,
}

impl FleetFaultTest {
    fn open(seed: u64) -> Result<Self, String> {
        let fleet = SharedFleet::start(HOSTS)?;
        let clients = fleet.clients();
        let variants = Arc::new(AdapterVariants::learn(&clients[0], &fleet.adapters(), CONTENTS));
        let changes = AdapterChanges::begin(clients.clone(), &variants, seed);
        let between = changes.pause();
        let _ = eventually_some("all hosts know what is always there", || agreed(&clients));
        drop(between);
        let steady: Vec<String> = STEADY.into_iter().chain([BASE]).map(str::to_owned).collect();
        let traffic = [steady, CHANGING.map(str::to_owned).to_vec()];
        let mut clients = CLIENTS.into_iter();
        let traffic = traffic.map(|models| {
            Traffic::begin(&fleet.front.client, &variants, &models, clients.next().expect("one for each"))
        });
        let ledger = ChaosReport::new("fleet faults", seed);
        let (random, healed) = (ChaosRng::new(seed), BTreeMap::new());
        Ok(Self { fleet, variants, changes, traffic, random, ledger, healed })
    }

    /// Injects `count` faults; every kind occurs once before any repeats.
    fn attack(&mut self, count: u64) {
        let mut deck = Vec::new();
        for number in 0..count {
            if deck.is_empty() {
                deck.extend(FleetFault::ALL);
            }
            let kind = deck.swap_remove(self.random.below(deck.len()));
            eprintln!("{number} {kind:?}");
            let answered = self.answered();
            happen(kind, &mut self.fleet, &self.changes, &mut self.random);
            self.heal(kind);
            eventually("requests are served", || {
                self.traffic.iter_mut().for_each(Traffic::check);
                self.answered() > answered
            });
            self.changes.check();
            let not_found = self.traffic[0].tally.not_found.load(Ordering::Relaxed);
            assert_eq!(not_found, 0, "what is registered is known everywhere");
            self.ledger.hit(&format!("{kind:?}"));
        }
    }

    fn answered(&self) -> u64 {
        self.traffic.iter().map(|traffic| traffic.tally.answered.load(Ordering::Relaxed)).sum()
    }

    /// Waits until all hosts agree, and checks their content.
    fn heal(&mut self, kind: FleetFault) {
        let since = Instant::now();
        let clients = self.fleet.clients();
        self.changes.ask(clients.clone());
        let mut state = self.changes.pause();
        let listed = eventually_some("all hosts list the same", || agreed(&clients));
        eventually("the pickers see all hosts", || {
            [0, 1].iter().all(|picker| (self.fleet.front.ready(*picker) - clients.len() as f64).abs() < 0.5)
        });
        let agreed = since.elapsed();
        let registered = state.reconcile(&listed);
        state.explain(&format!("{kind:?}"), kind.explains());
        thread::scope(|scope| {
            for client in &clients {
                scope.spawn(|| answers(client, &self.variants, &registered));
            }
        });
        drop(state);
        eprintln!(
            "  agreed after {:.1} s, all looked at after {:.1} s",
            agreed.as_secs_f64(),
            since.elapsed().as_secs_f64()
        );
        self.healed.entry(kind).or_default().push(agreed);
    }

    fn report(&mut self) {
        for traffic in &self.traffic {
            let seen = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
            self.ledger.count("golden answers", seen(&traffic.tally.answered));
            self.ledger.count("requests sent again", seen(&traffic.tally.retried));
            self.ledger.count("streams given up", seen(&traffic.tally.given_up));
        }
        self.ledger.count("changes", self.changes.pause().done);
        for (kind, times) in &mut self.healed {
            times.sort();
            eprintln!("{kind:?}: agreed after {times:.1?}");
        }
        let mut all: Vec<Duration> = self.healed.values().flatten().copied().collect();
        all.sort();
        let soon = all.iter().filter(|time| **time <= SOON).count();
        self.ledger.count("healed within 5 s", soon as u64);
        let at = |share: usize| all[(all.len() * share / 100).min(all.len() - 1)];
        eprintln!("median {:.1?}, 90th {:.1?}, 99th {:.1?}, last {:.1?}", at(50), at(90), at(99), at(100));
        self.ledger.write();
    }
}

/// Common list of all hosts; `None` if the lists differ or a host has no registry.
fn agreed(clients: &[Client]) -> Option<Vec<ListedAdapter>> {
    let listed = clients.iter().map(ListedAdapter::all).collect::<Option<Vec<_>>>()?;
    let is_reachable = |client: &Client| {
        client.try_get("/v1/status").is_ok_and(|status| status["registry"]["reachable"] == true)
    };
    let is_same = listed.windows(2).all(|two| two[0] == two[1]) && clients.iter().all(is_reachable);
    is_same.then(|| listed[0].clone())
}

/// Waits until a host has answered for every adapter and the base with the golden answers.
fn answers(client: &Client, variants: &AdapterVariants, registered: &BTreeMap<String, String>) {
    let models = registered.iter().map(|(name, generation)| (name.as_str(), Some(generation.as_str())));
    for (model, generation) in models.chain([(BASE, None)]) {
        let ask = variants.ask(model, 0);
        let reply = eventually_some("it is answered", || client.try_ask(&ask).ok());
        assert_eq!(reply.generation.as_deref(), generation, "{model}");
        variants.check(0, generation, &reply.answer);
    }
}

#[test]
fn whatever_fails_of_a_fleet_no_token_adapter_or_request_is_lost_and_all_agree_again() {
    let (count, seed) = (repeats::FLEET_FAULTS.number(), repeats::SEED.number());
    watched(move || {
        let mut arena = match FleetFaultTest::open(seed) {
            Ok(arena) => arena,
            Err(why) => return eprintln!("skipped: {why}"),
        };
        arena.attack(count);
        arena.changes.finish();
        arena.traffic.iter_mut().for_each(Traffic::end);
        arena.report();
        for host in std::mem::take(&mut arena.fleet.hosts) {
            assert!(host.deployment.stop().success());
        }
    });
}
