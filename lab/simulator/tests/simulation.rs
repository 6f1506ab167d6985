//! The simulator against hand-computed results, and against itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, time::Duration};

use clap::Parser as _;
use kv_cache::{manager::AdapterUnit, replacement::Variant};
use proptest::prelude::*;
use scheduling::batch::BatchLimits;
use simulator::{
    commands::SimulatorCli,
    cost::{ComputedWork, CostModel},
    engine::{Design, Engine, Observation, Setup},
    workload::{
        Conversation, ConversationTurn, ShareAccounting, Workload, WorkloadAdapter,
        arrivals::ArrivalHistory,
        popularity::Popularity,
        scenario::{Scenario, WorkloadSpec},
    },
};

const SECOND: Duration = Duration::from_secs(1);

fn setup(variant: Variant) -> Setup {
    Setup {
        design: Design::Paper,
        cost: CostModel::GPU,
        limits: BatchLimits { max_running: 16, chunk_tokens: 512, scored_tokens: 1 },
        device_blocks: 400,
        host_blocks: 300,
        disk_blocks: 0,
        adapter_unit: AdapterUnit::Whole,
        variant,
        adapter_share: None,
        max_adapter_blocks: None,
        tau: 10 * SECOND,
        recompute_cost: 10.0,
        cpu_assist: None,
        end: 1000 * SECOND,
        keeps_series: false,
        audit_every: 0,
    }
}

fn run(setup: Setup, workload: &Workload) -> Observation {
    Engine::new(setup, workload).unwrap().run().unwrap()
}

fn conversation_turn(prompt: usize, reply: usize) -> ConversationTurn {
    ConversationTurn { think: SECOND, prompt, reply }
}

fn talk(start: Duration, content: u64, turns: Vec<ConversationTurn>) -> Conversation {
    Conversation { start, adapter: 0, system: 0, content, turns }
}

fn workload(conversations: Vec<Conversation>) -> Workload {
    Workload {
        adapters: vec![WorkloadAdapter { rank: 32, tenant: 0 }],
        conversations,
        shares: ShareAccounting::ByTenant,
    }
}

fn prefill(tokens: usize) -> Duration {
    CostModel::GPU.step(ComputedWork { prefill_tokens: tokens, ..ComputedWork::default() })
}

#[test]
fn in_an_executor_as_it_is_a_request_takes_its_way_in_and_waits_for_no_adapter() {
    let cost = CostModel { request_s: 0.5, prefill_pair_s: 1e-6, context_token_s: 1e-5, ..CostModel::GPU };
    let setup = Setup { design: Design::Executor, cost, cpu_assist: Some(1.0), ..setup(Variant::Elora) };
    let work = workload(vec![
        talk(SECOND, 1, vec![conversation_turn(100, 1)]),
        talk(10 * SECOND, 1, vec![conversation_turn(100, 1)]),
    ]);
    let observation = run(setup, &work);
    let [first, second] = [0, 1].map(|index| observation.records[index]);
    let step = |prefill_tokens, context_tokens, prefill_pairs| {
        cost.step(ComputedWork { prefill_tokens, context_tokens, prefill_pairs, ..ComputedWork::default() })
    };
    assert_eq!((first.adapter_wait, first.queue), (Duration::ZERO, SECOND / 2));
    assert_eq!(first.ttft, SECOND / 2 + step(100, 0, 100 * 50));
    // Three blocks of 32 are cached.
    assert_eq!(second.ttft, SECOND / 2 + step(4, 96, 4 * (96 + 2)));
}

#[test]
fn a_step_waits_for_the_blocks_that_are_taken_off_the_device_beside_it() {
    let decode = |block_copy_s: f64| {
        let cost = CostModel { block_copy_s, ..CostModel::GPU };
        let setup = Setup { design: Design::Executor, cost, cpu_assist: Some(1.0), ..setup(Variant::Elora) };
        let talks = vec![
            talk(SECOND, 1, vec![conversation_turn(100, 1)]),
            talk(SECOND, 2, vec![conversation_turn(20, 50)]),
        ];
        let observation = run(setup, &workload(talks));
        observation.records.iter().find(|record| record.conversation == 1).unwrap().decode
    };
    // The first conversation leaves three full blocks.
    assert_eq!(decode(1e-3) - decode(0.0), Duration::from_millis(3));
}

