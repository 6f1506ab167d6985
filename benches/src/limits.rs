//! What this machine can do at most, measured in the same run as what is said to be near it.
//!
//! A model's limits follow from it (docs/performance/README.md says how): each token of a prompt needs every product of the
//! blocks, each step reads every weight once and needs the head's products too.

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

/// Operations and bytes a second, of all cores that are given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MachineLimits {
    /// Of bytes, by vectors.
    pub(crate) int8_ops: f64,
    /// Of bytes, by the matrix unit.
    pub(crate) matrix_ops: Option<f64>,
    /// Of bf16.
    pub(crate) bf16_flops: f64,
    /// Read from memory.
    pub(crate) read_bytes: f64,
}

/// What a model asks of a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ModelWork {
    /// Bytes of all matrices.
    pub(crate) bytes: f64,
    /// Weights of the blocks' matrices.
    blocks: f64,
    /// Weights of the head.
    head: f64,
}

impl MachineLimits {
    /// Measures them on `cores`, by as many threads, on a model of so many bytes.
    ///
    /// # Errors
    /// If there is no thread or memory for that.
    pub(crate) fn measure(cores: &[usize], bytes: usize) -> Result<Self> {
        let cores = cores.to_vec();
        // A thread of its own: a pool keeps its caller on a core.
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

    /// Tokens of prompts a second, at most, by vectors.
    pub(crate) fn prefill(&self, work: &ModelWork) -> f64 {
        self.int8_ops / (2.0 * work.blocks)
    }

    /// Tokens of `streams` a second, at most.
    pub(crate) fn decode(&self, work: &ModelWork, streams: usize) -> f64 {
        let by_memory = streams as f64 * self.read_bytes / work.bytes;
        by_memory.min(self.int8_ops / (2.0 * (work.blocks + work.head)))
    }
}

impl ModelWork {
    /// Of a GGUF file.
    ///
    /// # Errors
    /// If it is none.
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

/// Samples of what we reach beside what the machine would let us: `ratio` is the share of it.
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

/// All cores beside one.
///
/// # Errors
/// If they cannot be measured.
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
