//! The doors through which the crate `fuzz` feeds this crate's parsers what nobody should have written.

use std::io;

use crate::{client::sse::Events, deployment::config::DeploymentConfig};

/// Reads the text of a deployment file.
///
/// # Errors
/// Key, line and what was expected there.
pub fn deployment_file(text: &str) -> Result<(), toml::de::Error> {
    DeploymentConfig::parse(text).map(drop)
}

/// Reads every event of a gateway's stream.
///
/// # Errors
/// What is no text, or too long.
pub fn events(stream: &[u8]) -> io::Result<()> {
    let mut events = Events::new(stream);
    while events.next_data()?.is_some() {}
    Ok(())
}
