//! The benchmark harness: measures Holobiont and its peer side by side and prints one JSON object a line.
//!
//! # Layout
//!
//! - [`suite`]: a run, from what was asked for to the lines that are printed;
//! - [`limits`] (what the machine can do), [`llama_cpp`] (beside its tools and its server), [`xab`], [`board`], [`cold`] (cold starts, decode in their modes,
//!   and the crossover), [`executors`], [`remote_executor`] (one on another host), [`split`] (split clients: rate and calls, batching, beside resident requests,
//!   masking), [`gpu`], [`sim_validation`] and [`forecast`] (the simulator beside what it simulates), [`fleet`] (hosts that share servers), [`fairness`] (tenants beside each other),
//!   [`perf_model`] (what ranks cost), [`picker`] (a host for each request), [`stream`] (a base that comes from a disk), [`grammar`] (answers of a form),
//!   [`many_cores`] (the pass on more cores than there are): the benchmarks;
//! - [`holobiont_runner`] and [`peer`]: how each side is driven, by its measuring command and as a server;
//! - [`measure`], [`report`], [`plot`]: alternation, medians and spreads, and the rows and pictures they become;
//! - [`oracle_draft`]: a draft that is told the answer; [`requests`]: what an engine in this process is asked; [`http`], [`lora`], [`adapters`], [`workload`], [`arrivals`]: streamed requests, generated adapters, in files and in memory, prompts
//!   for the servers, and when they come;
//! - `servers`: the real PostgreSQL and the bucket of the tests;
//! - [`process`], [`machine`]: child processes that never outlive the harness, and the cores all of them share.
//!
//! `docs/performance/README.md` says what is compared with what, and by which rules.
#![forbid(unsafe_code)]

mod adapters;
mod arrivals;
mod board;
mod cold;
mod config;
mod executors;
mod fairness;
mod fleet;
mod forecast;
mod gpu;
mod grammar;
mod holobiont_runner;
mod http;
mod limits;
mod llama_cpp;
mod lora;
mod machine;
mod many_cores;
mod measure;
mod oracle_draft;
mod peer;
mod perf_model;
mod picker;
mod plot;
mod process;
mod remote_executor;
mod report;
mod requests;
mod sim_validation;
mod split;
mod stream;
mod suite;
mod tune;
mod workload;
mod xab;

use std::process::ExitCode;
use testkit::servers;

use clap::Parser;
use text::sandbox;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some(board::worker::COMMAND) => {
            return ended(board::worker::main(arguments).map(|()| ExitCode::SUCCESS));
        }
        Some(sandbox::ARGUMENT) => {
            return ended(sandbox::serve().map(|()| ExitCode::SUCCESS).map_err(Into::into));
        }
        _ => {}
    }
    ended(config::Args::parse().validate().and_then(|config| suite::run(&config)).map(Into::into))
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
