//! One stream beside a busy process on the same cores: share of the undisturbed speed.
//!
//! Threads that spin at barriers lose nearly all of it: whenever one of them is off its core, the others
//! wait.

use std::process::Command;

use anyhow::{Context, Result};

use super::setup::Setup;
use crate::{
    holobiont_runner::SyntheticLoad,
    measure::{Samples, alternate},
    process::LoggedProcess,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const LOAD: SyntheticLoad = SyntheticLoad { prompt_tokens: 1, generated_tokens: 128, streams: 1 };
/// Few tokens, since the peer may need a second for each.
const PEER_TOKENS: usize = 16;
/// Uses a core until its parent ends, in case the parent does not stop it.
const BUSY: &str = "while kill -0 $PPID; do i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done; done";

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let peer = &setup.peer;
    let ours = |_| Ok(setup.ours.rates(LOAD)?.decode_tokens_per_s);
    let theirs = |_| peer.decode(&peer.shipped, PEER_TOKENS);
    let [ours_alone, ours_beside, peer_alone, peer_beside] = alternate(
        setup.config.runs,
        [
            Box::new(ours),
            Box::new(|round| beside_a_busy_process(setup, || ours(round))),
            Box::new(theirs),
            Box::new(|round| beside_a_busy_process(setup, || theirs(round))),
        ],
    )?;
    let comparison = |case: &str, unit, ours, samples, target| Comparison {
        bench: "neighbour",
        case: case.to_owned(),
        unit,
        better: Better::Higher,
        ours,
        rival: PeerSamples { name: "llama-bench".to_owned(), format: peer.shipped.format.clone(), samples },
        target,
    };
    Ok(vec![
        comparison(
            "decode beside a busy process",
            "share of undisturbed",
            shares(&ours_beside, &ours_alone)?,
            shares(&peer_beside, &peer_alone)?,
            Some(BenchTarget::OursAtLeast(0.4)),
        ),
        comparison(
            "decode beside a busy process",
            "tokens/s",
            Samples::new(ours_beside)?,
            Samples::new(peer_beside)?,
            None,
        ),
    ])
}

fn shares(beside: &[f64], alone: &[f64]) -> Result<Samples> {
    Samples::new(beside.iter().zip(alone).map(|(beside, alone)| beside / alone).collect())
}

fn beside_a_busy_process<T>(setup: &Setup, measured: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut busy = LoggedProcess::start(Command::new("sh").args(["-c", BUSY]), &setup.temporary("busy.log"))
        .context("cannot start a busy process")?;
    let result = measured()?;
    busy.ensure_running()?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_taken_round_by_round() {
        let samples = shares(&[50.0, 30.0, 10.0], &[100.0, 50.0, 100.0]).unwrap();
        assert_eq!((samples.median(), samples.range()), (0.5, [0.1, 0.6]));
    }
}
