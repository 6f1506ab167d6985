//! Command line and environment, checked and turned into a [`SuiteConfig`].

mod name;

use std::{
    num::{NonZeroU64, NonZeroUsize},
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use model::precision::Precision;

pub(crate) use self::name::Name;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LinkSpeed {
    /// The ratio of load time to lone prefill is that of the paper.
    Prefill,
    /// Under saturated load, loads keep the link nearly as busy as requests keep the base.
    Busy,
    /// Speed in gigabits per second.
    Gbps(f64),
}

impl LinkSpeed {
    /// Name for file names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Busy => "busy",
            Self::Gbps(_) => "given",
        }
    }
}

impl FromStr for LinkSpeed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("prefill", _) => Ok(Self::Prefill),
            ("busy", _) => Ok(Self::Busy),
            (_, Ok(gbps)) if gbps > 0.0 && f64::is_finite(gbps) => Ok(Self::Gbps(gbps)),
            _ => Err("write prefill, busy, or a number of gigabits per second".to_owned()),
        }
    }
}

/// Precision of the base that trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BasePrecision {
    Mixed,
    Bf16,
}

impl BasePrecision {
    /// Name of the executor's option.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Bf16 => "bf16",
        }
    }

    pub(crate) fn of_model(self) -> Precision {
        match self {
            Self::Mixed => Precision::Mixed,
            Self::Bf16 => Precision::Bf16,
        }
    }
}

/// Measures Holobiont and llama.cpp side by side; prints one JSON object per line.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Names of the benchmarks to run.
    #[arg(required = true, value_enum)]
    names: Vec<Name>,
    /// Model that both sides run (GGUF); GPU benchmarks need none.
    #[arg(long, env = "HOLOBIONT_MODEL", value_name = "FILE")]
    model: Option<PathBuf>,
    /// Folder of llama-bench, llama-batched-bench, llama-server, llama-quantize and llama-perplexity.
    #[arg(long, env = "HOLOBIONT_LLAMA_CPP", value_name = "DIR")]
    peer: Option<PathBuf>,
    /// Folder of holobiont, gateway, base-executor and lora-worker (default: the folder of this program).
    #[arg(long, value_name = "DIR")]
    ours: Option<PathBuf>,
    /// Python of an environment with torch, for `xab`; `tune` also needs transformers, peft and gguf.
    #[arg(long, env = "HOLOBIONT_TORCH_PYTHON", value_name = "FILE")]
    torch_python: Option<PathBuf>,
    /// Python of an environment with openvino-genai, for `openvino`.
    #[arg(long, value_name = "FILE")]
    openvino_python: Option<PathBuf>,
    /// Folder of the model exported by optimum-cli, for `openvino`; may be repeated.
    #[arg(long, value_name = "DIR")]
    openvino: Vec<PathBuf>,
    /// Folder of a Python environment with vLLM, for `vllm`.
    #[arg(long, value_name = "DIR")]
    vllm: Option<PathBuf>,
    /// Folder of the model's bf16 checkpoint, for `vllm`.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Folder that keeps the peer's requantized models between runs (default: the system's temporary folder).
    #[arg(long, value_name = "DIR")]
    requantized: Option<PathBuf>,
    /// Precision of our base in `tune`, `tune-mixed` and the benchmarks of split clients.
    #[arg(long, value_enum, default_value = "mixed")]
    precision: BasePrecision,
    /// Compute threads of either side, and cores that all processes are confined to.
    #[arg(long, default_value = "2", value_name = "N")]
    threads: NonZeroUsize,
    /// Measurements of either side, in alternation.
    #[arg(long, default_value = "5", value_name = "N")]
    runs: NonZeroUsize,
    /// Length of one measurement of `hostile`, and of the rate of `push`, in seconds.
    #[arg(long, default_value = "600", value_name = "S")]
    seconds: NonZeroU64,
    /// Attacks that `hostile` makes, separated by commas, to find the cost of a single one [default: all].
    #[arg(long, value_name = "NAMES")]
    attacks: Option<String>,
    /// Cores of `board`, if not --threads: on a large machine each worker has its own, as in the paper.
    #[arg(long, value_name = "N")]
    cores: Option<NonZeroUsize>,
    /// CPU devices that hold the base together in `costs`, such as "cpu:0 cpu:1".
    #[arg(long, value_name = "LIST")]
    devices: Option<String>,
    /// Division of the weights among these devices: outputs or layers.
    #[arg(long, value_name = "SPLIT", default_value = "outputs")]
    device_split: String,
    /// Emulated link of the cold starts: prefill, busy, or gigabits per second.
    #[arg(long, default_value = "prefill", value_name = "LINK")]
    link: LinkSpeed,
    /// Folder for plots (SVG) of the cold starts and of waits at a site.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Device of the GPU benchmarks: cuda:0 or another.
    #[arg(long, default_value = "cuda:0", value_name = "DEVICE", value_parser = ordinal)]
    device: u32,
    /// Folder of a config.json: model shape for GPU benchmarks (default: that of Llama-2-7B).
    #[arg(long, value_name = "DIR")]
    shape: Option<PathBuf>,
    /// Cost model that `costs` writes and `reality` reads; `forecast` writes one per executor beside it.
    #[arg(long, value_name = "FILE", default_value = "costs.json")]
    costs: PathBuf,
    /// Draft adapter for the model, which `drafts` measures too.
    #[arg(long, value_name = "DIR")]
    draft_adapter: Option<PathBuf>,
    /// Measurements that scripts/gpu-peer.py made on the same GPU.
    #[arg(long, value_name = "FILE")]
    gpu_peer: Option<PathBuf>,
}

