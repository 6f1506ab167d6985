//! Many adapters over HTTP: 8 simultaneous streams on 8 adapters, beside `llama-server` with 8 slots; and the
//! cost of adapters for the base's streams.

use anyhow::Result;

use super::{
    peer_compare::{ContestantResults, PeerComparison},
    servers::{Adapters, warmed_up},
    setup::Setup,
};
use crate::{
    holobiont_runner::{Holobiont, NamedAdapter},
    http::Burst,
    measure::{Samples, alternate},
    peer::{LlamaServer, PeerWeights},
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{BurstMix, STREAMS, WARM_UP_ROUND, burst},
};

/// Extra rounds, since two of our own servers differ by only a hundredth or two.
const OWN_ROUNDS: usize = 4;

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let adapters = Adapters::generate(setup)?;
    let mut comparisons = beside_the_peer(setup, &adapters)?;
    comparisons.push(many_loaded(setup, &adapters)?);
    Ok(comparisons)
}

struct BurstMeasurements {
    adapters: ContestantResults<Burst>,
    base: ContestantResults<Burst>,
}

fn beside_the_peer(setup: &Setup, adapters: &Adapters) -> Result<Vec<Comparison>> {
    let measured = measure(setup, adapters)?;
    let mut comparisons = Vec::new();
    for (case, entries, targets) in [
        (
            "8 adapters",
            &measured.adapters,
            [Some(BenchTarget::RatioAtLeast(8.0)), Some(BenchTarget::RatioAtLeast(5.0))],
        ),
        ("8 base streams", &measured.base, [None, None]),
    ] {
        let rate = |case: String, targets| PeerComparison {
            bench: "adapters",
            case,
            unit: "tokens/s",
            better: Better::Higher,
            rival: "llama-server",
            targets,
        };
        let decode = rate(format!("{case}, decode"), targets);
        comparisons.extend(entries.compare(setup, &decode, Burst::decode_tokens_per_s)?);
        let aggregate = rate(format!("{case}, prefill and decode"), [None, None]);
        comparisons.extend(entries.compare(setup, &aggregate, Burst::aggregate_tokens_per_s)?);
    }
    comparisons.extend(measured.adapters.compare(setup, &first_token(), Burst::worst_first_token_ms)?);
    comparisons.push(adapters_beside_base(setup, &measured)?);
    Ok(comparisons)
}

fn first_token() -> PeerComparison {
    PeerComparison {
        bench: "adapters",
        case: "8 adapters, last first token".to_owned(),
        unit: "ms",
        better: Better::Lower,
        rival: "llama-server",
        targets: [Some(BenchTarget::OursAtMost(1000.0)); 2],
    }
}

/// Compares our streams on adapters with our streams on the base.
fn adapters_beside_base(setup: &Setup, measured: &BurstMeasurements) -> Result<Comparison> {
    Ok(Comparison {
        bench: "adapters",
        case: "8 adapters beside 8 base streams, decode".to_owned(),
        unit: "tokens/s",
        better: Better::Higher,
        ours: Samples::of(&measured.adapters.ours, Burst::decode_tokens_per_s)?,
        rival: PeerSamples {
            name: "holobiont, 8 base streams".to_owned(),
            format: setup.peer.shipped.format.clone(),
            samples: Samples::of(&measured.base.ours, Burst::decode_tokens_per_s)?,
        },
        target: Some(BenchTarget::RatioAtLeast(0.7)),
    })
}

fn measure(setup: &Setup, adapters: &Adapters) -> Result<BurstMeasurements> {
    let start = |weights: &PeerWeights| {
        let folder = setup.temporary(&format!("llama-server-{}", weights.format));
        LlamaServer::start(&setup.peer, weights, &adapters.peers, &folder).and_then(warmed_up)
    };
    let ours = Holobiont::start(&setup.holobiont, &adapters.ours[..STREAMS], &setup.temporary("holobiont-8"))
        .and_then(warmed_up)?;
    let (same, fastest) = (start(&setup.peer.shipped)?, start(&setup.peer.q4_0)?);
    let [adapters_ours, adapters_same, adapters_fastest, base_ours, base_same, base_fastest] = alternate(
        setup.config.runs,
        [
            Box::new(|round| ours.burst(&burst(BurstMix::Adapters, round))),
            Box::new(|round| same.burst(&burst(BurstMix::Adapters, round))),
            Box::new(|round| fastest.burst(&burst(BurstMix::Adapters, round))),
            Box::new(|round| ours.burst(&burst(BurstMix::Base, round))),
            Box::new(|round| same.burst(&burst(BurstMix::Base, round))),
            Box::new(|round| fastest.burst(&burst(BurstMix::Base, round))),
        ],
    )?;
    Ok(BurstMeasurements {
        adapters: ContestantResults {
            ours: adapters_ours,
            same_file: adapters_same,
            fastest: adapters_fastest,
        },
        base: ContestantResults { ours: base_ours, same_file: base_same, fastest: base_fastest },
    })
}

/// Compares our base streams with many idle adapters loaded, and with none.
fn many_loaded(setup: &Setup, adapters: &Adapters) -> Result<Comparison> {
    let start = |adapters: &[NamedAdapter]| -> Result<Holobiont> {
        let server = Holobiont::start(
            &setup.holobiont,
            adapters,
            &setup.temporary(&format!("holobiont-{}", adapters.len())),
        )?;
        server.warm_up(&burst(BurstMix::Base, WARM_UP_ROUND))?;
        Ok(server)
    };
    let (none, many) = (start(&[])?, start(&adapters.ours)?);
    let [many, none] = alternate(
        setup.config.runs * OWN_ROUNDS,
        [
            Box::new(|round| many.burst(&burst(BurstMix::Base, round))),
            Box::new(|round| none.burst(&burst(BurstMix::Base, round))),
        ],
    )?;
    Ok(Comparison {
        bench: "adapters",
        case: format!("8 base streams, {} adapters loaded, decode", adapters.ours.len()),
        unit: "tokens/s",
        better: Better::Higher,
        ours: Samples::of(&many, Burst::decode_tokens_per_s)?,
        rival: PeerSamples {
            name: "holobiont, no adapter loaded".to_owned(),
            format: setup.peer.shipped.format.clone(),
            samples: Samples::of(&none, Burst::decode_tokens_per_s)?,
        },
        target: Some(BenchTarget::RatioAtLeast(0.98)),
    })
}
