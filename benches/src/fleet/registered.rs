//! Start of a gateway with ten thousand registered adapters, from PostgreSQL and from SQLite, and the time of
//! the pickers' load report then.

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

const REGISTERED: usize = 10_000;
/// Maximum time until such a gateway and its executor are ready.
const START_S: f64 = 2.0;
const CLIENTS: usize = 2;
const QUESTIONS: usize = 20;
/// SQL that copies the existing row with other content hashes.
const COPY: &str = "INSERT INTO holobiont_adapters \
    SELECT (jsonb_populate_record(one, jsonb_build_object('name', 'copy-' || number, \
        'content', '\\x' || md5(number::text) || md5(number::text), \
        'generation', '\\x' || md5(number::text) || md5(number::text)))).* \
    FROM holobiont_adapters AS one, generate_series(2, $COUNT) AS number";

struct StartupTime {
    /// Time until the host is ready and has listed its models.
    seconds: f64,
    /// Time of the pickers' load report, in milliseconds.
    load_ms: f64,
}

/// Starts hosts with adapters in PostgreSQL, in SQLite, and without adapters.
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
    // Excludes the gateway's work right after its start.
    thread::sleep(Duration::from_secs(1));
    let mut times = Vec::new();
    for _ in 0..QUESTIONS {
        let asked = Instant::now();
        get(host.port(), "/v1/load").context("it says no load")?;
        times.push(asked.elapsed().as_secs_f64() * 1e3);
    }
    Ok(StartupTime { seconds, load_ms: Samples::new(times)?.median() })
}
