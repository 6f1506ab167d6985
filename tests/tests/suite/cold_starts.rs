//! Requests whose adapter is not on the device: equal bits from every computing process, and no wait where
//! workers help.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess,
    StateDirectory, StreamEnd, eventually, fixtures, watched,
};
use rustix::process::Signal;
use serde_json::Value;

/// Adapters of 48, 24 and 36 ranks: three, two and three blocks per layer.
const WIDE: [(&str, usize); 3] = [("pirate", 6), ("json", 6), ("haiku", 9)];

fn count(figure: &Value) -> u64 {
    figure.as_u64().unwrap_or_else(|| panic!("{figure} is no count"))
}

/// Writes the wide adapters into `place` under the names of the examples.
fn write_adapters(place: &StateDirectory) -> Vec<&'static str> {
    let written = WIDE.map(|(name, times)| {
        fixtures::stacked(name, times, 16, &place.adapters().join(name));
        name
    });
    written.to_vec()
}

/// Greedy and sampled requests to every model, with prompts long enough for several slices.
fn asks(models: &[&str]) -> Vec<CompletionRequest> {
    let of = |model: &&str| {
        [(90, None), (33, Some(7))].map(|(length, seed)| CompletionRequest {
            seed,
            ..CompletionRequest::new(model, fixtures::prompt(40, length), 24)
        })
    };
    models.iter().flat_map(of).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ComputeShares {
    device: u64,
    workers: u64,
    executor: u64,
    cold_starts: u64,
}

impl ComputeShares {
    fn of(client: &Client, names: &[&str]) -> Self {
        names.iter().fold(Self::default(), |sum, name| {
            let adapter = client.adapter(name);
            let rows = |place: &str| count(&adapter["rank_rows"][place]);
            Self {
                device: sum.device + rows("device"),
                workers: sum.workers + rows("workers"),
                executor: sum.executor + rows("executor"),
                cold_starts: sum.cold_starts + count(&adapter["cold_starts"]),
            }
        })
    }

    /// Shares after all work has ended; stats are up to a second old.
    fn settled(client: &Client, names: &[&str]) -> Self {
        let mut last = Self::default();
        eventually("figures stay as they are", || {
            let now = Self::of(client, names);
            let has_settled = now != Self::default() && now == last;
            last = now;
            thread::sleep(Duration::from_millis(1100));
            has_settled
        });
        last
    }
}

/// Answers of a deployment of `plan` to all requests, in sequence and then at once, and the compute shares.
fn answers(
    plan: &DeploymentPlan,
    place: &Arc<StateDirectory>,
    names: &[&'static str],
) -> ([Vec<CompletionAnswer>; 2], ComputeShares) {
    let deployment = plan.start_in(Arc::clone(place));
    let client = &deployment.client;
    for name in names {
        client.load(name, &place.adapters().join(name));
    }
    let asks = asks(&[names, &[BASE]].concat());
    let alone = asks.iter().map(|ask| client.ask(ask).answer).collect();
    let together = thread::scope(|scope| {
        let asked: Vec<_> = asks.iter().map(|ask| scope.spawn(|| client.ask(ask).answer)).collect();
        asked.into_iter().map(|answer| answer.join().expect("an answer")).collect()
    });
    let shares = ComputeShares::settled(client, names);
    for name in names {
        client.unload(name);
    }
    assert!(deployment.stop().success());
    ([alone, together], shares)
}

#[test]
fn cached_on_demand_and_assisted_answers_have_the_same_bits() {
    watched(|| {
        let place = Arc::new(StateDirectory::new());
        let names = write_adapters(&place);
        let cached = DeploymentPlan::bare().workers(0).set("COLD_START", "cached");
        let ([golden, again], shares) = answers(&cached, &place, &names);
        assert_eq!(golden, again);
        assert!(
            shares.device > 0 && shares.workers + shares.executor + shares.cold_starts == 0,
            "{shares:?}"
        );

        // The device holds one adapter at a time.
        let on_demand = DeploymentPlan::bare().cold(15 << 10, 0.4).set("COLD_START", "on-demand");
        let (answers_of, shares) = answers(&on_demand, &place, &names);
        assert_eq!(answers_of, [golden.clone(), golden.clone()], "on demand");
        assert!(shares.cold_starts > 0 && shares.workers + shares.executor == 0, "{shares:?}");

        for (workers, link_gbps) in [(0, 0.1), (1, 0.1), (2, 0.3), (2, 0.0001)] {
            let what = format!("{workers} workers, a link of {link_gbps} Gbit/s");
            let assisted = DeploymentPlan::bare().workers(workers).cold(15 << 10, link_gbps);
            let (answers_of, shares) = answers(&assisted, &place, &names);
            assert_eq!(answers_of, [golden.clone(), golden.clone()], "{what}");
            eprintln!("{what}: {shares:?}");
            assert!(shares.cold_starts > 0, "{what}: {shares:?}");
            assert_eq!(shares.workers > 0, workers > 0, "{what}: {shares:?}");
            assert!(workers > 0 || shares.executor > 0, "{what}: {shares:?}");
        }
    });
}

/// Deployment with one adapter that was just loaded, a request, and its golden answer.
fn with_cold_pirate(
    plan: &DeploymentPlan,
    link_gbps: f64,
) -> (Deployment, CompletionRequest, CompletionAnswer) {
    let place = Arc::new(StateDirectory::new());
    fixtures::variant("pirate", 16, &place.adapters().join("pirate"));
    let ask = CompletionRequest::new("pirate", fixtures::prompt(50, 40), 24);
    let calm = DeploymentPlan::bare().workers(0).start_in(Arc::clone(&place));
    calm.client.load("pirate", &place.adapters().join("pirate"));
    let golden = calm.client.ask(&ask).answer;
    calm.client.unload("pirate");
    assert!(calm.stop().success());
    let deployment = plan.clone().cold(2 << 10, link_gbps).start_in(Arc::clone(&place));
    deployment.client.load("pirate", &place.adapters().join("pirate"));
    (deployment, ask, golden)
}

#[test]
fn a_cold_adapter_answers_before_it_has_arrived() {
    watched(|| {
        // On this link the adapter takes ten minutes.
        let (deployment, ask, golden) = with_cold_pirate(&DeploymentPlan::bare(), 0.000025);
        let client = &deployment.client;
        assert_eq!(client.ask(&ask).answer, golden);
        let mut adapter = Value::Null;
        eventually("the cold start is counted", || {
            adapter = client.adapter("pirate");
            count(&adapter["cold_starts"]) == 1
        });
        // Even after the answer most of the adapter is missing.
        assert!(count(&adapter["device_bytes"]) < count(&adapter["bytes"]) / 2, "{adapter}");
        assert_eq!(adapter["load_wait_ms"], 0.0, "{adapter}");
        let status = client.status();
        assert_eq!(status["cold_starts"]["load_wait_ms"], 0.0, "{status}");
        assert_eq!(
            status["device"]["emulated_link_bytes_per_s"].as_f64(),
            Some(fixtures::of_layers(3125.0)),
            "{status}"
        );
        assert!(deployment.stop().success(), "what is on its way keeps nobody from stopping");
    });
}

#[test]
fn on_demand_a_request_waits_for_its_adapter_while_others_go_on() {
    watched(|| {
        let plan = DeploymentPlan::bare().set("COLD_START", "on-demand");
        // On this link the adapter takes six seconds.
        let (deployment, ask, golden) = with_cold_pirate(&plan, 0.0025);
        let client = &deployment.client;
        let begun = Instant::now();
        let waiting = {
            let (client, ask) = (client.clone(), ask.clone());
            thread::spawn(move || client.ask(&ask).answer)
        };
        let neighbour = CompletionRequest::new(BASE, fixtures::prompt(51, 10), 16);
        let alone = client.ask(&neighbour).answer;
        let mut answered = 0;
        while !waiting.is_finished() {
            let (answer, ending) = client.stream(&neighbour).finish();
            assert_eq!((&answer, ending), (&alone, StreamEnd::Done));
            answered += 1;
        }
        let waited = begun.elapsed();
        assert_eq!(waiting.join().expect("an answer"), golden);
        assert!(answered > 3, "neighbours were answered {answered} times in {waited:?}");
        let mut adapter = Value::Null;
        eventually("the wait is reported", || {
            adapter = client.adapter("pirate");
            count(&adapter["cold_starts"]) == 1
        });
        assert_eq!(adapter["device_bytes"], adapter["bytes"], "it was there before the answer began");
        let load_wait_ms = adapter["load_wait_ms"].as_f64().expect("a time");
        assert!(load_wait_ms > 1000.0, "{load_wait_ms} ms of {waited:?}");
        assert!(client.metric("holobiont_adapter_load_wait_seconds_sum") > 1.0);
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_worker_that_keeps_dying_is_given_up_and_its_part_is_computed() {
    watched(|| {
        let plan = DeploymentPlan::bare().set("MAX_CRASHES_PER_MIN", "3").set("RESTART_DELAY_MS", "0");
        let (deployment, ask, golden) = with_cold_pirate(&plan, 0.000025);
        for _ in 0..3 {
            let mut worker = None;
            eventually("a worker runs", || {
                worker = deployment.process(DeploymentProcess::Worker);
                worker.is_some()
            });
            deployment.signal(DeploymentProcess::Worker, Signal::KILL);
            eventually("it is gone", || deployment.process(DeploymentProcess::Worker) != worker);
        }
        let client = &deployment.client;
        eventually("the executor has noticed", || {
            client.status()["workers"]["seated"] == Value::Array(vec![])
        });
        assert_eq!(client.ask(&ask).answer, golden);
        assert_eq!(deployment.process(DeploymentProcess::Worker), None, "it was given up");
        assert_eq!(client.status()["workers"]["expected"], 1);
        eventually("the executor has computed the adapter", || {
            count(&client.adapter("pirate")["rank_rows"]["executor"]) > 0
        });
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_stopped_worker_keeps_nobody_from_an_answer_or_from_the_end() {
    watched(|| {
        let (deployment, ask, golden) = with_cold_pirate(&DeploymentPlan::bare().workers(2), 0.000025);
        let workers = deployment.processes(DeploymentProcess::Worker);
        workers.iter().for_each(|id| e2e_tests::signal(*id, Signal::STOP));
        assert_eq!(deployment.client.ask(&ask).answer, golden);
        assert!(deployment.stop().success(), "stopped workers are killed");
    });
}
