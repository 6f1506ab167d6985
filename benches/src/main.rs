//! The benchmark harness: measures Holobiont and its peer side by side and prints one JSON object a line.
//!
//! # Layout
//!
//! - one file for each benchmark: [`decode`], [`prefill`], [`batch`], [`adapters`], [`neighbour`], [`startup`],
//!   [`overload`], [`xab`], [`board`], [`cold`] (cold starts, decode in their modes, and the crossover),
//!   [`split`] (split clients: rate and calls, batching, beside resident requests, masking), [`gpu`] (all of them);
//! - [`ours`] and [`peer`]: how each side is driven, by its measuring command and as a server;
//! - [`measure`], [`contest`], [`report`]: alternation, medians and spreads, and the rows they become;
//! - [`http`], [`lora`], [`workload`]: streamed requests, generated adapters and prompts for the servers;
//! - [`process`], [`machine`]: child processes that never outlive the harness, and the cores all of them share.
//!
//! `docs/performance/README.md` says what is compared with what, and by which rules.
#![forbid(unsafe_code)]

mod adapters;
mod batch;
mod board;
mod cold;
mod config;
mod contest;
mod decode;
mod gpu;
mod http;
mod lora;
mod machine;
mod measure;
mod neighbour;
mod ours;
mod overload;
mod peer;
mod plot;
mod prefill;
mod process;
mod report;
mod setup;
mod split;
mod startup;
mod workload;
mod xab;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(board::worker::COMMAND) {
        return ended(board::worker::main(arguments).map(|()| ExitCode::SUCCESS));
    }
    ended(config::Args::parse().validate().and_then(|config| setup::run(&config)).map(Into::into))
}

fn ended(run: anyhow::Result<ExitCode>) -> ExitCode {
    match run {
        Ok(code) => code,
        Err(error) => {
            eprintln!("holobiont-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
