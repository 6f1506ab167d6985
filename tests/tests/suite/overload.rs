//! More requests than the real processes can serve: all at once, a burst, which is queued; and without end,
//! an overload, which is rejected early.
//!
//! No assertion uses the clock: the bound is on the number of other requests served while one waits.

use std::{
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use e2e_tests::{BASE, CompletionRequest, DeploymentPlan, RequestFault, fixtures, watched};
use serde_json::json;

const BURST: u32 = 500;

#[test]
fn a_burst_of_five_hundred_requests_is_served() {
    watched(|| {
        // A busy machine may need more than the default interval of five seconds to send all, and later
        // requests are no burst.
        let deployment = DeploymentPlan::bare().set("CODEL_INTERVAL_MS", "120000").start();
        let together = Barrier::new(BURST as usize);
        let served = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..BURST {
                let (client, together, served) = (&deployment.client, &together, &served);
                scope.spawn(move || {
                    let ask = CompletionRequest::new(BASE, fixtures::prompt(number, 4), 2);
                    together.wait();
                    // Each prompt is unique.
                    let reply = client.try_ask(&ask).unwrap_or_else(|fault| panic!("{number}: {fault}"));
                    assert_eq!(reply.answer.scored.len(), 2);
                    served.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(served.into_inner(), BURST as usize);
    });
}

#[test]
fn choices_and_prompts_beyond_what_runs_together_wait_for_their_turn() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("MAX_RUNNING", "4").start();
        let prompts: Vec<_> = (0..32).map(|number| fixtures::prompt(number, 4)).collect();
        let body = json!({ "model": BASE, "prompt": prompts, "n": 4, "max_tokens": 2, "ignore_eos": true });
        let answer = deployment.client.try_post("/v1/completions", &body).expect("it is served");
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(128));
    });
}

/// Clients of the overload: each sends its next request after any answer.
const CLIENTS: usize = 64;
/// Value of `MAX_RUNNING`: the batch slots.
const RUNNING: &str = "4";
/// Requests served before the count starts: until then the initial queue is served.
const SETTLING: usize = 3 * CLIENTS;
const SERVED: usize = 6 * CLIENTS;

#[derive(Debug, Default)]
struct OverloadCounts {
    served: AtomicUsize,
    refused: AtomicUsize,
    /// Requests served meanwhile, for each request sent after the start of the count.
    overtaken: Mutex<Vec<usize>>,
}

#[test]
fn under_a_sustained_overload_most_are_refused_and_the_others_wait_for_few() {
    watched(|| {
        let plan = DeploymentPlan::bare().set("MAX_RUNNING", RUNNING);
        let plan = plan.set("CODEL_TARGET_MS", "50").set("CODEL_INTERVAL_MS", "500");
        let deployment = plan.start();
        let tally = Arc::new(OverloadCounts::default());
        thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (client, tally) = (&deployment.client, &*tally);
                let ask = CompletionRequest::new(BASE, fixtures::prompt(number as u32, 4), 16);
                scope.spawn(move || {
                    while tally.served.load(Ordering::Relaxed) < SERVED {
                        ask_once(client, &ask, tally);
                    }
                });
            }
        });
        let overtaken = tally.overtaken.lock().unwrap();
        let few = CLIENTS / 2;
        let patient = overtaken.iter().filter(|others| **others > few).count();
        assert!(overtaken.len() >= SERVED - SETTLING - CLIENTS, "{overtaken:?}");
        assert!(patient * 20 < overtaken.len(), "a queue of all would be {CLIENTS} long: {overtaken:?}");
        assert!(tally.refused.load(Ordering::Relaxed) > SERVED, "{tally:?}");
    });
}

fn ask_once(client: &e2e_tests::Client, ask: &CompletionRequest, tally: &OverloadCounts) {
    let before = tally.served.load(Ordering::Relaxed);
    match client.try_ask(ask) {
        Ok(_) => {
            let after = tally.served.fetch_add(1, Ordering::Relaxed);
            if before > SETTLING {
                tally.overtaken.lock().unwrap().push(after - before);
            }
        }
        Err(RequestFault::Refused { status: 429, code }) => {
            assert_eq!(code, "queue_full");
            tally.refused.fetch_add(1, Ordering::Relaxed);
            // Ten times the served rate, but not a loop that takes the server's cores.
            thread::sleep(Duration::from_millis(20));
        }
        Err(fault) => panic!("{fault}"),
    }
}
