use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    shape::source::Target,
};
use types::AdapterVersion;

use super::*;
use crate::fixtures::square_model;

const WIDTH: usize = 64;
const LAYERS: usize = 4;
const RANK: usize = 16;

fn config(layers: usize) -> ModelConfig {
    square_model(WIDTH, layers)
}

/// An adapter of the queries of all layers.
fn adapter(layers: usize) -> PreparedAdapter {
    let module = |layer| LoraModule {
        layer,
        target: Target::Q,
        rank: RANK,
        scale: 1.0,
        a: vec![0.5; RANK * WIDTH],
        b: vec![0.5; WIDTH * RANK],
    };
    let (modules, generation) = ((0..layers).map(module).collect(), AdapterVersion([0; 32]));
    let adapter = Adapter {
        generation,
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    };
    PreparedAdapter::new(&adapter, &config(layers), LoraPrecision::Exact).unwrap()
}

/// Costs per adapter token and layer of a core (ns), per token and layer of the base (ns), and of the link
/// (bytes per microsecond).
fn costs(core_ns: u64, base_ns: u64, link: u64, cores: &[usize]) -> ColdStartModel {
    let mut perf = PerfModel::new();
    for rows in [1, 16, 64, 256] {
        let multiply_adds = rows * (RANK * 2 * WIDTH) as u64;
        perf.observe_core(multiply_adds, Duration::from_nanos(rows * core_ns));
        perf.observe_base(rows as usize, Duration::from_nanos(rows * base_ns * LAYERS as u64));
        perf.observe_link(rows * link * 1000, Duration::from_millis(rows));
    }
    let copied = CopyStats::default();
    ColdStartModel { perf, config: config(LAYERS), cores: cores.to_vec(), whole_pass: None, copied }
}

#[test]
fn a_short_prompt_starts_and_a_long_one_behind_a_fast_link_waits() {
    // The core is ten times slower than the base; the link moves 100 bytes per microsecond.
    let costs = costs(10_000, 1_000, 100, &[0]);
    let adapter = adapter(LAYERS);
    let missing = adapter.bytes() as u64;
    let help = |tokens| costs.help(&adapter, tokens, [missing, 0], &[1]);
    assert!(matches!(help(1), ColdStartDecision::Start { .. }));
    assert_eq!(help(10_000), ColdStartDecision::Wait);
    // There is one crossover between both lengths.
    let waits: Vec<bool> = (1..2000).map(|tokens| help(tokens) == ColdStartDecision::Wait).collect();
    assert!(waits.is_sorted(), "who is longer than one who waits, waits too");
    // A prompt starts at once if many bytes precede its adapter on the link.
    let first = waits.iter().position(|waits| *waits).unwrap() + 1;
    assert!(matches!(costs.help(&adapter, first, [missing, 1 << 30], &[1]), ColdStartDecision::Start { .. }));
}

#[test]
fn a_device_that_plans_whole_passes_waits_earlier_and_looks_at_one_pass() {
    let adapter = adapter(LAYERS);
    let missing = adapter.bytes() as u64;
    let crossover = |whole_pass, link| {
        let costs = ColdStartModel { whole_pass, ..costs(2_000, 1_000, link, &[0]) };
        (1..2000).find(|tokens| costs.help(&adapter, *tokens, [missing, 0], &[1]) == ColdStartDecision::Wait)
    };
    let by_layer = crossover(None, 100).expect("a long prompt waits");
    let whole = crossover(Some(512), 100).expect("the worker would compute all layers");
    assert!(whole < by_layer, "{whole} and {by_layer}");
    // Waiting pays only above `whole` tokens. A pass has fewer, and the adapter is present for the next one.
    let most = whole - 1;
    assert_eq!(crossover(Some(most), 100), None);
}

#[test]
fn nothing_that_is_missing_is_never_waited_for() {
    let costs = costs(10_000, 1_000, 100, &[0]);
    assert!(matches!(
        costs.help(&adapter(LAYERS), 10_000, [0, 1 << 40], &[1]),
        ColdStartDecision::Start { .. }
    ));
}

