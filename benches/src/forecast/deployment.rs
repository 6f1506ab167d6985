//! Three executors on two cores: one has a core to itself, the others have quotas of the second.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    process::Pid,
    thread::{CpuSet, sched_setaffinity},
};
use scheduling::{
    perf::linear_fit::{LinearFit, TimingSample},
    routing::RoutingPolicy,
};
use serde_json::Value;
use simulator::cost::CostModel;
use tempfile::TempDir;

use super::cpu_quota::CpuQuota;
use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, EnvSetting, Holobiont, Installation},
    http::{get, post},
    machine::Cores,
    process::children_called,
    sim_validation::{costs::fitted, deployment::write, probe::StepProbe},
};

/// Names of the executors.
pub(super) const NAMES: [&str; 3] = ["fast", "middle", "slow"];
/// Share of the second core for each executor; `None` for the executor that has the first core alone.
const SHARES: [Option<f64>; 3] = [None, Some(0.45), Some(0.25)];
pub(super) const RANKS: [usize; 5] = [8, 16, 32, 64, 128];
/// Device memory of each executor: enough for all KV blocks and adapters.
const DEVICE_BYTES: u64 = 1 << 30;
const READY: Duration = Duration::from_secs(120);

/// Prompt lengths measured one at a time: short ones more often, since each has another rank.
const ALONE: [usize; 10] = [1, 8, 16, 16, 32, 32, 64, 64, 128, 256];
/// Sequences that decode together, and context tokens of each.
const TOGETHER: [(usize, usize); 11] =
    [(1, 32), (1, 32), (1, 32), (2, 32), (3, 32), (4, 32), (6, 32), (8, 32), (12, 32), (1, 512), (4, 256)];
/// Prompts of one step, and prompts beside sequences that decode.
const AT_ONCE: [(usize, usize); 3] = [(2, 16), (4, 16), (4, 64)];
const BESIDE: [(usize, usize); 5] = [(16, 1), (16, 2), (16, 6), (64, 2), (128, 4)];
/// Prompt tokens of the requests that measure a cold adapter.
const LOADING: usize = 16;
/// Sequences whose steps measure an executor's speed, and context tokens of each.
const PACE: (usize, usize) = (6, 32);

#[derive(Debug)]
pub(super) struct UnequalFleet {
    // Dropped before its control groups and its folder.
    pub(super) server: Holobiont,
    ranks: Vec<usize>,
    block_bytes: u64,
    _shares: Vec<CpuQuota>,
    _folder: TempDir,
}

impl UnequalFleet {
    /// Starts the fleet with adapters of these ranks.
    ///
    /// # Errors
    /// Fails if an executor does not start, or there are not two cores.
    pub(super) fn start(
        config: &SuiteConfig,
        cores: &Cores,
        policy: RoutingPolicy,
        ranks: Vec<usize>,
    ) -> Result<Self> {
        let [first, second] = cores.numbers()[..] else {
            bail!("three executors of unequal speed are measured on two cores: give --threads 2");
        };
        let folder = tempfile::tempdir().context("no folder for a deployment")?;
        let file = folder.path().join("deployment.toml");
        let executors: String =
            NAMES.iter().map(|name| format!("[[executor]]\nname = \"{name}\"\n\n")).collect();
        let gateway = format!("[lab]\nrouting = \"{}\"\n\n[workers]\ncount = 0\n\n", policy.name());
        fs::write(&file, gateway + &executors).with_context(|| format!("cannot write {}", file.display()))?;
        let installation = Installation {
            binaries: config.ours.clone(),
            model: config.model.clone(),
            placement: DeploymentPlacement::Described(file),
            key: None,
        };
        let adapters = write(&config.model, &ranks, &folder.path().join("adapters"))?;
        let settings: [EnvSetting; 2] =
            [("HOLOBIONT_CORES", second.to_string()), ("HOLOBIONT_DEVICE_BYTES", DEVICE_BYTES.to_string())];
        let server = Holobiont::start_with(&installation, &adapters, &folder.path().join("up"), &settings)?;
        let status = wait_for_all(server.port())?;
        let block_bytes = status["executors"][0]["memory"]["block_bytes"].as_u64();
        let block_bytes = block_bytes.context("/v1/status says no size of a block")?;
        let shares = place(server.process_id(), first)?;
        Ok(Self { server, ranks, block_bytes, _shares: shares, _folder: folder })
    }

    /// Costs of steps and cold adapters per executor: the first is measured, and the others' are its costs
    /// times their measured slowdown. Each measurement runs while the other executors are drained.
    ///
    /// # Errors
    /// If a request fails.
    pub(super) fn costs(&self, config: &SuiteConfig) -> Result<Vec<CostModel>> {
        let (model, pace_s) = self.alone(NAMES[0], || Ok((self.observe(config)?, self.pace_s()?)))?;
        let costs = NAMES.iter().skip(1).map(|name| {
            let slowness = self.alone(name, || self.pace_s())? / pace_s;
            eprintln!("holobiont-bench: '{name}' is {slowness:.2} times as slow as '{}'", NAMES[0]);
            Ok(slowed(&model, slowness))
        });
        [Ok(model)].into_iter().chain(costs).collect()
    }