fn ordinal(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    number.ok_or_else(|| "write cuda:0, or another number".to_owned())
}

#[derive(Debug, Clone)]
pub(crate) struct GpuConfig {
    pub(crate) ordinal: u32,
    pub(crate) shape: Option<PathBuf>,
    pub(crate) peer: Option<PathBuf>,
}

#[derive(Debug, Clone)]
pub(crate) struct SuiteConfig {
    /// Benchmarks in the order of the command line, without duplicates.
    pub(crate) names: Vec<Name>,
    /// GGUF file, checked to exist if a benchmark needs it.
    pub(crate) model: PathBuf,
    /// Folder of peer binaries, checked to exist if a benchmark needs it.
    pub(crate) peer: Option<PathBuf>,
    pub(crate) ours: PathBuf,
    pub(crate) torch_python: Option<PathBuf>,
    pub(crate) openvino_python: Option<PathBuf>,
    pub(crate) openvino: Vec<PathBuf>,
    pub(crate) vllm: Option<PathBuf>,
    pub(crate) checkpoint: Option<PathBuf>,
    /// Folder that may not exist yet.
    pub(crate) requantized: PathBuf,
    pub(crate) precision: BasePrecision,
    pub(crate) threads: usize,
    pub(crate) runs: usize,
    /// Length of one measurement of `hostile`, and of the rate of `push`, in seconds.
    pub(crate) seconds: u64,
    /// Names of the attacks of `hostile`; `None` means all.
    pub(crate) attacks: Option<String>,
    pub(crate) cores: usize,
    /// Devices of a group, and its split.
    pub(crate) devices: Option<(String, String)>,
    pub(crate) link: LinkSpeed,
    pub(crate) plot: Option<PathBuf>,
    pub(crate) costs: PathBuf,
    pub(crate) draft_adapter: Option<PathBuf>,
    pub(crate) gpu: GpuConfig,
}

