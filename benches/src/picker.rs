//! Time of the endpoint picker to read a request and choose a host, with as many adapters per host as a fleet
//! may have.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use control_protocol::fleet::{
    GatewayReport, GatewayState, ReportedAdapter, ReportedExecutor, ReportedLoad, Tagged, Timings,
};
use endpoint_picker::{fleet::PickRules, picker::Picker, request_parser::RequestHead};
use scheduling::{
    perf::serving::RequestLoad,
    routing::{
        RoutingPolicy, Slo,
        cost_estimates::{CostEstimate, UNSEEN},
    },
};
use serde_json::json;

use crate::{
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const HOSTS: [u8; 3] = [3, 30, 240];
/// Adapters that all hosts know, and adapters in the memory of each host.
const REGISTERED: usize = 10_000;
const RESIDENT: usize = 200;
/// Bytes of a prompt: about 500 tokens.
const PROMPT_BYTES: usize = 2_000;
const DECISIONS: usize = 5_000;
const GOAL_US: f64 = 50.0;

/// Measures every comparison of this benchmark.
///
/// # Errors
/// If a report is rejected, or no host is found.
pub(crate) fn run() -> Result<Vec<Comparison>> {
    let mut rows = Vec::new();
    for hosts in HOSTS {
        let [ours, idle] =
            [RoutingPolicy::RankAware, RoutingPolicy::MostIdle].map(|policy| times_us(hosts, policy));
        let (ours, idle) = (ours?, idle?);
        for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
            let at = |samples: &Samples| Samples::new(vec![samples.quantile(share)]);
            let rival =
                PeerSamples { name: "most-idle".to_owned(), format: String::new(), samples: at(&idle)? };
            rows.push(Comparison {
                bench: "picker",
                case: format!("{hosts} hosts, {name}"),
                unit: "us",
                better: Better::Lower,
                ours: at(&ours)?,
                rival,
                target: Some(BenchTarget::OursAtMost(GOAL_US)),
            });
        }
    }
    Ok(rows)
}

/// Times of decisions, from the body to the endpoint.
fn times_us(hosts: u8, policy: RoutingPolicy) -> Result<Samples> {
    let picker = picker(hosts, policy)?;
    let head = RequestHead { path: "/v1/chat/completions".to_owned(), key: b"Bearer hb-key".to_vec() };
    let mut times = Vec::with_capacity(DECISIONS);
    for index in 0..DECISIONS {
        let text = format!("{index} {}", "x".repeat(PROMPT_BYTES));
        let body = json!({
            "model": format!("adapter-{}", index * 7 % REGISTERED),
            "messages": [{ "role": "user", "content": text }], "max_tokens": 100,
        });
        let body = body.to_string();
        let began = Instant::now();
        let pick = picker.decide(&head, body.as_bytes(), &None);
        times.push(began.elapsed().as_secs_f64() * 1e6);
        pick.context("no host is ready")?;
    }
    Samples::new(times)
}

fn picker(hosts: u8, policy: RoutingPolicy) -> Result<Picker> {
    let stale = Duration::from_secs(3600);
    let picker = Picker::new(PickRules { policy, slo: Slo::default(), stale, fallbacks: 2 }, 8 << 20);
    let addresses = (1..=hosts).map(|host| (host, SocketAddr::from(([10, 0, 0, host], 8080))));
    picker.fleet.set_hosts(&addresses.clone().map(|(_, address)| address).collect());
    let name = |index: usize| format!("adapter-{index}");
    let adapters = (0..REGISTERED).map(|index| ReportedAdapter {
        name: name(index),
        rank: 16,
        bytes: 64 << 20,
        generation: index as u64,
    });
    let registered = Tagged::of(adapters.collect::<Vec<_>>(), None);
    for (host, address) in addresses {
        let resident = (0..RESIDENT).map(|index| name((usize::from(host) * RESIDENT + index) % REGISTERED));
        let report = GatewayReport {
            state: GatewayState::Ready,
            instance: 1,
            base: "base".to_owned(),
            answer_tokens: 60.0,
            queued: 0,
            executors: vec![executor(host)],
            registered: registered.clone(),
            resident: Tagged::of(vec![resident.collect()], None),
        };
        picker.fleet.heard(address, Instant::now(), report)?;
    }
    Ok(picker)
}

fn executor(host: u8) -> ReportedExecutor {
    let running = (0..host % 32).fold(RequestLoad::default(), |sum, _| sum.plus(RequestLoad::of(16, 500)));
    ReportedExecutor {
        open: true,
        places: 64,
        running: running.into(),
        waiting: ReportedLoad::default(),
        promised_tpot_us: None,
        timings: Some(Timings::from(CostEstimate { model: UNSEEN, is_stale: false })),
    }
}
