//! Context of all GPU benchmarks: the device, the measured shape, and the output of rows.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use kernels::cuda::{Cuda, CudaEvent, CudaStream};
use model::{
    shape::{config::ModelConfig, source::WeightSource as _},
    sources::random::RandomSource,
};
use serde::Serialize;
use tempfile::TempDir;

use super::{
    peer::Peers,
    sizes::{Sizes, is_stand_in},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples, ReportRow},
};

/// Seed of the weights, here and in the executors.
pub(super) const SEED: u64 = 1;

/// Shape on a GPU. The program contains it, since a GPU machine may have no other files.
pub(super) const LLAMA_2_7B: &str = include_str!("../../shapes/llama-2-7b/config.json");

/// Shape on the CPU stand-in. The vocabulary covers the words of the prompts.
const TINY: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
  "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false,
  "attention_bias": false, "torch_dtype": "bfloat16", "vocab_size": 32000
}
"#;

pub(super) struct GpuBenchContext {
    pub(super) cuda: Arc<Cuda>,
    pub(super) source: RandomSource,
    pub(super) sizes: Sizes,
    pub(super) peers: Peers,
    pub(super) runs: usize,
    pub(super) cores: Cores,
    pub(super) programs: PathBuf,
    folder: Folder,
    name: String,
}

enum Folder {
    Given(PathBuf),
    Written(TempDir),
}

#[derive(Serialize)]
struct GpuRow<'a> {
    #[serde(flatten)]
    row: ReportRow,
    shape: &'a str,
    device: &'a str,
    driver: String,
}

/// A result of ours, before the comparison with a baseline.
pub(super) struct GpuMeasurement {
    pub(super) bench: &'static str,
    pub(super) case: String,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    pub(super) ours: Samples,
}

impl GpuBenchContext {
    /// Opens the device and reads shape and peer.
    ///
    /// # Errors
    /// If there is no such device, or a file cannot be read.
    pub(super) fn open(config: &SuiteConfig) -> Result<Self> {
        let cuda = Cuda::open(config.gpu.ordinal)?;
        let (folder, name) = match &config.gpu.shape {
            Some(given) => {
                let name = given.file_name().unwrap_or(given.as_os_str()).to_string_lossy().into_owned();
                (Folder::Given(given.clone()), name)
            }
            None if is_stand_in(&cuda) => (Folder::write(TINY)?, "tiny".to_owned()),
            None => (Folder::write(LLAMA_2_7B)?, "llama-2-7b".to_owned()),
        };
        Ok(Self {
            sizes: Sizes::of(&cuda),
            source: RandomSource::open(folder.path(), SEED)?,
            peers: config.gpu.peer.as_deref().map(Peers::read).transpose()?.unwrap_or_default(),
            runs: config.runs,
            cores: Cores::all()?,
            programs: config.ours.clone(),
            cuda,
            folder,
            name,
        })
    }

    pub(super) fn config(&self) -> &ModelConfig {
        self.source.config()
    }

    pub(super) fn shape_folder(&self) -> &Path {
        self.folder.path()
    }

    /// Device name in the format of our programs.
    pub(super) fn device(&self) -> String {
        format!("cuda:{}", self.cuda.info().ordinal)
    }

    pub(super) fn report(
        &self,
        figure: GpuMeasurement,
        rival: PeerSamples,
        target: Option<BenchTarget>,
    ) -> Result<()> {
        let GpuMeasurement { bench, case, unit, better, ours } = figure;
        let comparison = Comparison { bench, case, unit, better, ours, rival, target };
        let info = self.cuda.info();
        let row = GpuRow {
            row: comparison.into_row(self.cores.numbers().len()),
            shape: &self.name,
            device: &info.name,
            driver: format!("CUDA {}.{}", info.driver.0, info.driver.1),
        };
        println!("{}", serde_json::to_string(&row).context("a row is not JSON")?);
        Ok(())
    }

    /// Device time in milliseconds of what `work` enqueues on `stream`: one warm-up, then `runs` times.
    pub(super) fn device_ms(
        &self,
        stream: &CudaStream,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<Samples> {
        work()?;
        let (begin, end) = (CudaEvent::timed(&self.cuda)?, CudaEvent::timed(&self.cuda)?);
        let mut times = Vec::with_capacity(self.runs);
        for _ in 0..self.runs {
            stream.synchronize()?;
            begin.record(stream)?;
            work()?;
            end.record(stream)?;
            end.synchronize()?;
            times.push(f64::from(end.ms_since(&begin)?));
        }
        Samples::new(times)
    }

    /// Results of two ways, whose index `work` gets, in turns: what the device's clocks do meanwhile meets both.
    pub(super) fn alternating(&self, mut work: impl FnMut(usize) -> Result<f64>) -> Result<[Samples; 2]> {
        let mut results = [Vec::with_capacity(self.runs), Vec::with_capacity(self.runs)];
        // The first round does not count.
        for round in 0..=self.runs {
            for way in [round % 2, 1 - round % 2] {
                let result = work(way)?;
                if round > 0 {
                    results[way].push(result);
                }
            }
        }
        let [one, other] = results.map(Samples::new);
        Ok([one?, other?])
    }

    /// Results of `work`: one warm-up, then `runs` times.
    pub(super) fn samples(&self, mut work: impl FnMut() -> Result<f64>) -> Result<Samples> {
        work()?;
        Samples::new((0..self.runs).map(|_| work()).collect::<Result<_>>()?)
    }
}

impl Folder {
    fn write(shape: &str) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for a shape")?;
        fs::write(folder.path().join("config.json"), shape).context("cannot write a shape")?;
        Ok(Self::Written(folder))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Written(folder) => folder.path(),
        }
    }
}

pub(super) fn own(name: impl Into<String>, samples: Samples) -> PeerSamples {
    PeerSamples { name: name.into(), format: "bf16".to_owned(), samples }
}

pub(super) fn map(samples: &Samples, change: impl Fn(f64) -> f64) -> Result<Samples> {
    Samples::of(samples.values(), |&value| change(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shapes_in_the_program_are_models_that_are_known() {
        for (shape, layers) in [(LLAMA_2_7B, 32), (TINY, 2)] {
            let folder = Folder::write(shape).unwrap();
            let source = RandomSource::open(folder.path(), SEED).unwrap();
            assert_eq!(source.config().layers, layers);
            assert!(source.config().vocab_size > 30_000, "prompts' words are in the vocabulary");
        }
    }
}
