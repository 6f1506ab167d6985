//! `holobiont doctor`: checks whether this machine suits a deployment, and says how to fix each finding. With
//! a model, the command says instead how many tokens and adapters fit.

pub(crate) mod capacity;
pub(crate) mod host_ledger;
mod numa;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Arg;
use rustix::process::{Resource, getrlimit};

use settings::{ByteCount, DeviceChoice, SettingFlags};

use self::host_ledger::HostLedger;
use crate::{
    commands::check,
    deployment::{
        config::{DeploymentConfig, DeploymentConfigError},
        cores,
    },
    exit::Exit,
    home::HomeDirectory,
    terminal::{
        Terminal,
        findings::{CheckFailure, Finding, Health, report},
        table::size,
    },
};

/// Free disk bytes below which a registry and logs may run out of space.
const LITTLE_DISK_BYTES: u64 = 1 << 30;

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArguments {
    /// Deployment file [default: environment variables and defaults only]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Memory of a GPU that need not be in this machine, for --model with --device cuda
    #[arg(long, value_name = "BYTES", requires = "model")]
    device_memory: Option<ByteCount>,
    #[command(flatten)]
    settings: SettingFlags,
}

/// Hides the settings of `up` from the help of `doctor`, except the model.
pub(crate) fn without_settings(argument: Arg) -> Arg {
    match argument.get_help_heading() {
        Some(_) if argument.get_id() == "model" => argument
            .help(
                "Computes how many tokens and adapters fit beside a model, with the settings of `up`, all of \
                   which are options here too",
            )
            .help_heading(None),
        Some(_) => argument.hide(true),
        None => argument,
    }
}

pub(crate) fn run(arguments: &DoctorArguments, terminal: Terminal) -> Result<(), CheckFailure> {
    let home = HomeDirectory::from_environment();
    let config = DeploymentConfig::from_flags(&arguments.settings)
        .and_then(|flags| DeploymentConfig::layered(flags, arguments.config.as_deref()));
    let names_model = arguments.settings.given().any(|(setting, _)| setting.flag == "model");
    match config {
        Ok(config) if names_model => capacity::run(&config, arguments.device_memory, &home, terminal),
        config => machine(config, &home, terminal),
    }
}

/// Compares the memory of the host with what the executors, or several bases, need.
fn memory(config: &DeploymentConfig, home: &HomeDirectory) -> Option<Finding> {
    match HostLedger::of(config, home) {
        Ok(None) => capacity::memory(config, home),
        Ok(Some(ledger)) => Some(ledger.finding()),
        Err(error) => Some(Finding::error("bases", &error)),
    }
}

/// Checks the machine and the configuration.
fn machine(
    config: Result<DeploymentConfig, DeploymentConfigError>,
    home: &HomeDirectory,
    terminal: Terminal,
) -> Result<(), CheckFailure> {
    let mut findings = vec![cores(), cpu(&read("/proc/cpuinfo"))];
    match config {
        Ok(config) => {
            findings.extend(numa::finding(&config, &numa::nodes(Path::new(numa::NODES))));
            findings.extend(memory(&config, home));
            let is_cpu =
                |config: &DeploymentConfig| matches!(config.executor.device, None | Some(DeviceChoice::Cpu));
            if config.members().iter().all(|member| is_cpu(&member.config)) {
                findings.push(unused_gpu(&check::device(DeviceChoice::Cuda { ordinal: 0 })));
            }
            findings.push(huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")));
            findings.push(locked_memory());
            findings.push(open_files());
            findings.push(disk(&config.deployment.state.clone().unwrap_or_else(|| home.state())));
            findings.extend(check::deployment(&config, home));
        }
        Err(error) => findings.push(Finding::error("configuration", &error)),
    }
    findings.extend(service());
    report(&findings, Exit::Failed, terminal)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn cores() -> Finding {
    match cores::allowed().0.len() {
        0 => Finding::warn("cores", "the system does not list the cores", "set [executor].cores"),
        1 => {
            Finding::warn("cores", "1", "use at least two cores, so that HTTP does not wait for computation")
        }
        cores => Finding::ok("cores", cores.to_string()),
    }
}

/// Checks the widest SIMD extension of the CPU.
fn cpu(cpuinfo: &str) -> Finding {
    let flags =
        cpuinfo.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':').map(|(_, flags)| flags));
    let flags: Vec<&str> = flags.unwrap_or_default().split_whitespace().collect();
    let has = |flag: &str| flags.contains(&flag);
    let fix = "use a CPU with AVX2 or AVX-512, which is several times as fast";
    if !(has("avx2") && has("fma") && has("f16c")) {
        Finding::warn("arithmetic", "portable code", fix)
    } else if ["avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"].into_iter().all(has) {
        let amx = if has("amx_int8") { ", and AMX where Linux grants it" } else { "" };
        Finding::ok("arithmetic", format!("AVX-512 with VNNI and BF16{amx}"))
    } else if has("avx512f") {
        Finding::ok("arithmetic", "AVX2, because AVX-512 lacks VNNI or BF16")
    } else {
        Finding::ok("arithmetic", "AVX2")
    }
}

