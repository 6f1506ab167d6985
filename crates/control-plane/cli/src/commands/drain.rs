//! `holobiont drain` and `holobiont undrain`: stop and resume new requests to one executor, so that it can
//! be replaced.

use std::time::Duration;

use control_protocol::status::DeploymentStatus;
use serde_json::json;

use crate::{
    client::{ClientError, GatewayClient},
    terminal::{PrintFormat, Terminal},
};

/// Interval between checks for running requests.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Arguments of the commands `drain` and `undrain`.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArguments {
    /// Name of the executor, as `holobiont status` shows it
    name: String,
}

/// Stops new requests to an executor and returns when its running requests have ended.
pub(crate) fn drain(arguments: &DrainArguments, url: &str, terminal: Terminal) -> Result<(), ClientError> {
    let client = GatewayClient::new(url, terminal);
    let name = &arguments.name;
    let report = client.post_text(&format!("/v1/executors/{name}/drain"), &json!({}))?;
    let progress = terminal.spinner(format!("{name} gets no new requests; waiting for its running requests"));
    while under_way(&client, name)? > 0 {
        std::thread::sleep(LOOK_AGAIN_AFTER);
    }
    progress.finish_and_clear();
    print(terminal, report, &format!("{name} is drained; replace it, then: holobiont undrain {name}"));
    Ok(())
}

pub(crate) fn undrain(arguments: &DrainArguments, url: &str, terminal: Terminal) -> Result<(), ClientError> {
    let client = GatewayClient::new(url, terminal);
    let name = &arguments.name;
    let report = client.post_text(&format!("/v1/executors/{name}/undrain"), &json!({}))?;
    print(terminal, report, &format!("{name} gets new requests again"));
    Ok(())
}

fn under_way(client: &GatewayClient, name: &str) -> Result<usize, ClientError> {
    let status: DeploymentStatus =
        serde_json::from_value(client.get("/v1/status")?).map_err(ClientError::Garbled)?;
    let executor = status.executors.into_iter().find(|executor| executor.name == name);
    Ok(executor.map_or(0, |executor| executor.sequences.under_way))
}

fn print(terminal: Terminal, body: String, text: &str) {
    match terminal.format {
        PrintFormat::Json => terminal.print(body),
        PrintFormat::Human => terminal.print(text),
    }
}
