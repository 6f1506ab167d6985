//! A fleet against hand-computed results, against itself, and with faults.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use clap::Parser as _;
use scheduling::{
    batch::BatchLimits,
    perf::{
        linear_fit::LinearFit,
        linear_model::LinearModel,
        serving::{ColdStart, LoraForm, ServingModel},
    },
    routing::{RoutingPolicy, Slo},
};
use simulator::{
    commands::SimulatorCli,
    fleet::{
        self, FleetRequest, FleetSetup, GatewayKnowledge, LowerTier, Prompts, RequestEnd, RequestOutcome,
        SECOND, ServerSetup, fault_scenario,
        load::{Arrivals, FleetLoad},
        summary::Summary,
    },
    workload::popularity::Popularity,
};

const MS: u64 = SECOND / 1000;

/// A step takes 10 ms and 1 ms per sequence, a pass 20 ms and 1 ms per token.
fn server(prompts: Prompts) -> ServerSetup {
    const FREE: LinearFit = LinearFit { alpha: 0.0, beta: 0.0 };
    let pass_s = if prompts == Prompts::Preempt { 20e-3 } else { 0.0 };
    ServerSetup {
        model: ServingModel {
            form: LoraForm::TrueRank,
            decode: LinearModel { seconds_each: [10e-3, 1e-3, 0.0, 0.0] },
            prefill: LinearModel { seconds_each: [pass_s, 1e-3, 0.0] },
            link: LinearFit { alpha: 1e-9, beta: 0.0 },
            store: FREE,
            cold: ColdStart::Waits,
        },
        costs: None,
        prompts,
        limits: BatchLimits { max_running: 2, chunk_tokens: 64, scored_tokens: 1 },
        adapter_slots: 1,
        below: LowerTier::Host,
        rank_bytes: 1_000_000,
        kv_tokens: u64::MAX,
    }
}

fn setup(servers: Vec<ServerSetup>) -> FleetSetup {
    FleetSetup {
        servers,
        knowledge: GatewayKnowledge::Given,
        policy: RoutingPolicy::MostIdle,
        slo: Slo::default(),
        weights: Vec::new(),
        flood_share: 1.0,
        seed: 1,
    }
}

fn request(at_ms: u64, prompt: u32, answer: u32) -> FleetRequest {
    FleetRequest { at: at_ms * MS, tenant: 0, adapter: 0, rank: 0, prompt, answer, patience: None }
}

fn times_ms(outcomes: &[RequestOutcome]) -> Vec<(u64, u64)> {
    outcomes.iter().map(|one| (one.first_token.unwrap() / MS, one.ended / MS)).collect()
}

#[test]
fn prompts_have_passes_of_their_own_or_are_computed_beside_those_that_decode() {
    let requests = [request(0, 5, 4), request(30, 5, 2)];
    // 25 for the first prompt, a step of 11, then the pass of the second, and the rest together.
    let preempted = fleet::run(&setup(vec![server(Prompts::Preempt)]), &requests);
    assert_eq!(times_ms(&preempted), [(25, 84), (61, 73)]);
    // 15, two steps of 11, one with the second prompt's 5 tokens beside, and the second alone.
    let beside = fleet::run(&setup(vec![server(Prompts::Beside)]), &requests);
    assert_eq!(times_ms(&beside), [(15, 53), (53, 64)]);
}

#[test]
fn who_finds_no_place_waits_in_the_queue_and_a_cold_adapter_travels_first() {
    let one = [request(0, 10, 1), request(0, 10, 1), request(0, 10, 1)];
    let outcomes = fleet::run(&setup(vec![server(Prompts::Preempt)]), &one);
    // The first alone, the second after it, and the third beside the second.
    assert_eq!(times_ms(&outcomes), [(30, 30), (70, 70), (70, 70)]);
    let cold = FleetRequest { rank: 64, adapter: 5, ..request(0, 10, 1) };
    let again = FleetRequest { at: 200 * MS, ..cold };
    let outcomes = fleet::run(&setup(vec![server(Prompts::Preempt)]), &[cold, again]);
    // 64 MB at 1 GB/s, and then no second load.
    assert_eq!(times_ms(&outcomes), [(94, 94), (230, 230)]);
}

#[test]
fn a_request_that_has_waited_for_too_long_is_given_up() {
    let long = request(0, 10, 500);
    let late = FleetRequest { patience: Some(100 * MS), ..request(1, 10, 1) };
    let outcomes = fleet::run(&setup(vec![server(Prompts::Preempt)]), &[long, long, late, request(2, 10, 1)]);
    let ends: Vec<RequestEnd> = outcomes.iter().map(|outcome| outcome.end).collect();
    assert_eq!(ends, [RequestEnd::Answered, RequestEnd::Answered, RequestEnd::Expired, RequestEnd::Answered]);
}

