//! Benchmark harness: measures Holobiont and its peers side by side and prints one JSON object per line.
//!
//! # Layout
//!
//! - [`suite`]: a run, from the arguments to the printed lines;
//! - the benchmarks: [`limits`] (the machine's limits), [`divergence`] (what each precision rounds),
//!   [`llama_cpp`] (llama.cpp's tools and server),
//!   [`xab`], [`board`], [`cold`] (cold starts, decode in their modes, and the crossover), [`executors`],
//!   [`push`] (adapters pushed from memory), [`receipts`] (verification beside decoding),
//!   [`remote_executor`] (an executor on another host), [`split`] (split clients: rate and calls, batching,
//!   beside resident requests, masking), [`gpu`], [`sim_validation`] and [`forecast`] (the simulator beside
//!   reality), [`fleet`] (hosts that share servers), [`fairness`] (tenants beside each other), [`tune`]
//!   (training jobs beside PEFT), [`tinker`] (tenants that train and sample), [`perf_model`] (cost of
//!   ranks), [`picker`] (the routing decision of the endpoint picker), [`stream`] (a base streamed
//!   from disk), [`grammar`] (structured output), [`openvino`] (prompts and batches beside OpenVINO),
//!   [`vllm`] (servers beside vLLM), [`devices`] (one base over several devices), [`many_cores`] (the pass on more cores than the machine has);
//! - [`holobiont_runner`] and [`peer`]: drivers of each side, by its benchmark command and as a server;
//! - [`measure`], [`report`], [`plot`]: alternation, medians and spreads, and their rows and plots;
//! - [`oracle_draft`]: a drafter of chosen quality; [`requests`]: requests to an engine in this process;
//!   [`http`], [`lora`], [`adapters`], [`workload`], [`arrivals`]: streamed requests, generated adapters in
//!   files and in memory, prompts for the servers, and their arrival times;
//! - `servers`: the tests' real PostgreSQL and bucket;
//! - [`process`], [`machine`]: child processes that never outlive the harness, and the cores that all of them
//!   share.
//!
//! `docs/performance/README.md` says what is compared with what, and by which rules.
#![forbid(unsafe_code)]

mod adapters;
mod arrivals;
mod board;
mod cold;
mod config;
mod devices;
mod divergence;
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
mod openvino;
mod oracle_draft;
mod peer;
mod perf_model;
mod picker;
mod plot;
mod process;
mod push;
mod receipts;
mod remote_executor;
mod report;
mod requests;
mod sim_validation;
mod split;
mod stream;
mod suite;
mod tinker;
mod tune;
mod vllm;
mod workload;
mod xab;

use std::process::ExitCode;
use testkit::servers;

use clap::Parser;
use text::sandbox;

fn main() -> ExitCode {
    if let Some(served) = sandbox::serve(std::env::args_os().nth(1).as_deref()) {
        return ended(served.map(|()| ExitCode::SUCCESS).map_err(Into::into));
    }
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(board::worker::COMMAND) {
        return ended(board::worker::main(arguments).map(|()| ExitCode::SUCCESS));
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
