//! Tests with the paper's example, an independent implementation's choices, and properties of every snapshot.

use proptest::prelude::*;

use super::*;
use crate::perf::{
    linear_fit::LinearFit,
    linear_model::LinearModel,
    serving::{ColdStart, LoraForm},
};
use crate::random::Rng;

const FREE: LinearFit = LinearFit { alpha: 0.0, beta: 0.0 };

fn model(form: LoraForm, decode: [f64; 4], prefill: [f64; 3]) -> ServingModel {
    ServingModel {
        form,
        decode: LinearModel { seconds_each: decode },
        prefill: LinearModel { seconds_each: prefill },
        link: FREE,
        store: FREE,
        cold: ColdStart::Waits,
    }
}

fn candidate(executor: usize, model: ServingModel, running: RequestLoad) -> Candidate {
    Candidate {
        executor,
        model,
        running,
        waiting: RequestLoad::default(),
        places: 32,
        adapter: Residency::Device,
        cached_tokens: 0,
        promised_tpot_us: None,
        availability: Availability::Open,
    }
}

fn same(requests: u64, rank: u64) -> RequestLoad {
    RequestLoad { requests, ranks: requests * rank, max_rank: rank, ..RequestLoad::default() }
}

fn asked(rank: u64, prompt_tokens: u64, tpot_us: Option<u64>) -> PlacementRequest {
    PlacementRequest { prompt_tokens, rank, slo: Slo { ttft_us: None, tpot_us }, answer_tokens: 58.0 }
}

/// Fig. 5: instance 1 has 24 requests of rank 32, instance 2 has 16 of rank 64; a line through both times.
fn figure_5(form: LoraForm, slo_us: u64) -> [Option<usize>; 2] {
    let (first_ms, second_ms) = if form == LoraForm::Padded { (34.8, 35.8) } else { (35.3, 35.9) };
    let slope_ms = (second_ms - first_ms) / (16.0 * 64.0 - 24.0 * 32.0);
    let step_ms = first_ms - slope_ms * 24.0 * 32.0;
    let model = model(form, [step_ms * 1e-3, 0.0, 0.0, slope_ms * 1e-3], [0.0; 3]);
    let candidates = [candidate(1, model, same(24, 32)), candidate(2, model, same(16, 64))];
    [RoutingPolicy::RankAware, RoutingPolicy::Algo1Printed].map(|policy| {
        choose(policy, &asked(64, 1, Some(slo_us)), &candidates, 0).map(|choice| choice.executor)
    })
}

#[test]
fn the_example_of_figure_5_goes_where_the_paper_sends_it() {
    // The line through the paper's two points gives 36.05 ms for instance 2 with padding (C-16).
    assert_eq!(figure_5(LoraForm::Padded, 36_100), [Some(2), Some(2)]);
    assert_eq!(figure_5(LoraForm::TrueRank, 36_000), [Some(1), Some(1)]);
}

#[test]
fn an_idle_executor_is_free_as_printed_and_not_when_mended() {
    let [fast, slow] = [0.020, 0.050].map(|s| model(LoraForm::TrueRank, [s, 1e-4, 0.0, 1e-6], [0.0; 3]));
    // Number 1 is idle and too slow for the promise; number 0 has requests and is in time.
    let candidates = [candidate(0, fast, same(4, 32)), candidate(1, slow, RequestLoad::default())];
    let request = asked(32, 20, Some(36_000));
    let chosen = |policy| choose(policy, &request, &candidates, 0).map(|choice| choice.executor);
    assert_eq!(chosen(RoutingPolicy::Algo1Printed), Some(1));
    assert_eq!(chosen(RoutingPolicy::RankAware), Some(0));
    assert_eq!(violations(&request, &candidates[1]), 1);
}

