//! PyTorch's results in the same run: the lines of `scripts/gpu-peer.py`.

use std::{collections::HashMap, fs, path::Path};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{measure::Samples, report::PeerSamples};

/// A result line of the file; other lines, such as versions, lack these fields.
#[derive(Debug, Deserialize)]
struct PeerMeasurement {
    figure: String,
    runs: Vec<f64>,
    peer: String,
    shape: String,
}

#[derive(Debug, Default)]
pub(super) struct Peers(HashMap<String, PeerMeasurement>);

impl Peers {
    /// Reads the results of a file.
    ///
    /// # Errors
    /// Fails if the file cannot be read or a line is not JSON.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("no figures of the peer in {}; leave --gpu-peer out", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is not what gpu-peer.py writes", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut figures = HashMap::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let line: serde_json::Value = serde_json::from_str(line).context("a line is not JSON")?;
            if line.get("runs").is_some() {
                let figure: PeerMeasurement =
                    serde_json::from_value(line).context("a figure lacks something")?;
                figures.insert(figure.figure.clone(), figure);
            }
        }
        Ok(Self(figures))
    }

    /// Result as a baseline, if it was measured.
    ///
    /// # Errors
    /// Fails if the result holds no number.
    pub(super) fn rival(&self, name: &str) -> Result<Option<PeerSamples>> {
        let Some(figure) = self.0.get(name) else { return Ok(None) };
        let samples = Samples::new(figure.runs.clone())
            .with_context(|| format!("the peer's {name} is no measurement"))?;
        let name = format!("{}, {}", figure.peer, figure.shape);
        Ok(Some(PeerSamples { name, format: "bf16".to_owned(), samples }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_name_and_other_lines_are_passed_over() {
        let text = r#"{"figure": "versions", "torch": "2.8"}
{"figure": "matmul", "unit": "TFLOP/s", "value": 700.5, "runs": [700.0, 701.0], "peer": "torch mm, bf16", "shape": "7b"}
"#;
        let peers = Peers::parse(text).unwrap();
        let matmul = peers.rival("matmul").unwrap().unwrap();
        assert_eq!((matmul.name.as_str(), matmul.samples.median()), ("torch mm, bf16, 7b", 700.5));
        assert!(peers.rival("versions").unwrap().is_none() && peers.rival("decode-1").unwrap().is_none());
        assert!(Peers::parse("no json").is_err());
    }
}