#[test]
fn an_executor_with_nothing_to_do_pushes_no_adapter_out_for_another() {
    // Memory for one of the two.
    let room = Some(CostModel::GPU.adapter_blocks(32));
    let setup = Setup {
        design: Design::Executor,
        max_adapter_blocks: room,
        cpu_assist: Some(1.0),
        ..setup(Variant::Elora)
    };
    let mut work = workload(vec![
        talk(SECOND, 1, vec![conversation_turn(100, 1)]),
        talk(10 * SECOND, 2, vec![conversation_turn(100, 1)]),
    ]);
    work.adapters.push(WorkloadAdapter { rank: 32, tenant: 0 });
    work.conversations[1].adapter = 1;
    assert_eq!(run(setup, &work).loaded_adapters, 2);
}

#[test]
fn one_request_alone_takes_what_the_cost_model_says() {
    let observation = run(
        setup(Variant::Elora),
        &workload(vec![talk(Duration::ZERO, 1, vec![conversation_turn(1000, 11)])]),
    );
    let record = observation.records[0];
    let copy = CostModel::GPU.over_link(CostModel::GPU.adapter_bytes(32));
    assert_eq!((record.queue, record.kv_wait), (Duration::ZERO, Duration::ZERO));
    assert_eq!(record.adapter_wait, copy, "it waits for its adapter, which is on no other's way");
    assert_eq!(record.compute, prefill(512) + prefill(488));
    assert_eq!(record.ttft, record.adapter_wait + record.compute);
    let step = CostModel::GPU.step(ComputedWork { decode_sequences: 1, ..ComputedWork::default() });
    assert_eq!(record.decode, 10 * step, "the first token is the prompt's");
    assert_eq!((observation.prefill_tokens, observation.steps), (1000, 12));
}

#[test]
fn a_second_turn_computes_what_is_new_and_what_fills_no_block() {
    let turns = vec![conversation_turn(100, 30), conversation_turn(20, 5)];
    let observation = run(setup(Variant::Elora), &workload(vec![talk(Duration::ZERO, 1, turns)]));
    let [first, second] = observation.records[..] else { panic!("two turns") };
    // 129 tokens were computed, since the last generated one never is. Four blocks of 32 are full.
    assert_eq!((second.prompt, second.device_blocks, second.lower_blocks), (150, 4, 0));
    assert_eq!(second.ttft, prefill(150 - 128));
    assert_eq!(second.arrived, first.arrived + first.ttft + first.decode + SECOND);
    assert!(!second.was_cold && first.was_cold);
}

#[test]
fn with_help_a_cold_request_starts_at_once_and_more_slowly() {
    let talks = || workload(vec![talk(Duration::ZERO, 1, vec![conversation_turn(600, 1)])]);
    // On this link the adapter takes 200 ms, and workers add 120.
    let slow = CostModel { link_bytes_per_s: 0.5e9, ..CostModel::GPU };
    let helped = Setup { cpu_assist: Some(2.0), cost: slow, ..setup(Variant::Elora) };
    // The adapter arrives before the second chunk.
    let record = run(helped, &talks()).records[0];
    assert_eq!((record.adapter_wait, record.ttft), (Duration::ZERO, prefill(2 * 512) + prefill(88)));
    let waits = Setup { cpu_assist: Some(2.0), ..setup(Variant::Elora) };
    let record = run(waits, &talks()).records[0];
    let copy = CostModel::GPU.over_link(CostModel::GPU.adapter_bytes(32));
    assert_eq!(record.adapter_wait, copy, "over a fast one it waits");
}