fn load() -> FleetLoad {
    FleetLoad {
        arrivals: Arrivals::Minutes,
        adapters: 2000,
        popularity: Popularity::Maf,
        ranks: vec![8, 16, 32, 64, 128],
        per_s: 60.0,
        length: Duration::from_secs(60),
        max_requests: usize::MAX,
        tenants: 1,
    }
}

fn output(arguments: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    let all = [&["holobiont-simulator"], arguments].concat();
    SimulatorCli::try_parse_from(all).unwrap().run(&mut out).unwrap();
    out
}

#[test]
fn rank_aware_choices_are_faster_for_each_token_than_those_of_the_baselines() {
    // C-23 for half a minute.
    let arguments = ["fleet", "--duration", "40", "--warmup", "10", "--seeds", "1"];
    let lines = String::from_utf8(output(&arguments)).unwrap();
    let figures: Vec<serde_json::Value> =
        lines.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(figures.len(), 2 * RoutingPolicy::ALL.len());
    for by_kernel in figures.chunks(RoutingPolicy::ALL.len()) {
        let of = |policy: &str, figure: &str| {
            by_kernel.iter().find(|line| line["policy"] == policy).unwrap()[figure]["mean"].as_f64().unwrap()
        };
        let best = of("rank-aware", "tpot_ms");
        assert!(
            best < 0.93 * of("most-idle", "tpot_ms") && best < 0.8 * of("first-fit", "tpot_ms"),
            "{lines}"
        );
        for baseline in ["most-idle", "first-fit", "random"] {
            assert!(of("rank-aware", "attainment") > of(baseline, "attainment"), "{lines}");
        }
    }
}

#[test]
fn everybody_is_answered_once_and_a_seed_gives_the_same_run() {
    let requests = load().make(3);
    let setup = FleetSetup { policy: RoutingPolicy::RankAware, ..setup(vec![server(Prompts::Preempt); 8]) };
    let outcomes = fleet::run(&setup, &requests);
    assert_eq!(outcomes.len(), requests.len());
    assert!(outcomes.iter().all(|outcome| outcome.end == RequestEnd::Answered && outcome.sent == 1));
    assert_eq!(outcomes, fleet::run(&setup, &load().make(3)));
    let summary = Summary::of(&requests, &outcomes, 0, &Slo::default(), 0.0);
    assert_eq!((summary.requests, summary.unanswered, summary.attainment), (requests.len(), 0, 1.0));
    let arguments = ["fleet", "--executors", "4", "--rate", "20", "--duration", "20", "--seeds", "3"];
    assert_eq!(output(&arguments), output(&arguments), "threads end in another order");
}

#[test]
fn worlds_hold_whatever_goes_wrong_and_a_seed_gives_the_same_one() {
    let (mut sent_again, mut unanswered) = (0, 0);
    for seed in 1..=3000 {
        let world = fault_scenario::run_scenario(seed).unwrap();
        sent_again += world.sent_again;
        unanswered += world.requests - world.answered;
        if seed % 100 == 0 {
            assert_eq!(fault_scenario::run_scenario(seed), Ok(world));
        }
    }
    // Faults do occur.
    assert!(sent_again > 1000 && unanswered > 1000, "{sent_again} {unanswered}");
}

#[test]
fn as_many_executors_as_are_needed_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let (trace, costs) = (directory.path().join("trace.csv"), directory.path().join("costs.json"));
    let row = |n: u32| {
        format!("2023-11-16 18:{:02}:{:02}.{:07},200,50\n", n / 600, n / 10 % 60, n % 10 * 1_000_000)
    };
    let rows: String = (0..1200).map(row).collect();
    std::fs::write(&trace, format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")).unwrap();
    std::fs::write(&costs, output(&["costs", "--preset", "cpu"])).unwrap();
    let at = |rate: &str| {
        let paths = ["--trace", trace.to_str().unwrap(), "--costs", costs.to_str().unwrap()];
        let text = output(&[&["forecast", "--rate", rate, "--executors", "2"], paths.as_slice()].concat());
        let lines: Vec<serde_json::Value> = String::from_utf8(text)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        (lines[1]["is_enough"].as_bool().unwrap(), lines[2]["needed_executors"].as_u64().unwrap())
    };
    // A request computes for 0.15 s and decodes 50 tokens of 1.2 to 6.2 ms.
    let (is_enough, few) = at("2");
    assert!(is_enough && few <= 2);
    let (is_enough, many) = at("40");
    assert!(!is_enough && (6..=24).contains(&many), "{many}");
}
