//! `holobiont doctor --model`: how many tokens and adapters fit beside a model, without loading the model.
//!
//! The figures are those of `base-executor capacity`, which runs the functions that size a running executor.

use std::{ffi::OsString, io, path::Path, process::Command};

use serde::Deserialize;
use serde_json::{Value, json};
use settings::{ByteCount, DeviceChoice, ProcessKind};

use crate::{
    commands::check,
    deployment::{
        config::{DeployedExecutor, DeploymentConfig},
        program_paths,
    },
    exit::{Exit, Explain},
    home::HomeDirectory,
    models::{self, FindError},
    terminal::{
        Terminal, TextStyle,
        findings::{CheckFailure, Finding, report_with},
        table::{size, table},
    },
};

/// Name of the program that computes the figures.
const PROGRAM: &str = "base-executor";

/// Name of the finding about the memory that is free now.
const FREE_MEMORY: &str = "free memory";

/// Next step if the executor names none.
const NO_FIX: &str = "check the model and the settings with holobiont check";

/// Tokens of the contexts that are counted, if the model's own context is not shorter.
const CONTEXT_TOKENS: u64 = 4096;

/// Reason why the capacity of an executor is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CapacityError {
    #[error(transparent)]
    Model(#[from] FindError),
    #[error("cannot compute it without the program {PROGRAM}")]
    NoProgram,
    #[error("cannot run {PROGRAM}")]
    Run(#[source] io::Error),
    #[error("the answer of {PROGRAM} cannot be read")]
    Answer(#[source] serde_json::Error),
    /// The executor refuses the model or the settings.
    #[error("{cause}")]
    Refused { cause: String, fix: Option<String>, exit: Exit },
}

impl Explain for CapacityError {
    fn exit(&self) -> Exit {
        match self {
            Self::Model(error) => error.exit(),
            Self::NoProgram => Exit::NotFound,
            Self::Run(_) | Self::Answer(_) => Exit::Failed,
            Self::Refused { exit, .. } => *exit,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Model(error) => error.next(),
            Self::NoProgram | Self::Run(_) | Self::Answer(_) => {
                Some("install all programs of one release side by side".into())
            }
            Self::Refused { fix, .. } => fix.clone(),
        }
    }
}

/// Figures of one executor, as `base-executor capacity` prints them.
#[derive(Debug, Deserialize)]
struct Capacity {
    architecture: String,
    device: String,
    context_length: u64,
    weights: WeightCapacity,
    kv: KvCapacity,
    adapters: AdapterCapacity,
    host: HostCapacity,
    gpu: Option<GpuCapacity>,
}

#[derive(Debug, Deserialize)]
struct WeightCapacity {
    bytes: u64,
    streamed: bool,
}

#[derive(Debug, Deserialize)]
struct KvCapacity {
    bits: u32,
    bytes_per_token: u64,
    tokens: u64,
}

#[derive(Debug, Deserialize)]
struct AdapterCapacity {
    bits: u32,
    host_bytes: u64,
    device_bytes: u64,
    sizes: Vec<AdapterSizeCapacity>,
}

#[derive(Debug, Deserialize)]
struct AdapterSizeCapacity {
    targets: String,
    rank: u32,
    bytes: u64,
    host_adapters: u64,
    device_adapters: u64,
}

#[derive(Debug, Deserialize)]
struct HostCapacity {
    weights_bytes: u64,
    pool_bytes: u64,
    adapter_bytes: u64,
    kv_offload_bytes: u64,
    limit_bytes: u64,
    free_bytes: u64,
}

#[derive(Debug, Deserialize)]
struct GpuCapacity {
    free_bytes: u64,
    total_bytes: u64,
    scratch_bytes: u64,
    pool_bytes: u64,
}

/// Prints the capacity of every executor of `config` on this host.
pub(super) fn run(
    config: &DeploymentConfig,
    device_memory: Option<ByteCount>,
    home: &HomeDirectory,
    terminal: Terminal,
) -> Result<(), CheckFailure> {
    let (mut findings, mut values, mut hosts, mut exit) = (Vec::new(), Vec::new(), Vec::new(), Exit::Failed);
    for member in config.members() {
        let found = match read_capacity(&member, device_memory, home) {
            Ok((value, capacity)) => {
                values.push(json!({ "executor": member.name, "figures": value }));
                let found = capacity.findings();
                hosts.push(capacity.host);
                found
            }
            Err(error) => {
                exit = error.exit();
                vec![Finding::error("capacity", &error)]
            }
        };
        findings.extend(found.into_iter().map(|finding| check::named(finding, &member)));
    }
    findings.extend(free_memory(&hosts));
    report_with(&findings, &json!({ "capacity": values }), exit, terminal)
}

/// Compares what all executors of `config` on this host take with the memory that is free now; `None` without
/// executors.
pub(super) fn memory(config: &DeploymentConfig, home: &HomeDirectory) -> Option<Finding> {
    let host = |member| read_capacity(&member, None, home).map(|(_, capacity)| capacity.host);
    match config.members().into_iter().map(host).collect::<Result<Vec<_>, _>>() {
        Ok(hosts) => free_memory(&hosts),
        Err(error) => {
            let fix = error.next().unwrap_or_else(|| NO_FIX.to_owned());
            Some(Finding::warn(FREE_MEMORY, format!("not compared: {error}"), fix))
        }
    }
}

/// Returns the host memory that an executor needs at most, and its limit.
pub(super) fn host_memory(
    member: &DeployedExecutor,
    home: &HomeDirectory,
) -> Result<(u64, u64), CapacityError> {
    read_capacity(member, None, home).map(|(_, capacity)| (capacity.host.needed(), capacity.host.limit_bytes))
}

/// Runs the executor's program with the settings that `up` would pass to it. Returns the answer, and the same
/// parsed.
fn read_capacity(
    member: &DeployedExecutor,
    device_memory: Option<ByteCount>,
    home: &HomeDirectory,
) -> Result<(Value, Capacity), CapacityError> {
    let model = models::find(member.config.model.name.as_deref(), home)?;
    let program = program_paths::find(PROGRAM).ok_or(CapacityError::NoProgram)?;
    let output = Command::new(program).args(command(&member.config, &model, device_memory, home)).output();
    let output = output.map_err(CapacityError::Run)?;
    if output.status.success() {
        let value: Value = serde_json::from_slice(&output.stdout).map_err(CapacityError::Answer)?;
        let capacity = Capacity::deserialize(&value).map_err(CapacityError::Answer)?;
        return Ok((value, capacity));
    }
    let refusal = check::said_finding("capacity", false, &[output.stdout, output.stderr].concat(), NO_FIX);
    let (cause, exit) = (refusal.found, Exit::of_code(output.status.code()));
    let is_on_gpu = matches!(member.config.executor.device, Some(DeviceChoice::Cuda { .. }));
    let fix = refusal.fix.map(|fix| match is_on_gpu && device_memory.is_none() {
        true => format!("{fix}; or give the memory of a GPU, as in --device-memory 80GiB"),
        false => fix,
    });
    Err(CapacityError::Refused { cause, fix, exit })
}

fn command(
    config: &DeploymentConfig,
    model: &Path,
    device_memory: Option<ByteCount>,
    home: &HomeDirectory,
) -> Vec<OsString> {
    // No socket is made.
    let socket = home.state().join("executor.sock");
    let mut words: Vec<OsString> =
        vec!["capacity".into(), "--model".into(), model.into(), "--socket".into(), socket.into()];
    if let Some(bytes) = device_memory {
        words.extend(["--device-memory".into(), bytes.to_string().into()]);
    }
    words.extend(config.arguments_for(ProcessKind::Executor));
    words
}

impl Capacity {
    fn findings(&self) -> Vec<Finding> {
        let model = format!("{}, contexts of up to {} tokens", self.architecture, self.context_length);
        let fit = self.gpu.as_ref().map_or_else(|| self.host_memory(), |gpu| self.gpu_memory(gpu));
        vec![
            Finding::ok("model", model),
            Finding::ok("weights", self.weights()),
            self.kv_cache(),
            self.adapters(),
            fit,
        ]
    }

    fn weights(&self) -> String {
        let bytes = size(self.weights.bytes);
        match self.weights.streamed {
            true => format!("at most {bytes} on the device {}, the rest streamed from the disk", self.device),
            false => format!("{bytes} on the device {}", self.device),
        }
    }

    fn kv_cache(&self) -> Finding {
        const NAME: &str = "KV cache";
        let KvCapacity { bits, bytes_per_token, tokens } = self.kv;
        let context = self.context_length.min(CONTEXT_TOKENS);
        let found = format!(
            "{} per token with {bits} bits per value; at most {tokens} tokens, as {} contexts of {context} tokens",
            size(bytes_per_token),
            tokens / context.max(1),
        );
        match tokens < self.context_length {
            true => Finding::warn(
                NAME,
                format!("{found}; the longest context does not fit"),
                "raise --device-bytes or --kv-bytes, set --kv-dtype int8 on a CPU, or lower --context-length",
            ),
            false => Finding::ok(NAME, found),
        }
    }

    fn adapters(&self) -> Finding {
        let AdapterCapacity { bits, host_bytes, device_bytes, sizes } = &self.adapters;
        let row = |of: &AdapterSizeCapacity| {
            let counts = [of.host_adapters, of.device_adapters].map(|count| count.to_string());
            let [host, device] = counts;
            [of.targets.clone(), of.rank.to_string(), size(of.bytes), host, device]
        };
        let rows: Vec<_> = sizes.iter().map(row).collect();
        let head = ["TARGETS", "RANK", "SIZE", "HOST TIER", "DEVICE TIER"];
        let found = format!(
            "{bits} bits per value; host tier {}, device tier at most {}\n{}",
            size(*host_bytes),
            size(*device_bytes),
            table(TextStyle::None, head, &rows)
        );
        match sizes.iter().any(|of| of.host_adapters == 0) {
            true => {
                Finding::warn("adapters", found, "raise --adapter-bytes for the largest of these adapters")
            }
            false => Finding::ok("adapters", found),
        }
    }

    /// Compares host memory of an executor on a CPU with its limit.
    fn host_memory(&self) -> Finding {
        const NAME: &str = "memory";
        let HostCapacity { weights_bytes, pool_bytes, limit_bytes, .. } = self.host;
        let found = format!(
            "{} at most: {}; the executor's limit is {}",
            size(self.host.needed()),
            self.host.by_purpose(),
            size(limit_bytes)
        );
        if weights_bytes > limit_bytes {
            const FIX: &str = "use a smaller model or one with fewer bits per weight, set \
                               --resident-weight-bytes, or raise --process-memory";
            Finding::fail(NAME, format!("{found}, which is less than the weights take"), FIX)
        } else if weights_bytes.saturating_add(pool_bytes) > limit_bytes {
            let found = format!("{found}, so the executor would refuse to start");
            Finding::fail(NAME, found, "lower --device-bytes, or --kv-bytes and --device-adapter-bytes")
        } else if self.host.needed() > limit_bytes {
            let found = format!("{found}, so loads of adapters may be refused");
            Finding::warn(NAME, found, "lower --adapter-bytes, --host-bytes or --device-bytes")
        } else {
            Finding::ok(NAME, found)
        }
    }

    /// Reports a GPU's memory; the executor refuses a model that does not fit.
    fn gpu_memory(&self, gpu: &GpuCapacity) -> Finding {
        let found = format!(
            "weights {}, passes {}, KV cache and adapters {}; {} of {} free",
            size(self.weights.bytes),
            size(gpu.scratch_bytes),
            size(gpu.pool_bytes),
            size(gpu.free_bytes),
            size(gpu.total_bytes)
        );
        Finding::ok("GPU memory", found)
    }
}

impl HostCapacity {
    fn needed(&self) -> u64 {
        let purposes = [self.weights_bytes, self.pool_bytes, self.adapter_bytes, self.kv_offload_bytes];
        purposes.into_iter().fold(0, u64::saturating_add)
    }

    fn by_purpose(&self) -> String {
        let purposes = [
            ("weights", self.weights_bytes),
            ("KV cache and adapters on the device", self.pool_bytes),
            ("host tier of adapters", self.adapter_bytes),
            ("offloaded KV cache", self.kv_offload_bytes),
        ];
        let used = purposes.into_iter().filter(|(_, bytes)| *bytes > 0);
        used.map(|(purpose, bytes)| format!("{purpose} {}", size(bytes))).collect::<Vec<_>>().join(", ")
    }
}

/// Compares what all executors take together with the memory that is free now.
fn free_memory(hosts: &[HostCapacity]) -> Option<Finding> {
    let free = hosts.first()?.free_bytes;
    let sum = |bytes: fn(&HostCapacity) -> u64| hosts.iter().map(bytes).fold(0, u64::saturating_add);
    let (weights, needed) = (sum(|host| host.weights_bytes), sum(HostCapacity::needed));
    let found = format!("{} now, of which {} are needed at most", size(free), size(needed));
    Some(if weights > free {
        Finding::fail(FREE_MEMORY, found, "choose a smaller model, or one with fewer bits per weight")
    } else if needed > free {
        Finding::warn(FREE_MEMORY, found, "lower --device-bytes or --adapter-bytes, or stop other programs")
    } else {
        Finding::ok(FREE_MEMORY, found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    const GIB: u64 = 1 << 30;

    fn capacity(limit_bytes: u64) -> Capacity {
        let value = json!({
            "architecture": "llama", "device": "cpu", "context_length": 8192,
            "weights": { "bytes": GIB, "streamed": false },
            "kv": { "bits": 16, "block_bytes": 368_640, "bytes_per_token": 23_040, "blocks": 2912, "tokens": 46_592 },
            "adapters": {
                "bits": 16, "host_bytes": GIB, "device_bytes": GIB / 2,
                "sizes": [{ "targets": "q, v", "rank": 8, "bytes": 1 << 20, "device_bytes": 2 << 20,
                    "host_adapters": 1024, "device_adapters": 256 }],
            },
            "host": {
                "weights_bytes": GIB, "pool_bytes": GIB, "adapter_bytes": GIB, "kv_offload_bytes": 0,
                "limit_bytes": limit_bytes, "free_bytes": 2 * GIB,
            },
            "gpu": null,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_sum_is_compared_with_the_limit_and_with_free_memory() {
        let health = |limit| capacity(limit).host_memory().health;
        assert_eq!((health(3 * GIB), health(3 * GIB - 1)), (Health::Ok, Health::Warn));
        assert_eq!((health(2 * GIB - 1), health(GIB - 1)), (Health::Fail, Health::Fail));
        let free = |count: u64| free_memory(&(0..count).map(|_| capacity(9 * GIB).host).collect::<Vec<_>>());
        assert_eq!(free(0), None);
        assert_eq!([1, 3].map(|count| free(count).unwrap().health), [Health::Warn, Health::Fail]);
    }

    #[test]
    fn tokens_contexts_and_adapters_are_counted() {
        let mut capacity = capacity(9 * GIB);
        let kv = capacity.kv_cache();
        assert!(kv.found.contains("46592 tokens, as 11 contexts of 4096 tokens"), "{kv:?}");
        let adapters = capacity.adapters().found;
        assert!(adapters.ends_with("q, v     8     1.00 MiB  1024       256"), "{adapters}");
        capacity.context_length = 131_072;
        assert_eq!(capacity.kv_cache().health, Health::Warn);
    }

    #[test]
    fn the_executor_gets_the_settings_that_up_passes() {
        let config = DeploymentConfig::parse("executor.kv_dtype = 'int8'\nmodel.name = 'm'").unwrap();
        let home = HomeDirectory::at(Path::new("/h"));
        let words = command(&config, Path::new("/m.gguf"), Some(ByteCount(1 << 30)), &home);
        let expected = "capacity --model /m.gguf --socket /h/state/executor.sock --device-memory 1073741824 --kv-dtype int8";
        assert_eq!(words.join(&OsString::from(" ")), OsString::from(expected));
    }
}