    /// Runs `measure` while only the executor called `name` takes requests.
    fn alone<T>(&self, name: &str, measure: impl Fn() -> Result<T>) -> Result<T> {
        let order = |what: &str| {
            let mut others = NAMES.iter().filter(|other| **other != name);
            let port = self.server.port();
            others.try_for_each(|other| post(port, &format!("/v1/executors/{other}/{what}")))
        };
        order("drain")?;
        let measured = measure()?;
        order("undrain")?;
        Ok(measured)
    }

    /// Seconds of some prompts and steps, after a warm-up that loads the adapters.
    fn pace_s(&self) -> Result<f64> {
        let mut seconds = 0.0;
        for _ in 0..2 {
            let mut probe = StepProbe::new(&self.server, &self.ranks);
            seconds = probe.together(PACE.0, PACE.1)?.seconds + probe.together(1, PACE.1)?.seconds;
        }
        Ok(seconds)
    }

    fn observe(&self, config: &SuiteConfig) -> Result<CostModel> {
        let mut probe = StepProbe::new(&self.server, &self.ranks);
        let loads = probe.loads(LOADING)?;
        let mut observed = Vec::new();
        for tokens in ALONE {
            observed.push(probe.alone(tokens)?);
        }
        for (sequences, context) in TOGETHER {
            observed.push(probe.together(sequences, context)?);
        }
        for (prompts, tokens) in AT_ONCE {
            observed.push(probe.at_once(prompts, tokens)?);
        }
        for (tokens, sequences) in BESIDE {
            observed.push(probe.beside(tokens, sequences)?);
        }
        let model = fitted(&config.model, self.block_bytes, observed.into_iter())?;
        let bytes = self.ranks.iter().map(|&rank| model.adapter_bytes(rank as u32) as f64);
        let loads: Vec<TimingSample> =
            bytes.zip(loads).map(|(bytes, seconds)| TimingSample::new(bytes, seconds)).collect();
        let LinearFit { alpha, beta } = LinearFit::least_squares(&loads).context("there are no adapters")?;
        Ok(CostModel { load_s: beta, load_byte_s: alpha, ..model })
    }
}

fn slowed(model: &CostModel, slowness: f64) -> CostModel {
    CostModel {
        step_s: model.step_s * slowness,
        batch_s: model.batch_s * slowness,
        prefill_token_s: model.prefill_token_s * slowness,
        prefill_pair_s: model.prefill_pair_s * slowness,
        decode_sequence_s: model.decode_sequence_s * slowness,
        context_token_s: model.context_token_s * slowness,
        rank_row_s: model.rank_row_s * slowness,
        block_copy_s: model.block_copy_s * slowness,
        load_s: model.load_s * slowness,
        load_byte_s: model.load_byte_s * slowness,
        ..*model
    }
}

/// Waits until all executors serve and returns `/v1/status`.
fn wait_for_all(port: u16) -> Result<Value> {
    let begin = Instant::now();
    loop {
        let status: Value =
            serde_json::from_str(&get(port, "/v1/status")?).context("a status is not JSON")?;
        let executors = status["executors"].as_array().cloned().unwrap_or_default();
        if executors.iter().filter(|one| one["state"] == "ready").count() == NAMES.len() {
            return Ok(status);
        }
        ensure!(begin.elapsed() < READY, "the executors are not ready after {READY:?}: {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Moves the first executor to core `first` and limits the others to their shares of their core.
fn place(up: u32, first: usize) -> Result<Vec<CpuQuota>> {
    let mut shares = Vec::new();
    for (name, share) in NAMES.iter().zip(SHARES) {
        let process = process_of(up, name)?;
        match share.map(|share| CpuQuota::of(process, share)) {
            None => move_to(process, first)?,
            Some(Ok(share)) => shares.push(share),
            Some(Err(error)) => {
                eprintln!("holobiont-bench: '{name}' has what others leave of its core, for {error:#}");
            }
        }
    }
    Ok(shares)
}

fn process_of(up: u32, name: &str) -> Result<u32> {
    let socket = format!("executor-{name}.sock\0");
    let is_its = |id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&socket)
    };
    let executors = children_called(up, "base-executor")?;
    executors.into_iter().find(is_its).with_context(|| format!("there is no executor '{name}'"))
}

fn move_to(process: u32, core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    let threads = fs::read_dir(format!("/proc/{process}/task")).context("an executor has ended")?;
    for thread in threads {
        let id: i32 = thread?.file_name().to_string_lossy().parse().context("a thread has no number")?;
        sched_setaffinity(Pid::from_raw(id), &set).context("cannot move an executor to its core")?;
    }
    Ok(())
}
