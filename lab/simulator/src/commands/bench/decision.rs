//! Times a choice among executors (C-18); the snapshot is built anew each time, as in a gateway.

use std::{
    collections::HashMap,
    hint::black_box,
    time::{Duration, Instant},
};

use scheduling::{
    perf::{
        linear_fit::LinearFit,
        linear_model::LinearModel,
        serving::{ColdStart, LoraForm, ServingModel},
    },
    routing::{
        Availability, Candidate, PlacementRequest, Residency, RoutingPolicy, Slo, choose,
        in_flight::InFlightLoad,
    },
};

use crate::{random::RandomStream, statistics::quantile};

const MODEL: ServingModel = ServingModel {
    form: LoraForm::TrueRank,
    decode: LinearModel { seconds_each: [33e-3, 1e-4, 1e-7, 2e-6] },
    prefill: LinearModel { seconds_each: [33e-3, 2e-4, 1e-6] },
    link: LinearFit { alpha: 1e-10, beta: 1e-4 },
    store: LinearFit { alpha: 1e-9, beta: 1e-3 },
    cold: ColdStart::Waits,
};

/// State of an executor as the gateway records it.
#[derive(Debug, Default)]
struct ExecutorLoads {
    running: InFlightLoad,
    waiting: InFlightLoad,
    /// Bytes of each adapter that are missing on the device.
    missing: HashMap<usize, u64>,
}

/// Returns the median and 99th percentile of a choice among `executors` executors, each of which knows
/// `adapters` adapters.
pub(super) fn measure(executors: usize, adapters: usize, rounds: usize) -> [Duration; 2] {
    let mut stream = RandomStream::new(1, "decision", 0);
    let fleet: Vec<ExecutorLoads> = (0..executors).map(|_| books(&mut stream, adapters)).collect();
    let mut candidates = Vec::with_capacity(executors);
    let took: Vec<f64> = (0..rounds)
        .map(|_| {
            let (adapter, draw) = (stream.below(adapters), stream.bits());
            let asked = PlacementRequest {
                prompt_tokens: 1 + stream.below(500) as u64,
                rank: [8, 16, 32, 64, 128][adapter % 5],
                slo: Slo { ttft_us: Some(1_000_000), tpot_us: Some(50_000) },
                answer_tokens: 58.0,
            };
            let began = Instant::now();
            candidates.clear();
            candidates.extend(fleet.iter().enumerate().map(|(executor, books)| Candidate {
                executor,
                model: MODEL,
                running: books.running.load(),
                waiting: books.waiting.load(),
                places: 32,
                adapter:
                    books.missing.get(&adapter).map_or(Residency::Device, |&bytes| Residency::Host { bytes }),
                cached_tokens: 0,
                promised_tpot_us: books.running.promised_tpot_us(),
                availability: Availability::Open,
            }));
            black_box(choose(RoutingPolicy::RankAware, &asked, &candidates, draw));
            began.elapsed().as_secs_f64()
        })
        .collect();
    [0.5, 0.99].map(|q| Duration::from_secs_f64(quantile(&took, q)))
}

fn books(stream: &mut RandomStream, adapters: usize) -> ExecutorLoads {
    let mut books = ExecutorLoads::default();
    for _ in 0..stream.below(30) {
        books.running.add_request(
            [8, 16, 32, 64, 128][stream.below(5)],
            Some(50_000),
            stream.below(300) as u64,
        );
    }
    for _ in 0..stream.below(4) {
        books.waiting.add_request(
            [8, 16, 32, 64, 128][stream.below(5)],
            Some(50_000),
            stream.below(300) as u64,
        );
    }
    let is_missing = |_: &usize| stream.uniform() < 0.8;
    books.missing = (0..adapters).filter(is_missing).map(|adapter| (adapter, 100 << 20)).collect();
    books
}