/// Reports a GPU that the configuration does not use; no GPU at all is no fault.
fn unused_gpu(first: &Finding) -> Finding {
    match first.health {
        Health::Ok => {
            Finding::ok("GPU", format!("{}; device = \"cuda:0\" in [executor] uses it", first.found))
        }
        Health::Warn | Health::Fail => Finding::ok("GPU", format!("none in use: {}", first.found)),
    }
}

fn huge_pages(enabled: &str) -> Finding {
    match enabled.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
        Some((mode @ ("always" | "madvise"), _)) => Finding::ok("huge pages", format!("transparent, {mode}")),
        Some((mode, _)) => Finding::warn(
            "huge pages",
            format!("transparent, {mode}"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => Finding::warn(
            "huge pages",
            "the kernel has no huge pages",
            "use a kernel with transparent huge pages, for fewer page faults",
        ),
    }
}

fn locked_memory() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok("locked memory", "unlimited"),
        Some(bytes) if bytes >= 64 << 20 => Finding::ok("locked memory", size(bytes)),
        Some(bytes) => {
            Finding::warn("locked memory", size(bytes), "ulimit -l unlimited, or LimitMEMLOCK= in the unit")
        }
    }
}

fn open_files() -> Finding {
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < 4096 => Finding::warn(
            "open files",
            files.to_string(),
            "ulimit -n 65536, or LimitNOFILE= in the unit; each connection needs a file",
        ),
        Some(files) => Finding::ok("open files", files.to_string()),
        None => Finding::ok("open files", "unlimited"),
    }
}

/// Checks free space where the state directory is or would be.
fn disk(state: &Path) -> Finding {
    const NAME: &str = "disk space";
    let Some(existing) = state.ancestors().find(|path| path.exists()) else {
        return Finding::fail(
            NAME,
            format!("cannot create {}", state.display()),
            "set [deployment].state to another directory",
        );
    };
    match rustix::fs::statvfs(existing) {
        Ok(space) => {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            let found = format!("{} free for {}", size(free), state.display());
            match free {
                0..LITTLE_DISK_BYTES => {
                    Finding::warn(NAME, found, "free disk space, or move [deployment].state")
                }
                _ => Finding::ok(NAME, found),
            }
        }
        Err(errno) => Finding::warn(NAME, format!("{}: {errno}", existing.display()), "run df"),
    }
}

/// Checks the systemd units, if there are any.
fn service() -> Option<Finding> {
    let output = Command::new("systemctl")
        .args(["list-units", "--all", "--plain", "--no-legend", "--no-pager", "holobiont*"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    service_finding(&String::from_utf8_lossy(&output.stdout))
}

fn service_finding(listed: &str) -> Option<Finding> {
    // UNIT LOAD ACTIVE SUB DESCRIPTION
    let units: Vec<[&str; 4]> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().take(4).collect::<Vec<_>>().try_into().ok())
        .collect();
    let failed = units.iter().find(|[_, _, active, _]| *active == "failed");
    match (units.as_slice(), failed) {
        ([], _) => None,
        (_, Some([unit, ..])) => Some(Finding::fail(
            "service",
            format!("{unit} has failed"),
            format!("journalctl --unit={unit} shows why; systemctl reset-failed {unit} allows another start"),
        )),
        (units, None) => {
            let states = units.iter().map(|[unit, _, active, sub]| format!("{unit} {active} ({sub})"));
            Some(Finding::ok("service", states.collect::<Vec<_>>().join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_arithmetic_is_named() {
        let cpu = |flags: &str| cpu(&format!("processor: 0\nflags\t\t: {flags}\n"));
        let avx512 = "fpu avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni";
        assert_eq!(cpu(&format!("{avx512} avx512_bf16")).found, "AVX-512 with VNNI and BF16");
        assert_eq!(cpu(avx512).found, "AVX2, because AVX-512 lacks VNNI or BF16");
        assert_eq!(cpu("avx2 fma f16c").found, "AVX2");
        assert_eq!(cpu("sse2").health, Health::Warn);
    }

    #[test]
    fn a_gpu_that_is_not_used_is_named() {
        let found = |finding| unused_gpu(&finding).found;
        assert!(found(Finding::ok("d", "A GPU")).contains("device = \"cuda:0\""));
        assert_eq!(found(Finding::fail("d", "there is no driver", "x")), "none in use: there is no driver");
    }

    #[test]
    fn a_failed_unit_is_found_and_no_units_are_no_finding() {
        let listed = "holobiont-executor.service loaded failed failed Base\nholobiont-gateway.service loaded active running G\n";
        let finding = service_finding(listed).unwrap();
        assert_eq!(finding.health, Health::Fail);
        assert!(finding.fix.unwrap().contains("reset-failed holobiont-executor.service"));
        assert_eq!(service_finding(""), None);
    }

    #[test]
    fn huge_pages_that_are_off_are_a_warning() {
        assert_eq!(huge_pages("always [madvise] never\n").health, Health::Ok);
        assert_eq!(huge_pages("always madvise [never]\n").health, Health::Warn);
    }
}
