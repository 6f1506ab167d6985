//! Tenants that train and sample through Tinker's API: time from the end of an optimizer step to the first
//! token of the new weights, for one tenant, and for sixteen at once.
//!
//! Every round trains on one sequence, serves the weights without a name, and samples one token after a
//! prompt of 32 tokens. Beside it stands a second sample from the same weights, with another prompt: what the
//! token costs once the weights are served. [`client`] speaks the API.

mod client;

use std::{sync::Barrier, thread, time::Instant};

use anyhow::{Result, anyhow};

use self::client::TinkerClient;
use crate::{
    config::SuiteConfig,
    fairness::tenants::Tenants,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::prompt,
};

const TENANTS: [&str; 16] = [
    "t00", "t01", "t02", "t03", "t04", "t05", "t06", "t07", "t08", "t09", "t10", "t11", "t12", "t13", "t14",
    "t15",
];
/// Measured rounds per `--runs`, of one tenant and of each of the sixteen.
const ROUNDS_ALONE: usize = 20;
const ROUNDS_TOGETHER: usize = 4;
/// Rounds before the measurement.
const WARM_UP: usize = 2;
const RANK: usize = 8;
/// Tokens of a training sequence, and of a sample's prompt.
const SEQUENCE: usize = 128;
const PROMPT: usize = 32;
/// Target of the 99th percentile.
const FIRST_TOKEN_MS: f64 = 50.0;

/// Times of rounds in milliseconds.
#[derive(Debug, Default)]
struct RoundTimes {
    /// From the end of the step until the sampler is there.
    served: Vec<f64>,
    /// From the end of the step until the first token.
    first_token: Vec<f64>,
    /// A token of the served weights.
    next_sample: Vec<f64>,
}

impl RoundTimes {
    fn extend(&mut self, other: Self) {
        self.served.extend(other.served);
        self.first_token.extend(other.first_token);
        self.next_sample.extend(other.next_sample);
    }
}

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let settings = [("HOLOBIONT_MAX_TRAINERS", TENANTS.len().to_string())];
    let tenants = Tenants::start(config, cores, &TENANTS, "", &settings)?;
    let alone = measure(&tenants, &TENANTS[..1], ROUNDS_ALONE * config.runs)?;
    let together = measure(&tenants, &TENANTS, ROUNDS_TOGETHER * config.runs)?;
    Ok([rows("1 tenant", alone)?, rows("16 tenants at once", together)?].concat())
}

/// Lets all tenants `names` train and sample at once.
fn measure(tenants: &Tenants, names: &[&str], rounds: usize) -> Result<RoundTimes> {
    let warm = Barrier::new(names.len());
    thread::scope(|scope| {
        let clients = names.iter().enumerate().map(|(number, name)| {
            let warm = &warm;
            scope.spawn(move || one_tenant(tenants, name, number, rounds, warm))
        });
        let clients: Vec<_> = clients.collect();
        let mut times = RoundTimes::default();
        for client in clients {
            times.extend(client.join().unwrap_or_else(|_| Err(anyhow!("a tenant's thread panicked")))?);
        }
        Ok(times)
    })
}

fn one_tenant(
    tenants: &Tenants,
    name: &str,
    number: usize,
    rounds: usize,
    warm: &Barrier,
) -> Result<RoundTimes> {
    let begun = begin(tenants, name, number);
    // A tenant that fails must not let the others wait.
    warm.wait();
    let mut client = begun?;
    let mut times = RoundTimes::default();
    for round in WARM_UP..WARM_UP + rounds {
        one_round(&mut client, number, round, &mut times)?;
    }
    client.end()?;
    Ok(times)
}

fn begin(tenants: &Tenants, name: &str, number: usize) -> Result<TinkerClient> {
    let mut client = TinkerClient::begin(tenants.port(), tenants.key(name)?, tenants.base(), RANK)?;
    for round in 0..WARM_UP {
        one_round(&mut client, number, round, &mut RoundTimes::default())?;
    }
    Ok(client)
}

fn one_round(client: &mut TinkerClient, number: usize, round: usize, times: &mut RoundTimes) -> Result<()> {
    let seed = ((number << 20) + round) as u64 * 3;
    client.step(&prompt(seed, SEQUENCE + 1))?;
    let stepped = Instant::now();
    let sampler = client.serve()?;
    let served_ms = stepped.elapsed().as_secs_f64() * 1e3;
    client.sample(&sampler, &prompt(seed + 1, PROMPT))?;
    let first_token_ms = stepped.elapsed().as_secs_f64() * 1e3;
    let again = Instant::now();
    client.sample(&sampler, &prompt(seed + 2, PROMPT))?;
    times.next_sample.push(again.elapsed().as_secs_f64() * 1e3);
    times.served.push(served_ms);
    times.first_token.push(first_token_ms);
    Ok(())
}

fn rows(who: &str, times: RoundTimes) -> Result<Vec<Comparison>> {
    let (first, next) = (Samples::new(times.first_token)?, Samples::new(times.next_sample)?);
    let served = Samples::new(times.served)?;
    let row = |what: &str, ours: &Samples, share, target| -> Result<Comparison> {
        let at = |samples: &Samples| Samples::new(vec![samples.quantile(share)]);
        let name = "a token of weights that are served".to_owned();
        let rival = PeerSamples { name, format: "as ours".to_owned(), samples: at(&next)? };
        let case = format!("{who}: {what}, p{:.0}", share * 100.0);
        let (unit, better, ours) = ("ms", Better::Lower, at(ours)?);
        Ok(Comparison { bench: "tinker", case, unit, better, ours, rival, target })
    };
    let goal = Some(BenchTarget::OursAtMost(FIRST_TOKEN_MS));
    Ok(vec![
        row("optim_step to a sampler", &served, 0.5, None)?,
        row("optim_step to a sampler", &served, 0.99, None)?,
        row("optim_step to the first token", &first, 0.5, None)?,
        row("optim_step to the first token", &first, 0.99, goal)?,
    ])
}