impl Args {
    /// Checks that the files exist and expands `all`.
    ///
    /// # Errors
    /// If a file or folder is missing.
    pub(crate) fn validate(self) -> Result<SuiteConfig> {
        let ours = match self.ours {
            Some(folder) => folder,
            None => std::env::current_exe()
                .context("cannot find the folder of this program; give it with --ours")?
                .with_file_name(""),
        };
        let names = expand(&self.names);
        let model = self.model.unwrap_or_default();
        ensure!(
            model.is_file() || names.iter().all(|name| name.is_for_gpu()),
            "no model at {}; give a GGUF file with --model",
            model.display()
        );
        if names.iter().any(|name| name.needs_llama_cpp()) {
            let peer = self.peer.as_deref().unwrap_or(Path::new(""));
            ensure!(
                peer.is_dir(),
                "no peer binaries at {}; run scripts/build-peer or give a folder with --peer",
                peer.display()
            );
        }
        Ok(SuiteConfig {
            names,
            model,
            peer: self.peer,
            ours,
            torch_python: self.torch_python,
            openvino_python: self.openvino_python,
            openvino: self.openvino,
            vllm: self.vllm,
            checkpoint: self.checkpoint,
            requantized: self.requantized.unwrap_or_else(|| std::env::temp_dir().join("holobiont-bench")),
            precision: self.precision,
            threads: self.threads.get(),
            runs: self.runs.get(),
            seconds: self.seconds.get(),
            attacks: self.attacks,
            cores: self.cores.unwrap_or(self.threads).get(),
            devices: self.devices.map(|devices| (devices, self.device_split)),
            link: self.link,
            plot: self.plot,
            costs: self.costs,
            draft_adapter: self.draft_adapter,
            gpu: GpuConfig { ordinal: self.device, shape: self.shape, peer: self.gpu_peer },
        })
    }
}

fn expand(names: &[Name]) -> Vec<Name> {
    if names.contains(&Name::All) {
        return Name::EACH.to_vec();
    }
    let mut each = Vec::new();
    for &name in names {
        if !each.contains(&name) {
            each.push(name);
        }
    }
    each
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stands_for_every_benchmark_once() {
        assert_eq!(expand(&[Name::Decode, Name::All]), Name::EACH);
        assert_eq!(expand(&[Name::Batch, Name::Decode, Name::Batch]), [Name::Batch, Name::Decode]);
    }

    #[test]
    fn a_missing_model_is_named_before_anything_is_measured() {
        let args =
            Args::try_parse_from(["bench", "decode", "--model", "/no/such.gguf", "--peer", "/"]).unwrap();
        let message = args.validate().unwrap_err().to_string();
        assert!(message.contains("/no/such.gguf") && message.contains("--model"), "{message}");
    }

    #[test]
    fn what_is_measured_on_a_gpu_needs_no_model_and_is_not_among_all() {
        let args = |words: &[&str]| Args::try_parse_from([&["bench"], words].concat());
        let config = args(&["cuda-decode", "cuda-link", "--device", "cuda:1"]).unwrap().validate().unwrap();
        assert_eq!((config.names, config.gpu.ordinal), (vec![Name::CudaDecode, Name::CudaLink], 1));
        assert!(args(&["cuda-decode", "--device", "cpu"]).is_err());
        assert!(args(&["cuda-decode", "board", "--model", "/no/such"]).unwrap().validate().is_err());
        assert!(Name::EACH.iter().all(|name| !name.is_for_gpu()));
    }

    #[test]
    fn a_link_is_named_or_a_speed() {
        let link = |text: &str| text.parse::<LinkSpeed>();
        assert_eq!((link("busy"), link("2.5")), (Ok(LinkSpeed::Busy), Ok(LinkSpeed::Gbps(2.5))));
        for wrong in ["", "0", "-1", "nan", "inf", "fast"] {
            assert!(link(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_what_is_compared_with_llama_cpp_needs_it() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let validated = |name: &str| {
            let path = model.path().to_str().unwrap();
            Args::try_parse_from(["bench", name, "--model", path]).unwrap().validate()
        };
        assert!(validated("board").is_ok());
        assert!(validated("decode").unwrap_err().to_string().contains("--peer"));
    }
}
