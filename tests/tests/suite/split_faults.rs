//! Split clients and executors are killed or stopped anywhere: the others continue with the same tokens, and
//! nothing leaks.
//!
//! A resident client and a split one repeat golden requests. Meanwhile other split clients, in processes of
//! their own, are killed or stopped at failpoints; or the executor is, and they must continue with its
//! successor.
//!
//! `HOLOBIONT_SPLIT_FAULTS` sets the number of faults of clients and of executors, `HOLOBIONT_SEED` their
//! choice, `HOLOBIONT_LEDGER` the file for the counters.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess, StateDirectory,
    chaos::{AdapterVariants, ChaosReport, ChaosRng, FailpointDirectory, Traffic},
    eventually, fixtures, repeats, signal,
    split::{
        HeldResources, Program, SplitEndpoints, SplitRoute, SplitTenant, program::RunningProgram,
        tenant::OPEN, tenant::text,
    },
    watched,
};
use rustix::process::Signal;

const ANSWER: u32 = 6;
/// A few hundred tokens: two passes over the layers before the first sampled token.
const PROMPT: &str = "A client of an executor keeps its adapter, its keys and values, and its sampling to itself, and rents \
    only the base layers. ";
const REPEATS: usize = 12;
/// Pause of the companion after an answer, since otherwise it would use most of the cores.
const REST: Duration = Duration::from_millis(150);
fn calls() -> usize {
    usize::try_from(fixtures::calls()).expect("few")
}

/// Exit code of a command without an executor.
const UNAVAILABLE: i32 = 5;

/// A split client that repeats one golden request and survives the loss of executors.
struct SplitLoopClient {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl SplitLoopClient {
    fn begin(mut tenant: SplitTenant, client: &Client) -> Self {
        let prompt = fixtures::prompt(77, 30);
        let golden = client.ask(&CompletionRequest::new(BASE, prompt.clone(), ANSWER)).answer.text;
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, count) = (Arc::clone(&stop), Arc::clone(&answered));
        let thread = thread::spawn(move || {
            let text = text();
            while !ends.load(Ordering::Relaxed) {
                let tokens = tenant.generate(&prompt, ANSWER as usize).expect("an answer");
                let mut decoder = text.decoder(text::detokenize::TextStart::Continuation);
                let mut said = String::new();
                tokens.iter().for_each(|&token| said.push_str(decoder.push(token)));
                said.push_str(decoder.finish());
                assert_eq!(said, golden, "the companion's answer");
                count.fetch_add(1, Ordering::Relaxed);
                thread::sleep(REST);
            }
        });
        Self { stop, answered, thread }
    }

    fn check(&self) {
        assert!(!self.thread.is_finished(), "the companion has given up");
    }

    fn finish(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
        self.answered.load(Ordering::Relaxed)
    }
}

/// Deployment with background clients, and the answer that every client must give.
struct SplitFaultTest {
    deployment: Deployment,
    endpoints: SplitEndpoints,
    places: FailpointDirectory,
    prompt: String,
    golden: String,
    random: ChaosRng,
    ledger: ChaosReport,
    traffic: Traffic,
    companion: SplitLoopClient,
    /// Resources of the executor for the companion alone.
    before: HeldResources,
    slowest: Duration,
}

impl SplitFaultTest {
    fn open(test: &'static str, seed: u64) -> Self {
        let (endpoints, places, place) =
            (SplitEndpoints::new(), FailpointDirectory::new(), Arc::new(StateDirectory::new()));
        let deployment =
            endpoints.of(DeploymentPlan::bare().workers(0).mortal(&places)).start_in(Arc::clone(&place));
        let client = &deployment.client;
        let variants = Arc::new(AdapterVariants::learn(client, &place.adapters(), 0));
        let prompt = PROMPT.repeat(REPEATS);
        let tokens = text().encode_raw(&prompt).expect("text");
        let golden = client.ask(&CompletionRequest::new(BASE, tokens, ANSWER)).answer.text;
        let companion = endpoints.tenant(&deployment, SplitRoute::SharedMemory, OPEN, None);
        let companion = SplitLoopClient::begin(companion, client);
        let traffic = Traffic::begin(client, &variants, &[BASE.to_owned()], 1);
        // The first call creates its slab.
        eventually("the companion is answered", || companion.answered.load(Ordering::Relaxed) > 0);
        let before = HeldResources::of(&deployment);
        let (random, ledger) = (ChaosRng::new(seed), ChaosReport::new(test, seed));
        let slowest = Duration::ZERO;
        Self {
            deployment,
            endpoints,
            places,
            prompt,
            golden,
            random,
            ledger,
            traffic,
            companion,
            before,
            slowest,
        }
    }

    fn client(&self, route: SplitRoute) -> Program {
        let program = Program::new("generate", &self.endpoints, &self.deployment, route);
        program.arg("--patience-s").arg("90").ask(&self.prompt, ANSWER as usize)
    }

    /// Waits until the executor's resources are as before.
    fn wait_until_released(&mut self) {
        let begun = Instant::now();
        let what = format!("the executor holds no more than {:?}", self.before);
        eventually(&what, || HeldResources::of(&self.deployment).are_within(&self.before));
        self.slowest = self.slowest.max(begun.elapsed());
        self.traffic.check();
        self.companion.check();
    }