#[test]
fn of_an_adapter_that_gave_up_some_blocks_only_these_are_copied_again() {
    // 24 blocks: an adapter has 6 and its history 3, the other one 6 and a prompt of 11.
    let mut setup = Setup { host_blocks: 0, cpu_assist: Some(3.0), ..setup(Variant::Elora) };
    setup.device_blocks = 24;
    let turns =
        vec![conversation_turn(100, 1), ConversationTurn { think: 20 * SECOND, prompt: 20, reply: 1 }];
    let mut work =
        workload(vec![talk(Duration::ZERO, 1, turns), talk(10 * SECOND, 2, vec![conversation_turn(352, 1)])]);
    work.adapters.push(WorkloadAdapter { rank: 32, tenant: 0 });
    work.conversations[1].adapter = 1;
    let second = |setup: Setup| {
        let observation = run(setup, &work);
        *observation.records.iter().find(|record| record.turn == 1).unwrap()
    };
    let adapter_copy = CostModel::GPU.over_link(CostModel::GPU.adapter_bytes(32));
    let whole = second(setup);
    assert_eq!((whole.device_blocks, whole.adapter_wait), (0, adapter_copy));
    let parted = second(Setup { adapter_unit: AdapterUnit::Block { cost: 1.0 }, ..setup });
    assert_eq!(parted.device_blocks, 3, "its history need not leave before it");
    assert!(parted.adapter_wait > Duration::ZERO && parted.adapter_wait < adapter_copy, "{parted:?}");
}

#[test]
fn what_fell_to_the_host_tier_is_waited_for_and_not_computed() {
    // The second conversation needs nearly the whole device, so the first one's history moves to the host
    // tier.
    let mut setup = setup(Variant::Elora);
    setup.device_blocks = 60;
    let far = ConversationTurn { think: 100 * SECOND, prompt: 20, reply: 5 };
    let conversations = vec![
        talk(Duration::ZERO, 1, vec![conversation_turn(640, 2), far]),
        talk(20 * SECOND, 2, vec![conversation_turn(1600, 2)]),
    ];
    let observation = run(setup, &workload(conversations));
    let record = observation.records.iter().find(|record| record.turn == 1).unwrap();
    assert_eq!(record.device_blocks + record.lower_blocks, 20);
    let copies = CostModel::GPU.over_link(CostModel::GPU.block_bytes) * record.lower_blocks as u32;
    assert!(record.lower_blocks > 0);
    assert_eq!(record.kv_wait, copies);
    assert_eq!(record.compute, prefill(662 - 640));
}

const REQUESTS: u64 = 5000;

/// Requests of equal service time, one by one.
fn one_server(load: f64, seed: u64) -> (Vec<Duration>, Duration) {
    let service = prefill(400);
    let mut setup = setup(Variant::Elora);
    setup.limits.max_running = 1;
    setup.end = 1_000_000 * SECOND;
    let rng = scheduling::random::Rng::seeded(seed);
    let mut at = 10.0;
    let mut arrival = |number: u64| {
        at -= (1.0 - rng.uniform(number)).ln() / load * service.as_secs_f64();
        talk(Duration::from_secs_f64(at), number, vec![conversation_turn(400, 1)])
    };
    let conversations = (0..REQUESTS).map(&mut arrival).collect();
    let observation = run(setup, &workload(conversations));
    assert!(observation.records.is_sorted_by_key(|record| record.arrived), "first come, first served");
    (observation.records.iter().map(|record| record.queue).collect(), service)
}

#[test]
fn a_queue_is_as_long_as_the_formula_of_pollaczek_and_khinchine_says() {
    for load in [0.3, 0.7] {
        let (waits, service) = one_server(load, 1);
        let mean = waits.iter().sum::<Duration>().as_secs_f64() / waits.len() as f64;
        let expected = service.as_secs_f64() * load / (2.0 * (1.0 - load));
        assert!((mean / expected - 1.0).abs() < 0.15, "load {load}: {mean} s, not {expected}");
    }
}

#[test]
fn above_capacity_the_queue_grows_with_every_request() {
    let (waits, service) = one_server(1.25, 1);
    let last = waits[waits.len() - 1].as_secs_f64();
    let expected = 0.2 * REQUESTS as f64 * service.as_secs_f64();
    assert!((last / expected - 1.0).abs() < 0.15, "{last} s, not {expected}");
}

