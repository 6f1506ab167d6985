//! Cost of the tunnel: an executor behind its TLS listener for other hosts, here over loopback, beside one
//! behind its ipc socket.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, Holobiont, Installation},
    http::{Timeline, free_port},
    machine::Cores,
    measure::{Samples, alternate},
    process::LoggedProcess,
    report::{Better, Comparison, PeerSamples},
    workload::{BenchRequest, first_token},
};

const LONE: usize = 20;
/// Tokens of an answer; the tokens after the first are timed.
const ANSWER_TOKENS: usize = 64;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for deployments")?;
    let core = cores.numbers()[0];
    let near = start(config, &folder.path().join("near"), &format!("cores = \"{core}\"\n"), "")?;
    let far = TlsExecutor::start(config, &folder.path().join("far"), core)?;
    let first_ms = |timeline: &Timeline| (timeline.first - timeline.sent).as_secs_f64() * 1e3;
    let each_ms = |timeline: &Timeline| {
        (timeline.last - timeline.first).as_secs_f64() * 1e3 / (timeline.tokens.max(2) - 1) as f64
    };
    let first = |server, round| median(server, round, 1, first_ms);
    let each = |server, round| median(server, round, ANSWER_TOKENS, each_ms);
    let firsts = alternate(
        config.runs,
        [Box::new(|round| first(&far.gateway, round)), Box::new(|round| first(&near, round))],
    )?;
    let tokens = alternate(
        config.runs,
        [Box::new(|round| each(&far.gateway, round)), Box::new(|round| each(&near, round))],
    )?;
    Ok(vec![
        comparison("a lone request: first token", firsts)?,
        comparison("its other tokens, each", tokens)?,
    ])
}

/// An executor without supervisor, and a gateway that reaches it over TLS.
struct TlsExecutor {
    gateway: Holobiont,
    /// Dropped after its gateway.
    _executor: LoggedProcess,
}

impl TlsExecutor {
    fn start(config: &SuiteConfig, folder: &Path, core: usize) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (port, file) = (free_port()?, |name: &str| folder.join(name));
        certificates(config, folder)?;
        let mut command = Command::new(config.ours.join("base-executor"));
        command.arg("--model").arg(&config.model).arg("--socket").arg(file("run/executor.sock"));
        command
            .arg("--layer-cert")
            .arg(file("server.pem"))
            .arg("--layer-cert-key")
            .arg(file("server-key.pem"));
        command.arg("--layer-client-ca").arg(file("ca.pem")).args(["--layer-gateways", "front"]);
        command.arg("--layer-listen").arg(format!("127.0.0.1:{port}"));
        command.args(["--cores", &core.to_string(), "--max-workers", "0"]);
        let executor = LoggedProcess::start(&mut command, &file("executor.log"))?;
        let shown = |field: &str, name: &str| format!("{field} = {:?}\n", file(name));
        let gateway = shown("executor_ca", "ca.pem")
            + &shown("executor_cert", "client-front.pem")
            + &shown("executor_cert_key", "client-front-key.pem");
        let address = format!("address = \"127.0.0.1:{port}\"\n");
        Ok(Self { gateway: start(config, folder, &address, &gateway)?, _executor: executor })
    }
}

/// Makes certificates with the documented command.
fn certificates(config: &SuiteConfig, folder: &Path) -> Result<()> {
    let mut command = Command::new(config.ours.join("holobiont"));
    command.args(["cert", "--host", "127.0.0.1", "--client", "front", "--dir"]).arg(folder);
    let made = command.output().context("holobiont cert cannot be run")?;
    ensure!(made.status.success(), "holobiont cert: {}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

fn start(config: &SuiteConfig, folder: &Path, executor: &str, gateway: &str) -> Result<Holobiont> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let file: PathBuf = folder.join("deployment.toml");
    let text = format!(
        "[workers]\ncount = 0\n[training]\ntrainers = 0\n[gateway]\n{gateway}[[executor]]\nname = \"only\"\n{executor}"
    );
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    let (binaries, model) = (config.ours.clone(), config.model.clone());
    let installation =
        Installation { binaries, model, placement: DeploymentPlacement::Described(file), key: None };
    Holobiont::start(&installation, &[], &folder.join("up"))
}

fn median(server: &Holobiont, round: usize, tokens: usize, figure: impl Fn(&Timeline) -> f64) -> Result<f64> {
    let timelines: Result<Vec<_>> = (0..LONE)
        .map(|number| server.ask(&BenchRequest { generate: tokens, ..first_token(round * LONE + number) }))
        .collect();
    Ok(Samples::of(&timelines?, figure)?.median())
}

fn comparison(case: &str, [far, near]: [Vec<f64>; 2]) -> Result<Comparison> {
    let name = "holobiont, over ipc".to_owned();
    Ok(Comparison {
        bench: "far",
        case: case.to_owned(),
        unit: "ms",
        better: Better::Lower,
        ours: Samples::new(far)?,
        rival: PeerSamples { name, format: "Q4_1".to_owned(), samples: Samples::new(near)? },
        target: None,
    })
}
