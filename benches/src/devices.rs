//! One base over several devices of one core each, beside one executor with as many threads.

mod round_trip;

use anyhow::{Result, ensure};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{BenchProgram, HolobiontRunner, SyntheticLoad},
    machine::Cores,
    measure::{Samples, alternate},
    report::{Better, Comparison, PeerSamples},
};

/// A prompt, then streams.
const LOADS: [(&str, SyntheticLoad); 3] = [
    ("a prompt of 512", SyntheticLoad { prompt_tokens: 512, generated_tokens: 0, streams: 1 }),
    ("one stream", SyntheticLoad { prompt_tokens: 128, generated_tokens: 64, streams: 1 }),
    ("8 streams", SyntheticLoad { prompt_tokens: 128, generated_tokens: 32, streams: 8 }),
];

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    ensure!(cores.numbers().len() > 1, "several devices need several cores: raise --threads");
    let devices = cores.numbers().iter().map(|core| format!("cpu:{core}")).collect::<Vec<_>>().join(" ");
    let model = config.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut comparisons = vec![round_trip::compare(config.runs, cores.numbers())?];
    for (case, load) in LOADS {
        let rate = |options: &[&str]| {
            let program = BenchProgram::new(&config.ours, &config.model, config.threads).with(options);
            move |_| {
                let rates = program.rates(load)?;
                let is_prompt = load.generated_tokens == 0;
                Ok(if is_prompt { rates.prefill_tokens_per_s } else { rates.decode_tokens_per_s })
            }
        };
        let one = rate(&[]);
        let outputs = rate(&["--devices", &devices]);
        let layers = rate(&["--devices", &devices, "--device-split", "layers"]);
        let [one, outputs, layers] =
            alternate(config.runs, [Box::new(one), Box::new(outputs), Box::new(layers)])?;
        for (split, ours) in [("outputs", outputs), ("layers", layers)] {
            let samples = Samples::new(one.clone())?;
            comparisons.push(Comparison {
                bench: "devices",
                case: format!("{case}, {split}"),
                unit: "tokens/s",
                better: Better::Higher,
                ours: Samples::new(ours)?,
                rival: PeerSamples { name: "one device".into(), format: model.clone(), samples },
                target: None,
            });
        }
    }
    Ok(comparisons)
}
