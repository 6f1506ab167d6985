//! Many clients, some of which go away: every token golden, and nothing left behind.
//!
//! `HOLOBIONT_SOAK_S` says for how many seconds.

use std::{
    env,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{Answer, Ask, Client, EXAMPLES, Ending, MODELS, Plan, eventually, fixtures, within_seconds};

const CLIENTS: u32 = 64;
const DEFAULT_SOAK_S: u64 = 15;

/// A request and what a lone run answered.
type Golden = (Ask, Answer);

/// Short, medium and long prompts of every model; the long ones are sampled.
fn golden_table(client: &Client) -> Vec<Golden> {
    let asks = MODELS.into_iter().flat_map(|model| {
        [(5, None), (40, None), (150, Some(11))]
            .map(|(length, seed)| Ask { seed, ..Ask::new(model, fixtures::prompt(1, length), 24) })
    });
    asks.map(|ask| (ask.clone(), client.ask(&ask).answer)).collect()
}

/// What the clients saw.
#[derive(Default)]
struct Tally {
    completed: AtomicUsize,
    disconnected: AtomicUsize,
}

/// Asks one thing after the other until `deadline`, and leaves one stream in three early.
fn be_a_client(number: u32, client: &Client, table: &[Golden], deadline: Instant, tally: &Tally) {
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
            assert_eq!((&answer, ending), (golden, Ending::Done), "{ask:?}");
            tally.completed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Reads a few chunks and disconnects.
fn read_some(client: &Client, ask: &Ask, chunks: usize) -> Answer {
    let mut stream = client.stream(ask);
    for _ in 0..chunks {
        match stream.step() {
            None => {}
            Some(ending) => {
                assert_eq!(ending, Ending::Done, "{ask:?}");
                break;
            }
        }
    }
    std::mem::take(&mut stream.answer)
}

#[test]
fn sixty_four_clients_with_disconnects_get_golden_tokens_and_leave_nothing_behind() {
    let soak_s = env::var("HOLOBIONT_SOAK_S").map_or(DEFAULT_SOAK_S, |text| text.parse().expect("seconds"));
    within_seconds(soak_s + 180, move || {
        let deployment = Plan::with_examples().start();
        let client = &deployment.client;
        let (table, tally) = (golden_table(client), Tally::default());
        let deadline = Instant::now() + Duration::from_secs(soak_s);
        thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (table, tally) = (&table, &tally);
                scope.spawn(move || be_a_client(number, client, table, deadline, tally));
            }
        });
        let seen = [&tally.completed, &tally.disconnected].map(|count| count.load(Ordering::Relaxed));
        assert!(seen.iter().all(|count| *count > 0), "completed, disconnected: {seen:?}");
        nothing_is_left(client);
    });
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
