//! Many adapters from one file of weights: different scales make each one another adapter version with memory
//! of its own.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::lora::{AdapterShape, Projection, RandomAdapter, write_peft, write_peft_config};

pub(crate) const ADAPTED: [Projection; 3] = [Projection::Q, Projection::K, Projection::V];

/// Writes `count` adapters of rank `rank` on q, k and v of `model` below `folder` and returns their folders.
///
/// # Errors
/// Fails if the files cannot be written.
pub(super) fn write(model: &Path, rank: usize, count: usize, folder: &Path) -> Result<Vec<PathBuf>> {
    write_for(&AdapterShape::of(model)?, rank, count, folder)
}

/// Writes `count` adapters for a model of this shape and returns their folders.
///
/// # Errors
/// Fails if the files cannot be written.
pub(crate) fn write_for(
    shape: &AdapterShape,
    rank: usize,
    count: usize,
    folder: &Path,
) -> Result<Vec<PathBuf>> {
    let adapter = RandomAdapter::random(shape, rank, 1).on(&ADAPTED);
    let first = folder.join("0");
    write_peft(&adapter, &first)?;
    let weights = Path::new("adapter_model.safetensors");
    (0..count)
        .map(|index| {
            let folder = folder.join(index.to_string());
            if index > 0 {
                fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
                let alpha = rank as f64 * (1.0 - index as f64 * 1e-4);
                write_peft_config(&adapter, alpha, &folder)?;
                fs::hard_link(first.join(weights), folder.join(weights)).context("cannot link weights")?;
            }
            Ok(folder)
        })
        .collect()
}