    fn harm_client(&mut self, place: &str, action: &str) {
        let route = *self.random.pick(&SplitRoute::ALL);
        let at = 1 + self.random.below(if place == "client.session_opened" { 1 } else { 4 * calls() });
        self.places.arm(place, &format!("{action} {at}"));
        let mut running = self.client(route).mortal(&self.places).start();
        self.await_fault(place, &mut running);
        match action {
            "kill" => assert_eq!(running.finish().code, None, "it was killed"),
            _ => {
                thread::sleep(Duration::from_millis(self.random.below(400) as u64));
                let goes_on = self.random.below(2) == 0;
                signal(running.id(), if goes_on { Signal::CONT } else { Signal::KILL });
                let ended = running.finish();
                if goes_on {
                    assert_eq!(ended.text(), self.golden, "{ended:?}");
                }
            }
        }
        self.note(place, action, route);
    }

    /// Kills or pauses the executor at `place` while a client computes; the client must continue.
    fn harm_executor(&mut self, place: &'static str, action: &str) {
        let route = if place == "layer.channel_made" {
            SplitRoute::SharedMemory
        } else {
            *self.random.pick(&SplitRoute::ALL)
        };
        let few = ["layer.session_opened", "layer.session_left", "layer.channel_made", "layer.joined_pass"];
        let at = 1 + self.random.below(if few.contains(&place) { 1 } else { 3 * calls() });
        self.places.arm(place, &format!("{action} {at}"));
        let mut running = self.client(route).start();
        self.await_fault(place, &mut running);
        if action == "stop" {
            thread::sleep(Duration::from_millis(self.random.below(700) as u64));
            self.deployment.signal(DeploymentProcess::Executor, Signal::CONT);
        }
        self.expect_golden(running, route);
        self.note(place, action, route);
    }

    /// Checks a client that has survived. A client without a session at the kill reports that and is started
    /// again, since a client does not wait for an executor that it never reached.
    fn expect_golden(&mut self, running: RunningProgram, route: SplitRoute) {
        let mut ended = running.finish();
        let had_no_session = ended.code == Some(UNAVAILABLE) && !ended.complaint.contains("no successor");
        if had_no_session {
            self.ledger.count("clients without a session", 1);
            eventually("a client is served again", || {
                ended = self.client(route).run();
                ended.code == Some(0)
            });
        }
        assert_eq!(ended.text(), self.golden, "{ended:?}");
        // One kill costs one reconnection; repeated disconnections would be a fault, although the client
        // survives them.
        assert!(ended.reconnections() <= 2, "{ended:?}");
        self.ledger.count("reconnections of clients", ended.reconnections());
    }

    /// Kills the executor at a random time.
    fn kill_executor_anywhere(&mut self) {
        let route = *self.random.pick(&SplitRoute::ALL);
        let running = self.client(route).start();
        thread::sleep(Duration::from_millis(self.random.below(2500) as u64));
        self.deployment.kill_executor();
        self.expect_golden(running, route);
        self.note("anywhere", "kill", route);
    }

    fn await_fault(&self, place: &str, running: &mut RunningProgram) {
        // Failpoints after the client's end are reached because it disconnects.
        eventually("the client ends or gets there", || self.places.has_fired(place) || running.has_ended());
        eventually(place, || self.places.has_fired(place));
        self.places.clear(place);
    }

    fn note(&mut self, place: &str, action: &str, route: SplitRoute) {
        eprintln!("{} {action} {place} over {}", self.ledger.total(), route.name());
        self.ledger.hit(&format!("{place} {action}"));
        self.wait_until_released();
    }

    fn finish(mut self) {
        let tally = self.traffic.finish();
        self.ledger.count("golden resident answers", tally.answered.load(Ordering::Relaxed));
        self.ledger.count("resident requests sent again", tally.retried.load(Ordering::Relaxed));
        self.ledger.count("golden answers of the companion", self.companion.finish());
        let slowest = u64::try_from(self.slowest.as_millis()).expect("a short time");
        self.ledger.count("slowest return of resources ms", slowest);
        self.ledger.write();
        assert!(self.deployment.stop().success());
    }
}

#[test]
fn split_clients_may_die_or_stop_anywhere_and_leave_nothing_behind() {
    let (faults, seed) = (repeats::SPLIT_FAULTS.number(), repeats::SEED.number());
    watched(move || {
        let mut arena = SplitFaultTest::open("split clients", seed);
        for (number, place) in (0..faults).zip(client::FAILPOINTS.iter().cycle()) {
            let actions = ["kill", "stop"];
            let round = usize::try_from(number).expect("few") / client::FAILPOINTS.len();
            arena.harm_client(place, actions[round % actions.len()]);
        }
        arena.finish();
    });
}

#[test]
fn executors_may_die_or_stop_anywhere_and_split_clients_go_on_with_the_same_tokens() {
    let (faults, seed) = (repeats::SPLIT_FAULTS.number(), repeats::SEED.number());
    watched(move || {
        let mut arena = SplitFaultTest::open("executors of split clients", seed);
        for (number, place) in (0..faults).zip(base_executor::LAYER_FAILPOINTS.iter().cycle()) {
            let action = if arena.random.below(4) == 0 { "stop" } else { "kill" };
            arena.harm_executor(place, action);
            if number % 8 == 7 {
                arena.kill_executor_anywhere();
            }
        }
        arena.finish();
    });
}
