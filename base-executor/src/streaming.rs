//! A base whose weights come from a disk: what an operator set, and where the file of packed weights is.

use std::{
    fs::{self, DirBuilder},
    num::NonZeroU64,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::Path,
};

use anyhow::Context as _;
use model::weights::streamed::StreamOptions;

use crate::{config::ExecutorConfig, process};

/// The file, in its directory.
const FILE: &str = "packed.weights";

/// How the base of `config` is streamed, if it is; makes the directory of its file.
///
/// # Errors
/// If the directory cannot be made, or others may enter it.
pub(crate) fn options(config: &ExecutorConfig) -> anyhow::Result<Option<StreamOptions>> {
    let Some(bound) = config.weights.bytes else { return Ok(None) };
    let directory = config.weight_directory();
    prepare(&directory)?;
    let pace = config.weights.disk_gbps.and_then(|gbps| NonZeroU64::new(gbps.bytes_per_s()));
    if let Some(pace) = pace {
        tracing::warn!(
            bytes_per_s = pace,
            "the disk of the weights is emulated: an experiment, not a service"
        );
    }
    Ok(Some(StreamOptions {
        path: directory.join(FILE),
        program: process::program_hash().context("the own program cannot be read")?,
        bound_bytes: bound.0,
        readahead: config.weights.reads.into(),
        pace,
    }))
}

/// What the operator is told to do about weights that cannot be had.
pub(crate) const REMEDY: &str = "--resident-weight-bytes: raise it or leave it out, or give --disk-directory a place with room for the packed weights";

fn prepare(directory: &Path) -> anyhow::Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.with_context(|| format!("cannot make {} for the packed weights", directory.display()))?;
    let found = fs::metadata(directory).with_context(|| format!("cannot inspect {}", directory.display()))?;
    anyhow::ensure!(
        found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o077 == 0,
        "others may enter {}, where packed weights are to be kept: own it, and run `chmod 700 {}`",
        directory.display(),
        directory.display()
    );
    Ok(())
}
