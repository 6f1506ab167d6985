//! A deployment with API keys, and tenants with open or closed loops of requests.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use tempfile::TempDir;

use crate::{
    arrivals::{at_their_times, poisson},
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, EnvSetting, Holobiont, Installation},
    http::{Attempt, Timeline},
    machine::Cores,
    process::output_of,
    sim_validation::SAID,
    workload::{AdapterChoice, AnswerKind, BenchRequest, WARM_UP_ROUND, arrival, prompt},
};

const KEY_LIMIT: Duration = Duration::from_secs(20);
const REFUSED: Duration = Duration::from_millis(20);
/// Prompt and answer tokens of a request of a burst.
const SHORT: (usize, usize) = (8, 2);

/// Warm-up time of a load, and its measured time.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadWindow {
    pub(super) settle: Duration,
    pub(super) length: Duration,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct TenantAttempts(Vec<Timeline>);

impl TenantAttempts {
    pub(super) fn tokens(&self) -> usize {
        self.0.iter().map(|timeline| timeline.tokens).sum()
    }

    pub(super) fn first_tokens_ms(&self) -> impl Iterator<Item = f64> {
        self.0.iter().map(|timeline| (timeline.first - timeline.sent).as_secs_f64() * 1e3)
    }

    /// Served requests per second of a load of this `length`.
    pub(super) fn served_per_s(&self, length: Duration) -> f64 {
        self.0.len() as f64 / length.as_secs_f64()
    }
}

#[derive(Debug)]
pub(crate) struct Tenants {
    server: Holobiont,
    keys: Vec<(String, String)>,
    operator: String,
    requests: AtomicUsize,
    _folder: TempDir,
}

