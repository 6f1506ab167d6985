//! Holobiont beside llama.cpp on the same cores: the forward pass beside its benchmark tools, and the server
//! beside its server.
//!
//! - [`setup`]: preparation of both sides; [`peer_compare`]: our result beside the peer's two formats.
//! - [`decode`], [`prefill`], [`batch`], [`noisy_neighbour`]: the forward pass. [`accuracy`]: its exactness.
//! - [`adapters`], [`burst`], [`overload`], [`startup`], [`drafts`], [`forms`]: the servers; [`servers`]:
//!   their start.

mod accuracy;
mod adapters;
mod batch;
mod burst;
mod decode;
mod drafts;
mod forms;
mod noisy_neighbour;
mod overload;
mod peer_compare;
mod prefill;
mod servers;
mod setup;
mod startup;

use anyhow::Result;

pub(crate) use self::setup::Setup;
use crate::{config::Name, report::Comparison};

/// Measures every comparison of `name`; returns none if llama.cpp has no part in it.
///
/// # Errors
/// If a side cannot be measured.
pub(crate) fn measure(name: Name, setup: &Setup) -> Result<Vec<Comparison>> {
    match name {
        Name::Decode => decode::run(setup),
        Name::Prefill => prefill::run(setup),
        Name::Batch => batch::run(setup),
        Name::Adapters => adapters::run(setup),
        Name::Neighbour => noisy_neighbour::run(setup),
        Name::Startup => startup::run(setup),
        Name::Burst => burst::run(setup),
        Name::Overload => overload::run(setup),
        Name::Drafts => drafts::run(setup),
        Name::Forms => forms::run(setup),
        Name::Accuracy => accuracy::run(setup),
        _ => Ok(Vec::new()),
    }
}
