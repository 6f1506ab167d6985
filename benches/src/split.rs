//! Split clients: cost of calls to the base's layers, and gain of sharing them.
//!
//! Clients are the `client` library in this process with the defaults of `holobiont-client`, each with its
//! own session and thread; the executor is the real one.
//!
//! - [`executor`]: an executor with its three listeners, and sessions; [`watch`]: timings of single calls.
//! - [`model`]: a split model that decodes.
//! - [`rate`]: one client beside the resident engine, and the overhead of a call (`split`).
//! - [`load`]: clients that only call; [`batching`] and [`wait_time`]: batching of calls (`split-batching`).
//! - [`mixed`]: split clients beside resident requests (`split-mixed`).
//! - [`masking`]: cost of obfuscation, [`exact`]: cost of secrecy and verified answers, [`ring`]: the product
//!   that both use (`split-masking`).
//! - [`drafts`]: a client that drafts locally (`speculate`), over links that [`delay`] emulates.

pub(crate) mod batching;
mod delay;
pub(crate) mod drafts;
mod exact;
pub(crate) mod executor;
mod load;
pub(crate) mod masking;
pub(crate) mod mixed;
mod model;
pub(crate) mod rate;
mod ring;
mod wait_time;
mod watch;

use crate::{
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

#[derive(Debug)]
struct SplitRow {
    bench: &'static str,
    case: String,
    unit: &'static str,
    better: Better,
    target: Option<BenchTarget>,
}

impl SplitRow {
    fn beside(self, ours: &Samples, name: &str, rival: &Samples) -> Comparison {
        let Self { bench, case, unit, better, target } = self;
        let rival = PeerSamples { name: name.to_owned(), format: "Q4_1".to_owned(), samples: rival.clone() };
        Comparison { bench, case, unit, better, ours: ours.clone(), rival, target }
    }
}
