//! How soon a gateway is ready that knows ten thousand adapters, from PostgreSQL and from SQLite, and what the pickers' question
//! for all of them takes then.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use tempfile::TempDir;

use super::{hosts, hosts::Servers, row};
use crate::{
    config::SuiteConfig,
    holobiont_runner::Holobiont,
    http::get,
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Comparison},
};

/// Adapters that are registered.
const REGISTERED: usize = 10_000;
/// In which time a gateway that knows them is to be ready, its executor too.
const START_S: f64 = 2.0;
/// Clients that register them one by one.
const CLIENTS: usize = 2;
/// Times that the question is asked of a host.
const QUESTIONS: usize = 20;
/// So many rows like the one that is there, each of another content.
const COPY: &str = "INSERT INTO holobiont_adapters \
    SELECT (jsonb_populate_record(one, jsonb_build_object('name', 'copy-' || number, \
        'content', '\\x' || md5(number::text) || md5(number::text), \
        'generation', '\\x' || md5(number::text) || md5(number::text)))).* \
    FROM holobiont_adapters AS one, generate_series(2, $COUNT) AS number";

/// What came of a start.
struct StartupTime {
    /// Until it is ready and has listed its models.
    seconds: f64,
    /// Of all that pickers ask for, in milliseconds.
    load_ms: f64,
}

/// Starts of hosts that know them from PostgreSQL, from SQLite, and that know none.
pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (folder, servers) = (tempfile::tempdir()?, Servers::start()?);
    let adapter = hosts::adapters(config, 1, &folder.path().join("adapters"))?.remove(0);
    fill_postgres(&servers, config, cores, &folder, &adapter)?;
    let sqlite = folder.path().join("sqlite");
    fill_sqlite(&hosts::alone(config, cores, &sqlite)?, &adapter)?;
    let fresh = |name: &str, run: usize| -> PathBuf { folder.path().join(format!("{name}-{run}")) };
    let [shared, own, none] = alternate(
        config.runs,
        [
            Box::new(|run| start(REGISTERED, || servers.host(config, cores, &fresh("shared", run)))),
            Box::new(|_| start(REGISTERED, || hosts::alone(config, cores, &sqlite))),
            Box::new(|run| start(0, || hosts::alone(config, cores, &fresh("none", run)))),
        ],
    )?;
    let seconds = |starts: &[StartupTime]| Samples::of(starts, |start| start.seconds);
    let load_ms = |starts: &[StartupTime]| Samples::of(starts, |start| start.load_ms);
    let mut rows = Vec::new();
    for (from, starts) in [("PostgreSQL", &shared), ("SQLite", &own)] {
        let case = format!("10,000 adapters from {from}: start until ready");
        let rival = ("without adapters", seconds(&none)?);
        rows.push(row(&case, "s", seconds(starts)?, rival, Some(BenchTarget::OursAtMost(START_S))));
        let case = format!("10,000 adapters from {from}: GET /v1/load, all of it");
        rows.push(row(&case, "ms", load_ms(starts)?, ("without adapters", load_ms(&none)?), None));
    }
    Ok(rows)
}

fn fill_postgres(
    servers: &Servers,
    config: &SuiteConfig,
    cores: &Cores,
    folder: &TempDir,
    adapter: &Path,
) -> Result<()> {
    let host = servers.host(config, cores, &folder.path().join("filling"))?;
    hosts::load(&host, "copy-1", adapter)?;
    drop(host);
    let _ = servers.postgres.ask(&COPY.replace("$COUNT", &REGISTERED.to_string()));
    Ok(())
}

fn fill_sqlite(host: &Holobiont, adapter: &Path) -> Result<()> {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn(move || {
                    let mut numbers = (1..=REGISTERED).skip(client).step_by(CLIENTS);
                    numbers.try_for_each(|number| hosts::load(host, &format!("copy-{number}"), adapter))
                })
            })
            .collect();
        let mut joined = clients.into_iter().map(|client| client.join());
        joined.try_for_each(|filled| filled.unwrap_or_else(|_| Err(anyhow!("a client panicked"))))
    })
}

fn start(registered: usize, start: impl FnOnce() -> Result<Holobiont>) -> Result<StartupTime> {
    let begun = Instant::now();
    let host = start()?;
    let seconds = begun.elapsed().as_secs_f64();
    let listed = get(host.port(), "/v1/models")?.matches("\"copy-").count();
    ensure!(listed >= registered, "{listed} of {registered} adapters are there");
    // What it does in its first moments is over then.
    thread::sleep(Duration::from_secs(1));
    let mut times = Vec::new();
    for _ in 0..QUESTIONS {
        let asked = Instant::now();
        get(host.port(), "/v1/load").context("it says no load")?;
        times.push(asked.elapsed().as_secs_f64() * 1e3);
    }
    Ok(StartupTime { seconds, load_ms: Samples::new(times)?.median() })
}
