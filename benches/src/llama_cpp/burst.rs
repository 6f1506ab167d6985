//! Five hundred simultaneous requests and nothing after them: number of served ones, and their times.

use std::{sync::Barrier, thread, time::Duration};

use anyhow::{Result, anyhow};

use super::{
    servers::{Adapters, warmed_up},
    setup::Setup,
};
use crate::{
    holobiont_runner::Holobiont,
    http::{Attempt, Dialect, DialectServer, Timeline},
    measure::{Samples, alternate},
    peer::LlamaServer,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{STREAMS, arrival},
};

const REQUESTS: usize = 500;

type ServedTimelines = Vec<Timeline>;

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let adapters = Adapters::generate(setup)?;
    let folder = setup.temporary("holobiont-burst");
    let ours = Holobiont::start(&setup.holobiont, &adapters.ours[..STREAMS], &folder).and_then(warmed_up)?;
    let folder = setup.temporary("llama-server-burst");
    let peer =
        LlamaServer::start(&setup.peer, &setup.peer.q4_0, &adapters.peers, &folder).and_then(warmed_up)?;
    let [ours, peer] = alternate(
        setup.config.runs,
        [Box::new(|round| burst(&ours, round)), Box::new(|round| burst(&peer, round))],
    )?;
    let row =
        |case: &str, unit, better, figure: &dyn Fn(&ServedTimelines) -> f64, target| -> Result<Comparison> {
            let rival = PeerSamples {
                name: "llama-server".to_owned(),
                format: setup.peer.q4_0.format.clone(),
                samples: Samples::of(&peer, figure)?,
            };
            let (case, ours) = (case.to_owned(), Samples::of(&ours, figure)?);
            Ok(Comparison { bench: "burst", case, unit, better, ours, rival, target })
        };
    let all = Some(BenchTarget::OursAtLeast(REQUESTS as f64));
    Ok(vec![
        row("served of 500 at once", "requests", Better::Higher, &|served| served.len() as f64, all)?,
        row("last first token", "ms", Better::Lower, &last_first_token_ms, None)?,
    ])
}

fn last_first_token_ms(served: &ServedTimelines) -> f64 {
    let waits = served.iter().map(|timeline| timeline.first - timeline.sent);
    waits.max().unwrap_or(Duration::ZERO).as_secs_f64() * 1000.0
}

/// Sends a burst in which no prompt repeats.
fn burst<D: Dialect>(server: &DialectServer<D>, round: usize) -> Result<ServedTimelines> {
    let together = Barrier::new(REQUESTS);
    let client = |number| {
        let job = arrival(round, number);
        together.wait();
        server.attempt(&job)
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..REQUESTS).map(|number| scope.spawn(move || client(number))).collect();
        let mut served = ServedTimelines::new();
        for client in clients {
            let attempt = client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))?;
            served.extend(match attempt {
                Attempt::Served(timeline) => Some(timeline),
                Attempt::Refused { .. } => None,
            });
        }
        Ok(served)
    })
}
