//! The precision of linear layers on a CPU: as set, or chosen once for a deployment and kept.
//!
//! `auto` depends on the processor. A deployment that moves to another host keeps its choice, because its
//! stored keys and values, its fleet and its receipts have the bits of that precision.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::ValueEnum as _;
use model::precision::Precision;
use serde_json::{Value, json};

use crate::config::ExecutorConfig;

/// Largest size of a file with a choice, in bytes.
const MAX_BYTES: u64 = 4096;

/// The set precision, or the file that keeps the choice of `auto`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrecisionChoice {
    set: settings::Precision,
    file: Option<PathBuf>,
}

impl PrecisionChoice {
    pub(crate) fn of(config: &ExecutorConfig) -> Self {
        Self { set: config.precision, file: config.precision_file.clone() }
    }

    /// Returns the precision of the base with the hash `base`: as set, else as kept, else the `suitable` one,
    /// which is kept from now on.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds something else.
    pub(crate) fn resolve(
        &self,
        base: impl FnOnce() -> [u8; 32],
        suitable: impl FnOnce() -> Precision,
    ) -> anyhow::Result<Precision> {
        if let Some(precision) = precision_of(self.set) {
            return Ok(precision);
        }
        let Some(file) = &self.file else { return Ok(suitable()) };
        let base = base().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        if let Some((_, precision)) = read(file)?.filter(|(of, _)| *of == base) {
            return Ok(precision);
        }
        let precision = suitable();
        write(file, &json!({ "base": base, "precision": name(precision) })).with_context(|| {
            format!("cannot keep the precision in {}; make its directory writable", file.display())
        })?;
        Ok(precision)
    }
}

/// Returns the precision of a setting; `None` for `auto`.
pub(crate) fn precision_of(set: settings::Precision) -> Option<Precision> {
    match set {
        settings::Precision::Auto => None,
        settings::Precision::Int8 => Some(Precision::Int8),
        settings::Precision::Mixed => Some(Precision::Mixed),
        settings::Precision::Int15 => Some(Precision::Int15),
        settings::Precision::Bf16 => Some(Precision::Bf16),
        settings::Precision::Exact => Some(Precision::Exact),
    }
}

fn name(precision: Precision) -> &'static str {
    let set = settings::Precision::value_variants().iter().find(|&&set| precision_of(set) == Some(precision));
    set.expect("every precision can be set").as_str()
}

/// Reads the hash of a base and the precision that was chosen for it; `None` if there is no file.
fn read(file: &Path) -> anyhow::Result<Option<(String, Precision)>> {
    let problem = || format!("{} holds no precision; delete it, or set --precision", file.display());
    let length = match fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.with_context(problem)?.len(),
    };
    anyhow::ensure!(length <= MAX_BYTES, problem());
    let kept: Value = serde_json::from_slice(&fs::read(file).with_context(problem)?).with_context(problem)?;
    let set = kept["precision"].as_str().and_then(|set| set.parse().ok());
    let precision = set.and_then(precision_of);
    let choice = kept["base"].as_str().map(str::to_owned).zip(precision);
    choice.map(Some).with_context(problem)
}

/// Writes a choice, whole or not at all.
fn write(file: &Path, choice: &Value) -> io::Result<()> {
    let directory = file.parent().unwrap_or(Path::new("."));
    let mut new = tempfile::NamedTempFile::new_in(directory)?;
    serde_json::to_writer(&mut new, choice)?;
    new.flush()?;
    new.as_file().sync_all()?;
    new.persist(file).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(set: settings::Precision, file: &Path) -> PrecisionChoice {
        PrecisionChoice { set, file: Some(file.to_owned()) }
    }

    #[test]
    fn auto_keeps_its_choice_for_a_base_on_any_processor() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("precision.json");
        let auto = choice(settings::Precision::Auto, &file);
        assert_eq!(auto.resolve(|| [1; 32], || Precision::Bf16).unwrap(), Precision::Bf16);
        assert_eq!(auto.resolve(|| [1; 32], || Precision::Mixed).unwrap(), Precision::Bf16);
        // Another base has its own choice, which replaces the first.
        assert_eq!(auto.resolve(|| [2; 32], || Precision::Mixed).unwrap(), Precision::Mixed);
        assert_eq!(auto.resolve(|| [2; 32], || Precision::Bf16).unwrap(), Precision::Mixed);
    }

    #[test]
    fn a_set_precision_needs_no_file_and_leaves_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("precision.json");
        let set = choice(settings::Precision::Int8, &file);
        assert_eq!(set.resolve(|| unreachable!(), || unreachable!()).unwrap(), Precision::Int8);
        assert!(!file.exists());
        let without = PrecisionChoice { set: settings::Precision::Auto, file: None };
        assert_eq!(without.resolve(|| unreachable!(), || Precision::Mixed).unwrap(), Precision::Mixed);
    }

    #[test]
    fn a_file_of_something_else_is_refused_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("precision.json");
        for text in ["", "{}", "[1]", &"x".repeat(5000)] {
            fs::write(&file, text).unwrap();
            let error = choice(settings::Precision::Auto, &file).resolve(|| [1; 32], || Precision::Mixed);
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains("precision.json") && error.contains("delete it"), "{error}");
        }
    }
}
