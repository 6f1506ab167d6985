//! Tenants on one base: a tenant that floods waits for itself, weights are shares of the service, and limits
//! and targets of a class are kept and reported.
//!
//! No assertion uses the clock: the bound is on the number of other requests served while one waits.

use std::{
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, RequestFault, fixtures, keys::add_key,
    watched,
};
use serde_json::Value;

/// Value of `MAX_RUNNING`: the batch slots.
const RUNNING: &str = "4";
/// Threads of a tenant that always has a waiting request.
const BUSY: usize = 16;

struct KeyedDeployment {
    deployment: Deployment,
    key_file: tempfile::TempPath,
    operator: String,
}

impl KeyedDeployment {
    /// Starts a deployment whose queues may stand for `patience_ms`.
    fn start(classes: &str, patience_ms: &str) -> Self {
        let key_file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let operator = add_key(&key_file, "operator", "admin");
        let plan = DeploymentPlan::bare().set("MAX_RUNNING", RUNNING).file(classes);
        let plan = plan.set("API_KEY_FILE", &key_file.display().to_string());
        let deployment = plan.set("CODEL_INTERVAL_MS", patience_ms).start();
        Self { deployment, key_file, operator }
    }

    fn client(&self, tenant: &str) -> Client {
        let client = self.deployment.client.with_key(&add_key(&self.key_file, tenant, "user"));
        e2e_tests::eventually("the key opens", || client.try_get("/v1/models").is_ok());
        client
    }

    fn classes(&self) -> Vec<Value> {
        let operator = self.deployment.client.with_key(&self.operator);
        operator.try_get("/v1/status").unwrap()["classes"].as_array().unwrap().clone()
    }
}

fn ask_on(client: &Client, number: usize, is_over: &AtomicBool, served: &AtomicUsize) {
    let ask = CompletionRequest::new(BASE, fixtures::prompt(u32::try_from(number).unwrap(), 4), 16);
    while !is_over.load(Relaxed) {
        match client.try_ask(&ask) {
            Ok(_) => _ = served.fetch_add(1, Relaxed),
            Err(RequestFault::Refused { status: 429, code }) => {
                assert_eq!(code, "queue_full");
                thread::sleep(Duration::from_millis(20));
            }
            Err(fault) => panic!("{fault}"),
        }
    }
}

#[test]
fn a_tenant_that_floods_waits_for_itself_and_another_hardly_waits() {
    watched(|| {
        let keyed = KeyedDeployment::start("", "1000");
        let (flood, guest) = (keyed.client("flood"), keyed.client("guest"));
        let (is_over, flooded) = (AtomicBool::new(false), AtomicUsize::new(0));
        let overtaken = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..4 * BUSY {
                let (flood, is_over, flooded) = (&flood, &is_over, &flooded);
                scope.spawn(move || ask_on(flood, number, is_over, flooded));
            }
            e2e_tests::eventually("the flood is there", || flooded.load(Relaxed) > BUSY);
            for number in 0..20 {
                let before = flooded.load(Relaxed);
                let ask = CompletionRequest::new(BASE, fixtures::prompt(1000 + number, 4), 16);
                guest.try_ask(&ask).expect("who does not flood is never refused");
                overtaken.lock().unwrap().push(flooded.load(Relaxed) - before);
            }
            is_over.store(true, Relaxed);
        });
        let mut overtaken = overtaken.into_inner().unwrap();
        overtaken.sort_unstable();
        // Only running requests, and at most as many before its turn, were served first.
        assert!(overtaken[10] <= BUSY, "a queue for all would be {} long: {overtaken:?}", 4 * BUSY);
    });
}

#[test]
fn tenants_are_served_by_their_weights() {
    watched(|| {
        let keyed =
            KeyedDeployment::start("[[class]]\nname = 'gold'\ntenants = ['alice']\nweight = 3\n", "120000");
        let clients = [keyed.client("alice"), keyed.client("bob")];
        let (is_over, served) = (AtomicBool::new(false), [AtomicUsize::new(0), AtomicUsize::new(0)]);
        let count = || [served[0].load(Relaxed), served[1].load(Relaxed)];
        let ratio = thread::scope(|scope| {
            for number in 0..2 * BUSY {
                let (client, served) = (&clients[number % 2], &served[number % 2]);
                let is_over = &is_over;
                scope.spawn(move || ask_on(client, number, is_over, served));
            }
            e2e_tests::eventually("both are served", || count().iter().all(|count| *count > BUSY));
            let before = count();
            e2e_tests::eventually("enough were served", || count()[0] > before[0] + 200);
            is_over.store(true, Relaxed);
            let [alice, bob] = count();
            (alice - before[0]) as f64 / (bob - before[1]) as f64
        });
        assert!((2.7..3.3).contains(&ratio), "{ratio} for one");
        let classes = keyed.classes();
        let class = |name: &str| classes.iter().find(|class| class["name"] == name).unwrap();
        let (default, gold) = (class("default"), class("gold"));
        assert_eq!((default["weight"].as_u64(), gold["weight"].as_u64()), (Some(1), Some(3)));
        let tokens = |class: &Value| class["tokens"].as_f64().unwrap();
        assert!(tokens(gold) > 2.0 * tokens(default), "{classes:?}");
    });
}

#[test]
fn what_a_class_may_have_and_was_promised_is_held_and_told() {
    watched(|| {
        let keyed = KeyedDeployment::start(
            "[[class]]\nname = 'few'\ntenants = ['carol']\nrequests_per_min = 2\n\
             [[class]]\nname = 'strict'\ntenants = ['dave']\nttft_ms = 1\ntpot_ms = 60000\n",
            "5000",
        );
        let (carol, dave) = (keyed.client("carol"), keyed.client("dave"));
        let ask = CompletionRequest::new(BASE, fixtures::prompt(1, 4), 4);
        (0..2).for_each(|_| drop(carol.ask(&ask)));
        assert_eq!(carol.refusal(&ask), (429, "rate_limit_exceeded".to_owned()));
        // With an empty queue the request is served as fast as possible, which still misses the target.
        dave.ask(&ask);
        let classes = keyed.classes();
        let class = |name: &str| classes.iter().find(|class| class["name"] == name).unwrap();
        assert_eq!((&class("few")["requests"], &class("few")["throttled"]), (&2.into(), &1.into()));
        let strict = class("strict");
        assert_eq!((&strict["ttft"]["missed"], &strict["tpot"]["met"]), (&1.into(), &1.into()), "{strict}");
        let mut slo = Command::new(fixtures::program("holobiont"));
        slo.args(["slo", "--url", keyed.deployment.client.url()]);
        slo.env("HOLOBIONT_API_KEY", &keyed.operator);
        let told = slo.output().unwrap();
        let text = String::from_utf8_lossy(&told.stdout);
        let row = text.lines().find(|line| line.contains("strict")).unwrap_or_else(|| panic!("{told:?}"));
        assert!(row.contains("of 1 ms") && row.contains("0.0 %") && row.contains("100.0 %"), "{text}");
    });
}
