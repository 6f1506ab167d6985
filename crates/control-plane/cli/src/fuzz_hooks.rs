//! Entry points through which the crate `fuzz` passes malformed input to this crate's parsers.

use std::io;

use crate::{client::sse::Events, deployment::config::DeploymentConfig};

/// Parses the text of a deployment file.
///
/// # Errors
/// Returns key, line and expected value of the first error.
pub fn deployment_file(text: &str) -> Result<(), toml::de::Error> {
    DeploymentConfig::parse(text).map(drop)
}

/// Parses all events of a gateway's stream.
///
/// # Errors
/// Fails if the stream is not UTF-8, or if a line or an event is too long.
pub fn events(stream: &[u8]) -> io::Result<()> {
    let mut events = Events::new(stream);
    while events.next_data()?.is_some() {}
    Ok(())
}
