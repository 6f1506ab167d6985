//! Seven tenants beside an eighth that attacks, compared with the seven beside an eighth with the same load
//! as they.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{
    FIRST_TOKEN, FairnessSample, GOODPUT,
    attacks::{Attacker, check_names},
    rival, samples,
    tenants::{LoadWindow, Tenants},
};
use crate::{
    config::SuiteConfig,
    http::get_as,
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison},
};

/// Honest tenants, and the eighth, which attacks or sends the same load.
const HONEST: [&str; 7] = ["ann", "bob", "cleo", "dan", "eve", "fay", "gus"];
const EIGHTH: &str = "mal";
/// Load of all eight, as a share of the capacity.
const LOAD: f64 = 0.8;
/// Clients of one tenant that measure the capacity.
const CLIENTS: usize = 32;
const SETTLE: Duration = Duration::from_secs(10);
/// Memory budget of the gateway: requests, its code and tables, and its grammar helpers.
const GATEWAY_BYTES: f64 = ((2_u64 << 30) + (256 << 20)) as f64;

/// Measures the seven's tokens per second and slowest first tokens, and the gateway's peak memory.
///
/// # Errors
/// If a deployment does not start, or a request of the seven fails for another reason than a full queue.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    config.attacks.as_deref().map_or(Ok(()), check_names)?;
    let length = Duration::from_secs(config.seconds);
    let names = [&HONEST[..], &[EIGHTH]].concat();
    let tenants = Tenants::start(config, cores, &names, "", &[])?;
    let peak = tenants.closed(&[(HONEST[0], CLIENTS)], LoadWindow { settle: SETTLE / 2, length: SETTLE })?;
    let per_s = peak[0].served_per_s(SETTLE);
    ensure!(per_s > 0.0, "nothing was served");
    let each = LOAD * per_s / names.len() as f64;
    eprintln!("holobiont-bench: {each:.2} requests a second of each of {}", names.len());
    let memory = Mutex::new(Vec::new());
    let how = LoadWindow { settle: SETTLE, length };
    let asking = |names: &[&'static str]| names.iter().map(|name| (*name, each)).collect::<Vec<_>>();
    let (honest, all) = (asking(&HONEST), asking(&names));
    let attacked = |round| -> Result<FairnessSample> {
        let (tries, answers, highest) =
            tenants.beside(EIGHTH, config.attacks.as_deref(), || tenants.open(&honest, how, round))?;
        eprintln!("holobiont-bench: the attacks were answered {answers:?}");
        memory.lock().unwrap_or_else(PoisonError::into_inner).push(highest);
        samples(&tries?, length)
    };
    let asked = |round| samples(&tenants.open(&all, how, round)?[..HONEST.len()], length);
    let [beside, fair] = alternate(config.runs, [Box::new(attacked), Box::new(asked)])?;
    let row = |index: usize, what: &str, (unit, better), target| -> Result<Comparison> {
        Ok(Comparison {
            bench: "hostile",
            case: format!("seven tenants beside one that attacks every door: {what}"),
            unit,
            better,
            ours: Samples::of(&beside, |samples| samples[index])?,
            rival: rival(
                "the seven beside an eighth that asks as they do",
                Samples::of(&fair, |samples| samples[index])?,
            ),
            target: Some(target),
        })
    };
    Ok(vec![
        row(0, "goodput", ("tokens/s", Better::Higher), BenchTarget::ShareAtLeast(GOODPUT))?,
        row(1, "p99 first token", ("ms", Better::Lower), BenchTarget::ShareAtMost(FIRST_TOKEN))?,
        Comparison {
            bench: "hostile",
            case: "highest memory of the gateway under attack".to_owned(),
            unit: "bytes",
            better: Better::Lower,
            ours: Samples::new(memory.into_inner().unwrap_or_else(PoisonError::into_inner))?,
            rival: rival("the sum of its settings", Samples::new(vec![GATEWAY_BYTES])?),
            target: Some(BenchTarget::OursAtMost(GATEWAY_BYTES)),
        },
    ])
}

impl Tenants {
    /// Runs `work` while `name` makes the attacks `only`, or all of them. Returns the result of `work`, the
    /// number of responses to attacks by status, and the gateway's peak memory in bytes.
    fn beside<T>(
        &self,
        name: &str,
        only: Option<&str>,
        work: impl FnOnce() -> T,
    ) -> Result<(T, BTreeMap<u16, usize>, f64)> {
        let is_over = AtomicBool::new(false);
        let attacker = Attacker {
            port: self.port(),
            key: self.key(name)?,
            only,
            model: self.base(),
            is_over: &is_over,
            answers: Mutex::default(),
        };
        let (done, highest) = thread::scope(|scope| {
            scope.spawn(|| attacker.run());
            let watch = scope.spawn(|| self.highest_memory(&is_over));
            let done = work();
            is_over.store(true, Ordering::Relaxed);
            (done, watch.join().unwrap_or_else(|_| Err(anyhow!("the watch panicked"))))
        });
        let answers = attacker.answers.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok((done, answers, highest?))
    }

    /// Peak resident memory of the gateway, sampled every second.
    fn highest_memory(&self, is_over: &AtomicBool) -> Result<f64> {
        let mut highest = 0.0_f64;
        while !is_over.load(Ordering::Relaxed) {
            let metrics = get_as(self.port(), "/metrics", Some(self.operator()))?;
            let value = metrics.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
            let value: f64 = value.context("/metrics tells no resident memory")?.trim().parse()?;
            highest = highest.max(value);
            thread::sleep(Duration::from_secs(1));
        }
        Ok(highest)
    }
}
