//! Many clients, some of which disconnect, while adapters come and go: every token golden, and no leaks.
//!
//! `HOLOBIONT_SOAK_S` sets the seconds; from five minutes on, memory must be flat too.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess, EXAMPLES,
    MODELS, StreamEnd, eventually, fixtures, repeats, watched,
};

const CLIENTS: u32 = 64;
/// Shorter runs are still filling their caches at the end.
const FLAT_FROM_S: u64 = 300;
/// Allowed growth of open files from the middle to the end: connections come and go.
const OPEN_FILES_SLACK: usize = 8;
/// Allowed growth of a process's bytes in the second half of a long run.
const GROWTH_SLACK_BYTES: u64 = 12 << 20;

type GoldenRequest = (CompletionRequest, CompletionAnswer);

/// Short, medium and long prompts of every model; the long ones are sampled.
fn golden_table(client: &Client) -> Vec<GoldenRequest> {
    let asks = MODELS.into_iter().flat_map(|model| {
        [(5, None), (40, None), (150, Some(11))].map(|(length, seed)| CompletionRequest {
            seed,
            ..CompletionRequest::new(model, fixtures::prompt(1, length), 24)
        })
    });
    asks.map(|ask| (ask.clone(), client.ask(&ask).answer)).collect()
}

#[derive(Debug, Default)]
struct SoakCounts {
    completed: AtomicUsize,
    disconnected: AtomicUsize,
}

/// Sends requests in sequence until `deadline`, and disconnects from one stream in three.
fn be_a_client(number: u32, client: &Client, table: &[GoldenRequest], deadline: Instant, tally: &SoakCounts) {
    let mut random = fixtures::prompt(number, 100_000).into_iter().map(|token| token as usize);
    let mut below = |limit: usize| random.next().expect("enough random numbers") % limit;
    while Instant::now() < deadline {
        let (ask, golden) = &table[below(table.len())];
        if below(3) == 0 {
            let answer = read_some(client, ask, 1 + below(20));
            assert!(answer.begins(golden), "{ask:?}: {answer:?} does not begin {golden:?}");
            tally.disconnected.fetch_add(1, Ordering::Relaxed);
        } else {
            let (answer, ending) = client.stream(ask).finish();
            assert_eq!((&answer, ending), (golden, StreamEnd::Done), "{ask:?}");
            tally.completed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn read_some(client: &Client, ask: &CompletionRequest, chunks: usize) -> CompletionAnswer {
    let mut stream = client.stream(ask);
    for _ in 0..chunks {
        match stream.step() {
            None => {}
            Some(ending) => {
                assert_eq!(ending, StreamEnd::Done, "{ask:?}");
                break;
            }
        }
    }
    std::mem::take(&mut stream.answer)
}

#[derive(Debug, Clone, Copy)]
struct ProcessResources {
    open_files: usize,
    resident_bytes: u64,
}

impl ProcessResources {
    fn of(deployment: &Deployment) -> [Self; 4] {
        DeploymentProcess::ALL.map(|process| Self {
            open_files: deployment.open_files(process).len(),
            resident_bytes: deployment.resident_bytes(process),
        })
    }
}

fn churn(client: &Client, directory: &std::path::Path, deadline: Instant) -> usize {
    let paths = [30, 31].map(|alpha| {
        let path = directory.join(format!("churn-{alpha}"));
        fixtures::variant("pirate", alpha, &path);
        path
    });
    let mut rounds = 0;
    while Instant::now() < deadline {
        client.load("churn", &paths[0]);
        client.reload("churn", &paths[1]);
        assert!(client.unload("churn") > 0);
        rounds += 1;
        thread::sleep(Duration::from_millis(100));
    }
    rounds
}

#[test]
fn sixty_four_clients_with_disconnects_get_golden_tokens_and_leave_nothing_behind() {
    let soak_s = repeats::SOAK_S.number();
    watched(move || {
        let deployment = DeploymentPlan::with_examples().cores(2).start();
        let client = &deployment.client;
        let (table, tally) = (golden_table(client), SoakCounts::default());
        let deadline = Instant::now() + Duration::from_secs(soak_s);
        let (middle, rounds) = thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (table, tally) = (&table, &tally);
                scope.spawn(move || be_a_client(number, client, table, deadline, tally));
            }
            let churning = scope.spawn(|| churn(client, &deployment.place().adapters(), deadline));
            thread::sleep(Duration::from_secs(soak_s / 2));
            (ProcessResources::of(&deployment), churning.join().expect("every change is answered"))
        });
        eprintln!("{tally:?}, {rounds} rounds of adapters");
        assert!(rounds > 0);
        let seen = [&tally.completed, &tally.disconnected].map(|count| count.load(Ordering::Relaxed));
        assert!(seen.iter().all(|count| *count > 0), "completed, disconnected: {seen:?}");
        nothing_is_left(client);
        nothing_has_grown(middle, ProcessResources::of(&deployment), soak_s);
    });
}

fn nothing_has_grown(middle: [ProcessResources; 4], end: [ProcessResources; 4], soak_s: u64) {
    for ((process, middle), end) in DeploymentProcess::ALL.into_iter().zip(middle).zip(end) {
        eprintln!("{process:?}: {middle:?} in the middle, {end:?} at the end");
        assert!(end.open_files <= middle.open_files + OPEN_FILES_SLACK, "{process:?}: files");
        let bytes = middle.resident_bytes + GROWTH_SLACK_BYTES;
        assert!(soak_s < FLAT_FROM_S || end.resident_bytes <= bytes, "{process:?}: memory");
    }
}

fn nothing_is_left(client: &Client) {
    for figure in [
        "holobiont_requests_in_flight",
        "holobiont_requests_running",
        "holobiont_requests_waiting",
        "holobiont_kv_blocks{state=\"used\"}",
    ] {
        eventually(&format!("{figure} is zero"), || client.metric(figure) == 0.0);
    }
    assert!(client.metric("holobiont_cancelled_total") > 0.0, "no disconnect reached the executor");
    for name in EXAMPLES {
        assert!(client.unload(name) > 0, "{name}");
    }
    eventually("the adapters' bytes are free", || client.metric("holobiont_adapter_bytes") == 0.0);
}
