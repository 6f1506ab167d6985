//! `llama-quantize`: the peer's fastest format and others, made from the file that both sides run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::process::output_of;

const LIMIT: Duration = Duration::from_secs(300);

/// Path of `model` in `format` in `folder`; `programs`' llama-quantize makes the file unless a newer one
/// exists.
///
/// # Errors
/// Fails if the file cannot be made.
pub(super) fn requantized(
    model: &Path,
    format: &str,
    folder: &Path,
    programs: &Path,
    threads: usize,
) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let stem = model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let made = folder.join(format!("{stem}.requantized-{format}.gguf"));
    if is_newer(&made, model) {
        return Ok(made);
    }
    let unfinished = made.with_extension("unfinished");
    let mut command = Command::new(programs.join("llama-quantize"));
    command.arg("--allow-requantize").arg(model).arg(&unfinished).args([format, &threads.to_string()]);
    output_of(&mut command, LIMIT)?;
    fs::rename(&unfinished, &made).with_context(|| format!("cannot write {}", made.display()))?;
    Ok(made)
}

fn is_newer(made: &Path, source: &Path) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    modified(made).zip(modified(source)).is_some_and(|(made, source)| made >= source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_made_before_its_source_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let (older, newer) = (folder.path().join("older"), folder.path().join("newer"));
        fs::write(&older, "").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        fs::write(&newer, "").unwrap();
        assert!(is_newer(&newer, &older) && !is_newer(&older, &newer));
        assert!(!is_newer(&folder.path().join("missing"), &older));
    }
}
