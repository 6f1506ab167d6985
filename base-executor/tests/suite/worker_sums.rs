//! Equal bits with workers: the real model, the real board, and threads that compute as worker processes do.

use std::sync::Arc;

use kernels::lora::LoraPrecision;
use model::deltas::prepared::PreparedAdapter;
use serde_json::Value;

use crate::worker::{
    BatchRequest, PASSES, PassSpeed, TestWorker, WorkerFixture, WorkerThreads, adapter_of_everything, bits,
    golden, honest, request, resident, stage, until,
};

/// Batch of adapters of many ranks, with base requests between them.
fn batch(adapters: &[Arc<PreparedAdapter>]) -> Vec<BatchRequest> {
    let mut requests = vec![request(90, 9, None)];
    for (salt, adapter) in (0..).zip(adapters) {
        requests.push(request(salt, 1 + 13 * salt as usize, Some(adapter)));
        requests.extend((salt % 2 == 0).then(|| request(100 + salt, 6, None)));
        requests.push(request(50 + salt, 17, Some(adapter)));
    }
    requests
}

/// Bits of the requests in one batch, computed from the host tier by the pass's own threads. Another test
/// compares batches with single requests.
fn host_bits(name: &str, requests: &[BatchRequest]) -> Vec<u32> {
    requests.iter().filter_map(|request| request.adapter.as_ref()).for_each(|it| it.set_device(None));
    bits(&mut resident(name, 1), requests)
}

fn tallies(adapters: &[Arc<PreparedAdapter>]) -> [u64; 3] {
    let tallies = adapters.iter().map(|adapter| adapter.tally().read());
    tallies.fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
}

#[test]
fn one_to_four_workers_give_the_bits_of_the_host_tier_however_much_has_arrived() {
    let name = "llama-tied";
    for count in 1..=4 {
        let mut house = WorkerFixture::new(name, count, PassSpeed::Slow);
        let mut adapters: Vec<_> = ["rank64-all-linear", "rank4-attention", "patterns", "rank8-bf16"]
            .map(|adapter| house.golden_adapter(name, adapter))
            .into();
        let everything = adapter_of_everything(house.model.config(), &[70, 3, 16]);
        adapters.push(house.publish(&everything, LoraPrecision::Exact));
        adapters.push(house.golden_dora(name, "everything"));
        let requests = batch(&adapters);
        let expected = host_bits(name, &requests);
        let before = tallies(&adapters);
        let per_run = before.iter().sum::<u64>();
        let mut staff = WorkerThreads::default();
        (0..count).for_each(|_| house.hire(&mut staff, honest));
        house.until_seated(count);
        let runs: u64 = 18;
        for round in 0..runs as usize {
            for (at, adapter) in adapters.iter().enumerate() {
                match (round * 7 + at * 5) % 10 {
                    0 => adapter.set_device(None),
                    part => drop(stage(adapter, part - 1)),
                }
            }
            assert!(bits(&mut house.model, &requests) == expected, "{count} workers, round {round}");
        }
        let [device, workers, executor] = tallies(&adapters);
        assert_eq!(device + workers + executor, per_run * (runs + 1), "every rank of every row, once");
        assert!(workers > 0 && device > 0, "{count} workers did nothing");
        let stats = house.stats();
        assert_eq!(stats.workers.iter().map(|line| line.rank_rows).sum::<u64>(), workers, "{stats:?}");
        assert!(stats.workers.iter().all(|line| line.core == 7 && line.pid == std::process::id()));
    }
}

#[test]
fn a_pass_that_waits_for_nobody_has_the_same_bits() {
    for (name, threads) in [("llama-rope3", 3), ("qwen2-f16", 2)] {
        let mut house = WorkerFixture::new(name, threads, PassSpeed::Swift);
        let everything = adapter_of_everything(house.model.config(), &[40, 5, 33, 16]);
        let adapter = house.publish(&everything, LoraPrecision::Compact);
        let requests = [request(1, 60, Some(&adapter)), request(2, 3, None), request(3, 2, Some(&adapter))];
        let expected = host_bits(name, &requests);
        let mut staff = WorkerThreads::default();
        (0..threads).for_each(|_| house.hire(&mut staff, honest));
        house.until_seated(threads);
        for round in 0..80 {
            stage(&adapter, round % 8);
            assert!(bits(&mut house.model, &requests) == expected, "{name}, round {round}");
        }
        assert_eq!(house.stats().workers_lost, 0, "nobody was given up");
    }
}

