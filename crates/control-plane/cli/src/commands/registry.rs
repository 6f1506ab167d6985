//! `holobiont registry`: copies a registry between one host and storage shared by many hosts, and removes
//! unused adapter files. The `gateway` program does the work because only that program can reach both.

use std::{ffi::OsString, io, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use crate::{
    deployment::program_paths,
    exit::{Exit, Explain},
};

/// Name of the program that reaches registries.
pub(super) const GATEWAY: &str = "gateway";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum RegistryCommand {
    /// Copies a registry with its adapters and verifies the copy; the source stays unchanged
    Move {
        /// Source of the copy: the state directory of a stopped gateway, or postgres://USER@HOST/DATABASE
        #[arg(long, value_name = "DIR_OR_URL")]
        from: OsString,
        /// Target of the copy, a directory or URL like `--from`; it must have no adapters
        #[arg(long, value_name = "DIR_OR_URL")]
        to: OsString,
        /// Object store of the adapters' files, source or target, as s3://BUCKET/PREFIX
        #[arg(long, value_name = "URL")]
        store: OsString,
    },
    /// Removes files from the object store whose adapters are no longer registered
    Sweep {
        /// Registry, as postgres://USER@HOST/DATABASE
        #[arg(long, value_name = "URL")]
        registry: OsString,
        /// Object store, as s3://BUCKET/PREFIX
        #[arg(long, value_name = "URL")]
        store: OsString,
        /// Minimum age in hours of a file to remove
        #[arg(long, value_name = "HOURS", default_value_t = 24)]
        older_than_hours: u64,
        /// Counts the files and removes nothing
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    #[error("the program {GATEWAY} is neither beside `holobiont` nor on PATH")]
    NoGateway,
    #[error("cannot start {}", program.display())]
    Run { program: PathBuf, source: io::Error },
}

impl Explain for RegistryError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoGateway => Exit::NotFound,
            Self::Run { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        matches!(self, Self::NoGateway).then(|| "cargo build --release --bin gateway".into())
    }
}

/// Replaces this process by the gateway program; returns only on failure.
pub(crate) fn run(command: &RegistryCommand) -> Result<(), RegistryError> {
    let program = program_paths::find(GATEWAY).ok_or(RegistryError::NoGateway)?;
    let mut gateway = Command::new(&program);
    gateway.arg("registry");
    match command {
        RegistryCommand::Move { from, to, store } => {
            gateway.args(["move", "--from"]).arg(from).arg("--to").arg(to).arg("--store").arg(store);
        }
        RegistryCommand::Sweep { registry, store, older_than_hours, dry_run } => {
            gateway.args(["sweep", "--registry"]).arg(registry).arg("--store").arg(store);
            gateway.args(["--older-than-hours", &older_than_hours.to_string()]);
            gateway.args(dry_run.then_some("--dry-run"));
        }
    }
    let source = gateway.exec();
    Err(RegistryError::Run { program, source })
}