#[test]
fn as_many_workers_are_wanted_as_keep_up_with_the_base() {
    // With a slow link no request waits. A core takes a quarter of the base's time per token, or four times.
    for (core_ns, tokens, expected) in [(250, 100, 1), (4_000, 64, 4), (4_000, 100, 4), (1_000, 128, 1)] {
        let costs = costs(core_ns, 1_000, 1, &[0]);
        let ColdStartDecision::Start { workers } =
            costs.help(&adapter(LAYERS), tokens, [1 << 30, 0], &[1, 2])
        else {
            panic!("a link of a byte a microsecond is not worth waiting for")
        };
        assert_eq!(workers, expected, "{core_ns} ns, {tokens} tokens");
    }
}

#[test]
fn workers_that_share_the_executors_cores_make_waiting_more_likely() {
    let costs = costs(1_000, 1_000, 100, &[0, 1]);
    let adapter = adapter(LAYERS);
    let missing = adapter.bytes() as u64;
    let crossover = |cores: &[u32]| {
        (1..20_000)
            .find(|tokens| costs.help(&adapter, *tokens, [missing, 0], cores) == ColdStartDecision::Wait)
    };
    let (apart, shared) = (crossover(&[4, 5]), crossover(&[0, 1]));
    assert!(shared.is_some(), "each of them slows the base down");
    assert!(apart.is_none_or(|apart| apart > shared.unwrap()), "apart {apart:?}, shared {shared:?}");
}

#[test]
fn whoever_knows_nothing_starts_and_says_nothing_of_workers() {
    let costs = ColdStartModel {
        perf: PerfModel::new(),
        config: config(LAYERS),
        cores: Vec::new(),
        whole_pass: None,
        copied: CopyStats::default(),
    };
    assert_eq!(costs.help(&adapter(LAYERS), 100, [1 << 20, 0], &[]), ColdStartDecision::Start { workers: 0 });
}

#[test]
fn no_figures_are_too_large_or_too_small() {
    let adapters = [adapter(0), adapter(LAYERS)];
    for (core_ns, base_ns, link) in [(0, 0, 1), (1, 1, u64::MAX >> 20), (1 << 40, 1, 1), (1, 1 << 40, 1)] {
        for cores in [&[][..], &[0]] {
            for layers in [0, LAYERS] {
                let costs = ColdStartModel { config: config(layers), ..costs(core_ns, base_ns, link, cores) };
                for tokens in [0, 1, 1 << 20, usize::MAX] {
                    for bytes in [[0, 0], [1, u64::MAX], [u64::MAX, u64::MAX]] {
                        for workers in [&[][..], &[0], &[u32::MAX; 16]] {
                            let found = adapters.each_ref().map(|it| costs.help(it, tokens, bytes, workers));
                            assert_eq!(
                                found,
                                adapters.each_ref().map(|it| costs.help(it, tokens, bytes, workers))
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_link_is_learnt_from_what_was_copied_since() {
    let mut costs = costs(1_000, 1_000, 100, &[0]);
    let before = costs.perf.link().samples();
    let copied = |copied_bytes, copy_us| CopyStats { copied_bytes, copy_us, ..CopyStats::default() };
    costs.link(copied(1 << 20, 10_486));
    costs.link(copied(1 << 20, 10_486));
    assert_eq!(costs.perf.link().samples(), before + 1, "nothing was copied between two looks");
    // Counters that go backward do not occur, but must not cause a panic.
    costs.link(copied(0, 0));
    costs.link(copied(u64::MAX, u64::MAX));
    assert!(costs.perf.link().line().is_some());
}

#[test]
fn the_crossover_comes_later_for_faster_cores_and_may_never_come() {
    let long = ModelConfig { context_length: 8192, ..config(LAYERS) };
    let crossover =
        |core_ns| ColdStartModel { config: long.clone(), ..costs(core_ns, 1_000, 100, &[0]) }.crossover(RANK);
    let (slow, faster) = (crossover(50_000).unwrap(), crossover(20_000).unwrap());
    assert!(slow < faster, "{slow} {faster}");
    assert_eq!(crossover(1), None, "whoever keeps up with the base is never waited for");
}
