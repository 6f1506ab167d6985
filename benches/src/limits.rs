//! Measured limits of this machine, in the same run as the results that are compared with them.
//!
//! A model's limits follow from them (see docs/performance/README.md): each prompt token needs every product
//! of the blocks; each step reads every weight once and computes the head's products too.

use std::{path::Path, thread};

use anyhow::{Context, Result, anyhow};
use kernels::{Isa, ThreadPool, limits};
use model_files::gguf::GgufFile;

use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Operations and bytes per second of all cores in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MachineLimits {
    /// Operations on bytes with vector instructions.
    pub(crate) int8_ops: f64,
    /// Operations on bytes in the matrix unit.
    pub(crate) matrix_ops: Option<f64>,
    pub(crate) bf16_flops: f64,
    pub(crate) read_bytes: f64,
}

/// Work that a model needs per token or step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ModelWork {
    pub(crate) bytes: f64,
    blocks: f64,
    head: f64,
}

impl MachineLimits {
    /// Measures `cores` with one thread each, on a model of `bytes`.
    ///
    /// # Errors
    /// If there is no thread or memory for that.
    pub(crate) fn measure(cores: &[usize], bytes: usize) -> Result<Self> {
        let cores = cores.to_vec();
        // A new thread, since a pool pins its caller to a core.
        let measured = thread::spawn(move || -> Result<Self> {
            let (mut pool, isa) = (ThreadPool::new(&cores)?, Isa::best());
            Ok(Self {
                int8_ops: limits::int8_ops_per_s(&mut pool, isa),
                matrix_ops: limits::matrix_unit_ops_per_s(&mut pool, isa),
                bf16_flops: limits::bf16_flops_per_s(&mut pool, isa),
                read_bytes: limits::read_bytes_per_s(&mut pool, isa, bytes).context("no memory to read")?,
            })
        });
        measured.join().unwrap_or_else(|_| Err(anyhow!("measuring limits panicked")))
    }

    /// Maximum prompt tokens per second, with vector instructions.
    pub(crate) fn prefill(&self, work: &ModelWork) -> f64 {
        self.int8_ops / (2.0 * work.blocks)
    }

    /// Maximum tokens per second of `streams`.
    pub(crate) fn decode(&self, work: &ModelWork, streams: usize) -> f64 {
        let by_memory = streams as f64 * self.read_bytes / work.bytes;
        by_memory.min(self.int8_ops / (2.0 * (work.blocks + work.head)))
    }
}

impl ModelWork {
    /// Reads the work of a GGUF file's model.
    ///
    /// # Errors
    /// If the file is not GGUF.
    pub(crate) fn of(model: &Path) -> Result<Self> {
        let file = GgufFile::open(model)?;
        let matrices = || file.tensors().filter(|(_, tensor)| tensor.rows() > 1);
        let weights = |tensor: &model_files::gguf::TensorView<'_>| (tensor.rows() * tensor.cols()) as f64;
        let head = file.tensor("output.weight").or_else(|| file.tensor("token_embd.weight"));
        let head = head.context("the model has no token embedding")?;
        let is_block = |name: &str| name.starts_with("blk.");
        Ok(Self {
            bytes: matrices()
                .filter(|(name, _)| is_block(name))
                .map(|(_, t)| t.data.len() as f64)
                .sum::<f64>()
                + head.data.len() as f64,
            blocks: matrices().filter(|(name, _)| is_block(name)).map(|(_, t)| weights(&t)).sum(),
            head: weights(&head),
        })
    }
}

/// Compares our result with the machine's limit; `ratio` is the share of the limit.
pub(crate) fn share(
    bench: &'static str,
    case: String,
    ours: Samples,
    limits: Samples,
    least: Option<f64>,
) -> Comparison {
    let rival = PeerSamples {
        name: "the machine's limit".to_owned(),
        format: "as packed".to_owned(),
        samples: limits,
    };
    let target = least.map(BenchTarget::RatioAtLeast);
    Comparison { bench, case, unit: "tokens/s", better: Better::Higher, ours, rival, target }
}

/// Compares all cores with one.
///
/// # Errors
/// Fails if the cores cannot be measured.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let work = ModelWork::of(&config.model)?;
    let on = |cores: Vec<usize>| move |_| MachineLimits::measure(&cores, work.bytes as usize);
    let all = cores.numbers().to_vec();
    let [all, one] = alternate(config.runs, [Box::new(on(all.clone())), Box::new(on(all[..1].to_vec()))])?;
    let row = |case: &str, unit, figure: &dyn Fn(&MachineLimits) -> f64| -> Result<Comparison> {
        let rival = PeerSamples {
            name: "one core".to_owned(),
            format: String::new(),
            samples: Samples::of(&one, figure)?,
        };
        let (case, ours) = (case.to_owned(), Samples::of(&all, figure)?);
        Ok(Comparison { bench: "limits", case, unit, better: Better::Higher, ours, rival, target: None })
    };
    let mut rows = vec![
        row("int8 dot products", "GOP/s", &|limits| limits.int8_ops / 1e9)?,
        row("bf16 dot products", "GFLOP/s", &|limits| limits.bf16_flops / 1e9)?,
        row("reading as much as the model", "GB/s", &|limits| limits.read_bytes / 1e9)?,
    ];
    if all.iter().chain(&one).all(|limits| limits.matrix_ops.is_some()) {
        rows.push(row("int8 products, matrix unit", "GOP/s", &|limits| {
            limits.matrix_ops.unwrap_or(0.0) / 1e9
        })?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: ModelWork = ModelWork { bytes: 1e8, blocks: 1e8, head: 3e7 };
    const LIMITS: MachineLimits =
        MachineLimits { int8_ops: 9e11, matrix_ops: None, bf16_flops: 5e11, read_bytes: 3e10 };

    #[test]
    fn one_stream_is_bound_by_memory_and_many_by_products() {
        assert_eq!(LIMITS.prefill(&WORK), 4500.0);
        assert_eq!(LIMITS.decode(&WORK, 1), 300.0);
        assert_eq!(LIMITS.decode(&WORK, 64), 9e11 / 2.6e8);
    }
}