#[test]
fn an_adapter_that_arrives_while_workers_compute_changes_no_bit() {
    let name = "llama-tied";
    let mut house = WorkerFixture::new(name, 2, PassSpeed::Slow);
    let adapter = house.golden_adapter(name, "rank64-all-linear");
    let requests = [request(4, 40, Some(&adapter)), request(5, 7, None)];
    let expected = host_bits(name, &requests);
    let mut staff = WorkerThreads::default();
    (0..2).for_each(|_| house.hire(&mut staff, honest));
    house.until_seated(2);
    let mut partly = 0;
    for round in 0..20 {
        let copy = stage(&adapter, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while copy.next_bytes().is_some() {
                    std::thread::sleep(std::time::Duration::from_micros(150));
                    copy.copy_next(adapter.host());
                }
            });
            while !copy.is_complete() {
                partly += usize::from(copy.arrived_bytes() > 0);
                assert!(bits(&mut house.model, &requests) == expected, "round {round}");
            }
        });
    }
    assert!(partly > 0, "no pass began with an adapter on its way");
    let [device, workers, _] = adapter.tally().read();
    assert!(device > 0 && workers > 0);
}

#[test]
fn an_adapter_that_is_wholly_there_asks_no_worker() {
    let name = "llama-tied";
    let mut house = WorkerFixture::new(name, 1, PassSpeed::Slow);
    let adapter = house.golden_adapter(name, "rank16-all-linear");
    let requests = [request(1, 20, Some(&adapter)), request(2, 20, None)];
    let expected = host_bits(name, &requests);
    let mut staff = WorkerThreads::default();
    house.hire(&mut staff, honest);
    house.until_seated(1);
    stage(&adapter, 8);
    let [_, workers, executor] = adapter.tally().read();
    assert!(bits(&mut house.model, &requests) == expected);
    let found = adapter.tally().read();
    assert_eq!([found[1], found[2]], [workers, executor]);
    assert_eq!(house.stats().workers[0].slices, 0);
}

#[test]
fn an_image_is_on_offer_until_the_last_that_computes_with_it_is_done() {
    let name = "llama-tied";
    let house = WorkerFixture::new(name, 2, PassSpeed::Swift);
    let adapter = house.golden_adapter(name, "rank16-all-linear");
    let mut worker = TestWorker::sit(house.socket()).unwrap();
    let mut until_offered = |expected: &[&Arc<PreparedAdapter>]| {
        let expected: Vec<u64> = expected.iter().map(|adapter| adapter.image().0).collect();
        let is_so = || worker.news() && worker.images.keys().copied().eq(expected.iter().copied());
        until(is_so, || format!("{expected:?} on offer"));
    };
    until_offered(&[&adapter]);
    // A running pass holds the adapter in this way during an unload.
    let user = Arc::clone(&adapter);
    drop(adapter);
    let other = house.golden_adapter(name, "rank4-attention");
    until_offered(&[&user, &other]);
    drop(user);
    until_offered(&[&other]);
    let again = house.golden_adapter(name, "rank16-all-linear");
    until_offered(&[&other, &again]);
}

#[test]
fn workers_give_the_logits_of_transformers() {
    let model = "llama-tied";
    let mut house = WorkerFixture::new(model, 2, PassSpeed::Slow);
    let asked = "rank4-attention:0.7+rank16-rslora:0.5";
    let adapters = [
        ("rank64-all-linear", house.golden_adapter(model, "rank64-all-linear")),
        ("sum/0", house.golden_sum(model, asked)),
        ("dora/everything", house.golden_dora(model, "everything")),
        ("saved/two", house.golden_saved(model, "two")),
    ];
    let mut staff = WorkerThreads::default();
    (0..2).for_each(|_| house.hire(&mut staff, honest));
    house.until_seated(2);
    for (name, adapter) in adapters {
        let text = std::fs::read(golden("expected").join(model).join(format!("{name}.json"))).unwrap();
        let golden: Value = serde_json::from_slice(&text).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let numbers = |field: &str| case[field].as_array().unwrap().clone();
            let prompt = numbers("prompt").iter().map(|token| token.as_u64().unwrap() as u32).collect();
            let requests = [BatchRequest { prompt, adapter: Some(Arc::clone(&adapter)) }];
            for part in [0, 3, 7] {
                stage(&adapter, part);
                let found = bits(&mut house.model, &requests);
                let expected = numbers("logits");
                assert_eq!(found.len(), PASSES * expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    let (found, expected) = (f64::from(f32::from_bits(*found)), expected.as_f64().unwrap());
                    assert!(
                        (found - expected).abs() <= 1e-3,
                        "{name}: {found} and {expected}, {part} of 8 parts"
                    );
                }
            }
        }
        assert!(adapter.tally().read()[1] > 0, "{name}: workers did nothing");
    }
}
