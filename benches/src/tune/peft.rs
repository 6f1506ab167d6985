//! PEFT's job, kept running between measurements: loading its base takes longer than a measurement.

use std::{ffi::OsString, path::Path};

use anyhow::{Context, Result};

use super::{BATCH, RANK, STEPS, TOKENS, WARM_UP_STEPS};
use crate::peer::Python;

const SCRIPT: &str = include_str!("peft.py");

#[derive(Debug)]
pub(super) struct Peft(Python);

impl Peft {
    pub(super) fn start(python: &Path, model: &Path, threads: usize) -> Result<Self> {
        let numbers = [BATCH, TOKENS, RANK, WARM_UP_STEPS, STEPS, threads];
        let mut arguments = vec![OsString::from(model)];
        arguments.extend(numbers.iter().map(|number| number.to_string().into()));
        Ok(Self(Python::start(python, SCRIPT, &arguments)?))
    }

    /// Tokens per second: the median of some steps.
    pub(super) fn tokens_per_s(&mut self) -> Result<f64> {
        let answer = self.0.ask("steps")?;
        answer.trim().parse().with_context(|| format!("Python answered {answer:?}, which is no number"))
    }
}