impl Tenants {
    /// Starts a deployment for tenants `names` with the service classes `classes` of a deployment file.
    ///
    /// # Errors
    /// Fails if the deployment does not start.
    pub(crate) fn start(
        config: &SuiteConfig,
        cores: &Cores,
        names: &[&str],
        classes: &str,
        settings: &[EnvSetting],
    ) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for a deployment")?;
        let (file, key_file) = (folder.path().join("deployment.toml"), folder.path().join("api-keys"));
        let key = |name: &str, role| new_key(&config.ours, name, role, &key_file);
        let operator = key("operator", "admin")?;
        let keys = names.iter().map(|name| Ok(((*name).to_owned(), key(name, "user")?)));
        let keys: Vec<(String, String)> = keys.collect::<Result<_>>()?;
        let text = format!(
            "[executor]\ncores = \"{}\"\n\n[gateway]\napi_key_file = \"{}\"\n\n{classes}",
            cores.list(),
            key_file.display()
        );
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        let installation = Installation {
            binaries: config.ours.clone(),
            model: config.model.clone(),
            placement: DeploymentPlacement::Described(file),
            key: keys.first().map(|(_, key)| key.clone()),
        };
        let server = Holobiont::start_with(&installation, &[], &folder.path().join("up"), settings)?;
        server.warm_up(&(0..4).map(|number| job(WARM_UP_ROUND, number)).collect::<Vec<_>>())?;
        Ok(Self { server, keys, operator, requests: AtomicUsize::new(0), _folder: folder })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.port()
    }

    pub(crate) fn base(&self) -> &str {
        self.server.dialect().of(AdapterChoice::Base)
    }

    pub(super) fn operator(&self) -> &str {
        &self.operator
    }

    pub(crate) fn key(&self, name: &str) -> Result<&str> {
        let found = self.keys.iter().find(|(tenant, _)| tenant == name);
        found.map(|(_, key)| key.as_str()).with_context(|| format!("'{name}' has no key"))
    }

    /// Runs an open loop per tenant at its own rate; equal rounds have equal arrival times.
    ///
    /// # Errors
    /// If a request fails for another reason than a full queue.
    pub(super) fn open(
        &self,
        asking: &[(&str, f64)],
        how: LoadWindow,
        round: usize,
    ) -> Result<Vec<TenantAttempts>> {
        let mut arrivals = Vec::new();
        for (index, &(name, per_s)) in asking.iter().enumerate() {
            let key = self.key(name)?;
            let times = poisson(per_s, how.settle + how.length, ((round as u64) << 8) + index as u64);
            arrivals.extend(times.into_iter().map(|at| (at, index, key)));
        }
        arrivals.sort_unstable();
        let ask = |&(at, index, key): &(Duration, usize, &str)| {
            Ok((at, index, self.server.attempt_as(key, &self.next())?))
        };
        let mut tries = vec![TenantAttempts::default(); asking.len()];
        for (at, index, attempt) in at_their_times(&arrivals, |(at, ..)| *at, ask)? {
            if let (true, Attempt::Served(timeline)) = (at >= how.settle, attempt) {
                tries[index].0.push(timeline);
            }
        }
        Ok(tries)
    }

    /// Runs closed loops with `clients` per tenant; requests that end within the measured time count.
    pub(super) fn closed(&self, clients: &[(&str, usize)], how: LoadWindow) -> Result<Vec<TenantAttempts>> {
        let begin = Instant::now();
        let counts = begin + how.settle..begin + how.settle + how.length;
        let client = |key: &str| -> Result<Vec<Timeline>> {
            let mut served = Vec::new();
            while Instant::now() < counts.end {
                match self.server.attempt_as(key, &self.next())? {
                    Attempt::Served(timeline) if counts.contains(&timeline.last) => served.push(timeline),
                    Attempt::Served(_) => {}
                    Attempt::Refused { .. } => thread::sleep(REFUSED),
                }
            }
            Ok(served)
        };
        thread::scope(|scope| {
            let mut tries = Vec::new();
            let mut tenants = Vec::new();
            for &(name, count) in clients {
                let key = self.key(name)?;
                let client = &client;
                tenants.push((0..count).map(|_| scope.spawn(move || client(key))).collect::<Vec<_>>());
            }
            for tenant in tenants {
                let mut served = Vec::new();
                for client in tenant {
                    let client = client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")));
                    served.extend(client?);
                }
                tries.push(TenantAttempts(served));
            }
            Ok(tries)
        })
    }

    /// Sends `count` different short requests at once and returns the number of served ones.
    pub(super) fn burst(&self, name: &str, count: usize, round: usize) -> Result<usize> {
        let (key, together) = (self.key(name)?, Barrier::new(count));
        let ask = |number: usize| -> Result<usize> {
            let seed = (1 << 50) + ((round << 24) + number) as u64;
            let (prompt, says) = (prompt(seed, SHORT.0), AnswerKind::Token(SAID));
            let job = BenchRequest { prompt, who: AdapterChoice::Base, generate: SHORT.1, says };
            together.wait();
            Ok(usize::from(matches!(self.server.attempt_as(key, &job)?, Attempt::Served(_))))
        };
        thread::scope(|scope| {
            let ask = &ask;
            let clients: Vec<_> = (0..count).map(|number| scope.spawn(move || ask(number))).collect();
            let served = clients
                .into_iter()
                .map(|client| client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked"))));
            served.sum()
        })
    }

    fn next(&self) -> BenchRequest {
        job(0, self.requests.fetch_add(1, Ordering::Relaxed))
    }
}

fn job(round: usize, number: usize) -> BenchRequest {
    BenchRequest { who: AdapterChoice::Base, says: AnswerKind::Token(SAID), ..arrival(round, number) }
}

fn new_key(binaries: &Path, name: &str, role: &str, file: &Path) -> Result<String> {
    let mut command = Command::new(binaries.join("holobiont"));
    command.args(["key", "add", name, "--role", role, "--requests-per-min", "0", "--file"]).arg(file);
    Ok(output_of(&mut command, KEY_LIMIT)?.trim().to_owned())
}