fn recipe(scenario: Scenario, per_s: f64) -> WorkloadSpec {
    WorkloadSpec {
        scenario,
        adapters: 12,
        popularity: Popularity::Zipf(0.9),
        drift: 0.1,
        rank: 32,
        tenants: 3,
        shares: ShareAccounting::ByTenant,
        hostile_per_s: 0.2,
        per_s,
        length_divisor: 1.0,
        before: ArrivalHistory::default(),
        end: 60 * SECOND,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_with_all_its_tokens_and_the_cache_stays_whole(
        seed in 0..1000_u64,
        variant in prop::sample::select(Variant::ALL),
        scenario in prop::sample::select(&[Scenario::Chat, Scenario::Translation, Scenario::Agents][..]),
        (host, disk) in (0..300_u32, 0..300_u32),
        per_s in 0.5..6.0_f64,
        partial in proptest::option::of(0.1..1.0_f32),
    ) {
        let workload = recipe(scenario, per_s).make(seed);
        let adapter_unit = partial.map_or(AdapterUnit::Whole, |cost| AdapterUnit::Block { cost });
        let cpu_assist = partial.map(|_| 2.0);
        let lower = Setup { host_blocks: host, disk_blocks: disk, ..setup(variant) };
        let setup = Setup { adapter_unit, cpu_assist, audit_every: 50, ..lower };
        let observation = run(setup, &workload);
        prop_assert_eq!(observation.records.len(), workload.requests());
        let ended: BTreeSet<(usize, usize)> =
            observation.records.iter().map(|record| (record.conversation, record.turn)).collect();
        prop_assert_eq!(ended.len(), workload.requests(), "none ends twice");
        let mut known = 0;
        for record in &observation.records {
            let (prompt, end) = workload.conversations[record.conversation].span(record.turn);
            prop_assert_eq!((record.prompt, record.prompt + record.reply), (prompt, end));
            prop_assert_eq!(record.ttft, record.queue + record.adapter_wait + record.kv_wait + record.compute);
            known += (record.device_blocks + record.lower_blocks) * 32;
        }
        let prompts: usize = observation.records.iter().map(|record| record.prompt).sum();
        prop_assert!(observation.prefill_tokens as usize + known >= prompts, "what was not found was computed");
        if observation.preemptions == 0 {
            prop_assert_eq!(observation.prefill_tokens as usize + known, prompts);
        }
        if variant == Variant::Elora {
            prop_assert_eq!(observation.invalid_share, 0.0);
        }
    }
}

fn output(arguments: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    let all = [&["holobiont-simulator"], arguments].concat();
    SimulatorCli::try_parse_from(all).unwrap().run(&mut out).unwrap();
    out
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let with_series = |seed: &str, name: &str| {
        let path = directory.path().join(name);
        let arguments =
            ["run", "--duration", "90", "--warmup", "10", "--seed", seed, "--series", path.to_str().unwrap()];
        (output(&arguments), std::fs::read(path).unwrap())
    };
    let (one, again, other) = (with_series("1", "one"), with_series("1", "again"), with_series("2", "other"));
    assert_eq!(one, again);
    assert_ne!(one.1, other.1);
    let arguments = ["compare", "--duration", "40", "--warmup", "5", "--seeds", "2", "--each"];
    assert_eq!(output(&arguments), output(&arguments), "threads end in another order");
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let mut setup = setup(Variant::Elora);
    setup.device_blocks = 20;
    let error =
        Engine::new(setup, &workload(vec![talk(Duration::ZERO, 1, vec![conversation_turn(1000, 1)])]))
            .unwrap_err();
    assert!(error.to_string().contains("do not fit into 20 blocks"), "{error}");
    let mut out = Vec::new();
    let cli = SimulatorCli::try_parse_from(["holobiont-simulator", "run", "--drift", "2"]).unwrap();
    assert!(cli.run(&mut out).unwrap_err().to_string().starts_with("--drift"));
}

#[test]
fn what_arrives_before_the_block_it_follows_is_not_invalid() {
    let workload = recipe(Scenario::Chat, 2.488_369_164_471_467_6).make(566);
    let setup = Setup { host_blocks: 61, disk_blocks: 205, audit_every: 50, ..setup(Variant::Elora) };
    assert_eq!(run(setup, &workload).invalid_share, 0.0);
}
