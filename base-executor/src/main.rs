//! Parses, validates, runs.

use base_executor::config::Config;
use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    let config = Config::parse().validated()?;
    base_executor::run(&config)
}
