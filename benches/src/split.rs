//! Split clients: what it costs to rent the base's layers, and what it is worth to share them.
//!
//! Clients are the `client` library in this process, each with its own session and thread; the executor is the real one.
//! What `holobiont-client` does by default, they do.
//!
//! - [`executor`]: an executor with its three doors, and sessions at them; [`watch`]: what became of single calls.
//! - [`model`]: a split model that decodes.
//! - [`rate`]: one client beside the resident engine, and what a call costs besides computing (`split`).
//! - [`load`]: clients that only call; [`batching`] and [`wait_time`]: how calls are put together (`split-batching`).
//! - [`mixed`]: split clients beside resident requests (`split-mixed`).
//! - [`masking`]: what obfuscation costs, [`exact`]: what secrecy and checked answers cost, [`ring`]: the product that both
//!   take (`split-masking`).
//! - [`drafts`]: a client that drafts at home (`speculate`), over links that [`delay`] emulates.

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

/// What is reported of two sides of ours: the figure, and what it is set beside.
#[derive(Debug)]
struct SplitRow {
    bench: &'static str,
    case: String,
    unit: &'static str,
    better: Better,
    target: Option<BenchTarget>,
}

impl SplitRow {
    /// The comparison of `ours` with `rival`, which is called `name`.
    fn beside(self, ours: &Samples, name: &str, rival: &Samples) -> Comparison {
        let Self { bench, case, unit, better, target } = self;
        let rival = PeerSamples { name: name.to_owned(), format: "Q4_1".to_owned(), samples: rival.clone() };
        Comparison { bench, case, unit, better, ours: ours.clone(), rival, target }
    }
}
