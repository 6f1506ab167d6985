//! The forward pass beside OpenVINO GenAI, the fastest peer on CPUs with a matrix unit: a prompt, one stream,
//! and batches.
//!
//! The peer's weights are exports of the same model (`optimum-cli export openvino --weight-format int8`).
//! Ours are measured with the precision that `auto` chooses, and with `int8`, which rounds like the peer.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{BenchProgram, HolobiontRunner, SyntheticLoad},
    machine::Cores,
    measure::{Samples, alternate},
    peer::Python,
    report::{Better, Comparison, PeerSamples},
};

const SCRIPT: &str = include_str!("openvino.py");

/// Precisions of ours, as options of `base-executor bench`.
const PRECISIONS: [(&str, &[&str]); 2] =
    [("auto", &["--precision", "auto"]), ("int8", &["--precision", "int8"])];

/// Prompts, then batches.
const LOADS: [SyntheticLoad; 5] = [
    SyntheticLoad { prompt_tokens: 512, generated_tokens: 0, streams: 1 },
    SyntheticLoad { prompt_tokens: 128, generated_tokens: 64, streams: 1 },
    SyntheticLoad { prompt_tokens: 128, generated_tokens: 64, streams: 4 },
    SyntheticLoad { prompt_tokens: 128, generated_tokens: 64, streams: 8 },
    SyntheticLoad { prompt_tokens: 128, generated_tokens: 64, streams: 16 },
];

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let python =
        config.openvino_python.as_deref().context("give a Python with openvino-genai: --openvino-python")?;
    ensure!(!config.openvino.is_empty(), "give folders of exports with --openvino");
    let mut comparisons = Vec::new();
    for folder in &config.openvino {
        let threads = cores.numbers().len().to_string();
        let mut peer = Python::start(python, SCRIPT, &[folder.into(), threads.into()])?;
        for load in LOADS {
            comparisons.extend(compare(config, &mut peer, folder, load)?);
        }
    }
    Ok(comparisons)
}

fn compare(
    config: &SuiteConfig,
    peer: &mut Python,
    folder: &Path,
    load: SyntheticLoad,
) -> Result<Vec<Comparison>> {
    let ours = PRECISIONS.map(|(_, options)| {
        let program = BenchProgram::new(&config.ours, &config.model, config.threads).with(options);
        move |_| {
            let rates = program.rates(load)?;
            Ok(if load.generated_tokens == 0 {
                rates.prefill_tokens_per_s
            } else {
                rates.decode_tokens_per_s
            })
        }
    });
    let [auto, int8] = ours;
    let question = question(load);
    let theirs = |_| {
        let answer = peer.ask(&question)?;
        answer.trim().parse().with_context(|| format!("Python answered {answer:?}, which is no number"))
    };
    let [auto, int8, theirs] = alternate(config.runs, [Box::new(auto), Box::new(int8), Box::new(theirs)])?;
    let format = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let row = |(precision, ours): (&str, Vec<f64>)| {
        let rival = PeerSamples {
            name: "openvino-genai".into(),
            format: format.clone(),
            samples: Samples::new(theirs.clone())?,
        };
        Ok(Comparison {
            bench: "openvino",
            case: format!("{question}, {precision}"),
            unit: "tokens/s",
            better: Better::Higher,
            ours: Samples::new(ours)?,
            rival,
            target: None,
        })
    };
    PRECISIONS.map(|(name, _)| name).into_iter().zip([auto, int8]).map(row).collect()
}

/// The load as the script understands it.
fn question(SyntheticLoad { prompt_tokens, generated_tokens, streams }: SyntheticLoad) -> String {
    match generated_tokens {
        0 => format!("prefill {prompt_tokens}"),
        _ => format!("decode {streams} {prompt_tokens} {generated_tokens}"),
    }
}
