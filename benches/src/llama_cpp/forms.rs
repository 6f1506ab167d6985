//! Answers of a form through HTTP: 8 streamed requests at once that write a list of objects, beside `llama-server`'s; and beside free ones, on
//! either side.

use anyhow::Result;

use super::setup::Setup;
use crate::{
    http::{Dialect, Server},
    measure::{Samples, alternate},
    ours::Holobiont,
    peer::LlamaServer,
    report::{Better, Comparison, Rival, Target},
    workload::{Job, Mix, Says, WARM_UP_ROUND, burst},
};

/// Tokens a second of both.
struct Rates {
    formed: f64,
    free: f64,
}

/// Every comparison of this benchmark.
pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let ours = Holobiont::start(&setup.holobiont, &[], &setup.temporary("holobiont-forms"))?;
    let folder = setup.temporary("llama-server-forms");
    let peer = LlamaServer::start(&setup.peer, &setup.peer.q4_0, &[], &folder)?;
    // Grammars are made, and vocabularies looked through, before anything is measured.
    rates(&ours, WARM_UP_ROUND)?;
    rates(&peer, WARM_UP_ROUND)?;
    let [ours, peer] = alternate(
        setup.config.runs,
        [Box::new(|round| rates(&ours, round)), Box::new(|round| rates(&peer, round))],
    )?;
    let row = |case: &str, unit, figure: &dyn Fn(&Rates) -> f64, target| -> Result<Comparison> {
        let rival = Rival {
            name: "llama-server".to_owned(),
            format: setup.peer.q4_0.format.clone(),
            samples: Samples::of(&peer, figure)?,
        };
        let (case, ours) = (case.to_owned(), Samples::of(&ours, figure)?);
        Ok(Comparison { bench: "forms", case, unit, better: Better::Higher, ours, rival, target })
    };
    Ok(vec![
        row("8 streams of a form, decode", "tokens/s", &|rates| rates.formed, None)?,
        row("8 free streams, decode", "tokens/s", &|rates| rates.free, None)?,
        row(
            "of a form beside free",
            "share",
            &|rates| rates.formed / rates.free,
            Some(Target::OursAtLeast(0.95)),
        )?,
    ])
}

fn rates<D: Dialect>(server: &Server<D>, round: usize) -> Result<Rates> {
    // No prompt comes twice.
    let rate = |says, round| {
        let jobs: Vec<Job> = burst(Mix::Base, round).into_iter().map(|job| Job { says, ..job }).collect();
        server.burst(&jobs).map(|burst| burst.decode_tokens_per_s())
    };
    Ok(Rates { formed: rate(Says::Form, 2 * round)?, free: rate(Says::Anything, 2 * round + 1)? })
}