/// Compares with the results of algorithm1.py for forty snapshots.
#[test]
fn scores_and_choices_are_those_of_an_independent_implementation() {
    let (mut request, mut candidates, mut cases) = (asked(0, 0, None), Vec::new(), 0);
    for line in include_str!("algorithm1.golden").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<f64>().unwrap();
        match words[0] {
            "request" => {
                request = asked(number(1) as u64, number(2) as u64, Some(number(3) as u64));
                candidates.clear();
            }
            "candidate" => {
                let form = if words[1] == "padded" { LoraForm::Padded } else { LoraForm::TrueRank };
                let model = model(form, [2, 3, 4, 5].map(number), [6, 7, 8].map(number));
                let load = |at: usize| {
                    let [requests, ranks, max_rank, tokens, token_ranks] =
                        [0, 1, 2, 3, 4].map(|index| number(at + index) as u64);
                    RequestLoad { requests, ranks, max_rank, tokens, token_ranks }
                };
                let (running, waiting) = (load(9), load(14));
                let one = Candidate { waiting, ..candidate(candidates.len(), model, running) };
                let mended = score::mended(&request, &one);
                // The golden values contain the finite penalty of C-15, which is infinite here.
                let penalty = f64::from(mended.class) * request.slo.tpot_us.unwrap() as f64 * 1e-3;
                for (found, wanted) in
                    [(score::printed(&request, &one), number(19)), (mended.cost + penalty, number(20))]
                {
                    assert!(
                        (found - wanted).abs() <= 1e-9 * wanted.abs(),
                        "{found} instead of {wanted}: {line}"
                    );
                }
                candidates.push(one);
            }
            _ => {
                let chosen = [RoutingPolicy::Algo1Printed, RoutingPolicy::RankAware]
                    .map(|policy| choose(policy, &request, &candidates, 0).unwrap().executor);
                assert_eq!(chosen.map(|executor| executor as f64), [number(1), number(2)], "case {cases}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 40);
}

#[test]
fn an_adapter_that_is_far_away_and_a_beginning_that_is_known_count() {
    let base = model(LoraForm::TrueRank, [0.02, 1e-4, 0.0, 1e-6], [1e-3, 2e-4, 0.0]);
    let waits = ServingModel {
        link: LinearFit { alpha: 1e-9, beta: 0.0 },
        store: LinearFit { alpha: 1e-8, beta: 0.0 },
        ..base
    };
    let there = candidate(0, waits, same(3, 32));
    let with = |adapter, model| Candidate { executor: 1, adapter, model, ..there };
    let bytes = 100 << 20;
    let request = asked(32, 200, None);
    let chosen = |other| choose(RoutingPolicy::RankAware, &request, &[there, other], 0).unwrap().executor;
    // Number 1 would be chosen for its load if its adapter were loaded.
    let idler = |one: Candidate| Candidate { running: same(2, 32), ..one };
    assert_eq!(chosen(idler(with(Residency::Device, waits))), 1);
    assert_eq!(chosen(idler(with(Residency::Host { bytes }, waits))), 0);
    let assisted = ServingModel { cold: ColdStart::Assisted, ..waits };
    assert_eq!(chosen(idler(with(Residency::Host { bytes }, assisted))), 1, "workers hide the load");
    assert_eq!(
        chosen(idler(with(Residency::Absent { bytes }, assisted))),
        0,
        "nobody hides the way from the store"
    );
    let knows = Candidate { executor: 1, cached_tokens: 190, ..there };
    assert_eq!(chosen(knows), 1);
    let ttft_us = |one: &Candidate| forecast(&request, one).ttft_us;
    assert_eq!(ttft_us(&there) - ttft_us(&knows), 38_000);
    let far = with(Residency::Host { bytes }, waits);
    // The load takes 104.9 ms, and no queue hides any of it.
    assert_eq!(ttft_us(&far) - ttft_us(&there), 104_858);
}

#[test]
fn the_baselines_are_what_they_are_called() {
    let model = model(LoraForm::TrueRank, [0.02, 0.0, 0.0, 0.0], [0.0; 3]);
    let candidates =
        [(0, 32), (1, 7), (2, 3), (3, 3)].map(|(number, n)| candidate(number, model, same(n, 8)));
    let request = asked(8, 10, None);
    let chosen = |policy, draw| choose(policy, &request, &candidates, draw).unwrap().executor;
    assert_eq!(chosen(RoutingPolicy::MostIdle, 0), 2);
    assert_eq!(chosen(RoutingPolicy::FirstFit, 0), 1, "number 0 is full");
    let full = candidates.map(|one| Candidate { places: 1, ..one });
    assert_eq!(
        choose(RoutingPolicy::FirstFit, &request, &full, 0).unwrap().executor,
        2,
        "else who has least"
    );
    let mut counts = [0_u32; 4];
    (0..4000).for_each(|draw| counts[chosen(RoutingPolicy::Random, Rng::seeded(7).bits(draw))] += 1);
    assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
}

#[test]
fn policies_are_read_by_the_names_they_are_written_with() {
    for policy in RoutingPolicy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let error = "best".parse::<RoutingPolicy>().unwrap_err();
    assert!(error.to_string().contains("rank-aware"), "{error}");
}

fn any_load() -> impl Strategy<Value = RequestLoad> {
    prop::collection::vec((0..5_usize, 1..900_u64), 0..40).prop_map(|requests| {
        let each = requests.iter().map(|&(rank, tokens)| RequestLoad::of([0, 8, 32, 64, 128][rank], tokens));
        each.fold(RequestLoad::default(), RequestLoad::plus)
    })
}

fn any_candidate() -> impl Strategy<Value = Candidate> {
    let planes = ([1e-3..0.05_f64, 0.0..1e-3, 0.0..1e-6, 0.0..1e-5], [0.0..0.02_f64, 0.0..1e-3, 0.0..1e-6]);
    let adapter = prop_oneof![
        Just(Residency::Device),
        (0..1_u64 << 30).prop_map(|bytes| Residency::Host { bytes }),
        (0..1_u64 << 30).prop_map(|bytes| Residency::Absent { bytes }),
    ];
    let kind = (prop::bool::ANY, prop::bool::ANY, prop::bool::weighted(0.8), adapter);
    let numbers = (1..40_u64, 0..300_u64, prop::option::of(10_000..90_000_u64));
    (planes, any_load(), any_load(), kind, numbers).prop_map(
        |(
            (decode, prefill),
            running,
            waiting,
            (pads, waits, is_open, adapter),
            (places, cached_tokens, promised),
        )| {
            let form = if pads { LoraForm::Padded } else { LoraForm::TrueRank };
            let cold = if waits { ColdStart::Waits } else { ColdStart::Assisted };
            let line = LinearFit { alpha: 1e-9, beta: 1e-4 };
            let model = ServingModel { link: line, store: line, cold, ..model(form, decode, prefill) };
            let availability = if is_open { Availability::Open } else { Availability::Closed };
            Candidate {
                waiting,
                places,
                adapter,
                cached_tokens,
                promised_tpot_us: promised,
                availability,
                ..candidate(0, model, running)
            }
        },
    )
}

proptest! {
    #[test]
    fn whoever_breaks_a_promise_is_never_chosen_while_somebody_keeps_all(
        mut candidates in prop::collection::vec(any_candidate(), 0..12),
        (rank, prompt) in (0..129_u64, 1..3000_u64),
        (ttft_us, tpot_us) in (prop::option::of(10_000..3_000_000_u64), prop::option::of(5_000..90_000_u64)),
        draw in any::<u64>(),
        at in 0..12_usize,
    ) {
        candidates.iter_mut().enumerate().for_each(|(number, one)| one.executor = number);
        let request = PlacementRequest { slo: Slo { ttft_us, tpot_us }, ..asked(rank, prompt, None) };
        let open: Vec<&Candidate> =
            candidates.iter().filter(|one| one.availability == Availability::Open).collect();
        for policy in RoutingPolicy::ALL {
            let choice = choose(policy, &request, &candidates, draw);
            prop_assert_eq!(choice.is_some(), !open.is_empty());
            let Some(choice) = choice else { continue };
            let chosen = &candidates[choice.executor];
            prop_assert_eq!(chosen.availability, Availability::Open);
            prop_assert_eq!(choice.forecast, forecast(&request, chosen));
            if policy == RoutingPolicy::RankAware {
                let least = open.iter().map(|one| violations(&request, one)).min();
                prop_assert_eq!(Some(violations(&request, chosen)), least);
            }
            // The order of the candidates has no effect.
            let mut turned = candidates.clone();
            turned.rotate_left(at % candidates.len());
            prop_assert_eq!(choose(policy, &request, &turned, draw), Some(choice));
            turned.reverse();
            prop_assert_eq!(choose(policy, &request, &turned, draw), Some(choice));
        }
    }

    #[test]
    fn of_equal_executors_the_mended_form_never_takes_the_fuller_one(
        one in any_candidate(), more in 1..20_u64, rank in 1..129_u64,
    ) {
        // The requests have one rank, so only their number differs.
        let idle = Candidate { running: RequestLoad::default(), waiting: RequestLoad::default(), availability: Availability::Open, ..one };
        let busy = Candidate { executor: 1, running: same(more, rank), ..idle };
        let request = asked(rank, 100, None);
        prop_assert_eq!(choose(RoutingPolicy::RankAware, &request, &[idle, busy], 0).unwrap().executor, 0);
    }

    #[test]
    fn nothing_that_can_come_in_gives_a_forecast_that_is_none(
        mut one in any_candidate(), prompt in any::<u64>(), rank in any::<u32>(), answer in any::<f64>(),
    ) {
        one.availability = Availability::Open;
        one.cached_tokens = prompt;
        let request = PlacementRequest { answer_tokens: answer, ..asked(u64::from(rank), prompt, Some(1)) };
        for policy in RoutingPolicy::ALL {
            prop_assert!(choose(policy, &request, &[one], 3).is_some());
        }
    }
}
